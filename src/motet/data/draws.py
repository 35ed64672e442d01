"""Random numbers that are counted, not drawn in turn: number j of key k is a fixed function of (k, j).

So any row can be made alone, on any rank, in any order. The mixing function is SplitMix64's finaliser, vectorised
over uint64 arrays, which wrap around silently.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def mix(words: Words) -> Words:
    """A bijection of 64-bit words in which every bit depends on every bit."""
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    return words ^ (words >> np.uint64(31))


def keys(seed: int, numbers: NDArray[Any]) -> Words:
    """One key for each number, of the shape of `numbers`."""
    start = mix(np.array([seed], dtype=np.uint64))
    return mix(start + (numbers.astype(np.uint64) + np.uint64(1)) * _GOLDEN)


def uniforms(row_keys: Words, width: int, stream: int) -> NDArray[np.float64]:
    """[R, width] numbers in [0, 1) for R keys; another `stream` gives others of the same keys."""
    counters = (np.arange(width, dtype=np.uint64) + np.uint64(stream << 40)) * _GOLDEN
    words = mix(row_keys[:, None] + counters[None, :])
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
