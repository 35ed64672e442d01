"""The picture of `motet show numerics`: a histogram by exponent for each kind of tensor, and a row for each tensor."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import log2

from motet.collectives.draw.program_drawing import svg_opening
from motet.monitor.events import NumericsKind, NumericsMeasured, TensorNumerics
from motet.monitor.numerics_report import KINDS, loss_in, percent, total_of
from motet.precision.number_formats import NUMBER_FORMATS

_KIND_TITLES: dict[NumericsKind, str] = {
    "weights": "weights, as the optimizer has them",
    "gradients": "gradients of weights, sums over the global batch",
    "activations": "outputs of blocks and linear layers",
    "activation_gradients": "gradients of these outputs",
}
_WIDTH, _LABEL, _SHARES, _TOP, _BARS, _ROW, _GAP = 1120, 250, 190, 74, 84, 13, 58
_MAX_ROWS = 24  # Of each kind: the tensors that lose most
_STYLE = """
text { font-size: 11px } .bar { fill: #1f5fbf }
.gone { fill: #c62828; fill-opacity: .17 } .faint { fill: #f0924a; fill-opacity: .22 }
.edge { stroke: #57606a; stroke-width: 1 } .unscaled { stroke: #c62828; stroke-width: 1.5; stroke-dasharray: 5 3 }
.unscaled-name { fill: #c62828 }
@media (prefers-color-scheme: dark) {
.bar { fill: #79aef2 }
.edge { stroke: #9da7b3 } .unscaled { stroke: #ff8a80 } .unscaled-name { fill: #ff8a80 }
}
"""


@dataclass(frozen=True)
class ExponentRange:
    """The exponents that a drawing shows, and those at which a format changes."""

    shown: range
    smallest: int  # Of the smallest subnormal number
    normal: int  # Of the smallest normal number
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
    """Say what the exponents of gradients say where the loss is scaled."""
    if event.loss_scale is None:
        return ""
    power = int(log2(event.loss_scale))
    return f"gradients are multiplied by the loss scale 2^{power}: without it their exponents would be {power} lower"


def draw_svg(event: NumericsMeasured, dtype: str) -> str:
    """A panel for each kind of tensor."""
    exponents = ExponentRange.of(event.tensors, dtype)
    title = f"step {event.step}: values by exponent, and the range of {dtype}"
    note = explain_loss_scale(event) or "the loss is not scaled"
    panels, y = list[str](), float(_TOP)
    for kind in KINDS:
        members = [tensor for tensor in event.tensors if tensor.kind == kind]
        total = total_of(kind, members)
        if total is not None:
            scale = event.loss_scale if "gradients" in kind else None
            panel = _Panel(exponents, dtype, y, members=members, total=total, loss_scale=scale or 1)
            panels += panel.elements()
            y += panel.height + _GAP
    return "\n".join(
        [
            f"{svg_opening(_WIDTH, y, title)}<style>{_STYLE}</style>",
            f'<rect class="page" width="{_WIDTH}" height="{y:g}"/>',
            f'<text class="big" x="16" y="24">{escape(title)}</text>',
            f'<text class="quiet" x="16" y="42">{escape(note)}</text>',
            *panels,
            "</svg>",
            "",
        ]
    )


@dataclass(frozen=True)
class _Panel:
    """The histogram of one kind, and rows of the tensors that lose most."""

    exponents: ExponentRange
    dtype: str
    top: float
    members: Sequence[TensorNumerics]
    total: TensorNumerics
    loss_scale: int

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
        yield f'<text class="head" x="16" y="{self.top + 4:g}">{escape(name)}</text>'
        yield from self._ranges()
        yield from self._bars()
        y = self.top + 16 + _BARS + 8
        header = ("zero", "vanish", "subn.", "over")
        right = _WIDTH - _SHARES
        for index, word in enumerate(header):
            yield f'<text class="quiet end" x="{right + 46 * (index + 1):g}" y="{y - 12:g}">{word}</text>'
        for tensor in self.rows:
            yield from self._row(tensor, y)
            y += _ROW

    def _x(self, exponent: float) -> float:
        shown = self.exponents.shown
        return _LABEL + (exponent - shown.start) / len(shown) * (_WIDTH - _SHARES - _LABEL)

    def _ranges(self) -> Iterator[str]:
        """Colours for what the format does with values, behind the histogram and the rows."""
        shown, bottom = self.exponents.shown, self.top + self.height
        smallest, normal, over = self.exponents.smallest, self.exponents.normal, self.exponents.largest + 1
        for css, first, stop, hint in (
            ("gone", shown.start, smallest, "becomes zero"),
            ("faint", smallest, normal, "subnormal: fewer digits"),
            ("gone", over, shown.stop, "overflows"),
        ):
            first, stop = max(first, shown.start), min(stop, shown.stop)
            if first < stop:
                x, width = self._x(first), self._x(stop) - self._x(first)
                box = f'x="{x:.1f}" y="{self.top + 16:g}" width="{width:.1f}" height="{bottom - self.top - 16:g}"'
                yield f'<rect class="{css}" {box}><title>{hint} in {self.dtype}</title></rect>'
        if self.loss_scale > 1 and smallest + log2(self.loss_scale) < shown.stop:
            x = self._x(smallest + log2(self.loss_scale))
            yield f'<path class="unscaled" d="M{x:.1f} {self.top + 16:g}V{bottom:g}"/>'
            words = "without the loss scale, values left of this line would become zero"
            yield f'<text class="unscaled-name" x="{x + 4:.1f}" y="{self.top + 26:g}">{words}</text>'
        step = max(1, -(-len(shown) // 14))
        for exponent in range(-(-shown.start // step) * step, shown.stop, step):
            x = self._x(exponent)
            yield f'<text class="quiet middle" x="{x:.1f}" y="{bottom + 14:g}">2^{exponent}</text>'
            yield f'<path class="edge" d="M{x:.1f} {bottom:g}v4"/>'

    def _bars(self) -> Iterator[str]:
        bottom, width = self.top + 16 + _BARS, self._x(1) - self._x(0) - 0.6
        counts = {e: self.exponents.count(self.total, e) for e in self.exponents.shown}
        most = max(counts.values()) or 1
        for exponent, count in counts.items():
            if count:
                height = max(_BARS * 0.94 * count / most, 0.7)
                box = f'x="{self._x(exponent):.1f}" y="{bottom - height:.1f}" width="{width:.1f}" height="{height:.1f}"'
                hint = escape(f"2^{exponent}: {percent(count, self.total.elements)}")
                yield f'<rect class="bar" {box}><title>{hint}</title></rect>'
        yield f'<path class="edge" d="M{_LABEL} {bottom:g}H{_WIDTH - _SHARES}"/>'

    def _row(self, tensor: TensorNumerics, y: float) -> Iterator[str]:
        name = tensor.name if len(tensor.name) <= 38 else f"...{tensor.name[-35:]}"
        yield f'<text class="end" x="{_LABEL - 8}" y="{y + _ROW - 3:g}">{escape(name)}</text>'
        most, width = max(tensor.exponents, default=0) or 1, self._x(1) - self._x(0)
        for index, count in enumerate(tensor.exponents):
            if count:
                x = self._x(tensor.lowest_exponent + index)
                opacity = max((count / most) ** 0.5, 0.08)
                box = f'x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{_ROW - 1}"'
                yield f'<rect class="bar" {box} fill-opacity="{opacity:.2f}"/>'
        loss = loss_in(tensor, self.dtype)
        counts = tensor.zeros, loss.vanished, loss.subnormal, loss.saturated + tensor.infinite
        for index, count in enumerate(counts):
            x = _WIDTH - _SHARES + 46 * (index + 1)
            share = escape(percent(count, tensor.elements))
            yield f'<text class="end" x="{x}" y="{y + _ROW - 3:g}">{share}</text>'
