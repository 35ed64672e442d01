"""Whether one tensor is made of others: equations that are true or not, up to rounding, and what their numbers mean."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from motet.parity.compare.tensor_differences import relative_distance

FIT_TOLERANCE = 1e-9  # How far from an equation rounding may be; other mistakes are further away
COEFFICIENT_TOLERANCE = 1e-7  # How far a coefficient may be from a number that has a meaning
TARGET_TOKENS = "target tokens"
DTYPE_EPSILON = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# How near what was lost is to what rounding loses; some elements may have been rounded the other way.
ROUNDING_MATCH = 1e-3


def relative_error(value: Tensor, expected: Tensor) -> float:
    return relative_distance(value, expected, 0.0)


def is_equal_up_to_rounding(value: Tensor, expected: Tensor) -> bool:
    return relative_error(value, expected) < FIT_TOLERANCE


def solve_coefficients(value: Tensor, basis: Sequence[Tensor]) -> list[float] | None:
    """Of the sum that the value is; None where it is none of these."""
    if any(each.shape != value.shape for each in basis):
        return None
    matrix = torch.stack([each.double().flatten() for each in basis], 1)
    if not matrix.numel() or not float(matrix.abs().max()):
        return None
    solution = torch.linalg.lstsq(matrix, value.double().flatten()[:, None], driver="gelsd").solution[:, 0]
    if relative_error(matrix @ solution, value.double().flatten()) > FIT_TOLERANCE and float(value.abs().max()):
        return None
    negligible_norm = FIT_TOLERANCE * float(torch.linalg.vector_norm(value.double()))
    term_norms = (matrix * solution).norm(dim=0)
    return [
        float(each) if float(size) > negligible_norm else 0.0 for each, size in zip(solution, term_norms, strict=True)
    ]


def is_about(factor: float, target: float) -> bool:
    return abs(factor - target) <= COEFFICIENT_TOLERANCE * (abs(target) or 1.0)


def format_factor(factor: float) -> str:
    """Short; fractions as fractions where they are simple."""
    for denominator in range(2, 65):
        if is_about(factor * denominator, round(factor * denominator)) and not is_about(factor, round(factor)):
            numerator = round(factor * denominator)
            return f"{numerator}/{denominator}" if numerator else f"{factor:.8g}"
    return f"{factor:.8g}"


def factor_meaning(factor: float, known_factors: Mapping[str, float]) -> str:
    """What a factor may come from."""
    multiplied_by = [name for name, size in known_factors.items() if size not in (0, 1) and is_about(factor, size)]
    divided_by = [name for name, size in known_factors.items() if size not in (0, 1) and is_about(factor, 1 / size)]
    if multiplied_by:
        return f": multiplied by {' = '.join([format_factor(factor), *multiplied_by])}"
    if divided_by:
        return f": divided by {' = '.join([format_factor(1 / factor), *divided_by])}"
    if is_about(factor, 2) or is_about(factor, 0.5):
        return ": counted twice" if factor > 1 else ": halved"
    by_count = {name: size for name, size in known_factors.items() if name.startswith(TARGET_TOKENS) and size}
    batch_count = by_count.pop(TARGET_TOKENS, 0.0)
    for name, size in by_count.items():
        if size != batch_count and (is_about(factor, batch_count / size) or is_about(factor, size / batch_count)):
            operation = "divided" if factor > 1 else "multiplied"
            return f": {operation} by the {name}, {format_factor(size)}, instead of the {format_factor(batch_count)} of the batch"
    return ""


def find_rounding_dtype(error: Tensor, exact: Tensor) -> str:
    """The dtype to which something was rounded, if that is what is off; empty if not."""
    for dtype in DTYPE_EPSILON:
        rounding_error = exact.to(dtype).double() - exact.double()
        if (
            exact.dtype != dtype
            and bool(rounding_error.any())
            and relative_error(error, rounding_error) < ROUNDING_MATCH
        ):
            return dtype_name(dtype)
    return ""


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
