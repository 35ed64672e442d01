"""The order of samples, and all other random numbers of data: those of step n depend only on (seed, n).
Number j of key k is a fixed function of (k, j), so any rank can make any row, in any order. Each epoch is a
pseudo-random permutation that is computed, not stored. A mixture is a repeating pattern of corpora, so the position
within each corpus is computed too."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from motet.core.errors import check_input
from motet.core.seeds import derive_seed

StreamPositions = NDArray[np.int64]
UInt64Array = NDArray[np.uint64]

MIXTURE_PERIOD = 1000  # Samples after which a mixture repeats; weights are exact to a thousandth over each period

_FEISTEL_ROUNDS = 4
_BLOCK_SIZE = 4096

# Constants of SplitMix64, whose finaliser mixes uint64 arrays that wrap around silently.
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
    return (splitmix64_hash(row_keys[:, None] + counters[None, :]) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permute(positions: StreamPositions, size: int, seed: int) -> StreamPositions:
    """The image of each position of 0..size-1 under the permutation of this seed, which is not stored.
    A Feistel network with modular addition on a grid that is barely larger than `size`. Results outside go through
    again until they are inside (cycle walking), which keeps it a bijection."""
    height = math.isqrt(size - 1) + 1
    grid, round_keys = (height, -(-size // height)), derive_keys(seed, np.arange(2 * _FEISTEL_ROUNDS))
    result = _feistel(positions.astype(np.uint64), grid, round_keys)
    while (outside := result >= size).any():
        result[outside] = _feistel(result[outside], grid, round_keys)
    return result.astype(np.int64)


def _feistel(words: UInt64Array, grid: tuple[int, int], round_keys: UInt64Array) -> UInt64Array:
    height, width = map(np.uint64, grid)
    high, low = words // width, words % width
    for left, right in round_keys.reshape(_FEISTEL_ROUNDS, 2):
        high = (high + splitmix64_hash(low + left) % height) % height
        low = (low + splitmix64_hash(high + right) % width) % width
    return high * width + low


def shuffled_samples(positions: StreamPositions, size: int, seed: int) -> StreamPositions:
    """The samples at these positions of the endless stream of epochs over `size` samples."""
    epochs, position_in_epoch = np.divmod(positions, size)
    blocks, position_in_block = np.divmod(position_in_epoch, _BLOCK_SIZE)
    samples = np.empty_like(positions)
    for epoch, block in set(zip(epochs.tolist(), blocks.tolist(), strict=True)):
        is_in_block = (epochs == epoch) & (blocks == block)
        samples[is_in_block] = _permuted_block(epoch, block, size, seed=seed)[position_in_block[is_in_block]]
    return samples


@lru_cache(maxsize=64)
def _permuted_block(epoch: int, block: int, size: int, *, seed: int) -> StreamPositions:
    """A block of an epoch: permuting 16 positions costs nearly as much as 4096, which then serve the next steps."""
    positions = np.arange(block * _BLOCK_SIZE, min((block + 1) * _BLOCK_SIZE, size))
    samples = permute(positions, size, derive_seed(seed, "epoch", epoch))
    samples.flags.writeable = False
    return samples


@dataclass(frozen=True)
class DataMixtureSchedule:
    """A pattern of slots that repeats for ever."""

    corpus_of_slot: StreamPositions  # [slots]
    occurrence_of_slot: StreamPositions  # [slots] earlier slots of the same corpus in the pattern
    slots_per_corpus: StreamPositions  # [corpora]

    def locate(self, positions: StreamPositions) -> tuple[StreamPositions, StreamPositions]:
        """The corpus of each position of the global stream, and the position in the stream of that corpus."""
        periods, slots = np.divmod(positions, len(self.corpus_of_slot))
        corpus = self.corpus_of_slot[slots]
        return corpus, periods * self.slots_per_corpus[corpus] + self.occurrence_of_slot[slots]


def build_mixture_schedule(weights: list[float]) -> DataMixtureSchedule:
    """The pattern for these weights: counts by largest remainder, each corpus evenly distributed over the pattern."""
    if len(weights) == 1:
        return DataMixtureSchedule(np.zeros(1, np.int64), np.zeros(1, np.int64), np.ones(1, np.int64))
    scale = -math.frexp(max(weights))[1]  # A power of two changes no bit of a fraction, and keeps the sum finite
    scaled = [math.ldexp(weight, scale) for weight in weights]
    exact_counts = np.array(scaled, dtype=np.float64) / math.fsum(scaled) * MIXTURE_PERIOD
    lowest = int(np.argmin(exact_counts))
    total = sum(weights)
    light = f"weight {weights[lowest]:g} of source {lowest + 1} is less than 1/{MIXTURE_PERIOD} of the sum {total:g}"
    check_input(exact_counts[lowest] >= 1 - 1e-9, f"data.mixture: {light}; raise it or leave the source out")
    counts = np.floor(exact_counts + 1e-9).astype(np.int64)
    counts[np.argsort(counts - exact_counts, kind="stable")[: MIXTURE_PERIOD - int(counts.sum())]] += 1
    corpus = np.repeat(np.arange(len(weights)), counts)
    occurrence = np.concatenate([np.arange(count) for count in counts])
    slot_order = np.lexsort((corpus, (occurrence + 0.5) / counts[corpus]))
    return DataMixtureSchedule(corpus[slot_order], occurrence[slot_order], counts)


def samples_for_epochs(epochs: float, samples: int) -> int:
    """Samples in this number of passes, rounded to whole samples."""
    return max(1, round(epochs * samples))
