"""Programs as text, which is read back, and as pictures: well-formed, complete and legible in both colour schemes."""

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from motet.collectives.algorithms import build
from motet.collectives.draw import frames
from motet.collectives.draw.frames import align_columns, format_ranges, program_frames, program_text, transfer_sentences
from motet.collectives.draw.program_drawing import program_animation, program_html, program_svg
from motet.collectives.program import ChunkTransfer, Program, copy_chunk
from motet.core.svg import COLOURS, DARK_MODE_COLOURS
from program_library import supported
from refusals import refused


def numbers(words: str) -> list[int]:
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


@pytest.mark.parametrize(("collective", "name"), supported(4))
def test_frames_are_the_program_played(collective: str, name: str) -> None:
    made = build(collective, name, 4)
    shown = program_frames(made)
    assert [frame.step for frame in shown] == [(), *made.steps]
    assert [[{c: list(s) for c, s in held.items()} for held in frame.contents] for frame in shown] == played(made)


@pytest.mark.parametrize("name", ["all-reduce/ring", "all-reduce/naive", "broadcast/tree"])
def test_the_text_can_be_read_back(name: str) -> None:
    made = build(*name.split("/"), 4)
    blocks = program_text(made).strip().split("\n\n")
    assert blocks[0] == frames.program_title(made)
    assert [block.splitlines()[0] for block in blocks[1:]] == ["start", *(f"step {n}" for n in range(len(made.steps)))]
    for block, after, step in zip(blocks[1:], played(made), [(), *made.steps], strict=True):
        written = {(t.dst, chunk) for t in step for chunk in t.chunks}
        for rank, line in enumerate(block.splitlines()[2:]):
            for chunk, cell in enumerate(re.split(r" {2,}", line.strip())[-made.chunks :]):
                assert cell.startswith("[") == ((rank, chunk) in written)
                assert (cell == ".") == (chunk not in after[rank])
                if cell != ".":
                    assert numbers(cell.strip("[]")) == after[rank][chunk]


def test_the_text_of_sends_groups_of_chunks_single_steps_repeats_and_columns() -> None:
    adds = ChunkTransfer(0, 1, 2, 3, "reduce"), ChunkTransfer(0, 2, 2, 3, "reduce")
    sentences = transfer_sentences((*adds, copy_chunk(0, 1, 5), copy_chunk(3, 0, 1)))
    assert sentences[0] == "rank 0 adds chunks 2,3 to ranks 1,2; copies chunk 5 to rank 1"
    assert sentences[1:] == ["rank 3 copies chunk 1 to rank 0"]
    start = program_text(build("all-to-all", "pairwise", 5)).split("\n\n")[1].splitlines()
    assert start[1].split() == ["rank", "then", "holds"] and start[3].split(maxsplit=1) == ["1", "5-9: 1"]
    made = build("all-reduce", "ring", 4)
    assert re.findall(r"(?m)^(start|step \d+)$", program_text(made, 0)) == ["start", "step 0"]
    assert re.findall(r"(?m)^(start|step \d+)$", program_text(made, 3)) == ["step 2", "step 3"]
    made = build("all-reduce", "recursive-doubling", 2)
    assert "[0,0,1,1]" in program_text(replace(made, steps=made.steps * 2))
    assert align_columns([["a", "1"], ["bcd", "22"]]) == ["  a    1", "  bcd  22"]


def test_a_program_that_breaks_off_says_where_and_why() -> None:
    made = build("all-gather", "ring", 4)
    broken = replace(made, steps=(made.steps[1], *made.steps))
    shown = program_frames(broken)
    assert len(shown) == 2 and shown[1].contents == shown[0].contents and shown[1].error is not None
    assert "step 0 cannot be executed: " + shown[1].error in program_text(broken)
    assert "[" not in program_text(broken).split("step 0")[1]


def test_numbers_are_spelled_as_ranges() -> None:
    given = [3], [1, 0], [0, 1, 2, 5], [0, 0, 1], [0, 2, 0, 0], []
    assert list(map(format_ranges, given)) == ["3", "0,1", "0-2,5", "0,0,1", "3x0,2", ""]


def brightness(colour: str) -> float:
    channels = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    dark, light = sorted((brightness(a), brightness(b)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize(("cells", "arrow"), [*zip(COLOURS, DARK_MODE_COLOURS, strict=True)])
def test_colours_have_contrast(cells: str, arrow: str) -> None:
    assert contrast(cells, "#ffffff") >= 4.5  # white digits on a cell, and arrows on a light page
    assert contrast(arrow, "#14181e") >= 4.5


@pytest.mark.parametrize(("collective", "name"), supported(4))
def test_every_cell_and_every_chunk_that_moves_is_drawn(collective: str, name: str) -> None:
    made = build(collective, name, 4)
    drawn = program_svg(made)
    ET.fromstring(drawn)
    assert drawn.count('class="cell"') == (len(made.steps) + 1) * made.ranks * made.chunks
    assert drawn.count("data-chunk=") == sum(len(t.chunks) for step in made.steps for t in step)
    absent = (made.chunks - len(held) for frame in program_frames(made) for held in frame.contents)
    assert drawn.count('class="absent"') == sum(absent)


def test_the_animation_plays_every_step_once_in_a_cycle() -> None:
    """At the middle of each step its arrows and the cells before it are visible; later in it, the cells after it."""
    made = build("all-reduce", "ring", 4)
    shown, steps = program_frames(made), len(made.steps) + 2
    root = ET.fromstring(program_animation(made))
    namespace = "{http://www.w3.org/2000/svg}"

    def visible(at: float) -> str:
        drawn = []
        for group in root.iter(f"{namespace}g"):
            fade = group.find(f"{namespace}animate")
            if group.get("class") == "moving" and fade is not None:
                times, values = (fade.get(name, "").split(";") for name in ("keyTimes", "values"))
                now = [value for time, value in zip(times, values, strict=True) if float(time) <= at / steps][-1]
                drawn += [ET.tostring(group, encoding="unicode")] * int(now)
        return "".join(drawn)

    for n, frame in enumerate(shown):
        arrows = sum(len(t.chunks) for t in frame.step)
        for at, contents in ((n + 0.3, shown[max(0, n - 1)]), (n + 0.8, frame)):
            drawn = visible(at)
            assert f">{'start' if n == 0 else f'step {n - 1}'}</" in drawn and drawn.count("data-chunk=") == arrows
            assert drawn.count("animateMotion") == (arrows if at < n + 0.5 else 0)
            held = sum(len(sources) for chunks in contents.contents for sources in chunks.values())
            assert len(re.findall(r'rect class="k', drawn)) == held
    assert len(re.findall(r'"done"', visible(steps - 0.1))) == made.ranks * made.chunks
    assert "prefers-reduced-motion" in program_animation(made) and 'class="still"' in program_animation(made)


def test_cells_say_what_they_hold_and_a_step_that_cannot_be_played_is_named() -> None:
    words = re.findall(r'data-words="([^"]*)"', program_svg(build("all-reduce", "ring", 4), only_steps=(2,)))
    assert words[0] == "rank 0, chunk 0: from ranks 0-3, as it must be at the end" and len(words) == 16
    assert words[1] == "rank 0, chunk 1: from ranks 0,2,3"
    made = build("all-gather", "ring", 4)
    drawn = program_svg(replace(made, steps=(made.steps[1],)))
    assert "step 0 cannot be executed" in drawn and "has nothing to send" in drawn


def test_nothing_is_drawn_outside() -> None:
    for name in ("ring", "naive", "hierarchical"):
        drawn = program_svg(build("all-reduce", name, 8))
        width, height = map(float, re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', drawn)[0])
        for x, y in re.findall(r"translate\(([\d.]+) ([\d.]+)\)", drawn):
            panel_width, panel_height = map(float, re.findall(r'"frame" width="([\d.]+)" height="([\d.]+)"', drawn)[0])
            assert float(x) + panel_width <= width and float(y) + panel_height <= height


def test_what_is_too_large_is_refused() -> None:
    for draw in (program_svg, program_animation, program_html):
        refused("at most 16 ranks", draw, build("all-reduce", "ring", 17))
        refused("so give fewer ranks or pieces", draw, build("all-to-all", "pairwise", 16))


def test_the_page_is_whole_in_itself_and_escapes_names() -> None:
    made = build("all-reduce", "ring", 4)
    drawn = program_html(made)
    assert drawn.count('class="step"') == len(made.steps) + 1 and not re.search(r"@(title|svg|text|colours)@", drawn)
    addresses = set(re.findall(r"""(?:https?:)?//[\w.-]+\.\w+[^\s"'<]*""", drawn))
    assert addresses <= {"http://www.w3.org/2000/svg"}  # a name, not a place to fetch from
    assert not re.search(r"<(link|img|iframe)|@import|src=|url\(", drawn)
    for control in ("first", "back", "play", "on", "last", "at", "speed"):
        assert f'id="{control}"' in drawn
    assert "prefers-color-scheme: dark" in drawn and "prefers-reduced-motion" in drawn
    assert 'data-says="step 0. rank 0 adds chunk 3 to rank 1. ' in drawn
    made = replace(build("all-reduce", "ring", 2), algorithm="<script>alert(1)</script>")
    assert "<script>alert" not in program_html(made) + program_svg(made) + program_animation(made)
