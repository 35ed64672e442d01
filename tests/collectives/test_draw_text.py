"""The text of a Program, read back: it must say what the transfers are, and what every rank holds by them."""

import re
from dataclasses import replace

import pytest

from motet.collectives.algorithms import algorithm_names, build, collective_names, find_algorithm
from motet.collectives.draw.frames import (
    align_columns,
    format_ranges,
    program_frames,
    program_text,
    program_title,
    transfer_sentences,
)
from motet.collectives.program import ChunkTransfer, Program

SMALL = [
    (collective, name)
    for collective in collective_names()
    for name in algorithm_names(collective)
    if find_algorithm(collective, name).supports(4)
]


def numbers(words: str) -> list[int]:
    """`0-2,5` -> 0 1 2 5"""
    found: list[int] = []
    for part in words.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def played(made: Program) -> list[list[dict[int, list[int]]]]:
    """The contents of each rank after each step, by other code: lists of contributors, added and replaced."""
    held = [{chunk: [rank] for chunk in chunks} for rank, chunks in enumerate(made.initial)]
    history = [held]
    for step in made.steps:
        after = [dict(chunks) for chunks in held]
        for t in step:
            for chunk in t.chunks:
                before = after[t.dst].get(chunk, []) if t.op == "reduce" else []
                after[t.dst][chunk] = sorted([*before, *held[t.src][chunk]])
        held = after
        history.append(held)
    return history


@pytest.mark.parametrize(("collective", "name"), SMALL)
def test_frames_are_the_program_played(collective: str, name: str) -> None:
    made = build(collective, name, 4)
    shown = program_frames(made)
    assert [frame.step for frame in shown] == [(), *made.steps]
    assert [[{c: list(s) for c, s in held.items()} for held in frame.contents] for frame in shown] == played(made)


@pytest.mark.parametrize(
    ("collective", "name"), [("all-reduce", "ring"), ("all-reduce", "naive"), ("broadcast", "tree")]
)
def test_the_text_can_be_read_back(collective: str, name: str) -> None:
    made = build(collective, name, 4)
    blocks = program_text(made).strip().split("\n\n")
    assert blocks[0] == program_title(made)
    assert [block.splitlines()[0] for block in blocks[1:]] == ["start", *(f"step {n}" for n in range(len(made.steps)))]
    for block, after, step in zip(blocks[1:], played(made), [(), *made.steps], strict=True):
        written = {(t.dst, chunk) for t in step for chunk in t.chunks}
        for rank, line in enumerate(block.splitlines()[2:]):
            for chunk, cell in enumerate(re.split(r" {2,}", line.strip())[-made.chunks :]):
                assert cell.startswith("[") == ((rank, chunk) in written)
                assert (cell == ".") == (chunk not in after[rank])
                if cell != ".":
                    assert numbers(cell.strip("[]")) == after[rank][chunk]


def test_what_is_sent_is_said_in_words() -> None:
    step = (
        ChunkTransfer(0, 1, 2, 3, "reduce"),
        ChunkTransfer(0, 2, 2, 3, "reduce"),
        ChunkTransfer(0, 1, 5, 5, "copy"),
        ChunkTransfer(3, 0, 1, 1, "copy"),
    )
    assert transfer_sentences(step) == [
        "rank 0 adds chunks 2,3 to ranks 1,2; copies chunk 5 to rank 1",
        "rank 3 copies chunk 1 to rank 0",
    ]


def test_many_chunks_are_named_in_groups() -> None:
    start = program_text(build("all-to-all", "pairwise", 5)).split("\n\n")[1].splitlines()
    assert start[1].split() == ["rank", "then", "holds"]
    assert start[3].split(maxsplit=1) == ["1", "5-9: 1"]


def test_one_step_is_shown_with_the_one_before() -> None:
    made = build("all-reduce", "ring", 4)
    assert re.findall(r"(?m)^(start|step \d+)$", program_text(made, 0)) == ["start", "step 0"]
    assert re.findall(r"(?m)^(start|step \d+)$", program_text(made, 3)) == ["step 2", "step 3"]


def test_a_program_that_breaks_off_says_where_and_why() -> None:
    made = build("all-gather", "ring", 4)
    broken = replace(made, steps=(made.steps[1], *made.steps))
    shown = program_frames(broken)
    assert len(shown) == 2
    assert shown[1].contents == shown[0].contents
    assert shown[1].error is not None
    assert "step 0 cannot be executed: " + shown[1].error in program_text(broken)
    assert "[" not in program_text(broken).split("step 0")[1]


def test_a_contribution_that_is_there_twice_is_seen() -> None:
    made = build("all-reduce", "recursive-doubling", 2)
    assert "[0,0,1,1]" in program_text(replace(made, steps=made.steps * 2))


@pytest.mark.parametrize(
    ("given", "words"),
    [([3], "3"), ([1, 0], "0,1"), ([0, 1, 2, 5], "0-2,5"), ([0, 0, 1], "0,0,1"), ([0, 2, 0, 0], "3x0,2"), ([], "")],
)
def test_numbers_are_spelled_as_ranges(given: list[int], words: str) -> None:
    assert format_ranges(given) == words


def test_columns_stand_under_each_other() -> None:
    assert align_columns([["a", "1"], ["bcd", "22"]], right_aligned=[1]) == ["  a     1", "  bcd  22"]
