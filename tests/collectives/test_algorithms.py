"""Algorithms: proven, costed as their closed forms say, refused where they cannot work; Programs made of Programs."""

import random
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import chain, product
from math import prod
from typing import Any

import pytest

from motet.cluster.cluster import uniform_cluster
from motet.collectives.algorithms import algorithm_names, build, closed_form, find_algorithm
from motet.collectives.compose import concatenate, reverse
from motet.collectives.cost.alpha_beta import estimate_cost
from motet.collectives.prove.program_checker import prove_program
from motet.core.errors import InputError
from program_library import ALL

SOME_COUNTS = (2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 24, 32)
OPTIONS: dict[str, tuple[object, ...]] = {"root": (1,), "pieces": (1, 3), "hosts": (1, 2), "src": (3,), "dst": (4,)}
OPTIONS["dims"] = ((2, 6), (3, 2, 2), (3, 4), (2, 3, 2, 2), (2, 2, 2, 2, 2, 2))


def _check(collective: str, name: str, ranks: int, **options: object) -> None:
    """Proven; on a uniform network exactly as dear as its closed form says, whatever the numbers are."""
    built = build(collective, name, ranks, **options)
    assert prove_program(built).same_bits == find_algorithm(collective, name).same_bits or ranks == 2
    draw = random.Random(f"{collective} {name} {ranks}")
    alpha, beta, gamma = (Fraction(draw.randint(1, 10**6), draw.randint(1, 10**6)) for _ in range(3))
    size = Fraction(draw.randint(1, 10**9))
    derived = estimate_cost(built, uniform_cluster(ranks, alpha, 1 / beta, gamma)).seconds(size)
    assert derived == closed_form(collective, name, ranks, **options).seconds(alpha, beta * size, gamma * size)


@pytest.mark.parametrize("counts", [SOME_COUNTS, pytest.param(range(2, 65), marks=pytest.mark.proof)])
@pytest.mark.parametrize(("collective", "name"), ALL)
def test_proven_and_costed_as_the_closed_form(collective: str, name: str, counts: Sequence[int]) -> None:
    for ranks in filter(find_algorithm(collective, name).supports, counts):
        _check(collective, name, ranks)


@pytest.mark.parametrize(("collective", "name"), ALL)
def test_options_change_the_program_and_its_cost_alike(collective: str, name: str) -> None:
    found = find_algorithm(collective, name)
    for option in found.options:
        assert OPTIONS[option]
        for value in OPTIONS[option]:
            if not isinstance(value, tuple) or len(value) in found.axes:
                _check(collective, name, prod(value) if isinstance(value, tuple) else 12, **{option: value})


def test_every_algorithm_says_what_it_is() -> None:
    for collective, name in ALL:
        found = find_algorithm(collective, name)
        assert found.summary.endswith("."), found
        built = build(collective, name, next(filter(found.supports, range(2, 65))))
        assert (built.collective, built.algorithm) == (collective, name)


def test_a_ring_moves_what_theory_says_and_a_torus_uses_all_its_links_alike() -> None:
    built = build("all-reduce", "ring", 5)
    assert [built.send_fraction(rank) for rank in range(5)] == [Fraction(2 * 4, 5)] * 5
    assert len(built.steps) == 8 and built.message_count == 40
    assert {(t.src, t.dst) for step in built.steps for t in step} == {(rank, (rank + 1) % 5) for rank in range(5)}
    built = build("all-reduce", "torus-2d", 16, dims=(4, 4))
    crossed = Counter[tuple[int, int]]()
    for step in built.steps:
        for t in step:
            crossed[t.src, t.dst] += built.relative_size(t)
    assert len(crossed) == 16 * 4 and len(set(crossed.values())) == 1


@pytest.mark.parametrize("name", ["recursive-doubling", "halving-doubling"])
def test_butterflies_meet_every_partner_at_a_distance_of_a_power_of_two(name: str) -> None:
    distances = [{t.src ^ t.dst for t in step} for step in build("all-reduce", name, 16).steps]
    assert all(len(distance) == 1 for distance in distances)
    assert {one for distance in distances for one in distance} == {1, 2, 4, 8}


@pytest.mark.parametrize(("name", "dims"), [("torus-2d", (3, 4)), ("torus-3d", (2, 3, 2)), ("mesh-2d", (3, 4))])
def test_grids_use_only_neighbours(name: str, dims: tuple[int, ...]) -> None:
    """Two ranks that talk differ by one in one coordinate, on a torus also around its end."""
    built = build("all-reduce", name, 12, dims=dims)
    places = list(product(*map(range, dims)))
    for t in chain.from_iterable(built.steps):
        apart = [(abs(a - b), d) for a, b, d in zip(places[t.src], places[t.dst], dims, strict=True) if a != b]
        assert len(apart) == 1
        distance, length = apart[0]
        assert distance == 1 or (name != "mesh-2d" and distance == length - 1)


def test_in_a_double_tree_whoever_is_inside_one_is_a_leaf_of_the_other() -> None:
    for ranks in range(3, 40):
        built = build("all-reduce", "double-tree", ranks, pieces=1)
        sums = [t for t in chain.from_iterable(built.steps) if t.op == "reduce"]
        parents = [{t.dst for t in sums if t.first == tree} for tree in (0, 1)]
        copies = [t for t in chain.from_iterable(built.steps) if t.op == "copy"]
        halves = [[t for t in copies if t.first == tree] for tree in (0, 1)]
        roots = [{t.src for t in half} - {t.dst for t in half} for half in halves]
        assert not parents[0] & parents[1] and all(len(root) == 1 for root in roots)


def test_hierarchies_send_less_between_hosts_than_a_ring() -> None:
    def across(name: str, **options: object) -> Fraction:
        built = build("all-reduce", name, 8, **options)
        moved = [built.relative_size(t) for step in built.steps for t in step if t.src // 4 != t.dst // 4]
        return Fraction(sum(moved), built.message_size_units)

    assert across("ring") == Fraction(2 * 2 * 7, 8)
    assert across("hierarchical", hosts=2) == across("hierarchical-sharded", hosts=2) == 2


@pytest.mark.parametrize(
    ("arguments", "options", "sentence"),
    [
        (("all-reduce", "rign", 4), {}, r"all-reduce has no algorithm 'rign'; it has flat, .*torus-5d.*nearest: ring"),
        (("allreduce", "ring", 4), {}, r"no collective 'allreduce'; there are broadcast, .*nearest: all-reduce"),
        (("all-reduce", "ring", 1), {}, r"1 ranks: all-reduce/ring needs at least 2"),
        (("all-reduce", "torus-3d", 7), {}, r"7 ranks: all-reduce/torus-3d takes 8, 12, 16, .*64"),
        (
            ("all-reduce", "torus-2d", 12),
            {"dims": (5, 2)},
            r"dims 5x2 are not a grid of 12 ranks; give .* for example 3x4",
        ),
        (("all-reduce", "torus-2d", 12), {"dims": (2, 2, 3)}, r"dims 2x2x3: this algorithm has 2 dimensions"),
        (
            ("all-reduce", "hierarchical-sharded", 12),
            {"hosts": 5},
            r"hosts 5: not a divisor of 12 ranks; give one of 1, 2, 3, 4, 6, 12",
        ),
        (("all-reduce", "hierarchical", 3), {"hosts": 9}, r"hosts 9: give 1 to 3 hosts for 3 ranks"),
        (("broadcast", "tree", 4), {"root": 4}, r"root 4: give 0 to 3, one of the 4 ranks"),
        (("broadcast", "pipelined-ring", 4), {"pieces": 0}, r"pieces 0: give 1 to "),
        (("reduce", "ring", 64), {"pieces": 10**9}, r"pieces 10{9}: give 1 to 4096 with 64 ranks"),
        (("all-reduce", "double-tree", 3), {"pieces": 10**9}, r"pieces 10{9}: give 1 to 87381 with 3 ranks"),
        (("send", "direct", 4), {"src": 2, "dst": 2}, r"src and dst are both rank 2"),
        (("all-reduce", "ring", 4), {"root": 1}, r"all-reduce/ring has no option 'root'; it has no options"),
        (("send", "direct", 4), {"src": 4}, r"src 4: give 0 to 3, one of the 4 ranks"),
        (("receive", "direct", 4), {}, r"there is no collective 'receive'; .*nearest: send"),
        (("wait", "direct", 4), {}, r"there is no collective 'wait'; .*nearest: signal"),
        (("all-reduce", "torus", 128), {"dims": (2,) * 7}, r"dims 2x2x2x2x2x2x2: a torus has at most 6 dimensions"),
        (("all-reduce", "ring", "4"), {}, r"ranks: '4' is not a whole number; give 2 or more"),
        (("all-reduce", "ring", 4.0), {}, r"ranks: 4.0 is not a whole number; give 2 or more"),
        (("all-reduce", ["ring"], 4), {}, r"all-reduce has no algorithm \['ring'\]; it has flat"),
        ((["all-reduce"], "ring", 4), {}, r"there is no collective \['all-reduce'\]; there are broadcast"),
        (("broadcast", "tree", 4), {"root": 1.5}, r"root: 1.5 is not a whole number; give one, as in root=1"),
        (("broadcast", "tree", 4), {"root": True}, r"root: True is not a whole number"),
        (
            ("all-reduce", "torus", 8),
            {"dims": "4x2"},
            r"dims: '4x2' are not whole numbers; give them as in dims=\(4, 4",
        ),
        (("all-reduce", "torus", 8), {"dims": ()}, r"dims: \(\) are not whole numbers"),
        (("broadcast", "tree", 4), {"hosts": 1}, r"broadcast/tree has no option 'hosts'; it has the options root"),
    ],
)
def test_what_cannot_work_is_refused(arguments: tuple[str, str, int], options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        build(*arguments, **options)


@pytest.mark.parametrize("dims", [(12,), (3, 4), (2, 2, 3), (2, 3, 2, 2), (2, 2, 2, 2, 2, 2)])
def test_a_torus_of_any_number_of_dimensions(dims: tuple[int, ...]) -> None:
    _check("all-reduce", "torus", prod(dims), dims=dims)
    if len(dims) in (2, 3):
        named = build("all-reduce", f"torus-{len(dims)}d", prod(dims), dims=dims)
        assert build("all-reduce", "torus", prod(dims), dims=dims).steps == named.steps


def test_the_double_tree_is_as_deep_as_derived_and_hosts_may_be_unequal() -> None:
    # docs/reference/collective-costs.md: 2q-1 or 2q steps for the first piece, p more for each other one.
    for ranks in range(2, 129):
        q = ranks.bit_length() - 1
        one, four = (len(build("all-reduce", "double-tree", ranks, pieces=pieces).steps) // 2 for pieces in (1, 4))
        assert one in (2 * q - 1, 2 * q) and four == one + (1 if ranks == 2 else 2) * 3
        if ranks == 1 << q:
            assert one == 2 * q - 1
    for ranks in (5, 7, 11):
        for hosts in range(1, ranks + 1):
            _check("all-reduce", "hierarchical", ranks, hosts=hosts)


@pytest.mark.parametrize("name", algorithm_names("all-gather"))
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(name: str) -> None:
    gather = build("all-gather", name, 6)
    joined = concatenate(reverse(gather, "reduce-scatter"), gather, "all-reduce", name)
    assert prove_program(joined) and joined.final == build("all-reduce", "ring", 6).final


def test_parts_that_do_not_fit_are_not_joined_and_a_reduction_is_a_distribution_backwards() -> None:
    ring = build("all-gather", "ring", 4)
    with pytest.raises(ValueError, match="do not have the same ranks and chunks"):
        concatenate(build("reduce-scatter", "ring", 5), ring, "all-reduce", "ring")
    with pytest.raises(ValueError, match="starts with chunk 1 on rank 1, where gather/flat of 4 ranks leaves none"):
        concatenate(build("gather", "flat", 4), ring, "all-gather", "odd")
    for collective, backwards in (("broadcast", "reduce"), ("all-gather", "reduce-scatter")):
        for name in set(algorithm_names(collective)) - {"scatter-all-gather"}:
            prove_program(reverse(build(collective, name, 8), backwards))
    with pytest.raises(ValueError, match=r"cannot be reversed: rank \d is sent chunk \d, which it has"):
        reverse(build("broadcast", "scatter-all-gather", 8), "reduce")
