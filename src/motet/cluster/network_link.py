"""One directed link of a cluster, and what it costs when flows are hashed onto its parallel lanes."""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import cast

import numpy as np

from motet.cluster.device_specs import Origin, ValueWithOrigin
from motet.core.errors import InputError

Number = float | Fraction


def with_origin(value: Number, origin: Origin = "assumed") -> ValueWithOrigin:
    """A figure that keeps a Fraction as it is, so that sums over links stay exact (it is typed as a float)."""
    return ValueWithOrigin(cast(float, value), origin)


@dataclass(frozen=True, slots=True)
class NetworkLink:
    """A resource that messages cross in one direction, or a shared one that they cross in any."""

    alpha_s: ValueWithOrigin  # At a port the one-way start-up of each message; elsewhere the delay of passing through
    # Of all lanes together.
    bandwidth_Bps: ValueWithOrigin  # noqa: N815 - a unit
    is_port: bool = False  # Belongs to one endpoint, which sends (or receives) its messages over it one after the other
    hashed_paths: int = 1  # How many equal lanes flows are hashed onto, each flow onto one. 1: the load is always even.

    def __post_init__(self) -> None:
        if not self.bandwidth_Bps.value > 0:
            raise InputError(
                f"a link with bandwidth_Bps = {self.bandwidth_Bps.value} carries nothing; give more than 0"
            )
        if not self.alpha_s.value >= 0:
            raise InputError(f"a link with alpha_s = {self.alpha_s.value} starts before it is asked; give 0 or more")
        if self.hashed_paths < 1:
            raise InputError(f"a link cannot have {self.hashed_paths} lanes; give 1 or more")

    def imbalance(self, flows: int) -> float:
        """How many times longer the fullest lane takes than an even load would, when equal flows are hashed.

        Between 1 and the number of lanes: a single flow has but one of them.
        """
        assert flows >= 1
        if self.hashed_paths == 1:
            return 1
        return self.hashed_paths * expected_max_load(flows, self.hashed_paths) / flows


@lru_cache(maxsize=4096)
def expected_max_load(balls: int, bins: int) -> float:
    """The expected number of balls in the fullest bin when each falls into any bin alike; good to 1e-10 of it.

    P(no bin holds more than k) is P(that many Poisson counts are all at most k, given that their sum is `balls`). The
    probability of a sum is a coefficient of a power of the Poisson law cut off at k: a Fourier transform and back.
    """
    assert balls >= 0 and bins >= 1
    count_probabilities, sum_probability = _poisson(balls / bins, balls), _poisson(balls, balls)[-1]
    expected, before = float(balls // bins), 1.0  # some bin holds at least that many
    for k in range(balls // bins, balls):
        length = 1 << max(bins * k, balls).bit_length()  # no sum wraps around
        sums = np.fft.irfft(np.fft.rfft(count_probabilities[: k + 1], length) ** bins, length)
        more = 1 - float(sums[balls]) / sum_probability
        if more < 1e-11 or (more < 1e-6 and more >= before):  # it falls with k: what does not is rounding
            break
        expected, before = expected + more, more
    return expected


def _poisson(mean: float, last: int) -> list[float]:
    """The probabilities of 0 .. last, through logarithms: the factors alone overflow."""
    if mean == 0:
        return [1.0] + [0.0] * last
    return [math.exp(count * math.log(mean) - mean - math.lgamma(count + 1)) for count in range(last + 1)]
