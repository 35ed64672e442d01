"""Few cases in which every possible pair of values of two factors stands together at least once."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from random import Random
from typing import Any

Case = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]
_TRIES = 200


def covering_array(factors: Mapping[str, Sequence[Any]], is_possible: Callable[[Case], bool]) -> list[Case]:
    """The same cases each time. A pair that stands in no possible case is left out."""
    random, cases = Random(0), list[Case]()
    missing = set(_all_pairs(factors))
    for pair in sorted(missing, key=str):
        if pair in missing:
            drawn = [{**{n: random.choice(v) for n, v in factors.items()}, **dict(pair)} for _ in range(_TRIES)]
            possible = [case for case in drawn if is_possible(case)]
            if possible:
                cases.append(max(possible, key=lambda case: len(missing & pairs_of(case))))
                missing -= pairs_of(cases[-1])
    return cases


def uncovered_pairs(factors: Mapping[str, Sequence[Any]], cases: Sequence[Case]) -> list[Case]:
    """Values of two factors that stand together in no case."""
    covered = set[Pair]().union(*map(pairs_of, cases))
    return [dict(pair) for pair in _all_pairs(factors) if pair not in covered]


def _all_pairs(factors: Mapping[str, Sequence[Any]]) -> list[Pair]:
    return [((a, x), (b, y)) for a, b in combinations(factors, 2) for x in factors[a] for y in factors[b]]


def pairs_of(case: Case) -> set[Pair]:
    """Pairs of a factor and a value that stand together in a case."""
    return set(combinations(case.items(), 2))
