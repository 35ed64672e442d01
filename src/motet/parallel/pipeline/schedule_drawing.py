"""A timeline of a schedule as a grid of text and as SVG: a row for each rank, and time from left to right."""

from collections.abc import Iterator
from html import escape

from motet.parallel.pipeline.pipeline_schedule import PipelineAction, PipelineSchedule
from motet.parallel.pipeline.schedule_timeline import ScheduleTimeline

KIND_NAMES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "weight gradients"}
_MAX_COLUMNS = 1200

_WIDTH, _LEFT, _RIGHT, _ROW, _TOP = 1120, 70, 150, 30, 62
_STYLE = """
.page { fill: #ffffff }
text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; font-size: 12px; fill: #1f2328 }
.big { font-weight: 600; font-size: 15px } .quiet { fill: #57606a } .idle { fill: #eaeef2 }
.box { stroke: #ffffff; stroke-width: 1 }
.inside { fill: #ffffff; font-size: 11px; text-anchor: middle; pointer-events: none }
.F0 { fill: #1f5fbf } .F1 { fill: #123a75 } .B0 { fill: #7a3fb0 } .B1 { fill: #4a2470 }
.I0 { fill: #a84300 } .I1 { fill: #6b2b00 } .W0 { fill: #1a7439 } .W1 { fill: #0e4822 }
@media (prefers-color-scheme: dark) {
.page { fill: #14181e } text { fill: #e6edf3 } .quiet { fill: #9da7b3 } .inside { fill: #ffffff }
.idle { fill: #2a313a } .box { stroke: #14181e }
}
"""


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
    height = _TOP + schedule.ranks * _ROW + 40
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
            f"<title>{escape(title)}</title><style>{_STYLE}</style>",
            f'<rect class="page" width="{_WIDTH}" height="{height}"/>',
            f'<text class="big" x="16" y="24">{escape(title)}</text>',
            f'<text class="quiet" x="16" y="42">{escape(note)}</text>',
            *(line for rank in range(schedule.ranks) for line in _svg_row(timeline, rank)),
            *_svg_legend(schedule, height - 14),
            "</svg>",
            "",
        ]
    )


def _svg_row(timeline: ScheduleTimeline, rank: int) -> Iterator[str]:
    schedule, width, y = timeline.schedule, _WIDTH - _LEFT - _RIGHT, _TOP + rank * _ROW
    yield f'<text x="16" y="{y + 19}">rank {rank}</text>'
    yield f'<rect class="idle" x="{_LEFT}" y="{y}" width="{width}" height="{_ROW - 2}"/>'
    for action in schedule.compute_actions[rank]:
        start, stop = (_LEFT + time * width / timeline.end for time in timeline.times[action])
        hint = f"{KIND_NAMES[action.kind]}, stage {action.stage}, micro-batch {action.microbatch}"
        style, label = f"{action.kind}{chunk_of_stage(schedule, action.stage) % 2}", str(action.microbatch)
        position = f'x="{start:.1f}" y="{y}" width="{stop - start:.1f}" height="{_ROW - 2}"'
        text = f'<text class="inside" x="{(start + stop) / 2:.1f}" y="{y + 18}">{label}</text>'
        yield (
            f'<g><title>{hint}</title><rect class="box {style}" {position}/>'
            f"{text if stop - start > 7 * len(label) else ''}</g>"
        )
    memory = f"idle {timeline.bubble_share(rank):.0%}, memory {timeline.memory(rank):.3g}"
    yield f'<text class="quiet" x="{_WIDTH - _RIGHT + 10}" y="{y + 19}">{memory}</text>'


def _svg_legend(schedule: PipelineSchedule, y: int) -> Iterator[str]:
    x, kinds = _LEFT, {action.kind for order in schedule.compute_actions for action in order}
    for kind, name in KIND_NAMES.items():
        if kind in kinds:
            for chunk in range(min(2, schedule.chunks)):
                yield f'<rect class="{kind}{chunk}" x="{x}" y="{y - 11}" width="14" height="14"/>'
                x += 16
            yield f'<text class="quiet" x="{x + 4}" y="{y}">{name}</text>'
            x += 30 + 7 * len(name)
