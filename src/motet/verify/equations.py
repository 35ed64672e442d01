"""Whether one tensor is made of others: equations that are true or not, up to rounding, and what their numbers mean."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from motet.verify.compare import distance

FITS = 1e-9
"""How far from an equation rounding may be; other mistakes are further away."""
WHOLE = 1e-7
"""How far a coefficient may be from a number that has a meaning."""
TARGETS = "target tokens"
EPSILON = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
ROUNDED = 1e-3
"""How near what was lost is to what rounding loses; some elements may have been rounded the other way."""


def relative(value: Tensor, expected: Tensor) -> float:
    return distance(value, expected, 0.0)


def fits(value: Tensor, expected: Tensor) -> bool:
    return relative(value, expected) < FITS


def coefficients(value: Tensor, basis: Sequence[Tensor]) -> list[float] | None:
    """Of the sum that the value is; None where it is none of these."""
    if any(each.shape != value.shape for each in basis):
        return None
    matrix = torch.stack([each.double().flatten() for each in basis], 1)
    if not matrix.numel() or not float(matrix.abs().max()):
        return None
    found = torch.linalg.lstsq(matrix, value.double().flatten()[:, None], driver="gelsd").solution[:, 0]
    if relative(matrix @ found, value.double().flatten()) > FITS and float(value.abs().max()):
        return None
    least = FITS * float(torch.linalg.vector_norm(value.double()))
    shares = (matrix * found).norm(dim=0)
    return [float(each) if float(size) > least else 0.0 for each, size in zip(found, shares, strict=True)]


def is_about(factor: float, wanted: float) -> bool:
    return abs(factor - wanted) <= WHOLE * (abs(wanted) or 1.0)


def number(factor: float) -> str:
    """Short; fractions as fractions where they are simple."""
    for below in range(2, 65):
        if is_about(factor * below, round(factor * below)) and not is_about(factor, round(factor)):
            above = round(factor * below)
            return f"{above}/{below}" if above else f"{factor:.8g}"
    return f"{factor:.8g}"


def meaning(factor: float, sizes: Mapping[str, float]) -> str:
    """What a factor may come from."""
    times = [name for name, size in sizes.items() if size not in (0, 1) and is_about(factor, size)]
    over = [name for name, size in sizes.items() if size not in (0, 1) and is_about(factor, 1 / size)]
    if times:
        return f": multiplied by {' = '.join([number(factor), *times])}"
    if over:
        return f": divided by {' = '.join([number(1 / factor), *over])}"
    if is_about(factor, 2) or is_about(factor, 0.5):
        return ": counted twice" if factor > 1 else ": halved"
    by_count = {name: size for name, size in sizes.items() if name.startswith(TARGETS) and size}
    whole = by_count.pop(TARGETS, 0.0)
    for name, size in by_count.items():
        if size != whole and (is_about(factor, whole / size) or is_about(factor, size / whole)):
            how = "divided" if factor > 1 else "multiplied"
            return f": {how} by the {name}, {number(size)}, instead of the {number(whole)} of the batch"
    return ""


def lost_bits(off: Tensor, exact: Tensor) -> str:
    """The dtype to which something was rounded, if that is what is off; empty if not."""
    for dtype in EPSILON:
        lost = exact.to(dtype).double() - exact.double()
        if exact.dtype != dtype and bool(lost.any()) and relative(off, lost) < ROUNDED:
            return named_dtype(dtype)
    return ""


def named_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
