"""The proof accepts what is right and names the step and the reason of what is wrong, also of a `final`."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import check_mutation, computes_correct_sums, generate_mutations

from motet.collectives.algorithms import algorithm_names, build, find_algorithm
from motet.collectives.program import ChunkTransfer, Program, Step
from motet.collectives.prove import program_checker
from motet.collectives.prove.program_checker import CollectiveProofError, missing_postcondition, prove_program
from program_library import ALL, every_program

RING = build("all-reduce", "ring", 3)


def _reduction(*steps: list[ChunkTransfer], ranks: int = 3, ports: int = 1) -> Program:
    initial, final = ((0,),) * ranks, ({0: tuple(range(ranks))},) * ranks
    return Program("all-reduce", "by-hand", ranks, (1,), initial, final, tuple(map(tuple, steps)), ports)


def _reduce(src: int, dst: int) -> ChunkTransfer:
    return ChunkTransfer(src, dst, 0, 0, "reduce")


def _copy(src: int, dst: int) -> ChunkTransfer:
    return ChunkTransfer(src, dst, 0, 0, "copy")


RIGHT = [[_reduce(1, 0)], [_reduce(2, 0)], [_copy(0, 1)], [_copy(0, 2)]]


def test_what_is_right_is_proven() -> None:
    proof = program_checker.CollectiveProof(ranks=3, steps=4, messages=4, same_bits=True, supports_blocking_sends=True)
    assert prove_program(_reduction(*RIGHT)) == proof
    assert prove_program(RING) == replace(proof, messages=12, supports_blocking_sends=False)


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
    with pytest.raises(CollectiveProofError, match=sentence) as caught:
        prove_program(_reduction(*steps, ports=ports))
    assert caught.value.step == step


def test_a_set_would_not_see_a_contribution_that_is_there_twice() -> None:
    """Ranks 0 and 1 exchange, and then exchange again: each rank is in the sum, each twice."""
    both = [_reduce(0, 1), _reduce(1, 0)]
    prove_program(_reduction(both, ranks=2))
    with pytest.raises(CollectiveProofError, match="chunk 0 of rank 0 has more than once ranks 0, 1"):
        prove_program(_reduction(both, both, ranks=2))


def test_what_has_not_arrived_or_is_in_the_wrong_place() -> None:
    gathered = build("all-gather", "ring", 4)
    early = replace(gathered, steps=(gathered.steps[1], gathered.steps[0], gathered.steps[2]))
    with pytest.raises(CollectiveProofError, match=r"in step 0: 0 -> 1: copy chunk 3: rank 0 has nothing to send"):
        prove_program(early)
    adding = replace(gathered, steps=((ChunkTransfer(0, 1, 0, 0, "reduce"),),))
    with pytest.raises(CollectiveProofError, match="rank 1 has nothing to add to, since chunk 0 has not arrived there"):
        prove_program(adding)
    swapped = build("all-to-all", "pairwise", 3)
    astray = replace(swapped, steps=((swapped.steps[0][0]._replace(dst=2), *swapped.steps[0][2:]), *swapped.steps[1:]))
    with pytest.raises(CollectiveProofError, match=r"chunk 1 of rank 1 has not arrived"):
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
    with pytest.raises(CollectiveProofError, match=f"wrong at the end: {sentence}$"):
        prove_program(asking)
    if asked == (0, 1, 1):
        assert prove_program(replace(asking, steps=asking.steps * 2)).messages == 2


def test_mutations_say_what_they_change_and_wrong_sums_are_seen() -> None:
    alone = replace(_reduction(ranks=1), ranks=1)
    assert prove_program(alone).messages == 0 and str(alone) == "all-reduce/by-hand of 1 rank"
    assert list(generate_mutations(alone, 5)) == []
    whats = [what.description for what in generate_mutations(RING, 40) if " repeated" in what.description]
    assert whats
    assert all(re.search(r"repeated; step \d now has \d -> \d: (copy|reduce) chunk \d$", what) for what in whats)
    assert computes_correct_sums(_reduction(*RIGHT)) and not computes_correct_sums(_reduction(*RIGHT[:3]))
    tree = build("broadcast", "tree", 4)
    assert not computes_correct_sums(replace(tree, steps=tree.steps[1:]))


def test_counts_do_not_run_over_into_the_next_rank() -> None:
    # Fields of 16 bits: after 16 doublings a careless sum would look like a contribution of the next rank.
    both = [_reduce(0, 1), _reduce(1, 0)]
    with pytest.raises(CollectiveProofError, match=r"in step 15: .* more than 32767 times"):
        prove_program(_reduction(*[both] * 40, ranks=2))
    # 65536 times rank 0 would look like once rank 1.
    alone = replace(_reduction(ranks=2), collective="of-mine", final=({}, {0: (0,) * 65536}))
    too_often = "asks for rank 0 in chunk 0 of rank 1 65536 times; give at most 32767"
    with pytest.raises(CollectiveProofError, match=too_often):
        prove_program(alone)


def test_deadlocks_and_orders_of_adding_are_found() -> None:
    with pytest.raises(CollectiveProofError, match=r"in step 0: .* ranks 0 -> 1 -> 2 -> 0 wait in a circle"):
        prove_program(RING, send_mode="blocking")
    assert prove_program(build("all-reduce", "tree", 7), send_mode="blocking").supports_blocking_sends
    # Rank 1 gives to 0 first; then 0 and 2 both begin with a send to the other.
    late = _reduction([_reduce(1, 0)], [_reduce(0, 2), _reduce(2, 0)], [_copy(0, 1)])
    assert prove_program(late).same_bits
    with pytest.raises(CollectiveProofError, match=r"in step 1: .* ranks 0 -> 2 -> 0 wait"):
        prove_program(late, send_mode="blocking")
    # (0 + 1) + 2 on rank 0, (1 + 2) + 0 on rank 1: right sums, other bits.
    step: Step = tuple(_reduce(src, dst) for dst in range(3) for src in ((dst + 1) % 3, (dst + 2) % 3))
    assert not prove_program(_reduction(list(step), ports=2)).same_bits


@settings(deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(ALL), st.integers(2, 9))
def test_no_planted_fault_is_missed(seed: int, which: tuple[str, str], ranks: int) -> None:
    if find_algorithm(*which).supports(ranks):
        for corruption in generate_mutations(build(*which, ranks), 3, seed):
            assert check_mutation(corruption).outcome != "missed", corruption.description


def test_of_many_planted_faults_most_are_rejected_and_the_others_do_no_harm() -> None:
    programs = [program for program in every_program(8) if program.collective == "all-reduce"]
    verdicts = [check_mutation(corruption) for program in programs for corruption in generate_mutations(program, 20)]
    assert len(verdicts) >= 250
    rejected = [judgement for judgement in verdicts if judgement.outcome == "rejected"]
    assert len(rejected) > 0.9 * len(verdicts)
    assert {"rejected", "equivalent"} >= {judgement.outcome for judgement in verdicts}
    changes = {re.sub(r".*?chunk [0-9-]+ |;.*", "", judgement.mutation.description) for judgement in rejected}
    assert {"dropped", "repeated", "redirected", "moved to another step"} <= changes


@pytest.mark.parametrize(
    ("collective", "sentence"),
    [
        ("all-reduce", "rank 2 need not end with chunk 0"),
        ("all-gather", "rank 2 need not end with chunk 0"),
        ("reduce-scatter", "no rank must end with chunk 2"),
        ("scatter", "no rank must end with chunk 2"),
        ("all-to-all", "rank 2 need not end with the chunk of rank 0 for it"),
        ("barrier", "rank 2 need not end with a token of rank 0"),
    ],
)
def test_a_final_that_asks_for_less_is_named(collective: str, sentence: str) -> None:
    whole = build(collective, algorithm_names(collective)[0], 3)
    assert missing_postcondition(replace(whole, final=(*whole.final[:2], {}))) == sentence
    assert missing_postcondition(replace(whole, collective="of-mine", final=(*whole.final[:2], {}))) is None


def test_sums_of_fewer_ranks_and_a_root_without_everything_are_named() -> None:
    for collective in ("all-reduce", "reduce", "reduce-scatter"):
        whole = build(collective, "ring", 3)
        final = tuple({chunk: sources[:2] for chunk, sources in held.items()} for held in whole.final)
        assert "need not contain the contribution of rank 2" in str(missing_postcondition(replace(whole, final=final)))
    for collective in ("reduce", "gather"):
        whole = build(collective, "tree", 3, root=1)
        final = tuple({c: s for c, s in held.items() if c > 0} for held in whole.final)
        assert missing_postcondition(replace(whole, final=final)) == "no rank must end with all chunks, such as chunk 0"
    whole = build("broadcast", "tree", 3)
    assert missing_postcondition(replace(whole, final=({}, *whole.final[1:]))) is None


def _of(collective: str, initial: list[list[int]], final: list[dict[int, tuple[int, ...]]]) -> Program:
    chunks = 1 + max(chunk for held in (*initial, *final) for chunk in held)
    return Program(collective, "mine", len(initial), (1,) * chunks, tuple(map(tuple, initial)), tuple(final), ())


UNLIKE_ORIGINS = "chunk 0 is rank 0's on one rank, and rank 1's on rank 1"
TWO_ROOTS = "chunks come from ranks 0 and 1"


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (_of("all-reduce", [[0], [0]], [{0: (0, 1, 1)}] * 2), "must contain the contribution of rank 1 more than once"),
        (_of("reduce-scatter", [[0], [0]], [{0: (0, 1)}, {}]), "rank 1 need not end with any chunk"),
        (_of("broadcast", [[0], [0]], [{0: (0,)}, {0: (1,)}]), UNLIKE_ORIGINS),
        (_of("broadcast", [[0], [0]], [{}, {}]), UNLIKE_ORIGINS),
        (_of("broadcast", [[0], [1]], [{0: (0,), 1: (1,)}] * 2), f"{TWO_ROOTS}, which is not one root"),
        (_of("all-gather", [[0, 1]] * 2, [{}, {}]), UNLIKE_ORIGINS),
        (_of("all-gather", [[0, 1], []], [{}, {0: (0,), 1: (0,)}]), "nothing of rank 1 must end anywhere"),
        (_of("all-gather", [[0]] * 2, [{0: (0, 1)}] * 2), "chunk 0 of rank 0 is made of 2 contributions"),
        (_of("gather", [[0, 1]] * 2, [{}, {}]), "nothing of rank 1 must end anywhere"),
        (_of("scatter", [[0, 1], [0, 1]], [{0: (0,)}, {1: (1,)}]), TWO_ROOTS),
        (_of("scatter", [[0, 1], []], [{0: (0,), 1: (0,)}, {}]), "rank 1 need not end with any chunk"),
        (_of("barrier", [[0, 1]] * 2, [{}, {}]), "rank 0 need not end with a token of rank 1"),
        (_of("send", [[0], []], [{0: (0,)}, {}]), "nothing must arrive at another rank"),
        (_of("signal", [[0], [0]], [{}, {0: (1,)}]), "nothing must arrive at another rank"),
        (_of("copy", [[0], [0]], [{}, {0: (0, 1)}]), "chunk 0 of rank 1 is made of 2 contributions"),
    ],
)
def test_a_final_that_asks_for_something_else_is_not_proven(wrong: Program, sentence: str) -> None:
    assert sentence in str(missing_postcondition(wrong))
    with pytest.raises(program_checker.PostconditionError, match="its `final` is not that of") as caught:
        prove_program(Program.from_json(wrong.to_json()))
    assert sentence in str(caught.value) and caught.value.step is None


def test_other_ways_of_keeping_a_promise() -> None:
    for right in (
        _of("barrier", [[0], [0]], [{0: (0, 1)}] * 2),  # tokens that are counted
        _of("gather", [[0, 1], [0, 1]], [{1: (1,)}, {}]),  # others keep room for all
        _of("all-gather", [[0, 1], [0, 1]], [{0: (0,), 1: (1,)}] * 2),
    ):
        assert missing_postcondition(right) is None, right
