"""A Program under a known name promises what that collective does."""

from dataclasses import replace

import pytest

from motet.collectives.library import algorithms, collectives, find, program
from motet.collectives.promise import shortfall


def test_the_library_keeps_its_promises() -> None:
    for collective in collectives():
        for name in algorithms(collective):
            for ranks in filter(find(collective, name).takes, (2, 3, 8)):
                assert shortfall(program(collective, name, ranks)) is None


@pytest.mark.parametrize(
    ("collective", "sentence"),
    [
        ("all-reduce", "rank 2 need not end with chunk 0"),
        ("all-gather", "rank 2 need not end with chunk 0"),
        ("reduce-scatter", "no rank must end with chunk 2"),
        ("scatter", "no rank must end with chunk 2"),
        ("all-to-all", "rank 2 need not end with what rank 0 has for it"),
        ("barrier", "rank 2 need not end with chunk 0"),
    ],
)
def test_a_final_that_asks_for_less_is_named(collective: str, sentence: str) -> None:
    whole = program(collective, algorithms(collective)[0], 3)
    assert shortfall(replace(whole, final=(*whole.final[:2], {}))) == sentence
    assert shortfall(replace(whole, collective="of-mine", final=(*whole.final[:2], {}))) is None


def test_sums_of_fewer_ranks_are_named() -> None:
    for collective in ("all-reduce", "reduce", "reduce-scatter"):
        whole = program(collective, "ring", 3)
        final = tuple({chunk: sources[:2] for chunk, sources in held.items()} for held in whole.final)
        assert "need not contain what rank 2 contributes" in str(shortfall(replace(whole, final=final)))


def test_a_root_must_end_with_everything() -> None:
    for collective in ("reduce", "gather"):
        whole = program(collective, "tree", 3, root=1)
        final = tuple({c: s for c, s in held.items() if c > 0} for held in whole.final)
        assert shortfall(replace(whole, final=final)) == "no rank must end with all chunks, such as chunk 0"


def test_a_root_that_keeps_what_it_sends_need_not_say_so() -> None:
    whole = program("broadcast", "tree", 3)
    assert shortfall(replace(whole, final=({}, *whole.final[1:]))) is None
