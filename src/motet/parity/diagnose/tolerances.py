"""Tolerances within which an equation between numbers holds: in float64, or in the precision of a job."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple


class Tolerances(NamedTuple):
    """Relative distances up to which an equation holds: rounding is below them, other mistakes are above."""

    fit: float = 1e-9
    coefficient: float = 1e-7  # How far a coefficient may be from a number that has a meaning
    enumeration: float = 1e-11  # Tight, since many combinations are tried on few numbers
    update: float = 1e-6  # Between changes of masters, which are small against the masters
    scalar: float = 1e-10

    @property
    def is_coarse(self) -> bool:
        """Whether numbers of a job's own precision are compared, where every sum is rounded."""
        return self.fit > 1e-9

    @property
    def digits(self) -> int:
        """Digits after the point that a coefficient has."""
        return max(0, math.floor(-math.log10(10 * self.coefficient)))


EXACT = Tolerances()
_TOLERANCES = ContextVar("tolerances", default=EXACT)
tolerances = _TOLERANCES.get


@contextmanager
def wider_tolerances(fit: float) -> Iterator[None]:
    """Inside, equations hold up to this distance, which is that of rounding in a smaller dtype."""
    token = _TOLERANCES.set(Tolerances(*(max(fit, tolerance) for tolerance in EXACT)))
    try:
        yield
    finally:
        _TOLERANCES.reset(token)
