"""A counter-based random number generator: number j of key k is a fixed function of (k, j).

Any rank can therefore make any row, in any order. The mixing function is SplitMix64's finaliser over uint64 arrays,
which wrap around silently.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

UInt64Array = NDArray[np.uint64]

_GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)


def splitmix64_hash(words: UInt64Array) -> UInt64Array:
    """A bijection of 64-bit words in which every bit depends on every bit."""
    words = (words ^ (words >> np.uint64(30))) * _MULTIPLIER_1
    words = (words ^ (words >> np.uint64(27))) * _MULTIPLIER_2
    return words ^ (words >> np.uint64(31))


def derive_keys(seed: int, indices: NDArray[Any]) -> UInt64Array:
    """One key for each index."""
    start = splitmix64_hash(np.array([seed], dtype=np.uint64))
    return splitmix64_hash(start + (indices.astype(np.uint64) + np.uint64(1)) * _GOLDEN_RATIO)


def uniform_floats(row_keys: UInt64Array, width: int, stream: int) -> NDArray[np.float64]:
    """[R, width] numbers in [0, 1) for R keys; each `stream` of a key is different."""
    counters = (np.arange(width, dtype=np.uint64) + np.uint64(stream << 40)) * _GOLDEN_RATIO
    words = splitmix64_hash(row_keys[:, None] + counters[None, :])
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
