"""Links: what hashing flows onto paths costs, and numbers that stay exact."""

from fractions import Fraction
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.cluster.network_link import NetworkLink, expected_max_load, with_origin
from motet.core.errors import InputError


def counted(balls: int, bins: int) -> Fraction:
    """The expectation over all `bins ** balls` ways, counted: the tail sum of P(fullest > k)."""

    def ways(most: int) -> int:
        found = [1] + [0] * balls  # of placing n balls into the bins so far, none with more than `most`
        for _ in range(bins):
            found = [sum(comb(n, i) * found[n - i] for i in range(min(n, most) + 1)) for n in range(balls + 1)]
        return found[balls]

    return sum((1 - Fraction(ways(k), bins**balls) for k in range(balls)), Fraction(0))


@pytest.mark.parametrize("bins", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("balls", [0, 1, 2, 3, 7, 16, 24])
def test_the_fullest_bin_is_as_full_as_counted(balls: int, bins: int) -> None:
    assert expected_max_load(balls, bins) == pytest.approx(float(counted(balls, bins)), rel=1e-10, abs=1e-12)


def test_cases_that_are_known_by_heart() -> None:
    assert expected_max_load(2, 2) == pytest.approx(1.5, rel=1e-12)
    assert expected_max_load(2, 365) == pytest.approx(1 + 1 / 365, rel=1e-12)
    assert expected_max_load(3, 3) == pytest.approx((6 * 1 + 18 * 2 + 3 * 3) / 27, rel=1e-12)


@given(st.integers(1, 400), st.integers(1, 64))
def test_the_fullest_bin_has_at_least_the_mean_and_at_most_all(balls: int, bins: int) -> None:
    fullest = expected_max_load(balls, bins)
    assert max(1, balls / bins) * (1 - 1e-10) <= fullest <= balls * (1 + 1e-10)
    assert expected_max_load(balls + 1, bins) > fullest - 1e-9


def paths(count: int) -> NetworkLink:
    return NetworkLink(with_origin(0), with_origin(1), hashed_paths=count)


@given(st.integers(1, 400), st.integers(1, 64))
def test_imbalance_is_between_even_and_all_in_one_path(flows: int, count: int) -> None:
    assert 1 - 1e-10 <= paths(count).imbalance(flows) <= count * (1 + 1e-10)


def test_imbalance_of_one_flow_and_of_very_many() -> None:
    assert paths(8).imbalance(1) == 8  # it has one path of eight
    assert 1 < paths(8).imbalance(20_000) < 1.04
    assert paths(1).imbalance(5) == 1


def test_a_fraction_stays_a_fraction() -> None:
    link = NetworkLink(with_origin(Fraction(1, 3)), with_origin(Fraction(7)))
    assert Fraction(1) / link.bandwidth_Bps.value + link.alpha_s.value == Fraction(10, 21)
    assert isinstance(link.imbalance(3) * Fraction(1, 3), Fraction)


@pytest.mark.parametrize(
    ("alpha_s", "bandwidth", "count", "words"),
    [
        (0, 0, 1, "bandwidth_Bps = 0 carries nothing; give more than 0"),
        (0, float("nan"), 1, "bandwidth_Bps = nan carries nothing"),
        (-1, 1, 1, "alpha_s = -1 starts before it is asked; give 0 or more"),
        (0, 1, 0, "0 paths; give 1 or more"),
    ],
)
def test_impossible_links(alpha_s: float, bandwidth: float, count: int, words: str) -> None:
    with pytest.raises(InputError, match=words):
        NetworkLink(with_origin(alpha_s), with_origin(bandwidth), hashed_paths=count)
