"""Start-up time and bandwidth of a link, fitted to measured times, in the form of a cluster file."""

from collections.abc import Sequence
from typing import Any, NamedTuple


class AlphaBetaFit(NamedTuple):
    """The time of a message is `alpha_s` plus its bytes over `bandwidth_Bps`."""

    alpha_s: float
    bandwidth_Bps: float  # noqa: N815 - a unit

    def port_description(self) -> dict[str, Any]:
        """The keys of a port in a cluster file."""
        return {"alpha_s": measured(self.alpha_s), "bandwidth_Bps": measured(self.bandwidth_Bps)}


def measured(value: float) -> dict[str, Any]:
    """The entry of a cluster file for a measured number."""
    return {"value": value, "origin": "measured"}


def fit_alpha_beta(sizes: Sequence[int], seconds: Sequence[float]) -> AlphaBetaFit:
    """The line through the measured times with the least squared relative errors, and alpha >= 0."""
    weights = [1 / time_s**2 for time_s in seconds]

    def mean(values: Sequence[float]) -> float:
        return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)

    size, time_s = mean(sizes), mean(seconds)
    variance = mean([(s - size) ** 2 for s in sizes])
    covariance = mean([(s - size) * (t - time_s) for s, t in zip(sizes, seconds, strict=True)])
    beta = covariance / variance if variance else 0.0
    alpha = time_s - beta * size
    if alpha < 0 or beta <= 0:  # The best line through zero
        alpha, beta = 0.0, mean([s * t for s, t in zip(sizes, seconds, strict=True)]) / mean([s * s for s in sizes])
    return AlphaBetaFit(alpha, 1 / beta)
