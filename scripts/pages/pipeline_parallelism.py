"""Tables and pictures of docs/guide/pipeline-parallelism.md: the schedules and their timelines."""

from functools import partial

from motet.cli.show.layout_report import placement_lines, placement_report
from motet.parallel.data_parallel.communication.communication_settings import communication_cluster
from motet.parallel.pipeline.pipeline_schedule import PipelineSchedule
from motet.parallel.pipeline.schedule_drawing import draw_svg
from motet.parallel.pipeline.schedule_timeline import DURATIONS, ScheduleTimeline
from motet.parallel.pipeline.schedules import SCHEDULES, make_schedule
from motet.train.job import load_job
from motet.train.job_step_plan import step_plan_of_split_job
from motet.train.launch.preflight import check_job
from pages import fill_blocks, markdown_table

PAGE = "guide/pipeline-parallelism.md"
RANKS, CHUNKS, MICROBATCHES = 4, 2, 8


def schedule(name: str, microbatches: int = MICROBATCHES, ranks: int = RANKS) -> PipelineSchedule:
    """The schedule with its own number of chunks, or two."""
    return make_schedule(name, ranks, chunks=SCHEDULES[name].chunks or CHUNKS, microbatches=microbatches)


def timeline(value: PipelineSchedule, **durations: float) -> ScheduleTimeline:
    """Durations for all blocks of a rank; a chunk takes its part of them."""
    scaled = {
        kind: duration / (value.chunks if kind != "M" else 1) for kind, duration in {**DURATIONS, **durations}.items()
    }
    return ScheduleTimeline(value, scaled)


def page() -> str:
    """The text of the page with its tables."""
    tables = {"schedules": schedules_table(), "microbatches": microbatches_table()}
    return fill_blocks(PAGE, tables | {name: placement(*command) for name, command in PLACEMENTS.items()})


# Block -> (layout, settings) of `motet show layout --cluster dgx-h100`.
PLACEMENTS: dict[str, tuple[str, list[str]]] = {
    "16 devices": ("pp=4 tp=2 dp=2", []),
    "96 devices": ("pp=4 tp=8 dp=3 zero=2", ["model.layers=8", "data.batch_sequences=48"]),
}


def placement(words: str, settings: list[str]) -> str:
    """The command and its output, without the proof."""
    job = load_job("tiny", [*(f"layout.{word}" for word in words.split()), *settings])
    layout = check_job(job, job.layout.dims.ranks)
    plan, cluster = step_plan_of_split_job(job, layout), communication_cluster("dgx-h100", layout.dims.ranks)
    command = " ".join(["motet show layout", f'"{words}"', "--cluster dgx-h100", *settings])
    lines = placement_lines(placement_report(job, layout, plan, cluster=cluster))
    return "\n".join(["```", f"$ {command}", *map(str, lines), "```"])


def schedules_table() -> str:
    """Step time, idle time, memory and bytes of each schedule."""
    rows = []
    for name in SCHEDULES:
        value = schedule(name)
        plain = timeline(value)
        memory = [plain.memory(rank) for rank in range(RANKS)]
        costs = [f"{max(memory):.3g}", f"{min(memory):.3g}", f"{plain.bytes_factor:.3g}"]
        times = [f"{timeline(value, M=message).end:.4g}" for message in (0.0, 0.05, 0.2)]
        uneven = timeline(value, I=1.3, W=0.7).end
        rows.append([f"`{name}`", f"{plain.bubble_share():.1%}", *times, f"{uneven:.4g}", *costs])
    head = (
        "schedule",
        "idle",
        "step",
        "step, M 0.05",
        "step, M 0.2",
        "step, I 1.3 W 0.7",
        "memory",
        "least memory",
        "bytes",
    )
    return markdown_table(head, rows)


def microbatches_table() -> str:
    """Idle time by the number of micro-batches."""
    counts = (1, 4, 8, 16, 32, 64)
    rows = [
        [f"`{name}`", *(f"{timeline(schedule(name, count)).bubble_share():.1%}" for count in counts)]
        for name in SCHEDULES
    ]
    return markdown_table(("micro-batches", *map(str, counts)), rows)


PICTURES = {
    f"pipeline-{name}.svg": partial(lambda name: draw_svg(ScheduleTimeline(schedule(name))), name) for name in SCHEDULES
}
