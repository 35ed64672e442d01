"""Programs made of Programs keep their promises, and cutting undoes joining."""

import pytest

from motet.collectives.compose import cut, grouped, refine, renumber, reverse, then
from motet.collectives.library import algorithms, program
from motet.collectives.prove import prove


@pytest.mark.parametrize("name", algorithms("all-gather"))
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(name: str) -> None:
    ranks = 6
    gather = program("all-gather", name, ranks)
    joined = then(reverse(gather, "reduce-scatter"), gather, "all-reduce", name)
    prove(joined)
    assert joined.final == program("all-reduce", "ring", ranks).final
    first, second = cut(joined, len(gather.steps), ("reduce-scatter", "all-gather"))
    prove(first)
    prove(second)
    assert [set(held) for held in first.final] == [{rank} for rank in range(ranks)]
    again = then(first, second, "all-reduce", name)
    assert (again.initial, again.final, again.steps) == (joined.initial, joined.final, joined.steps)


def test_a_program_can_be_cut_anywhere() -> None:
    for name in ("ring", "tree", "halving-doubling", "double-tree", "direct", "hierarchical"):
        whole = program("all-reduce", name, 6)
        for at in range(len(whole.steps) + 1):
            first, second = cut(whole, at, ("begin", "end"))
            prove(first)
            prove(second)
            again = then(first, second, "all-reduce", name)
            assert again.final == whole.final and again.steps == whole.steps


def test_parts_that_do_not_fit_are_not_joined() -> None:
    ring = program("all-gather", "ring", 4)
    with pytest.raises(ValueError, match="do not have the same ranks and chunks"):
        then(program("reduce-scatter", "ring", 5), ring, "all-reduce", "ring")
    with pytest.raises(ValueError, match="starts with chunk 1 on rank 1, where gather/flat of 4 ranks leaves none"):
        then(program("gather", "flat", 4), ring, "all-gather", "odd")


def test_a_reduction_is_a_distribution_backwards() -> None:
    for collective, backwards in (("broadcast", "reduce"), ("all-gather", "reduce-scatter")):
        for name in set(algorithms(collective)) - {"scatter-all-gather"}:
            prove(reverse(program(collective, name, 8), backwards))
    with pytest.raises(ValueError, match=r"cannot be reversed: rank \d is sent chunk \d, which it has"):
        reverse(program("broadcast", "scatter-all-gather", 8), "reduce")


def test_groups_at_once_are_one_program() -> None:
    small = program("all-reduce", "ring", 3)
    both = grouped(small, [[0, 2, 4], [1, 3, 5]], [range(3)] * 2, width=1)
    prove(both)
    assert both.collective == "all-reduce in groups"
    assert both.ranks == 6 and len(both.steps) == len(small.steps) and both.messages == 2 * small.messages
    assert both.final[4] == dict.fromkeys(range(3), (0, 2, 4)) and both.final[5][0] == (1, 3, 5)


def test_chunks_can_be_cut_up_and_renamed() -> None:
    ring = program("all-gather", "ring", 4)
    fine = refine(ring, 3)
    prove(fine)
    assert (fine.chunks, fine.messages, fine.sent(0)) == (12, ring.messages, ring.sent(0))
    renamed = renumber(fine, [5 * chunk % 12 for chunk in range(12)])
    prove(renamed)
    assert (renamed.messages, renamed.sent(1)) == (ring.messages, ring.sent(1))
    again = renumber(renamed, [5 * chunk % 12 for chunk in range(12)])
    assert (again.initial, again.final) == (fine.initial, fine.final)
