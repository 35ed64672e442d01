"""The fit of a link's start-up and bandwidth to measured times, and the cluster description of such fits."""

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
    """A measured number as a cluster file has it."""
    return {"value": value, "origin": "measured"}


def fit_alpha_beta(sizes: Sequence[int], seconds: Sequence[float]) -> AlphaBetaFit:
    """The line with the smallest relative errors that does not start below 0."""
    weights = [1 / time_s**2 for time_s in seconds]

    def mean(values: Sequence[float]) -> float:
        return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)

    size, time_s = mean(sizes), mean(seconds)
    variance = mean([(s - size) ** 2 for s in sizes])
    covariance = mean([(s - size) * (t - time_s) for s, t in zip(sizes, seconds, strict=True)])
    beta = covariance / variance if variance else 0.0
    alpha = time_s - beta * size
    if alpha < 0 or beta <= 0:  # the best line through zero
        alpha, beta = 0.0, mean([s * t for s, t in zip(sizes, seconds, strict=True)]) / mean([s * s for s in sizes])
    return AlphaBetaFit(alpha, 1 / beta)
