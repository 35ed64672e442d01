"""A Program under a known name promises what that collective does."""

from dataclasses import replace

import pytest

from motet.collectives.algorithms import algorithm_names, build, collective_names, find_algorithm
from motet.collectives.program import Program
from motet.collectives.prove.postconditions import missing_postcondition
from motet.collectives.prove.program_checker import PostconditionError, prove_program


def test_the_library_keeps_its_promises() -> None:
    for collective in collective_names():
        for name in algorithm_names(collective):
            for ranks in filter(find_algorithm(collective, name).supports, (2, 3, 8)):
                assert missing_postcondition(build(collective, name, ranks)) is None


@pytest.mark.parametrize(
    ("collective", "sentence"),
    [
        ("all-reduce", "rank 2 need not end with chunk 0"),
        ("all-gather", "rank 2 need not end with chunk 0"),
        ("reduce-scatter", "no rank must end with chunk 2"),
        ("scatter", "no rank must end with chunk 2"),
        ("all-to-all", "rank 2 need not end with what rank 0 has for it"),
        ("barrier", "rank 2 need not end with a token of rank 0"),
    ],
)
def test_a_final_that_asks_for_less_is_named(collective: str, sentence: str) -> None:
    whole = build(collective, algorithm_names(collective)[0], 3)
    assert missing_postcondition(replace(whole, final=(*whole.final[:2], {}))) == sentence
    assert missing_postcondition(replace(whole, collective="of-mine", final=(*whole.final[:2], {}))) is None


def test_sums_of_fewer_ranks_are_named() -> None:
    for collective in ("all-reduce", "reduce", "reduce-scatter"):
        whole = build(collective, "ring", 3)
        final = tuple({chunk: sources[:2] for chunk, sources in held.items()} for held in whole.final)
        assert "need not contain what rank 2 contributes" in str(missing_postcondition(replace(whole, final=final)))


def test_a_root_must_end_with_everything() -> None:
    for collective in ("reduce", "gather"):
        whole = build(collective, "tree", 3, root=1)
        final = tuple({c: s for c, s in held.items() if c > 0} for held in whole.final)
        assert missing_postcondition(replace(whole, final=final)) == "no rank must end with all chunks, such as chunk 0"


def _of(collective: str, initial: list[list[int]], final: list[dict[int, tuple[int, ...]]]) -> Program:
    chunks = 1 + max(chunk for held in (*initial, *final) for chunk in held)
    return Program(collective, "mine", len(initial), (1,) * chunks, tuple(map(tuple, initial)), tuple(final), ())


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (_of("all-reduce", [[0], [0]], [{0: (0, 0, 1, 1)}] * 2), "contain what rank 0 contributes more than once"),
        (_of("reduce-scatter", [[0], [0]], [{0: (0, 1)}, {}]), "rank 1 need not end with any chunk"),
        (
            _of("broadcast", [[0], [0]], [{0: (0,)}, {0: (1,)}]),
            "chunk 0 is rank 0's on one rank, and rank 1's on rank 1",
        ),
        (_of("broadcast", [[0], [0]], [{}, {}]), "chunk 0 is rank 0's on one rank, and rank 1's on rank 1"),
        (
            _of("broadcast", [[0], [1]], [{0: (0,), 1: (1,)}] * 2),
            "chunks come from ranks 0 and 1, which is not one root",
        ),
        (_of("all-gather", [[0, 1]] * 2, [{}, {}]), "chunk 0 is rank 0's on one rank, and rank 1's on rank 1"),
        (_of("all-gather", [[0, 1], []], [{}, {0: (0,), 1: (0,)}]), "nothing of rank 1 must end anywhere"),
        (_of("all-gather", [[0]] * 2, [{0: (0, 1)}] * 2), "chunk 0 of rank 0 is made of 2 contributions"),
        (_of("gather", [[0, 1]] * 2, [{}, {}]), "nothing of rank 1 must end anywhere"),
        (_of("scatter", [[0, 1], [0, 1]], [{0: (0,)}, {1: (1,)}]), "chunks come from ranks 0 and 1"),
        (_of("scatter", [[0, 1], []], [{0: (0,), 1: (0,)}, {}]), "rank 1 need not end with any chunk"),
        (_of("barrier", [[0, 1]] * 2, [{}, {}]), "rank 0 need not end with a token of rank 1"),
        (_of("send", [[0], []], [{0: (0,)}, {}]), "nothing must arrive at another rank"),
        (_of("signal", [[0], [0]], [{}, {0: (1,)}]), "nothing must arrive at another rank"),
        (_of("copy", [[0], [0]], [{}, {0: (0, 1)}]), "chunk 0 of rank 1 is made of 2 contributions"),
    ],
)
def test_a_final_that_asks_for_something_else_is_not_proven(wrong: Program, sentence: str) -> None:
    assert sentence in str(missing_postcondition(wrong))
    with pytest.raises(PostconditionError, match="its `final` is not that of") as caught:
        prove_program(Program.from_json(wrong.to_json()))
    assert sentence in str(caught.value) and caught.value.step is None


@pytest.mark.parametrize(
    "right",
    [
        _of("barrier", [[0], [0]], [{0: (0, 1)}] * 2),  # tokens that are counted
        _of("gather", [[0, 1], [0, 1]], [{1: (1,)}, {}]),  # others keep room for all
        _of("all-gather", [[0, 1], [0, 1]], [{0: (0,), 1: (1,)}] * 2),
    ],
)
def test_other_ways_of_keeping_a_promise(right: Program) -> None:
    assert missing_postcondition(right) is None


def test_a_root_that_keeps_what_it_sends_need_not_say_so() -> None:
    whole = build("broadcast", "tree", 3)
    assert missing_postcondition(replace(whole, final=({}, *whole.final[1:]))) is None
