"""The output of `motet show numerics`: tables and histograms by exponent, from the counts of the numerics monitor.

The picture of `motet show numerics`: a histogram by exponent for each kind of tensor, and a row for each tensor.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import log2
from pathlib import Path

from motet.cli.output import OutputLine, check_writable, print_lines, table_lines, write_output_file
from motet.core.errors import check_input
from motet.core.svg import MARGIN, PAGE_WIDTH, Scale, element, svg_page, text
from motet.monitor.events import EVENTS_FILE, NumericsKind, NumericsMeasured, TensorNumerics, read_events
from motet.monitor.stdout_stderr import print_json
from motet.monitor.summary import KINDS, loss_in, measurement_at, percent, total_of
from motet.precision.number_formats import NUMBER_FORMATS

_KIND_TITLES: dict[NumericsKind, str] = {
    "weights": "weights, as the optimizer has them",
    "gradients": "gradients of weights, sums over the global batch",
    "activations": "outputs of blocks and linear layers",
    "activation_gradients": "gradients of these outputs",
}
_LABEL, _SHARES, _BARS, _ROW, _GAP = 250, 190, 84, 13, 58
_MAX_ROWS = 24  # Rows of each kind, for the tensors that lose most


@dataclass(frozen=True)
class ExponentRange:
    """The exponents that a drawing shows, and those at which a format changes."""

    shown: range
    smallest: int  # Exponent of the smallest subnormal number
    normal: int  # Exponent of the smallest normal number
    largest: int

    @classmethod
    def of(cls, tensors: Sequence[TensorNumerics], dtype: str) -> "ExponentRange":
        """The exponents that occur, with the range of float16 or bfloat16 where values come near its ends."""
        number_format = next(each for each in NUMBER_FORMATS if each.dtype == dtype)
        smallest = number_format.smallest_exponent - number_format.mantissa_bits
        largest = int(log2(number_format.largest))
        used = [
            e for t in tensors for e in (t.lowest_exponent, t.lowest_exponent + len(t.exponents) - 1) if t.exponents
        ]
        if dtype == "float16":
            used += [smallest, largest]
        low, high = (min(used), max(used)) if used else (0, 0)
        return cls(range(low - 1, high + 3), smallest, number_format.smallest_exponent, largest)

    def count(self, tensor: TensorNumerics, exponent: int) -> int:
        """The values of a tensor with an exponent."""
        index = exponent - tensor.lowest_exponent
        return tensor.exponents[index] if 0 <= index < len(tensor.exponents) else 0


def kind_title(kind: NumericsKind) -> str:
    return _KIND_TITLES[kind]


def explain_loss_scale(event: NumericsMeasured) -> str:
    """Explain the exponents of gradients where the loss is scaled."""
    if event.backward_scale is None:
        return ""
    power = int(log2(event.backward_scale))
    return f"gradients of sums of losses are multiplied by 2^{power}: without that, exponents would differ by {-power}"


def draw_svg(event: NumericsMeasured, dtype: str) -> str:
    """A panel for each kind of tensor."""
    exponents = ExponentRange.of(event.tensors, dtype)
    title = f"step {event.step}: values by exponent, and the range of {dtype}"
    note = explain_loss_scale(event) or "the loss is not scaled"
    panels, y = list[str](), 8.0
    for kind in KINDS:
        members = [tensor for tensor in event.tensors if tensor.kind == kind]
        total = total_of(kind, members)
        if total is not None:
            scale = event.backward_scale if "gradients" in kind else None
            panel = _Panel(exponents, dtype, y, members=members, total=total, backward_scale=scale or 1.0)
            panels += panel.elements()
            y += panel.height + _GAP
    return svg_page(title, note, panels, height=max(y - _GAP, 0) + 20)


@dataclass(frozen=True)
class _Panel:
    """The histogram of one kind, and rows of the tensors that lose most."""

    exponents: ExponentRange
    dtype: str
    top: float
    members: Sequence[TensorNumerics]
    total: TensorNumerics
    backward_scale: float

    @property
    def rows(self) -> list[TensorNumerics]:
        """Tensors in the order of the model."""
        by_loss = sorted(self.members, key=self._lost_share, reverse=True)[:_MAX_ROWS]
        return [tensor for tensor in self.members if tensor in by_loss]

    def _lost_share(self, tensor: TensorNumerics) -> float:
        loss = loss_in(tensor, self.dtype)
        return (tensor.zeros + loss.underflow + loss.saturated) / tensor.elements

    @property
    def height(self) -> float:
        return 16 + _BARS + 8 + _ROW * len(self.rows)

    def elements(self) -> Iterator[str]:
        """The parts of the panel."""
        left_out = len(self.members) - len(self.rows)
        others = f"; {left_out} tensors that lose less are left out below" if left_out else ""
        loss = loss_in(self.total, self.dtype)
        share = {
            "zero": self.total.zeros,
            "vanish": loss.vanished,
            "subnormal": loss.subnormal,
            "overflow": loss.saturated + self.total.infinite,
        }
        shares = ", ".join(f"{percent(count, self.total.elements)} {word}" for word, count in share.items())
        name = f"{kind_title(self.total.kind)}: {shares}{others}"
        yield text((MARGIN, self.top + 4), name, "head")
        yield from self._ranges()
        yield from self._bars()
        y = self.top + 16 + _BARS + 8
        yield from self._columns(("zero", "vanish", "subn.", "over"), y - 12, "quiet end small")
        for tensor in self.rows:
            yield from self._row(tensor, y)
            y += _ROW

    @cached_property
    def x(self) -> Scale:
        """The axis of exponents."""
        shown = self.exponents.shown
        return Scale(shown.start, shown.stop, _LABEL, PAGE_WIDTH - MARGIN - _SHARES)

    def _columns(self, words: Sequence[str], y: float, css: str) -> Iterator[str]:
        for index, word in enumerate(words, start=1):
            yield text((self.x.stop + 46 * index, y), word, css)

    def _ranges(self) -> Iterator[str]:
        """Colours for the effect of the format on values, behind the histogram and the rows."""
        shown, top, bottom = self.exponents.shown, self.top + 16, self.top + self.height
        smallest, normal, over = self.exponents.smallest, self.exponents.normal, self.exponents.largest + 1
        for fill, first, stop, hint in (
            ("#c628282b", shown.start, smallest, "becomes zero"),
            ("#f0924a38", smallest, normal, "subnormal: fewer digits"),
            ("#c628282b", over, shown.stop, "overflows"),
        ):
            left, right = self.x(max(first, shown.start)), self.x(min(stop, shown.stop))
            if left < right:
                box = {"x": left, "y": top, "width": right - left, "height": bottom - top}
                yield element("rect", "", fill=fill, hint=f"{hint} in {self.dtype}", **box)
        if self.backward_scale > 1 and smallest + log2(self.backward_scale) < shown.stop:
            x = self.x(smallest + log2(self.backward_scale))
            yield element("path", "limit", d=f"M{x:.1f} {top:g}V{bottom:g}")
            words = "without the loss scale, values left of this line would become zero"
            yield text((x + 4, top + 10), words, "limit-name small")
        step = max(1, -(-len(shown) // 14))
        for exponent in range(-(-shown.start // step) * step, shown.stop, step):
            yield text((self.x(exponent), bottom + 14), f"2^{exponent}", "quiet middle small")
            yield element("path", "curve c7", d=f"M{self.x(exponent):.1f} {bottom:g}v4")

    def _bars(self) -> Iterator[str]:
        bottom, width = self.top + 16 + _BARS, self.x(1) - self.x(0) - 0.6
        counts = {e: self.exponents.count(self.total, e) for e in self.exponents.shown}
        most = max(counts.values()) or 1
        for exponent, count in counts.items():
            if count:
                height = max(_BARS * 0.94 * count / most, 0.7)
                box = {"x": self.x(exponent), "y": bottom - height, "width": width, "height": height}
                yield element("rect", "t0", hint=f"2^{exponent}: {percent(count, self.total.elements)}", **box)
        yield element("path", "curve c7", d=f"M{self.x.start} {bottom:g}H{self.x.stop}")

    def _row(self, tensor: TensorNumerics, y: float) -> Iterator[str]:
        name = tensor.name if len(tensor.name) <= 34 else f"...{tensor.name[-31:]}"
        yield text((self.x.start - 8, y + _ROW - 3), name, "end small")
        most, width = max(tensor.exponents, default=0) or 1, self.x(1) - self.x(0)
        for index, count in enumerate(tensor.exponents):
            if count:
                opacity = f"{max((count / most) ** 0.5, 0.08):.2f}"
                x = self.x(tensor.lowest_exponent + index)
                yield element("rect", "t0", x=x, y=y, width=width, height=_ROW - 1, fill_opacity=opacity)
        yield from self._columns(_shares(tensor, self.dtype), y + _ROW - 3, "end small")


_SHADES = " .:-=+*#%@"
_COLUMNS = "zero", "vanish", "subnormal", "overflow"
_MAX_NAME, _MAX_MAP = 44, 64


def show_numerics(folder: Path, step: int | None, dtype: str | None, *, json: bool, svg: Path | None) -> None:
    """Draw a measurement of a run on the terminal or into a file."""
    check_writable(svg)
    event = measurement_at(read_events(folder / EVENTS_FILE), step, str(folder))
    dtype = dtype or event.formats[-1 if event.formats[0] in ("float32", "float64") else 0]
    check_input(
        dtype in event.formats,
        f"--dtype {dtype}: the run has counted the losses of {' and '.join(event.formats)}; give one of these",
    )
    if svg is not None:
        write_output_file(svg, draw_svg(event, dtype))
    if json:
        print_json(event.model_dump(mode="json"))
    elif svg is not None:
        print_lines(f"{svg} is written")
    else:
        print_lines(*_text_lines(event, dtype))


def _text_lines(event: NumericsMeasured, dtype: str) -> Iterator[OutputLine]:
    exponents = ExponentRange.of(event.tensors, dtype)
    factor = -(-len(exponents.shown) // _MAX_MAP)  # Exponents of one column
    yield f"step {event.step}, range of {dtype}: normal from 2^{exponents.normal} to 2^{exponents.largest + 1}"
    if text := explain_loss_scale(event):
        yield f"{text}."
    ruler, rows = "".join(_mark(exponents, at, factor) for at in exponents.shown[::factor]), list[tuple[str, ...]]()
    for kind in KINDS:
        members = [tensor for tensor in event.tensors if tensor.kind == kind]
        total = total_of(kind, members)
        if total is not None:
            rows += [(), (kind_title(kind), *_COLUMNS, ruler)]
            for tensor in (*members, total):
                name = tensor.name if len(tensor.name) <= _MAX_NAME else f"...{tensor.name[3 - _MAX_NAME :]}"
                rows.append((name, *_shares(tensor, dtype), _map(tensor, exponents, factor)))
    yield from table_lines(rows, right=range(1, 5))
    step_text = "each column is one exponent" if factor == 1 else f"each column is {factor} exponents"
    yield ""
    yield (
        f"Columns on the right are exponents from 2^{exponents.shown.start} on; {step_text}. Below | values vanish, "
        "from [ on they are normal, and beyond ] they overflow. A darker sign stands for more values of the tensor."
    )


def _shares(tensor: TensorNumerics, dtype: str) -> list[str]:
    loss = loss_in(tensor, dtype)
    counts = tensor.zeros, loss.vanished, loss.subnormal, loss.saturated + tensor.infinite
    return [percent(count, tensor.elements) for count in counts]


def _mark(exponents: ExponentRange, at: int, factor: int) -> str:
    """The sign above a column in which the format changes."""
    column = range(at, at + factor)
    marks = {exponents.smallest: "|", exponents.normal: "[", exponents.largest: "]"}
    return next((mark for exponent, mark in marks.items() if exponent in column), "-")


def _map(tensor: TensorNumerics, exponents: ExponentRange, factor: int) -> str:
    counts = [sum(exponents.count(tensor, at + i) for i in range(factor)) for at in exponents.shown[::factor]]
    most = max(counts, default=0)
    return "".join(
        _SHADES[0] if not count else _SHADES[1 + round((len(_SHADES) - 2) * (count / most) ** 0.5)] for count in counts
    )
