"""The order of samples: counted random numbers, bijections, places that do not depend on who asks, exact mixtures."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.core.errors import InputError
from motet.data.samples import shuffle_and_mix
from motet.data.samples.shuffle_and_mix import (
    MIXTURE_PERIOD,
    build_mixture_schedule,
    derive_keys,
    permute,
    shuffled_samples,
    splitmix64_hash,
    uniform_floats,
)

SIZES = st.integers(1, 3000)
SEEDS = st.integers(0, 2**63 - 1)


@given(SIZES, SEEDS)
def test_a_permutation_is_a_bijection(size: int, seed: int) -> None:
    assert sorted(permute(np.arange(size), size, seed)) == list(range(size))


@given(st.integers(1, 2**50), SEEDS, st.lists(st.integers(0, 2**50), min_size=1, max_size=20, unique=True))
def test_a_huge_permutation_costs_nothing_and_repeats_nothing(size: int, seed: int, places: list[int]) -> None:
    inside = np.unique(np.array(places) % size)
    result = permute(inside, size, seed)
    assert len(np.unique(result)) == len(inside) and result.min() >= 0 and result.max() < size


def test_every_order_of_four_is_about_equally_likely() -> None:
    orders: dict[tuple[int, ...], int] = {}
    for seed in range(2400):
        order = tuple(permute(np.arange(4), 4, seed).tolist())
        orders[order] = orders.get(order, 0) + 1
    assert len(orders) == 24
    assert max(abs(count - 100) for count in orders.values()) < 50  # five standard deviations


def test_neighbours_are_not_kept_together() -> None:
    order = permute(np.arange(10_000), 10_000, 3)
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.05
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.05


@given(SIZES, SEEDS, st.integers(0, 2**40), st.integers(1, 200), st.data())
def test_the_stream_can_be_sliced(size: int, seed: int, first: int, count: int, data: st.DataObject) -> None:
    places = np.arange(first, first + count)
    parts = np.split(places, [data.draw(st.integers(0, count))])
    found = [shuffled_samples(part, size, seed) for part in parts]
    assert np.concatenate(found).tolist() == shuffled_samples(places, size, seed).tolist()


@settings(max_examples=20)
@given(st.integers(4000, 9000), SEEDS, st.integers(0, 5))
def test_each_epoch_holds_every_sample_once(size: int, seed: int, epoch: int) -> None:
    assert sorted(shuffled_samples(np.arange(epoch * size, (epoch + 1) * size), size, seed)) == list(range(size))


def test_epochs_and_seeds_differ() -> None:
    first, second = shuffled_samples(np.arange(200), 100, 0).reshape(2, 100)
    assert first.tolist() != second.tolist() and first.tolist() != shuffled_samples(np.arange(100), 100, 1).tolist()


@given(st.lists(st.integers(5, 1000), min_size=1, max_size=5), st.integers(0, 2**40))
def test_mixtures_hold_exactly_over_the_pattern(weights: list[int], rounds: int) -> None:
    total = sum(weights)
    mixture = build_mixture_schedule([float(weight) for weight in weights])
    length = len(mixture.corpus_of_slot)
    corpus, place = mixture.locate(np.arange(rounds * length, (rounds + 1) * length))
    for number, weight in enumerate(weights):
        mine = place[corpus == number]
        count = len(mine)
        assert abs(count - weight / total * length) < 1
        if weight * length % total == 0:
            assert count == weight * length // total
        # The places within a corpus go on without gaps or repetitions, from round to round.
        assert mine.tolist() == list(range(rounds * count, (rounds + 1) * count))


def test_a_mixture_is_spread_evenly() -> None:
    corpus, _ = build_mixture_schedule([3.0, 1.0]).locate(np.arange(MIXTURE_PERIOD))
    assert set(np.convolve(corpus, np.ones(40, np.int64), "valid").tolist()) == {10}


def test_a_weight_too_small_to_appear_is_refused() -> None:
    with pytest.raises(InputError, match=r"weight 0\.0001 of source 2 is less than 1/1000"):
        build_mixture_schedule([1.0, 0.0001])


def test_samples_of_epochs() -> None:
    cases = {(1, 100): 100, (1, 101): 101, (2, 101): 202, (0.5, 101): 50, (0.001, 101): 1, (3, 1): 3}
    assert {case: shuffle_and_mix.samples_for_epochs(*case) for case in cases} == cases


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


@pytest.mark.parametrize("weight", [1e308, 5e-324, 1e-320])
def test_weights_at_the_ends_of_the_range_are_weights(weight: float) -> None:
    mixture = build_mixture_schedule([weight] * 4)
    assert mixture.slots_per_corpus.tolist() == [250] * 4
