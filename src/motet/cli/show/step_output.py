"""The output of `motet show step`: the planner's simulation of a step, drawn in seconds.

The events of a simulated step as rows of letters and as SVG: two rows for each rank, and time from left to right.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from math import ceil, floor, log10
from pathlib import Path

from motet.cli.job_arguments import load_job_or_config
from motet.cli.output import check_writable, print_lines, write_output_file
from motet.cli.plan.plan_report import planned_model, stack_on
from motet.core.errors import check_input
from motet.core.units import format_seconds
from motet.models.settings import UserModuleSettings
from motet.monitor.stdout_stderr import print_json
from motet.parallel.layout import layout_of_sizes
from motet.plan.planned_cluster import PlannedCluster, load_planned_cluster
from motet.plan.planned_step import PlannedStep
from motet.plan.search.layout_space import with_layout
from motet.plan.time.step_events import StepEvent, StepEventKind, StepStream
from motet.train.forecast.planned_job import planned_step, step_of_run
from motet.train.job import Job
from motet.train.job_step_plan import predicted_stages
from motet.train.launch.preflight import check_job

# Kind -> (letter of the text, words of the legend)
KINDS: dict[StepEventKind, tuple[str, str]] = {
    "forward": ("f", "forward"),
    "recomputation": ("c", "forward computed again"),
    "backward": ("b", "backward"),
    "weights": ("w", "weight gradients"),
    "update": ("u", "update"),
    "host": ("h", "host"),
    "data": ("d", "waits for data"),
    "gather": ("g", "gather"),
    "reduce": ("r", "reduction"),
    "exchange": ("e", "exchange of activations"),
    "message": ("m", "message between stages"),
    "norm": ("n", "agree on the norm"),
}
STREAMS: tuple[StepStream, ...] = ("compute", "network")
_COLUMNS, _LEAST_SHARE = 96, 0.25

_WIDTH, _LEFT, _RIGHT, _TOP, _LETTER = 1120, 112, 16, 66, 6.5
_STYLE = """
.page { fill: #ffffff }
text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; font-size: 12px; fill: #1f2328 }
.big { font-weight: 600; font-size: 15px } .quiet { fill: #57606a } .box { stroke: #ffffff; stroke-width: 0.5 }
.inside { fill: #ffffff; font-size: 11px; text-anchor: middle; pointer-events: none } .tick { stroke: #d0d7de }
.forward { fill: #1f5fbf } .recomputation { fill: #123a75 } .backward { fill: #7a3fb0 } .weights { fill: #1b7f79 }
.reduce { fill: #a84300 } .exchange { fill: #8a5a00 } .gather { fill: #1a7439 } .message { fill: #b0307a }
.norm, .update, .host { fill: #4c5a6b } .data { fill: #8c959f }
@media (prefers-color-scheme: dark) {
.page { fill: #14181e } text { fill: #e6edf3 } .quiet { fill: #9da7b3 } .inside { fill: #ffffff }
.box { stroke: #14181e } .tick { stroke: #39424d }
}
"""


def draw_text(events: Sequence[StepEvent]) -> Iterator[str]:
    """A row of letters for each stream of each rank; of a single rank, a line for each event, too."""
    end, ranks = max(event.stop_s for event in events), {event.rank for event in events}
    for (rank, stream), row in _rows(events):
        label = f"rank {rank:<{len(str(max(ranks)))}} " * (len(ranks) > 1)
        yield f"{label}{stream:8} {_letters(row, end)}".rstrip()
    used = {event.kind for event in events if event.stop_s > event.start_s}
    yield f"({', '.join(f'{letter} {name}' for kind, (letter, name) in KINDS.items() if kind in used)})"
    if len(ranks) == 1:
        yield ""
        for event in events:
            times = (format_seconds(event.start_s), format_seconds(event.stop_s - event.start_s))
            yield "{:>8}  {:>8}  {:8} ".format(*times, event.stream) + event.name


def _letters(row: Sequence[StepEvent], end: float) -> str:
    """The letter of the kind that has most of each column, if that is enough to be seen."""
    columns = [dict[str, float]() for _ in range(_COLUMNS)]
    for event in row:
        letter, start, stop = KINDS[event.kind][0], event.start_s / end * _COLUMNS, event.stop_s / end * _COLUMNS
        for number, column in enumerate(columns[int(start) : ceil(stop)], start=int(start)):
            column[letter] = column.get(letter, 0.0) + min(stop, number + 1) - max(start, number)
    idle = {" ": _LEAST_SHARE}
    return "".join(max(idle | column, key=(idle | column).__getitem__) for column in columns)


def draw_svg(events: Sequence[StepEvent], *, title: str, note: str, end_s: float | None = None) -> str:
    """A box for each event. `end_s` is the time at the right edge; the end of the last event when not given."""
    rows = [row for _, row in _rows(events)]
    end, height = end_s or max(event.stop_s for event in events), 46 if len(rows) == len(STREAMS) else 18
    scale, bottom = (_WIDTH - _LEFT - _RIGHT) / end, _TOP + len(rows) * (height + 6)
    ranks = {event.rank for event in events}
    elements = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom + 52}" role="img">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<rect class="page" width="{_WIDTH}" height="{bottom + 52}"/>',
        f'<text class="big" x="16" y="24">{escape(title)}</text>',
        f'<text class="quiet" x="16" y="42">{escape(note)}</text>',
    ]
    for seconds in _ticks(end):
        x = _LEFT + seconds * scale
        elements.append(f'<path class="tick" d="M{x:.1f} {_TOP - 6}V{bottom}"/>')
        elements.append(f'<text class="quiet" x="{x:.1f}" y="{bottom + 16}">{format_seconds(seconds)}</text>')
    for index, ((rank, stream), row) in enumerate(_rows(events)):
        y = _TOP + index * (height + 6)
        label = f"rank {rank} " * (len(ranks) > 1) + stream
        elements.append(f'<text x="16" y="{y + height / 2 + 4:g}">{label}</text>')
        elements += (_box(event, y, height=height, scale=scale) for event in row)
    return "\n".join([*elements, *_legend(events, bottom + 40), "</svg>", ""])


def _rows(events: Sequence[StepEvent]) -> Iterator[tuple[tuple[int, StepStream], list[StepEvent]]]:
    """The events of each stream of each rank."""
    for rank, group in groupby(events, lambda event: event.rank):
        of_rank = list(group)
        for stream in STREAMS:
            yield (rank, stream), [event for event in of_rank if event.stream == stream]


def _ticks(end: float) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, about eight of them."""
    power = 10.0 ** floor(log10(end / 8))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= end / 8)
    return [number * step for number in range(floor(end / step) + 1)]


def _box(event: StepEvent, y: float, *, height: int, scale: float) -> str:
    x, width = _LEFT + event.start_s * scale, max((event.stop_s - event.start_s) * scale, 0.5)
    hint = escape(f"{event.name}: {format_seconds(event.stop_s - event.start_s)} from {format_seconds(event.start_s)}")
    box = f'<rect class="box {event.kind}" x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{height}"/>'
    label = next((text for text in (event.name, event.block) if text and width > _LETTER * len(text)), "")
    text = f'<text class="inside" x="{x + width / 2:.1f}" y="{y + height / 2 + 4:g}">{escape(label)}</text>'
    return f"<g><title>{hint}</title>{box}{text if label else ''}</g>"


def _legend(events: Sequence[StepEvent], y: float) -> Iterator[str]:
    x, used = float(_LEFT), {event.kind for event in events}
    for kind, (_, name) in KINDS.items():
        if kind in used:
            yield f'<rect class="{kind}" x="{x:g}" y="{y - 11:g}" width="14" height="14"/>'
            yield f'<text class="quiet" x="{x + 20:g}" y="{y:g}">{name}</text>'
            x += 36 + _LETTER * len(name)


@dataclass(frozen=True)
class StepRequest:
    """The options of the command."""

    source: str
    overrides: list[str]
    ranks: int
    cluster: str
    layout: str | None
    rank: int | None
    svg: Path | None
    json: bool


def show_step(request: StepRequest) -> None:
    """Draw a step on the terminal or into a file."""
    check_writable(request.svg)
    job = load_job_or_config(request.source, request.overrides)
    cluster = load_planned_cluster(request.cluster, request.ranks, option="--ranks")
    step = _simulated_step(job, cluster, request)
    time, events = cluster.step_times.predict(step), cluster.step_times.events(step)
    if request.rank is not None:
        check_input(request.rank < request.ranks, f"--rank {request.rank}: give 0 to {request.ranks - 1}")
        of_stage = max(event.rank for event in events if event.rank <= request.rank)  # Ranks of a stage do the same
        events = [event for event in events if event.rank == of_stage]
    title = f"{job.name}: {step.layout_text} on {request.ranks} devices of {cluster.name}"
    parts = sorted(time.parts.items(), key=lambda item: -item[1])
    largest = ", ".join(f"{name} {format_seconds(value)}" for name, value in parts if value >= 0.005 * time.seconds)
    note = f"a step takes {format_seconds(time.seconds)}: {largest}"
    if request.svg is not None:
        write_output_file(request.svg, draw_svg(events, title=title, note=note))
    if request.json:
        head = {"job": job.name, "ranks": request.ranks, "cluster": cluster.name, "layout": step.layout_text}
        times = {"step_time_s": time.seconds, "time_s": {name: value for name, value in parts if value}}
        print_json({**head, **times, "events": [event._asdict() for event in events]})
    elif request.svg is not None:
        print_lines(f"{request.svg} is written")
    else:
        print_lines(title, note, "", *draw_text(events))


def _simulated_step(job: Job, cluster: PlannedCluster, request: StepRequest) -> PlannedStep:
    """The step of a layout that is given, or of the layout of the job."""
    step = planned_step(job, layout_of_sizes(), model=planned_model(job, None), stack=stack_on(cluster, "motet"))
    if request.layout is not None:
        return with_layout(step, request.layout, request.ranks)
    check_input(
        job.layout.data == "all_reduce" and job.outer.every is None,
        "motet show step simulates ranks that exchange the gradients of each step; leave out layout.data and "
        "outer.every, or give --layout",
    )
    layout = check_job(job, request.ranks)
    is_known = not isinstance(job.model, UserModuleSettings)
    stages = predicted_stages(job, layout).stages if is_known else ()
    return step_of_run(job, step, layout, stages=stages)
