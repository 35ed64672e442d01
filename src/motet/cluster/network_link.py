"""A directed link of a cluster, and its load if flows are hashed onto its parallel paths."""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import cast

from motet.cluster.device_specs import HardwareNumberWithOrigin
from motet.cluster.devices.datasheets import Origin
from motet.core.errors import check_input

Number = float | Fraction


def with_origin(value: Number, origin: Origin = "assumed") -> HardwareNumberWithOrigin:
    """A value that stays a Fraction if it is one, so that sums over links are exact; its type says float."""
    return HardwareNumberWithOrigin(cast(float, value), origin)


@dataclass(frozen=True, slots=True)
class NetworkLink:
    """A resource that messages cross in one direction, or in both directions if they share it."""

    alpha_s: HardwareNumberWithOrigin  # At a port the one-way start-up of each message, elsewhere a delay
    bandwidth_Bps: HardwareNumberWithOrigin  # noqa: N815 - a unit; all paths together
    is_port: bool = False  # An endpoint sends (or receives) its messages over its port in turn
    hashed_paths: int = 1  # Equal paths, on one of which each flow is hashed. 1: the load is always even

    def __post_init__(self) -> None:
        bandwidth, alpha = self.bandwidth_Bps.value, self.alpha_s.value
        check_input(bandwidth > 0, f"a link with bandwidth_Bps = {bandwidth} carries nothing; give more than 0")
        check_input(alpha >= 0, f"a link with alpha_s = {alpha} starts before it is asked; give 0 or more")
        check_input(self.hashed_paths >= 1, f"a link cannot have {self.hashed_paths} paths; give 1 or more")

    def imbalance(self, flows: int) -> float:
        """The time of the fullest path over that of an even load, if equal flows are hashed: 1 to `hashed_paths`."""
        assert flows >= 1
        return 1 if self.hashed_paths == 1 else self.hashed_paths * expected_max_load(flows, self.hashed_paths) / flows


@lru_cache(maxsize=4096)
def expected_max_load(balls: int, bins: int) -> float:
    """The expected number of balls in the fullest of equally likely bins, with a relative error of 1e-10.

    P(no bin holds more than k) is P(all of `bins` Poisson counts are at most k, given that their sum is `balls`). The
    probability of a sum is a coefficient of a power of the Poisson law cut off at k: a Fourier transform and back.
    """
    import numpy as np  # Few commands cost hashed flows, and all others start faster without it

    assert balls >= 0 and bins >= 1
    count_probabilities, sum_probability = _poisson(balls / bins, balls), _poisson(balls, balls)[-1]
    expected, before = float(balls // bins), 1.0  # some bin holds at least that many
    for k in range(balls // bins, balls):
        length = 1 << max(bins * k, balls).bit_length()  # no sum wraps around
        sums = np.fft.irfft(np.fft.rfft(count_probabilities[: k + 1], length) ** bins, length)
        more = 1 - float(sums[balls]) / sum_probability
        if more < 1e-11 or (more < 1e-6 and more >= before):  # `more` falls with k, except for rounding
            break
        expected, before = expected + more, more
    return expected


def _poisson(mean: float, last: int) -> list[float]:
    """The probabilities of 0 .. last, by logarithms, since the factors overflow."""
    if mean == 0:
        return [1.0] + [0.0] * last
    return [math.exp(count * math.log(mean) - mean - math.lgamma(count + 1)) for count in range(last + 1)]
