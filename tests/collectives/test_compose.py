"""Programs made of Programs keep their promises."""

import pytest

from motet.collectives.algorithms import algorithm_names, build
from motet.collectives.compose import concatenate, renumber_chunks, replicate_in_groups, reverse, subdivide_chunks
from motet.collectives.prove.program_checker import prove_program


@pytest.mark.parametrize("name", algorithm_names("all-gather"))
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(name: str) -> None:
    ranks = 6
    gather = build("all-gather", name, ranks)
    joined = concatenate(reverse(gather, "reduce-scatter"), gather, "all-reduce", name)
    prove_program(joined)
    assert joined.final == build("all-reduce", "ring", ranks).final


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


def test_groups_are_one_program_and_chunks_can_be_cut_up_and_renamed() -> None:
    small = build("all-reduce", "ring", 3)
    both = replicate_in_groups(small, [[0, 2, 4], [1, 3, 5]], chunks=[range(3)] * 2, width=1)
    prove_program(both)
    assert both.collective == "all-reduce in groups"
    assert both.ranks == 6 and len(both.steps) == len(small.steps) and both.message_count == 2 * small.message_count
    assert both.final[4] == dict.fromkeys(range(3), (0, 2, 4)) and both.final[5][0] == (1, 3, 5)
    ring = build("all-gather", "ring", 4)
    fine = subdivide_chunks(ring, 3)
    prove_program(fine)
    assert (fine.chunks, fine.message_count, fine.send_fraction(0)) == (12, ring.message_count, ring.send_fraction(0))
    renamed = renumber_chunks(fine, [5 * chunk % 12 for chunk in range(12)])
    prove_program(renamed)
    assert (renamed.message_count, renamed.send_fraction(1)) == (ring.message_count, ring.send_fraction(1))
    again = renumber_chunks(renamed, [5 * chunk % 12 for chunk in range(12)])
    assert (again.initial, again.final) == (fine.initial, fine.final)
