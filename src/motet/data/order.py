"""Which sample stands where: the samples of step n depend on (seed, n) and on nothing else.

Each epoch is a pseudo-random permutation that is computed, not stored, so that any place of it costs the same; a
mixture is a repeating pattern of corpora, so that the place within each corpus is computed as well.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from motet.core.errors import InputError
from motet.core.seeds import derive_seed
from motet.data.draws import keys, mix

Places = NDArray[np.int64]

PATTERN = 1000
"""Samples after which the pattern of a mixture repeats: weights hold exactly to a thousandth over each of them."""

_ROUNDS = 4
_BLOCK = 4096


def permute(places: Places, size: int, seed: int) -> Places:
    """Where each place of 0..size-1 goes in the permutation of this seed, without storing the permutation.

    A Feistel network with modular addition on a grid a x b that is barely larger than `size`; what falls outside
    goes through again until it is inside (cycle walking), which keeps it a bijection.
    """
    a = math.isqrt(size - 1) + 1
    b = -(-size // a)
    round_keys = keys(seed, np.arange(2 * _ROUNDS))
    result = _feistel(places.astype(np.uint64), a, b, round_keys)
    while (outside := result >= size).any():
        result[outside] = _feistel(result[outside], a, b, round_keys)
    return result.astype(np.int64)


def _feistel(words: NDArray[np.uint64], a: int, b: int, round_keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    height, width = np.uint64(a), np.uint64(b)
    high, low = words // width, words % width
    for left, right in round_keys.reshape(_ROUNDS, 2):
        high = (high + mix(low + left) % height) % height
        low = (low + mix(high + right) % width) % width
    return high * width + low


def samples_at(places: Places, size: int, seed: int) -> Places:
    """The samples at these places of the endless stream of epochs over `size` samples."""
    epochs, within = np.divmod(places, size)
    blocks, inside = np.divmod(within, _BLOCK)
    samples = np.empty_like(places)
    for epoch, block in set(zip(epochs.tolist(), blocks.tolist(), strict=True)):
        here = (epochs == epoch) & (blocks == block)
        samples[here] = _block(epoch, block, size, seed)[inside[here]]
    return samples


@lru_cache(maxsize=64)
def _block(epoch: int, block: int, size: int, seed: int) -> Places:
    """A stretch of an epoch: to permute 16 places costs nearly as much as 4096, which then serve the next steps."""
    places = np.arange(block * _BLOCK, min((block + 1) * _BLOCK, size))
    samples = permute(places, size, derive_seed(seed, "epoch", epoch))
    samples.flags.writeable = False
    return samples


@dataclass(frozen=True)
class Mixture:
    """A pattern of `PATTERN` slots that repeats for ever."""

    corpus: Places
    """[PATTERN] the corpus of each slot."""
    rank: Places
    """[PATTERN] how many slots of the same corpus come before it in the pattern."""
    counts: Places
    """[corpora] slots of each corpus."""

    def locate(self, places: Places) -> tuple[Places, Places]:
        """For each place of the global stream: its corpus, and the place in the stream of that corpus."""
        rounds, slots = np.divmod(places, len(self.corpus))
        corpus = self.corpus[slots]
        return corpus, rounds * self.counts[corpus] + self.rank[slots]


def mixture_of(weights: list[float]) -> Mixture:
    """The pattern for these weights: counts by largest remainder, each corpus spread evenly over the pattern."""
    if len(weights) == 1:
        zero = np.zeros(1, dtype=np.int64)
        return Mixture(zero, zero, np.ones(1, dtype=np.int64))
    shares = np.array(weights, dtype=np.float64) / math.fsum(weights) * PATTERN
    worst = int(np.argmin(shares))
    if shares[worst] < 1 - 1e-9:
        raise InputError(
            f"data.mixture: weight {weights[worst]:g} of source {worst + 1} is less than 1/{PATTERN} of the sum "
            f"{math.fsum(weights):g}; raise it or leave the source out"
        )
    counts = np.floor(shares + 1e-9).astype(np.int64)
    order = np.argsort(-(shares - counts), kind="stable")
    counts[order[: PATTERN - int(counts.sum())]] += 1
    corpus = np.repeat(np.arange(len(weights)), counts)
    rank = np.concatenate([np.arange(count) for count in counts])
    when = (rank + 0.5) / counts[corpus]
    spread = np.lexsort((corpus, when))
    return Mixture(corpus[spread], rank[spread], counts)


def samples_for_epochs(epochs: float, samples: int) -> int:
    """Samples in so many passes; a broken pass is rounded to whole samples."""
    return max(1, round(epochs * samples))


def steps_for_epochs(epochs: float, samples: int, batch: int) -> int:
    """Steps in so many passes; the last step may be incomplete."""
    return -(-samples_for_epochs(epochs, samples) // batch)
