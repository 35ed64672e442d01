"""A timeline of a schedule as a grid of text and as SVG: a row for each rank, and time from left to right."""

from collections.abc import Iterator

from motet.core.svg import MARGIN, PAGE_WIDTH, Scale, element, labelled_box, svg_page, text
from motet.parallel.pipeline.pipeline_schedule import PipelineAction, PipelineSchedule
from motet.parallel.pipeline.schedule_timeline import ScheduleTimeline

KIND_NAMES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "weight gradients"}
_MAX_COLUMNS = 1200

_LEFT, _RIGHT, _ROW = 70, 150, 30
_FILLS = {
    "F": ("#1f5fbf", "#123a75"),
    "B": ("#7a3fb0", "#4a2470"),
    "I": ("#a84300", "#6b2b00"),
    "W": ("#1a7439", "#0e4822"),
}


def chunk_of_stage(schedule: PipelineSchedule, stage: int) -> int:
    """The number of a stage among those of its rank."""
    return schedule.stages_of_rank(schedule.stage_ranks[stage]).index(stage)


def draw_text(timeline: ScheduleTimeline, width: int | None = None) -> list[str]:
    """Lines of text, in pieces of at most `width` columns; a cell is kind, micro-batch and, of several, chunk."""
    schedule = timeline.schedule
    labels = {action: _label(schedule, action) for action in timeline.times}
    cell_width = 1 + max(map(len, labels.values()))
    shortest = min(stop - start for start, stop in timeline.times.values() if stop > start)
    has_room = cell_width * timeline.end <= _MAX_COLUMNS * shortest
    scale = cell_width / shortest if has_room else _MAX_COLUMNS / timeline.end
    rows = []
    for rank, order in enumerate(schedule.compute_actions):
        row = ""
        for action in order:
            start, stop = (round(time * scale) for time in timeline.times[action])
            label = labels[action] if has_room else action.kind
            row = row.ljust(start) + label.ljust(stop - start - 1, "-").ljust(stop - start)[: stop - start]
        rows.append((f"rank {rank:<{len(str(schedule.ranks))}}  ", row))
    columns = round(timeline.end * scale)
    step = max(cell_width, (width or 0) - len(rows[0][0])) if width else columns
    pieces = [[head + row[left : left + step] for head, row in rows] for left in range(0, columns, step)]
    return [line.rstrip() for piece in pieces for line in (*piece, "")]


def _label(schedule: PipelineSchedule, action: PipelineAction) -> str:
    chunk = chr(ord("a") + chunk_of_stage(schedule, action.stage)) if schedule.chunks > 1 else ""
    return f"{action.kind}{action.microbatch}{chunk}"


def describe_schedule(timeline: ScheduleTimeline) -> tuple[str, str]:
    """A title with the sizes, and a sentence with the costs."""
    schedule = timeline.schedule
    counts = ((schedule.ranks, "rank"), (schedule.chunks, "chunk"), (schedule.microbatches, "micro-batch"))
    sizes = (f"{count} {name}{'' if count == 1 else 'es' if name.endswith('h') else 's'}" for count, name in counts)
    kinds = {action.kind for action in timeline.times}
    durations = " ".join(
        f"{kind} {value:g}" for kind, value in timeline.durations.items() if kind in kinds | {"M"} and value
    )
    memory = max(map(timeline.memory, range(schedule.ranks)))
    return f"{schedule.name}: {', '.join(sizes)}", (
        f"durations {durations}: idle {timeline.bubble_share():.1%} of the time; a rank holds up to {memory:.3g} times "
        f"the activations of a micro-batch; between ranks, {timeline.bytes_factor:.3g} times the bytes of one chunk"
    )


def draw_svg(timeline: ScheduleTimeline) -> str:
    """A box for each computation, with its micro-batch; of two chunks the second is darker."""
    schedule = timeline.schedule
    title, note = describe_schedule(timeline)
    kinds = {action.kind for order in schedule.compute_actions for action in order}
    legend = [
        (fill, KIND_NAMES[kind] if number == min(2, schedule.chunks) else "")
        for kind, fills in _FILLS.items()
        if kind in kinds
        for number, fill in enumerate(fills[: schedule.chunks], start=1)
    ]
    rows = (part for rank in range(schedule.ranks) for part in _svg_row(timeline, rank))
    return svg_page(title, note, rows, height=schedule.ranks * _ROW, legend=legend)


def _svg_row(timeline: ScheduleTimeline, rank: int) -> Iterator[str]:
    schedule, x, y = timeline.schedule, Scale(0, timeline.end, _LEFT, PAGE_WIDTH - _RIGHT), rank * _ROW
    yield text((MARGIN, y + 18), f"rank {rank}")
    yield element("rect", "empty", x=x.start, y=y, width=x.stop - x.start, height=_ROW - 2)
    for action in schedule.compute_actions[rank]:
        start, stop = map(x, timeline.times[action])
        hint = f"{KIND_NAMES[action.kind]}, stage {action.stage}, micro-batch {action.microbatch}"
        fill, label = _FILLS[action.kind][chunk_of_stage(schedule, action.stage) % 2], str(action.microbatch)
        yield labelled_box("box", [label], hint, x=start, y=y, width=stop - start, height=_ROW - 2, fill=fill)
    memory = f"idle {timeline.bubble_share(rank):.0%}, memory {timeline.memory(rank):.3g}"
    yield text((x.stop + 10, y + 18), memory, "quiet")
