"""The output of `motet show pipeline`: the computations of each rank over time, and their cost."""

import math
from pathlib import Path
from typing import Any

from rich.text import Text

from motet.cli.output import check_writable, print_lines, table_lines, write_output_file
from motet.core.errors import InputError, check_input
from motet.monitor.stdout_stderr import print_json, stdout_console
from motet.parallel.pipeline.pipeline_schedule import PipelineSchedule, peak_in_flight
from motet.parallel.pipeline.schedule_drawing import KIND_NAMES, describe_schedule, draw_svg, draw_text
from motet.parallel.pipeline.schedule_timeline import DURATIONS, ScheduleTimeline
from motet.parallel.pipeline.schedules import SCHEDULES, find_schedule, format_schedule, read_schedule

_COLOURS = {"F": "white on blue", "B": "white on magenta", "I": "white on red", "W": "white on green"}


def show_pipeline(timeline: ScheduleTimeline, *, json: bool, svg: Path | None, csv: Path | None) -> None:
    """Draw a schedule on the terminal or into files."""
    check_writable(svg, csv)
    title, note = describe_schedule(timeline)
    if svg is not None:
        write_output_file(svg, draw_svg(timeline))
    if csv is not None:
        write_output_file(csv, format_schedule(timeline.schedule))
    if json:
        print_json(_report(timeline))
    elif svg or csv:
        print_lines(*(f"{path} is written" for path in (svg, csv) if path))
    else:
        _print_grid(timeline, title)
        print_lines(f"{note}.")


def schedule_of_options(
    source: str, ranks: int | None, *, chunks: int | None, microbatches: int | None
) -> PipelineSchedule:
    """The schedule of these numbers; those not given are a file's, or 4 ranks, 8 micro-batches and 2 chunks."""
    if source not in SCHEDULES and Path(source).is_file():
        schedule = read_schedule(Path(source))
        defaults: tuple[int | None, ...] = (schedule.ranks, schedule.chunks, schedule.microbatches)
    else:
        defaults = (4, SCHEDULES[source].chunks if source in SCHEDULES else None, 8)
    values = [value or default for value, default in zip((ranks, chunks, microbatches), defaults, strict=True)]
    return find_schedule(source, values[0] or 4, chunks=values[1] or 2, microbatches=values[2] or 8)


def parse_durations(text: str) -> dict[str, float]:
    """Durations by kind of a text such as "F=1,B=2"; other kinds have the default."""
    durations, kinds_so_far = dict(DURATIONS), set[str]()
    for word in filter(None, (word.strip() for word in text.split(","))):
        kind, _, value = word.partition("=")
        check_input(kind not in kinds_so_far, f"--durations {text}: {kind} has two durations; write each kind once")
        kinds_so_far.add(kind)
        try:
            durations[kind] = float(value)
        except ValueError:
            durations[kind] = math.nan
        if kind not in DURATIONS or not (0 < durations[kind] < math.inf or (kind == "M" and durations[kind] == 0)):
            raise InputError(
                f"--durations {text}: {word!r} is not a duration; write KIND=NUMBER with a positive number and a kind "
                f"of {', '.join(DURATIONS)}, such as F=1,B=2"
            )
    return durations


def _print_grid(timeline: ScheduleTimeline, title: str) -> None:
    console = stdout_console()
    print_lines(title, "")
    for line in draw_text(timeline, console.width if console.is_terminal else None):
        text = Text(line)
        for kind, colour in _COLOURS.items():
            text.highlight_regex(rf"{kind}\d+[a-z]?-*", colour)
        console.print(text, soft_wrap=True)
    used = [kind for kind in KIND_NAMES if any(action.kind == kind for action in timeline.times)]
    chunks = "; a, b, ... are the chunks of a rank" * (timeline.schedule.chunks > 1)
    print_lines(f"{', '.join(f'{kind} {KIND_NAMES[kind]}' for kind in used)}{chunks}", "")
    header, rows = ("rank", "idle", "activations", "memory"), map(_row, _report(timeline)["ranks"])
    print_lines(*table_lines(rows, header=header, right=range(4)), "")


def _row(rank: dict[str, Any]) -> tuple[str, ...]:
    return str(rank["rank"]), f"{rank['bubble_share']:.1%}", str(rank["in_flight"]), f"{rank['memory']:.3g}"


def _report(timeline: ScheduleTimeline) -> dict[str, Any]:
    schedule = timeline.schedule
    return {
        "schedule": schedule.name,
        "chunks": schedule.chunks,
        "microbatches": schedule.microbatches,
        "stage_ranks": schedule.stage_ranks,
        "durations": dict(timeline.durations),
        "end": timeline.end,
        "bubble_share": timeline.bubble_share(),
        "bytes_factor": timeline.bytes_factor,
        "ranks": [
            {
                "rank": rank,
                "bubble_share": timeline.bubble_share(rank),
                "in_flight": peak_in_flight(order),
                "memory": timeline.memory(rank),
                "actions": list(map(str, order)),
                "times": [timeline.times[action] for action in order if not action.is_message],
            }
            for rank, order in enumerate(schedule.actions)
        ],
    }
