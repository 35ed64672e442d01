"""The output of `motet show step`: the planner's simulation of a step, drawn in seconds."""

from dataclasses import dataclass
from pathlib import Path

from motet.cli.config_job import load_job_or_config
from motet.cli.output import check_writable, print_lines, write_output_file
from motet.cli.plan.plan_report import planned_model, stack_on
from motet.cli.show.step_drawing import draw_svg, draw_text
from motet.core.errors import check_input
from motet.core.units import format_seconds
from motet.models.settings import UserModuleSettings
from motet.monitor.stdout_stderr import print_json
from motet.parallel.layout import layout_of_sizes
from motet.plan.planned_cluster import PlannedCluster, load_planned_cluster
from motet.plan.planned_step import PlannedStep
from motet.plan.search.parse_plan_layout import with_layout
from motet.train.forecast.planned_job import planned_step, step_of_run
from motet.train.job import Job
from motet.train.job_step_plan import predicted_stages
from motet.train.launch.preflight import check_job


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
