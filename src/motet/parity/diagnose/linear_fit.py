"""Equations between tensors that hold up to rounding or do not, and what their coefficients mean."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from motet.collectives.compression.byte_messages import dtype_name
from motet.parity.compare.tensor_differences import relative_distance

FIT_TOLERANCE = 1e-9  # Rounding is below it, other mistakes are above
COEFFICIENT_TOLERANCE = 1e-7  # How far a coefficient may be from a number that has a meaning
TARGET_TOKENS = "target tokens"
DTYPE_EPSILON = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
ROUNDING_MATCH = 1e-3  # Some elements may have been rounded the other way


def is_equal_up_to_rounding(value: Tensor, expected: Tensor) -> bool:
    return relative_distance(value, expected) < FIT_TOLERANCE


def solve_coefficients(value: Tensor, basis: Sequence[Tensor]) -> list[float] | None:
    """The coefficients with which the basis sums to the value; None where no such sum exists."""
    if any(each.shape != value.shape for each in basis):
        return None
    matrix, flat = torch.stack([each.double().flatten() for each in basis], 1), value.double().flatten()
    if not matrix.numel() or not float(matrix.abs().max()):
        return None
    solution = torch.linalg.lstsq(matrix, flat[:, None], driver="gelsd").solution[:, 0]
    if relative_distance(matrix @ solution, flat) > FIT_TOLERANCE and float(value.abs().max()):
        return None
    negligible_norm = FIT_TOLERANCE * float(torch.linalg.vector_norm(flat))
    term_norms = (matrix * solution).norm(dim=0)
    return [float(c) if float(size) > negligible_norm else 0.0 for c, size in zip(solution, term_norms, strict=True)]


def is_about(factor: float, target: float) -> bool:
    return abs(factor - target) <= COEFFICIENT_TOLERANCE * (abs(target) or 1.0)


def format_factor(factor: float) -> str:
    """At most eight digits; a simple fraction is written as one."""
    for denominator in range(2, 65):
        numerator = round(factor * denominator)
        if numerator and is_about(factor * denominator, numerator) and not is_about(factor, round(factor)):
            return f"{numerator}/{denominator}"
    return f"{factor:.8g}"


def factor_meaning(factor: float, known_factors: Mapping[str, float]) -> str:
    """The known quantities by which something was multiplied or divided, as the end of a sentence."""
    sizes = {name: size for name, size in known_factors.items() if size not in (0, 1)}
    for operation, number in (("multiplied", factor), ("divided", 1 / factor if factor else 0.0)):
        names = [n for n, size in sizes.items() if is_about(factor, size if operation == "multiplied" else 1 / size)]
        if names:
            return f": {operation} by {' = '.join([format_factor(number), *names])}"
    if is_about(factor, 2) or is_about(factor, 0.5):
        return ": counted twice" if factor > 1 else ": halved"
    counts = {name: size for name, size in known_factors.items() if name.startswith(TARGET_TOKENS) and size}
    batch_count = counts.pop(TARGET_TOKENS, 0.0)
    for name, size in counts.items():
        if size != batch_count and (is_about(factor, batch_count / size) or is_about(factor, size / batch_count)):
            operation = "divided" if factor > 1 else "multiplied"
            instead = f"instead of the {format_factor(batch_count)} of the batch"
            return f": {operation} by the {name}, {format_factor(size)}, {instead}"
    return ""


def find_rounding_dtype(error: Tensor, exact: Tensor) -> str:
    """The dtype whose rounding of `exact` makes this error; empty if none does."""
    for dtype in DTYPE_EPSILON:
        rounding_error = exact.to(dtype).double() - exact.double()
        is_lossy = exact.dtype != dtype and bool(rounding_error.any())
        if is_lossy and relative_distance(error, rounding_error) < ROUNDING_MATCH:
            return dtype_name(dtype)
    return ""
