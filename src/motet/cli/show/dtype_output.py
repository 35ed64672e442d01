"""The output of `motet show dtype`: the bits of number formats, what they hold, and what they make of a value."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from rich.text import Text

from motet.cli.output import print_lines
from motet.monitor.stdout_stderr import print_json, stdout_console
from motet.precision.number_formats import NUMBER_FORMATS, NumberFormat, parse_exact_value

_STYLES = ("bold red", "bold green", "bold blue")  # Sign, exponent, mantissa
_LEGEND = "S is the sign, E the exponent, M the mantissa."
_NOTES = (
    "The step at 1 is the distance to the next larger number. Overflow is what a value becomes that rounds beyond the "
    "largest number; a conversion that saturates stores the largest number instead."
)
_ROUNDING = (
    "Each value is rounded once from the exact number: to the nearest, and of two that are equally near to the even "
    "code (in E8M0 to the larger)."
)


def show_dtypes(value: str | None, *, json: bool) -> None:
    """Draw all formats, or the bits and the stored value of one number in each."""
    exact = None if value is None else parse_exact_value(value)
    if json:
        reports = [
            _properties(form) | ({} if exact is None else {"stored": _stored(form, exact)}) for form in NUMBER_FORMATS
        ]
        print_json({"value": value, "formats": reports})
    elif value is None or exact is None:
        _print_formats()
    else:
        _print_stored(value.strip(), exact)


def _properties(form: NumberFormat) -> dict[str, Any]:
    return {
        "name": form.name,
        "dtype": form.dtype,
        "bits": form.bits,
        "sign_bits": form.sign_bits,
        "exponent_bits": form.exponent_bits,
        "mantissa_bits": form.mantissa_bits,
        "bias": form.bias,
        "largest": form.largest,
        "smallest_normal": form.smallest_normal,
        "smallest_subnormal": form.smallest_subnormal,
        "epsilon": form.epsilon,
        "has_infinity": form.has_infinity,
        "has_nan": form.has_nan,
        "overflow": form.overflow,
        "remark": form.remark,
    }


def _stored(form: NumberFormat, exact: Fraction | float) -> dict[str, Any]:
    """Bits and value of a number in a format, and the value where a conversion saturates."""
    code, saturated = form.encode(exact), form.encode(exact, saturates=True)
    if code is None or saturated is None:
        return {"bits": None, "value": None, "saturated": None, "relative_error": None}
    value = form.decode(code)
    is_measurable = math.isfinite(value) and math.isfinite(exact) and exact != 0
    error = float(abs(Fraction(value) - Fraction(exact)) / abs(Fraction(exact))) if is_measurable else None
    bits = " ".join(filter(None, form.bit_fields(code)))
    return {"bits": bits, "value": value, "saturated": form.decode(saturated), "relative_error": error}


def _print_formats() -> None:
    parts = [(form.sign_bits, form.exponent_bits, form.mantissa_bits) for form in NUMBER_FORMATS]
    drawn = [[letter * count for letter, count in zip("SEM", counts, strict=True)] for counts in parts]
    _print_table(["format", "bits", ""], [[f.name, f.bits, b] for f, b in zip(NUMBER_FORMATS, drawn, strict=True)])
    header = "format", "bias", "largest", "smallest normal", "smallest subnormal", "step at 1", "inf", "NaN", "overflow"
    print_lines(_LEGEND, "")
    rows: list[list[Any]] = []
    for form in NUMBER_FORMATS:
        subnormal = "none" if form.smallest_subnormal is None else _format(form.smallest_subnormal)
        numbers = _format(form.largest), _format(form.smallest_normal), subnormal, _format(form.epsilon)
        exists = ["yes" if each else "no" for each in (form.has_infinity, form.has_nan)]
        rows.append([form.name, form.bias, *numbers, *exists, form.overflow])
    _print_table(header, rows)
    print_lines("", *(f"{form.name}: {form.remark}." for form in NUMBER_FORMATS if form.remark), _NOTES)


def _print_stored(value: str, exact: Fraction | float) -> None:
    rows: list[list[Any]] = []
    for form in NUMBER_FORMATS:
        stored = _stored(form, exact)
        if stored["bits"] is None:
            rows.append([form.name, "cannot be stored", "", "", []])
            continue
        error, differs = stored["relative_error"], not _is_same(stored["value"], stored["saturated"])
        saturated = _format(stored["saturated"]) if differs else ""
        error_text, digits = "" if error is None else f"{error:.2g}", form.bit_fields(form.encode(exact) or 0)
        rows.append([form.name, _format(stored["value"]), error_text, saturated, digits])
    _print_table(["format", f"stored for {value}", "relative error", "saturated", "sign, exponent, mantissa"], rows)
    print_lines("", _ROUNDING)


def _print_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Columns under their names, unwrapped; a list is the three parts of a format, each in its colour."""
    widths = [max(len(name), *(len(_plain(row[i])) for row in rows)) for i, name in enumerate(header)]
    for row in (header, *rows):
        line = Text()
        for index, (cell, width) in enumerate(zip(row, widths, strict=True)):
            parts = [(str(cell), "")] if isinstance(cell, str | int) else [*zip(cell, _STYLES, strict=False)]
            text = Text(" ").join([Text(part, style) for part, style in parts if part])
            is_left = index in (0, len(header) - 1)
            padding = Text(" " * (width - len(text)))
            line.append_text(Text.assemble(text, padding) if is_left else Text.assemble(padding, text)).append("  ")
        line.rstrip()
        stdout_console().print(line, soft_wrap=True)


def _plain(cell: Any) -> str:
    return str(cell) if isinstance(cell, str | int) else " ".join(filter(None, cell))


def _is_same(left: float, right: float) -> bool:
    return left == right or (math.isnan(left) and math.isnan(right))


def _format(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) else str(value).replace("nan", "NaN").replace("inf", "infinity")
