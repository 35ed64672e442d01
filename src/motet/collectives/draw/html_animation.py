"""A Program as an animated page that plays, pauses and steps: one file without external resources."""

from html import escape
from importlib.resources import files

from motet.collectives.draw.frames import (
    CollectiveStepFrame,
    program_frames,
    program_text,
    program_title,
    transfer_sentences,
)
from motet.collectives.draw.svg import (
    COLOURS,
    SvgPanelGeometry,
    check_drawable_size,
    frame_name,
    svg_arrows,
    svg_cells,
    svg_labels,
    svg_legend,
    svg_opening,
)
from motet.collectives.program import Program

_LEGEND_HEIGHT, _MIN_WIDTH = 34, 940


def program_html(program: Program) -> str:
    """The HTML of the page, from the template draw_page.html."""
    check_drawable_size(program)
    geometry = SvgPanelGeometry(program)
    width, height = max(geometry.width, _MIN_WIDTH), geometry.height + _LEGEND_HEIGHT
    svg_parts = [
        svg_opening(width + 2, height + 2, program_title(program), role="group"),
        svg_legend(geometry, 8, 18),
        f'<g transform="translate({1 + (width - geometry.width) / 2:g} {_LEGEND_HEIGHT})">{svg_labels(geometry)}',
        *[_svg_step(geometry, number, frame) for number, frame in enumerate(program_frames(program), start=-1)],
        '<g id="chips"></g></g></svg>',
    ]
    html = files("motet.collectives.draw").joinpath("draw_page.html").read_text(encoding="utf-8")
    values = {"title": escape(program_title(program)), "colours": str(len(COLOURS))}
    for name, value in {**values, "text": escape(program_text(program)), "svg": "\n".join(svg_parts)}.items():
        html = html.replace(f"@{name}@", value)
    return html


def _svg_step(geometry: SvgPanelGeometry, step_index: int, frame: CollectiveStepFrame) -> str:
    description = ". ".join(filter(None, [frame_name(step_index, frame), *transfer_sentences(frame.step), frame.error]))
    return (
        f'<g class="step" data-says="{escape(description)}"><g class="state hidden">{svg_cells(geometry, frame)}</g>'
        f'<g class="arrows hidden">{"".join(svg_arrows(geometry, frame))}</g></g>'
    )
