"""A Program as an animated page: one file without anything from elsewhere, to be played, paused and stepped through."""

from html import escape
from importlib.resources import files

from motet.collectives.draw import Frame, frames, sentences, text, title
from motet.collectives.draw_svg import COLOURS, Shape, arrows, labels, legend, named, opening, refuse_large, state
from motet.collectives.score import Program

_LEGEND, _LEAST_WIDTH = 34, 940


def page(program: Program) -> str:
    """The HTML of the page; draw_page.html is its frame."""
    refuse_large(program)
    shape = Shape(program)
    width, height = max(shape.width, _LEAST_WIDTH), shape.height + _LEGEND
    steps = [_step(shape, number, frame) for number, frame in enumerate(frames(program), start=-1)]
    drawn = [
        opening(width + 2, height + 2, title(program), role="group"),
        legend(shape, 8, 18),
        f'<g transform="translate({1 + (width - shape.width) / 2:g} {_LEGEND})">{labels(shape)}',
        *steps,
        '<g id="chips"></g></g></svg>',
    ]
    found = files("motet.collectives").joinpath("draw_page.html").read_text(encoding="utf-8")
    parts = {"title": escape(title(program)), "colours": str(len(COLOURS)), "text": escape(text(program))}
    for name, value in {**parts, "svg": "\n".join(drawn)}.items():
        found = found.replace(f"@{name}@", value)
    return found


def _step(shape: Shape, number: int, frame: Frame) -> str:
    says = ". ".join([named(number, frame), *sentences(frame.step), *([frame.fault] if frame.fault else [])])
    return (
        f'<g class="step" data-says="{escape(says)}"><g class="state hidden">{state(shape, frame)}</g>'
        f'<g class="arrows hidden">{"".join(arrows(shape, frame))}</g></g>'
    )
