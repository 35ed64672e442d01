"""Parts of SVG pictures: the page with its title, note and legend, and text, boxes, scales and axes on it.

Pages are light or dark, as the reader's system is. Positions on a page count from its left edge and from below the
note.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log, log10
from textwrap import wrap

# Fills of boxes, repeated in turn. White text on each has a contrast of at least 5 to 1.
COLOURS = ("#1f5fbf", "#a84300", "#1a7439", "#7a3fb0", "#006b75", "#b3226b", "#7a5417", "#4c5a6b")

# Colours of lines and text on a dark page.
DARK_MODE_COLOURS = ("#79aef2", "#f0924a", "#5cc27f", "#c39aec", "#4dc3cf", "#f285b6", "#d3a95c", "#a9b6c4")

PAGE_WIDTH, MARGIN = 1120, 16
_TEXT, _SMALL_TEXT, _LEGEND_ROW = 12, 11, 22


def _line_colours(colours: Sequence[str]) -> str:
    return "\n".join(f".c{n} {{ stroke: {colour} }} .t{n} {{ fill: {colour} }}" for n, colour in enumerate(colours))


_BOX_COLOURS = "\n".join(f".k{n} {{ fill: {colour} }}" for n, colour in enumerate(COLOURS))
_STYLE = f"""
.page {{ fill: #ffffff }}
text {{ font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; font-size: {_TEXT}px;
fill: #1f2328 }}
.big {{ font-weight: 600; font-size: 15px }} .head {{ font-weight: 600 }} .quiet {{ fill: #57606a }}
.small, .inside {{ font-size: {_SMALL_TEXT}px }} .inside {{ fill: #ffffff; pointer-events: none }}
.middle, .inside {{ text-anchor: middle }} .end {{ text-anchor: end }}
.box {{ stroke: #ffffff; stroke-width: 0.5 }} .empty {{ fill: #e1e6eb }}
.absent {{ fill: none; stroke: #8c959f; stroke-dasharray: 3 3 }}
.done {{ fill: none; stroke: #1f2328; stroke-width: 2 }} .frame {{ fill: none; stroke: #d0d7de }}
.curve {{ fill: none }} .heavy {{ stroke-width: 3 }} .light {{ stroke-width: 1.3 }} .dashed {{ stroke-dasharray: 7 3 }}
.limit {{ fill: none; stroke: #cf222e; stroke-width: 1.5; stroke-dasharray: 6 4 }} .limit-name {{ fill: #cf222e }}
.arrow {{ fill: none; stroke: #1f2328; stroke-width: 1.8 }} .copy {{ stroke-dasharray: 5 3 }} .tip {{ fill: #1f2328 }}
{_BOX_COLOURS}
{_line_colours(COLOURS)}
@media (prefers-color-scheme: dark) {{
.page {{ fill: #14181e }} text {{ fill: #e6edf3 }} .quiet {{ fill: #9da7b3 }} .inside {{ fill: #ffffff }}
.box {{ stroke: #14181e }} .empty {{ fill: #373e47 }} .absent {{ stroke: #768390 }} .done {{ stroke: #e6edf3 }}
.frame {{ stroke: #444c56 }} .limit {{ stroke: #ff7b72 }} .limit-name {{ fill: #ff7b72 }}
.arrow {{ stroke: #e6edf3 }} .tip {{ fill: #e6edf3 }}
{_line_colours(DARK_MODE_COLOURS)}
}}
"""


@dataclass(frozen=True)
class Scale:
    """The map from the values of an axis to positions on a page."""

    low: float
    high: float
    start: float
    stop: float
    is_logarithmic: bool = False

    def __call__(self, value: float) -> float:
        if self.is_logarithmic:
            share = log(value / self.low) / max(log(self.high / self.low), 1e-9)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + (self.stop - self.start) * share


def svg_page(
    title: str,
    note: str,
    body: Iterable[str],
    *,
    height: float,
    width: float = PAGE_WIDTH,
    legend: Sequence[tuple[str, str]] = (),
) -> str:
    """A page with a title and a note above the body. The legend below it has pairs of a fill and its meaning; a fill
    with an empty meaning shares the next one."""
    parts, top = list[str](), 4.0
    for words, css, letter_width, line_height in ((title, "big", 9.5, 22), (note, "quiet", 6.6, 18)):
        for line in wrap(words, int((width - 2 * MARGIN) / letter_width)):
            top += line_height
            parts.append(text((MARGIN, top), line, css))
    top += 16
    legend_parts, legend_height = _legend(legend, width, top + height)
    full_height = top + height + legend_height + MARGIN
    head = (svg_opening(width, full_height, title), element("rect", "page", width=width, height=full_height))
    return "\n".join(
        [*head, *parts, f'<g transform="translate(0 {top:g})">', *body, "</g>", *legend_parts, "</svg>", ""]
    )


def svg_opening(width: float, height: float, label: str, *, role: str = "img") -> str:
    """The start of a picture that is closed by `</svg>`."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="{role}" '
        f'aria-label="{escape(label)}"><style>{_STYLE}</style>'
    )


def _legend(entries: Sequence[tuple[str, str]], width: float, top: float) -> tuple[list[str], float]:
    """The parts of the legend, and its height."""
    parts, x, rows = list[str](), float(MARGIN), int(bool(entries))
    for fill, words in entries:
        needed = 40 + text_width(words) if words else 16
        if x + needed > width:
            x, rows = float(MARGIN), rows + 1
        y = top + rows * _LEGEND_ROW
        parts.append(element("rect", "", x=x, y=y - 11, width=14, height=14, fill=fill))
        parts.append(text((x + 20, y), words, "quiet"))
        x += needed
    return parts, rows * _LEGEND_ROW


def element(tag: str, css: str, *content: str, hint: str = "", **attributes: str | float) -> str:
    """An element with its CSS classes; `hint` is its tooltip, and `stroke_width` the attribute stroke-width."""
    values = {"class": css, **attributes} if css else attributes
    words = "".join(f' {name.replace("_", "-")}="{_value(value)}"' for name, value in values.items())
    inside = "".join([f"<title>{escape(hint)}</title>" if hint else "", *content])
    return f"<{tag}{words}>{inside}</{tag}>" if inside else f"<{tag}{words}/>"


def _value(value: str | float) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else escape(str(value))


def text(position: tuple[float, float], words: object, css: str = "") -> str:
    """Text whose base line begins at a position; the class `middle` or `end` puts its middle or end there."""
    return element("text", css, escape(str(words)), x=position[0], y=position[1])


def text_width(words: str, size: float = _TEXT) -> float:
    """The approximate width of a line of text in a wide font."""
    return 0.6 * size * len(words)


def labelled_box(
    css: str,
    labels: Iterable[str],
    hint: str,
    *,
    x: float,
    y: float,
    width: float,
    height: float,
    **attributes: str | float,
) -> str:
    """A box with a tooltip, and in it the first label for which there is room."""
    box = element("rect", css, hint=hint, x=x, y=y, width=width, height=height, **attributes)
    label = next((each for each in labels if each and text_width(each, _SMALL_TEXT) < width), "")
    return box + (text((x + width / 2, y + height / 2 + 4), label, "inside") if label else "")


def path_through(points: Iterable[tuple[float, float]]) -> str:
    """The `d` of a path of straight lines."""
    return "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def grid(x: Scale, y: Scale, *, x_ticks: Mapping[float, str], y_ticks: Mapping[float, str]) -> Iterator[str]:
    """A frame with a line at each tick, and its label below or to the left; `y` starts at the bottom."""
    yield element("rect", "frame", x=x.start, y=y.stop, width=x.stop - x.start, height=y.start - y.stop)
    for value, label in x_ticks.items():
        yield element("path", "frame", d=f"M{x(value):.1f} {y.stop:g} V{y.start:g}")
        if label:
            yield text((x(value), y.start + 18), label, "quiet middle")
    for value, label in y_ticks.items():
        yield element("path", "frame", d=f"M{x.start:g} {y(value):.1f} H{x.stop:g}")
        if label:
            yield text((x.start - 8, y(value) + 4), label, "quiet end")


def round_ticks(high: float) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten from 0 to `high`, about eight of them."""
    power = 10.0 ** floor(log10(high / 8))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= high / 8)
    return [number * step for number in range(floor(high / step) + 1)]
