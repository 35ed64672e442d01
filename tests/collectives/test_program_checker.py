"""The proof accepts what is right and names the step and the reason of what is wrong."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mutations import check_mutation, computes_correct_sums, generate_mutations

from motet.collectives.algorithms import algorithm_names, build, collective_names, find_algorithm
from motet.collectives.program import ChunkTransfer, Program, Step
from motet.collectives.prove.program_checker import CollectiveProof, UnprovenCollectiveError, prove_program

RING = build("all-reduce", "ring", 3)


def _reduction(*steps: list[ChunkTransfer], ranks: int = 3, ports: int = 1) -> Program:
    """An all-reduce of one chunk by hand."""
    return Program(
        "all-reduce",
        "by-hand",
        ranks,
        (1,),
        initial=((0,),) * ranks,
        final=({0: tuple(range(ranks))},) * ranks,
        steps=tuple(tuple(step) for step in steps),
        ports=ports,
    )


def _reduce(src: int, dst: int) -> ChunkTransfer:
    return ChunkTransfer(src, dst, 0, 0, "reduce")


def _copy(src: int, dst: int) -> ChunkTransfer:
    return ChunkTransfer(src, dst, 0, 0, "copy")


RIGHT = [[_reduce(1, 0)], [_reduce(2, 0)], [_copy(0, 1)], [_copy(0, 2)]]


def test_what_is_right_is_proven() -> None:
    assert prove_program(_reduction(*RIGHT)) == CollectiveProof(
        ranks=3, steps=4, messages=4, same_bits=True, supports_blocking_sends=True
    )
    assert prove_program(RING) == CollectiveProof(
        ranks=3, steps=4, messages=12, same_bits=True, supports_blocking_sends=False
    )


@pytest.mark.parametrize(
    ("steps", "step", "sentence"),
    [
        (RIGHT[:1] + RIGHT[2:], None, r"wrong at the end: chunk 0 of rank 0 does not contain rank 2$"),
        ([*RIGHT[:2], RIGHT[1], *RIGHT[2:]], None, r"chunk 0 of rank 0 has more than once rank 2$"),
        (RIGHT[:3], None, r"chunk 0 of rank 2 does not contain ranks 0, 1$"),
        ([*RIGHT[:2], [*RIGHT[2], *RIGHT[3]]], 2, r"step 2: rank 0 sends to ranks 1, 2 together over one port$"),
        ([[_reduce(1, 0), _reduce(2, 0)], *RIGHT[2:]], 0, r"step 0: rank 0 receives from ranks 1, 2 together over one"),
        ([[_copy(1, 0), _reduce(2, 0)], *RIGHT[2:]], 0, r"1 -> 0: copy chunk 0 and 2 -> 0: reduce chunk 0 both write"),
    ],
)
def test_what_is_wrong_is_named(steps: list[list[ChunkTransfer]], step: int | None, sentence: str) -> None:
    ports = 2 if "both write" in sentence else 1
    with pytest.raises(UnprovenCollectiveError, match=sentence) as caught:
        prove_program(_reduction(*steps, ports=ports))
    assert caught.value.step == step


def test_a_set_would_not_see_a_contribution_that_is_there_twice() -> None:
    """Ranks 0 and 1 exchange, and then exchange again: each rank is in the sum, each twice."""
    both = [_reduce(0, 1), _reduce(1, 0)]
    prove_program(_reduction(both, ranks=2))
    with pytest.raises(UnprovenCollectiveError, match="chunk 0 of rank 0 has more than once ranks 0, 1"):
        prove_program(_reduction(both, both, ranks=2))


def test_reading_what_has_not_arrived() -> None:
    gathered = build("all-gather", "ring", 4)
    early = replace(gathered, steps=(gathered.steps[1], gathered.steps[0], gathered.steps[2]))
    with pytest.raises(UnprovenCollectiveError, match=r"in step 0: 0 -> 1: copy chunk 3: rank 0 has nothing to send"):
        prove_program(early)
    adding = replace(gathered, steps=((ChunkTransfer(0, 1, 0, 0, "reduce"),),))
    with pytest.raises(
        UnprovenCollectiveError, match=r"rank 1 has nothing to add to, since chunk 0 has not arrived there"
    ):
        prove_program(adding)


def test_a_chunk_in_the_wrong_place() -> None:
    swapped = build("all-to-all", "pairwise", 3)
    astray = replace(swapped, steps=((swapped.steps[0][0]._replace(dst=2), *swapped.steps[0][2:]), *swapped.steps[1:]))
    with pytest.raises(UnprovenCollectiveError, match=r"chunk 1 of rank 1 has not arrived"):
        prove_program(astray)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ((0, 1, 1), "chunk 0 of rank 0 has too seldom rank 1"),
        ((1, 1), "chunk 0 of rank 0 has too seldom rank 1 and should not have rank 0"),
        ((0,), "chunk 0 of rank 0 should not have rank 1"),
    ],
)
def test_a_contribution_may_be_asked_for_several_times(asked: tuple[int, ...], sentence: str) -> None:
    once = _reduction([ChunkTransfer(1, 0, 0, 0, "reduce")], ranks=2)
    asking = replace(once, collective="of-mine", final=({0: asked}, {}))
    with pytest.raises(UnprovenCollectiveError, match=f"wrong at the end: {sentence}$"):
        prove_program(asking)
    if asked == (0, 1, 1):
        assert prove_program(replace(asking, steps=asking.steps * 2)).messages == 2


def test_a_program_without_steps_has_nothing_to_corrupt() -> None:
    alone = replace(_reduction(ranks=1), ranks=1)
    assert prove_program(alone).messages == 0
    assert str(alone) == "all-reduce/by-hand of 1 rank"
    assert list(generate_mutations(alone, 5)) == []


def test_a_corruption_says_what_it_has_put_where() -> None:
    whats = [
        corruption.description for corruption in generate_mutations(RING, 40) if " repeated" in corruption.description
    ]
    assert whats
    assert all(re.search(r"repeated; step \d now has \d -> \d: (copy|reduce) chunk \d$", what) for what in whats)


def test_adding_without_end_does_not_run_over_into_the_next_rank() -> None:
    """Fields of 16 bits: after 16 doublings a careless sum would look like a contribution of the next rank."""
    both = [_reduce(0, 1), _reduce(1, 0)]
    with pytest.raises(UnprovenCollectiveError, match=r"in step 15: .* more than 32767 times"):
        prove_program(_reduction(*[both] * 40, ranks=2))


def test_a_final_asks_for_no_more_repeats_than_can_be_counted() -> None:
    """65536 times rank 0 would look like once rank 1."""
    alone = replace(_reduction(ranks=2), collective="of-mine", final=({}, {0: (0,) * 65536}))
    with pytest.raises(
        UnprovenCollectiveError, match=r"asks for rank 0 in chunk 0 of rank 1 65536 times; give at most 32767"
    ):
        prove_program(alone)


def test_sends_that_wait_for_their_receiver_deadlock_in_a_ring_and_not_in_a_tree() -> None:
    with pytest.raises(UnprovenCollectiveError, match=r"in step 0: .* ranks 0 -> 1 -> 2 -> 0 wait in a circle"):
        prove_program(RING, send_mode="blocking")
    assert prove_program(build("all-reduce", "tree", 7), send_mode="blocking").supports_blocking_sends


def test_a_deadlock_later_on_is_found() -> None:
    """Rank 1 gives to 0 first; then 0 and 2 both begin with a send to the other."""
    late = _reduction([_reduce(1, 0)], [_reduce(0, 2), _reduce(2, 0)], [_copy(0, 1)])
    assert prove_program(late).same_bits
    with pytest.raises(UnprovenCollectiveError, match=r"in step 1: .* ranks 0 -> 2 -> 0 wait"):
        prove_program(late, send_mode="blocking")


def test_orders_of_adding_are_told_apart() -> None:
    """(0 + 1) + 2 on rank 0, (1 + 2) + 0 on rank 1: right sums, other bits."""
    step: Step = tuple(_reduce(src, dst) for dst in range(3) for src in ((dst + 1) % 3, (dst + 2) % 3))
    assert not prove_program(_reduction(list(step), ports=2)).same_bits


@given(
    st.integers(0, 2**32),
    st.sampled_from([(c, a) for c in collective_names() for a in algorithm_names(c)]),
    st.integers(2, 9),
)
def test_no_planted_fault_is_missed(seed: int, which: tuple[str, str], ranks: int) -> None:
    if find_algorithm(*which).supports(ranks):
        for corruption in generate_mutations(build(*which, ranks), 3, seed):
            assert check_mutation(corruption).outcome != "missed", corruption.description


def test_of_many_planted_faults_most_are_rejected_and_the_others_do_no_harm() -> None:
    verdicts = [
        check_mutation(corruption)
        for name in algorithm_names("all-reduce")
        if find_algorithm("all-reduce", name).supports(8)
        for corruption in generate_mutations(build("all-reduce", name, 8), 20)
    ]
    assert len(verdicts) >= 250
    rejected = [judgement for judgement in verdicts if judgement.outcome == "rejected"]
    assert len(rejected) > 0.9 * len(verdicts)
    assert {"rejected", "equivalent"} >= {judgement.outcome for judgement in verdicts}
    changes = {re.sub(r".*?chunk [0-9-]+ |;.*", "", judgement.mutation.description) for judgement in rejected}
    assert {"dropped", "repeated", "redirected", "moved to another step"} <= changes


def test_the_check_that_the_proof_is_judged_by_sees_wrong_sums() -> None:
    assert computes_correct_sums(_reduction(*RIGHT))
    assert not computes_correct_sums(_reduction(*RIGHT[:3]))
    assert not computes_correct_sums(
        replace(build("broadcast", "tree", 4), steps=build("broadcast", "tree", 4).steps[1:])
    )
