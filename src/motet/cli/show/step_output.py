"""The output of `motet show step`: the graph of a data-parallel step, drawn."""

from pathlib import Path

from motet.cli.output import check_writable, print_lines, write_output_file
from motet.core.errors import check_input
from motet.monitor.stdout_stderr import print_json, stdout_console
from motet.parallel.model_sharding import PIPELINE_DIMENSION
from motet.parallel.step_plan.timeline import draw_svg, draw_text
from motet.train.job import load_job
from motet.train.launch.preflight import check_job
from motet.train.step_graph import step_plan_of_split_job, step_timeline


def show_step(
    source: str, overrides: list[str], ranks: int, *, communication: float, svg: Path | None, json: bool
) -> None:
    """Draw a step on the terminal or into a file."""
    check_writable(svg)
    job = load_job(source, overrides)
    layout = check_job(job, ranks)
    stages = layout.dims.size(PIPELINE_DIMENSION)
    check_input(
        stages == 1,
        f"motet show step draws ranks that have all blocks, but layout.pp = {stages}; use motet show pipeline",
    )
    nodes, times = step_timeline(job, step_plan_of_split_job(job, layout), communication)
    title = f"{job.name}: zero = {layout.sharding.zero}, {ranks} ranks, overlap = {job.communication.overlap!r}"
    note = f"drawn for a network that all-reduces the gradients in {communication:g} of the time to compute a step"
    if svg is not None:
        write_output_file(svg, draw_svg(nodes, times, title=title, note=note))
    if json:
        rows = [
            {"name": n.name, "kind": n.kind, "resource": n.resource, "after": list(n.depends_on)}
            | dict(zip(("start", "stop"), times[n.name], strict=True))
            for n in nodes
        ]
        print_json({"job": job.name, "ranks": ranks, "communication": communication, "nodes": rows})
    elif svg is not None:
        print_lines(f"{svg} is written")
    else:
        stdout_console().print(f"{title}; {note}\n\n{draw_text(nodes, times)}", markup=False, highlight=False)
