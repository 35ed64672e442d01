"""The output of `motet show step`: the planner's simulation of a step, drawn in seconds.

The events of a simulated step as rows of letters and as SVG: two rows for each rank, and time from left to right.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil
from pathlib import Path

from motet.cli.job_arguments import load_job_or_config
from motet.cli.output import OutputLine, check_writable, print_lines, table_lines, write_output_file
from motet.cli.plan.plan_assumptions import rates_note, stack_on
from motet.cli.plan.plan_report import planned_model
from motet.core.errors import check_input
from motet.core.svg import MARGIN, PAGE_WIDTH, Scale, grid, labelled_box, round_ticks, svg_page, text
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

# Kind -> (letter of the text, words of the legend, fill of the picture)
KINDS: dict[StepEventKind, tuple[str, str, str]] = {
    "forward": ("f", "forward", "#1f5fbf"),
    "recomputation": ("c", "forward computed again", "#123a75"),
    "backward": ("b", "backward", "#7a3fb0"),
    "weights": ("w", "weight gradients", "#1b7f79"),
    "update": ("u", "update", "#4c5a6b"),
    "host": ("h", "host", "#6e7781"),
    "data": ("d", "waits for data", "#8c959f"),
    "gather": ("g", "gather", "#1a7439"),
    "reduce": ("r", "reduction", "#a84300"),
    "exchange": ("e", "exchange of activations", "#8a5a00"),
    "message": ("m", "message between stages", "#b0307a"),
    "norm": ("n", "agree on the norm", "#7d4e57"),
    "send": ("s", "sums to the host", "#6b5b00"),
    "read": ("i", "states from disk", "#3d6b1f"),
    "write": ("o", "states to disk", "#6b3d1f"),
    "receive": ("v", "values to the device", "#00616b"),
}
STREAMS: tuple[StepStream, ...] = ("compute", "network", "host link", "host cores", "disk")
_ALWAYS_SHOWN: tuple[StepStream, ...] = ("compute", "network")
_COLUMNS, _LEAST_SHARE, _LEFT = 96, 0.25, 124


def draw_text(events: Sequence[StepEvent]) -> Iterator[OutputLine]:
    """A row of letters for each stream of each rank; of a single rank, a line for each event, too."""
    end, ranks = max(event.stop_s for event in events), {event.rank for event in events}
    yield from table_lines(
        (
            [*([f"rank {rank}"] if len(ranks) > 1 else []), stream, _letters(row, end)]
            for (rank, stream), row in _rows(events)
        )
    )
    used = {event.kind for event in events if event.stop_s > event.start_s}
    yield f"({', '.join(f'{letter} {name}' for kind, (letter, name, _) in KINDS.items() if kind in used)})"
    if len(ranks) == 1:
        yield ""
        times = ((format_seconds(each.start_s), format_seconds(each.stop_s - each.start_s)) for each in events)
        rows = ((*time, event.stream, event.name) for time, event in zip(times, events, strict=True))
        yield from table_lines(rows, right=[0, 1])


def _letters(row: Sequence[StepEvent], end: float) -> str:
    """The letter of the kind that has most of each column, if it has enough to be seen."""
    columns = [dict[str, float]() for _ in range(_COLUMNS)]
    for event in row:
        letter, start, stop = KINDS[event.kind][0], event.start_s / end * _COLUMNS, event.stop_s / end * _COLUMNS
        for number, column in enumerate(columns[int(start) : ceil(stop)], start=int(start)):
            column[letter] = column.get(letter, 0.0) + min(stop, number + 1) - max(start, number)
    idle = {" ": _LEAST_SHARE}
    return "".join(max(idle | column, key=(idle | column).__getitem__) for column in columns)


def draw_svg(events: Sequence[StepEvent], *, title: str, note: str, end_s: float | None = None) -> str:
    """A box for each event. `end_s` is the time at the right edge; the end of the last event when not given."""
    rows, several = list(_rows(events)), len({event.rank for event in events}) > 1
    row_height, used = 24 if several else 52, {event.kind for event in events}
    x = Scale(0, end_s or max(event.stop_s for event in events), _LEFT, PAGE_WIDTH - 2 * MARGIN)
    y = Scale(0, len(rows), row_height * len(rows) + 4, 0)
    body = list(grid(x, y, x_ticks={seconds: format_seconds(seconds) for seconds in round_ticks(x.high)}, y_ticks={}))
    for index, ((rank, stream), row) in enumerate(rows):
        top = index * row_height + 4
        body.append(text((MARGIN, top + row_height / 2), f"rank {rank} " * several + stream))
        body += (_box(event, x, top, height=row_height - 4) for event in row)
    legend = [(fill, name) for kind, (_, name, fill) in KINDS.items() if kind in used]
    return svg_page(title, note, body, height=y.start + 20, legend=legend)


def _rows(events: Sequence[StepEvent]) -> Iterator[tuple[tuple[int, StepStream], list[StepEvent]]]:
    """The events of each stream of each rank."""
    for rank, group in groupby(events, lambda event: event.rank):
        rank_events = list(group)
        for stream in STREAMS:
            row = [event for event in rank_events if event.stream == stream]
            if row or stream in _ALWAYS_SHOWN:
                yield (rank, stream), row


def _box(event: StepEvent, x: Scale, y: float, *, height: float) -> str:
    duration = event.stop_s - event.start_s
    hint = f"{event.name}: {format_seconds(duration)} from {format_seconds(event.start_s)}"
    left, width, fill = x(event.start_s), max(x(event.stop_s) - x(event.start_s), 0.5), KINDS[event.kind][2]
    return labelled_box("box", (event.name, event.block), hint, x=left, y=y, width=width, height=height, fill=fill)


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
        stage_rank = max(event.rank for event in events if event.rank <= request.rank)  # Ranks of a stage do the same
        events = [event for event in events if event.rank == stage_rank]
    title = f"{job.name}: {step.layout_text} on {request.ranks} devices of {cluster.name}"
    parts = sorted(time.parts.items(), key=lambda item: -item[1])
    largest = ", ".join(f"{name} {format_seconds(value)}" for name, value in parts if value >= 0.005 * time.seconds)
    note = f"a step takes {format_seconds(time.seconds)}: {largest}"
    if assumption := rates_note(step, cluster):
        note = f"{note}. {assumption}"
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
    """The step of the requested layout, or of the layout of the job."""
    step = planned_step(job, layout_of_sizes(), model=planned_model(job, None), stack=stack_on(cluster, None, job))
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
