"""The pictures: well-formed, complete, legible in both colour schemes, and without anything from elsewhere."""

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from motet.collectives.algorithms import algorithm_names, build, collective_names, find_algorithm
from motet.collectives.draw.frames import program_frames
from motet.collectives.draw.svg import COLOURS, DARK_MODE_COLOURS, program_html, program_svg
from motet.core.errors import InputError

SMALL = [
    (collective, name)
    for collective in collective_names()
    for name in algorithm_names(collective)
    if find_algorithm(collective, name).supports(4)
]


def brightness(colour: str) -> float:
    """Relative luminance as WCAG defines it."""
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


@pytest.mark.parametrize(("collective", "name"), SMALL)
def test_every_cell_and_every_chunk_that_moves_is_drawn(collective: str, name: str) -> None:
    made = build(collective, name, 4)
    drawn = program_svg(made)
    ET.fromstring(drawn)
    assert drawn.count('class="cell"') == (len(made.steps) + 1) * made.ranks * made.chunks
    assert drawn.count("data-chunk=") == sum(len(t.chunks) for step in made.steps for t in step)
    assert drawn.count('class="absent"') == sum(
        made.chunks - len(held) for frame in program_frames(made) for held in frame.contents
    )


def test_cells_say_what_they_hold() -> None:
    words = re.findall(r'data-words="([^"]*)"', program_svg(build("all-reduce", "ring", 4), only_steps=(2,)))
    assert words[0] == "rank 0, chunk 0: from ranks 0-3, as it must be at the end"
    assert words[1] == "rank 0, chunk 1: from ranks 0,2,3"
    assert len(words) == 16


def test_nothing_is_drawn_outside() -> None:
    for name in ("ring", "naive", "hierarchical"):
        drawn = program_svg(build("all-reduce", name, 8))
        width, height = map(float, re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', drawn)[0])
        for x, y in re.findall(r"translate\(([\d.]+) ([\d.]+)\)", drawn):
            panel_width, panel_height = map(float, re.findall(r'"frame" width="([\d.]+)" height="([\d.]+)"', drawn)[0])
            assert float(x) + panel_width <= width
            assert float(y) + panel_height <= height


def test_a_step_that_cannot_be_played_is_named() -> None:
    made = build("all-gather", "ring", 4)
    drawn = program_svg(replace(made, steps=(made.steps[1],)))
    assert "step 0 cannot be executed" in drawn
    assert "has nothing to send" in drawn


def test_what_is_too_large_is_refused() -> None:
    for draw in (program_svg, program_html):
        with pytest.raises(InputError, match="at most 16 ranks"):
            draw(build("all-reduce", "ring", 17))
        with pytest.raises(InputError, match="so give fewer ranks or pieces"):
            draw(build("all-to-all", "pairwise", 16))


def test_the_page_is_whole_in_itself() -> None:
    made = build("all-reduce", "ring", 4)
    drawn = program_html(made)
    assert drawn.count('class="step"') == len(made.steps) + 1
    assert not re.search(r"@(title|svg|text|colours)@", drawn)
    addresses = set(re.findall(r"""(?:https?:)?//[\w.-]+\.\w+[^\s"'<]*""", drawn))
    assert addresses <= {"http://www.w3.org/2000/svg"}  # a name, not a place to fetch from
    assert not re.search(r"<(link|img|iframe)|@import|src=|url\(", drawn)
    for control in ("first", "back", "play", "on", "last", "at", "speed"):
        assert f'id="{control}"' in drawn
    assert "prefers-color-scheme: dark" in drawn and "prefers-reduced-motion" in drawn
    assert 'data-says="step 0. rank 0 adds chunk 3 to rank 1. ' in drawn


def test_names_from_a_file_are_escaped() -> None:
    made = replace(build("all-reduce", "ring", 2), algorithm="<script>alert(1)</script>")
    assert "<script>alert" not in program_html(made)
    assert "<script>alert" not in program_svg(made)
