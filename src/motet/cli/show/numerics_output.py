"""The output of `motet show numerics`: tables and histograms by exponent of what the numerics monitor has counted."""

from collections.abc import Iterator
from pathlib import Path

from motet.cli.output import check_writable, print_lines, write_output_file
from motet.cli.show.numerics_drawing import ExponentRange, draw_svg, explain_loss_scale, kind_title
from motet.core.errors import check_input
from motet.monitor.events import EVENTS_FILE, NumericsMeasured, TensorNumerics, read_events
from motet.monitor.numerics_report import KINDS, loss_in, measurement_at, percent, total_of
from motet.monitor.stdout_stderr import print_json

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
        f"--dtype {dtype}: the run has counted what {' and '.join(event.formats)} lose; give one of these",
    )
    if svg is not None:
        write_output_file(svg, draw_svg(event, dtype))
    if json:
        print_json(event.model_dump(mode="json"))
    elif svg is not None:
        print_lines(f"{svg} is written")
    else:
        print_lines(*_text_lines(event, dtype))


def _text_lines(event: NumericsMeasured, dtype: str) -> Iterator[str]:
    exponents = ExponentRange.of(event.tensors, dtype)
    width = min(max(len(tensor.name) for tensor in event.tensors), _MAX_NAME) if event.tensors else 0
    factor = -(-len(exponents.shown) // _MAX_MAP)  # Exponents of one column
    yield f"step {event.step}, range of {dtype}: normal from 2^{exponents.normal} to 2^{exponents.largest + 1}"
    if text := explain_loss_scale(event):
        yield f"{text}."
    for kind in KINDS:
        members = [tensor for tensor in event.tensors if tensor.kind == kind]
        total = total_of(kind, members)
        if total is None:
            continue
        ruler = "".join(_mark(exponents, at, factor) for at in exponents.shown[::factor])
        yield ""
        yield kind_title(kind)
        yield f"{'':{width}}  {'  '.join(word.rjust(9) for word in _COLUMNS)}  {ruler}"
        for tensor in [*members, total]:
            shares = "  ".join(share.rjust(9) for share in _shares(tensor, dtype))
            name = tensor.name if len(tensor.name) <= width else f"...{tensor.name[3 - width :]}"
            yield f"{name:{width}}  {shares}  {_map(tensor, exponents, factor)}".rstrip()
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
