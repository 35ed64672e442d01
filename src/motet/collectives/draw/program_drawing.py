"""A Program as SVG: a panel for each step, with a column for each rank and a row for each chunk.

A chunk has the same index on every rank, so a transfer is an arrow along one row. A cell has a slot for each rank,
filled if the chunk contains that rank's contribution. Without reductions it shows the chunk instead.
`program_animation` is one panel that plays all steps. `program_html` is a page that plays, pauses and steps: one file
without external resources.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from html import escape
from importlib.resources import files
from typing import NamedTuple

from motet.collectives.draw import frames
from motet.collectives.draw.frames import CollectiveStepFrame, program_frames, program_title
from motet.collectives.program import ChunkTransfer, Contributors, Program
from motet.core.errors import check_input
from motet.core.svg import COLOURS, element, svg_opening, svg_page, text

_MAX_RANKS = 16
_MAX_CELLS = 30_000
_WIDTH, _MIN_WIDTH = 1120, 900
_LABEL_WIDTH, _LANE_GAP, _CELL_HEIGHT, _HEADER_HEIGHT, _MARGIN, _PANEL_GAP = 66, 36, 22, 50, 16, 20


class ArrowPath(NamedTuple):
    """The `d` of the line and of the tip of an arrow."""

    line: str
    tip: str


@dataclass(frozen=True)
class ProgramPanels:
    """The panels of a Program: their size, positions in a panel, and their parts as SVG."""

    program: Program

    @cached_property
    def ops(self) -> frozenset[str]:
        return frozenset(t.op for step in self.program.steps for t in step)

    @property
    def slot_width(self) -> float:
        """The width of a rank's slot in a cell; with few ranks it has room for the rank's number."""
        return 12 if self.program.ranks <= 8 else 6

    @property
    def cell_width(self) -> float:
        return max(40.0, self.slot_width * self.program.ranks) if self.program.has_reductions else 40

    @cached_property
    def row_gap(self) -> int:
        """The space between rows, with room for arcs if an arrow passes a column."""
        return 28 if any(abs(t.src - t.dst) > 1 for step in self.program.steps for t in step) else 8

    @property
    def width(self) -> float:
        return _LABEL_WIDTH + self.program.ranks * (self.cell_width + _LANE_GAP) - _LANE_GAP + 2 * _MARGIN

    @property
    def height(self) -> float:
        return _HEADER_HEIGHT + self.program.chunks * (_CELL_HEIGHT + self.row_gap) + self.row_gap

    def x(self, rank: int) -> float:
        return _MARGIN + _LABEL_WIDTH + rank * (self.cell_width + _LANE_GAP)

    def y(self, chunk: int) -> float:
        return _HEADER_HEIGHT + self.row_gap + chunk * (_CELL_HEIGHT + self.row_gap)

    def legend(self, x: float, y: float) -> str:
        """The meaning of the arrows and cells."""
        parts = []
        for op, words, width in (("reduce", "is added to the chunk", 215), ("copy", "replaces the chunk", 200)):
            if op in self.ops:
                line = _draw_arrow(_straight_path((x, x + 32), y - 4), op, None)
                parts += [line, text((x + 40, y), words, "quiet")]
                x += width
        words = "numbers: whose contributions are in it; " if self.program.has_reductions else ""
        words += "framed: as it must be at the end"
        return "".join([*parts, text((x, y), words, "quiet")])

    def labels(self) -> str:
        """The frame of a panel, with the names of its columns and rows."""
        parts = [element("rect", "frame", width=self.width, height=self.height, rx=6)]
        for rank in range(self.program.ranks):
            parts.append(text((self.x(rank) + self.cell_width / 2, _HEADER_HEIGHT - 6), f"rank {rank}", "head middle"))
        for chunk in range(self.program.chunks):
            parts.append(text((_MARGIN, self.y(chunk) + 15), f"chunk {chunk}", "quiet"))
        return "".join(parts)

    def cells(self, frame: CollectiveStepFrame) -> str:
        """All cells, each with a tooltip."""
        parts = []
        for rank, held in enumerate(frame.contents):
            for chunk in range(self.program.chunks):
                sources = held.get(chunk)
                is_final = sources is not None and sources == self.program.final[rank].get(chunk)
                words = _cell_tooltip(rank, chunk, sources, is_final)
                drawn = self._cell(rank, chunk, sources, is_final=is_final)
                parts.append(element("g", "cell", *drawn, hint=words, data_words=words))
        return "".join(parts)

    def _cell(self, rank: int, chunk: int, sources: Contributors | None, *, is_final: bool) -> Iterator[str]:
        x, y, width, colour = self.x(rank), self.y(chunk), self.cell_width, f"k{chunk % len(COLOURS)}"

        def rect(css: str, left: float, rect_width: float) -> str:
            return element("rect", css, x=left, y=y, width=rect_width, height=_CELL_HEIGHT)

        def digits(middle: float, words: object) -> str:
            return text((middle, y + 15), words, "inside")

        if sources is None:
            yield rect("absent", x, width)
            return
        if self.program.has_reductions:
            slot = width / self.program.ranks
            yield rect("empty", x, width)
            for source, times in Counter(sources).items():
                slot_x = x + source * slot
                yield rect(colour, slot_x, slot - 1)
                if self.slot_width >= 12 or times > 1:
                    yield digits(slot_x + slot / 2 - 0.5, source if times == 1 else f"{times}x")
        else:
            yield rect(colour, x, width) + digits(x + width / 2, chunk)
        if is_final:
            yield element("rect", "done", x=x - 2, y=y - 2, width=width + 4, height=_CELL_HEIGHT + 4, rx=2)

    def arrows(self, frame: CollectiveStepFrame) -> str:
        """Straight arrows between neighbours, and arcs past others: to the right above the row, to the left below."""
        return "".join(_draw_arrow(self.arrow_path(t, chunk), t.op, chunk) for t in frame.step for chunk in t.chunks)

    def arrow_path(self, t: ChunkTransfer, chunk: int) -> ArrowPath:
        """The way of a chunk from the cell of its source to that of its destination."""
        sign, y, half = 1 if t.dst > t.src else -1, self.y(chunk), self.cell_width / 2
        start, end = self.x(t.src) + half, self.x(t.dst) + half
        if abs(t.src - t.dst) == 1:
            reach = sign * (half + 5)
            return _straight_path((start + reach, end - reach), y + _CELL_HEIGHT / 2 - 5 * sign)
        edge = y - 3 if sign > 0 else y + _CELL_HEIGHT + 3
        start, end = start + 6 * sign, end - 6 * sign
        peak, base = edge - sign * (10 + 4 * (t.src % 4)), edge - 6 * sign
        path = f"M{start:g} {edge:g} C{start:g} {peak:g} {end:g} {peak:g} {end:g} {base:g}"
        return ArrowPath(path, f"M{end - 4:g} {base:g} L{end + 4:g} {base:g} L{end:g} {edge:g} Z")

    def panel(self, step_index: int, frame: CollectiveStepFrame) -> str:
        """One step: its arrows, and the cells after it."""
        return (
            f"{self.labels()}{text((_MARGIN, 24), frame_name(step_index, frame), 'head')}"
            f"<g>{self.cells(frame)}</g><g>{self.arrows(frame)}</g>"
        )

    def hidden_step(self, step_index: int, frame: CollectiveStepFrame) -> str:
        """One step of an animated page, with a sentence for each transfer."""
        sentences = [frame_name(step_index, frame), *frames.transfer_sentences(frame.step), frame.error]
        return (
            f'<g class="step" data-says="{escape(". ".join(filter(None, sentences)))}"><g class="state hidden">'
            f'{self.cells(frame)}</g><g class="arrows hidden">{self.arrows(frame)}</g></g>'
        )


def check_drawable_size(program: Program) -> None:
    """Raise an `InputError` if a picture of the Program would be too large."""
    cells = program.ranks * program.chunks * (len(program.steps) + 1)
    limits = f"at most {_MAX_RANKS} ranks and {_MAX_CELLS} cells, so give fewer ranks or pieces, or draw it as text"
    message = f"{program} has {cells} cells to draw; a picture has {limits}"
    check_input(program.ranks <= _MAX_RANKS and cells <= _MAX_CELLS, message)


def program_svg(program: Program, only_steps: tuple[int, ...] | None = None) -> str:
    """Panels of the whole Program, or of some steps; -1 is the start."""
    check_drawable_size(program)
    panels = ProgramPanels(program)
    numbered = enumerate(program_frames(program), start=-1)
    shown = [(n, frame) for n, frame in numbered if only_steps is None or n in only_steps]
    columns = max(1, min(len(shown), int((_WIDTH + _PANEL_GAP) // (panels.width + _PANEL_GAP))))
    panel_rows = -(-len(shown) // columns)
    width = max(_MARGIN * 2 + columns * (panels.width + _PANEL_GAP) - _PANEL_GAP, _MIN_WIDTH)
    error = shown[-1][1].error
    body, top = [] if error else [panels.legend(_MARGIN, 8)], 0 if error else 24
    for panel_index, (step_index, frame) in enumerate(shown):
        row, column = divmod(panel_index, columns)
        x, y = _MARGIN + column * (panels.width + _PANEL_GAP), top + row * (panels.height + _PANEL_GAP)
        body.append(element("g", "", panels.panel(step_index, frame), transform=f"translate({x:g} {y:g})"))
    height = top + panel_rows * (panels.height + _PANEL_GAP) - _PANEL_GAP
    return svg_page(program_title(program), error or "", body, width=width, height=height)


def frame_name(step_index: int, frame: CollectiveStepFrame) -> str:
    name = "start" if step_index < 0 else f"step {step_index}"
    return f"{name} cannot be executed" if frame.error else name


def _cell_tooltip(rank: int, chunk: int, sources: Contributors | None, is_final: bool) -> str:
    if sources is None:
        return f"rank {rank} does not hold chunk {chunk}"
    ranks = f"rank{frames.plural_suffix(len(sources))} {frames.format_ranges(sources)}"
    return f"rank {rank}, chunk {chunk}: from {ranks}{', as it must be at the end' if is_final else ''}"


def _straight_path(ends: tuple[float, float], y: float) -> ArrowPath:
    start, end = ends
    back = end - 7 if end > start else end + 7
    return ArrowPath(f"M{start:g} {y:g} L{back:g} {y:g}", f"M{back:g} {y - 4:g} L{back:g} {y + 4:g} L{end:g} {y:g} Z")


def _draw_arrow(path: ArrowPath, op: str, chunk: int | None) -> str:
    """An arrow in the colour of the chunk; without colour in the legend, where `chunk` is None."""
    if chunk is None:
        return element("path", f"arrow {op}", d=path.line) + element("path", "tip", d=path.tip)
    n = chunk % len(COLOURS)
    return element("path", f"arrow {op} c{n}", data_chunk=chunk, d=path.line) + element("path", f"tip t{n}", d=path.tip)


_SECONDS_OF_A_STEP, _TRAVEL = 2.0, 0.6  # The part of a step in which its chunks travel
_STILL = """<style>.still { display: none }
@media (prefers-reduced-motion: reduce) { .moving { display: none } .still { display: inline } }</style>"""


def program_animation(program: Program) -> str:
    """A picture that plays all steps in one panel, again and again; the end alone for readers who want no motion."""
    check_drawable_size(program)
    panels, shown = ProgramPanels(program), program_frames(program)
    play = _Playback(len(shown) + 1)  # The end stays for the time of a step
    body = [f'{_STILL}<g transform="translate({_MARGIN} 1)">', panels.labels()]
    for n, frame in enumerate(shown):
        name, is_last = text((_MARGIN, 24), frame_name(n - 1, frame), "head"), n + 1 == len(shown)
        body.append(play.show(panels.cells(frame), (n + _TRAVEL * (n > 0), n + 1 + (1 if is_last else _TRAVEL))))
        body.append(play.show(name + panels.arrows(frame), (n, n + 1 + is_last)))
        paths = [(chunk, panels.arrow_path(t, chunk).line) for t in frame.step for chunk in t.chunks]
        body += [play.move(_chip(chunk), path, (n, n + _TRAVEL)) for chunk, path in paths]
    body += [element("g", "still", panels.cells(shown[-1])), "</g>"]
    note = "numbers: whose contributions are in a chunk; " if program.has_reductions else ""
    note = shown[-1].error or f"{note}framed: as it must be at the end; dashed arrows replace the chunk"
    return svg_page(program_title(program), note, body, width=panels.width + 2 * _MARGIN, height=panels.height + 2)


def _chip(chunk: int) -> str:
    return element("circle", f"k{chunk % len(COLOURS)}", r=9) + text((0, 4), chunk, "inside")


@dataclass(frozen=True)
class _Playback:
    """Parts of a picture that show and move in a part of a cycle of `steps` steps."""

    steps: int

    def show(self, content: str, between: tuple[float, float], *motion: str) -> str:
        first, stop = (min(1, time / self.steps) for time in between)
        values, times = ("1;0", f"0;{stop:.4f}") if not first else ("0;1;0", f"0;{first:.4f};{stop:.4f}")
        if stop == 1:
            values, times = values[:-2], times.rpartition(";")[0]
        fade = self._animate("animate", attributeName="opacity", calcMode="discrete", values=values, keyTimes=times)
        return element("g", "moving", content, fade, *motion, opacity=int(not first))

    def move(self, content: str, path: str, between: tuple[float, float]) -> str:
        times = ";".join(f"{time / self.steps:.4f}" for time in (0, *between, self.steps))
        motion = self._animate("animateMotion", path=path, calcMode="linear", keyPoints="0;0;1;1", keyTimes=times)
        return self.show(content, between, motion)

    def _animate(self, tag: str, **attributes: str) -> str:
        return element(tag, "", dur=f"{self.steps * _SECONDS_OF_A_STEP:g}s", repeatCount="indefinite", **attributes)


_LEGEND_HEIGHT, _MIN_PAGE_WIDTH = 34, 940


def program_html(program: Program) -> str:
    """The HTML of the page, from the template draw_page.html."""
    check_drawable_size(program)
    panels = ProgramPanels(program)
    width, height = max(panels.width, _MIN_PAGE_WIDTH), panels.height + _LEGEND_HEIGHT
    svg_parts = [
        svg_opening(width + 2, height + 2, program_title(program), role="group"),
        panels.legend(8, 18),
        f'<g transform="translate({1 + (width - panels.width) / 2:g} {_LEGEND_HEIGHT})">{panels.labels()}',
        *[panels.hidden_step(number, frame) for number, frame in enumerate(program_frames(program), start=-1)],
        '<g id="chips"></g></g></svg>',
    ]
    html = files("motet.collectives.draw").joinpath("draw_page.html").read_text(encoding="utf-8")
    values = {"title": escape(program_title(program)), "colours": str(len(COLOURS))}
    for name, value in {**values, "text": escape(frames.program_text(program)), "svg": "\n".join(svg_parts)}.items():
        html = html.replace(f"@{name}@", value)
    return html
