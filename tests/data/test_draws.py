"""Counted random numbers: fixed functions of key and place, and even enough to draw from."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.data.samples.shuffle_and_mix import derive_keys, splitmix64_hash, uniform_floats


@given(st.integers(0, 2**64 - 1))
def test_mix_can_be_undone(word: int) -> None:
    def shift_back(value: int, by: int) -> int:
        result = value
        for _ in range(64 // by + 1):
            result = value ^ (result >> by)
        return result

    mask = 2**64 - 1
    value = shift_back(int(splitmix64_hash(np.array([word], np.uint64))[0]), 31)
    value = shift_back(value * pow(0x94D049BB133111EB, -1, 2**64) & mask, 27)
    value = shift_back(value * pow(0xBF58476D1CE4E5B9, -1, 2**64) & mask, 30)
    assert value == word


@given(st.integers(0, 2**63 - 1), st.lists(st.integers(0, 2**50), min_size=1, max_size=20), st.integers(1, 40))
def test_a_number_depends_on_key_and_place_alone(seed: int, rows: list[int], width: int) -> None:
    together = uniform_floats(derive_keys(seed, np.array(rows)), width + 3, 1)
    for row, number in enumerate(rows):
        assert (uniform_floats(derive_keys(seed, np.array([number])), width, 1)[0] == together[row, :width]).all()


def test_seeds_rows_and_streams_differ() -> None:
    first = uniform_floats(derive_keys(0, np.arange(3)), 50, 0)
    cases = ((1, np.arange(3), 0), (0, np.arange(3, 6), 0), (0, np.arange(3), 1))
    others = [uniform_floats(derive_keys(seed, rows), 50, stream) for seed, rows, stream in cases]
    assert all((first != other).all() for other in others) and len(np.unique(first)) == first.size


@pytest.mark.parametrize("stream", [0, 1, 2])
def test_numbers_fill_the_unit_interval_evenly(stream: int) -> None:
    numbers = uniform_floats(derive_keys(5, np.arange(500)), 200, stream).ravel()
    counts, _ = np.histogram(numbers, bins=10, range=(0, 1))
    # 100,000 draws: five standard deviations of a bin are 474.
    assert numbers.min() >= 0 and numbers.max() < 1 and np.abs(counts - 10_000).max() < 474
