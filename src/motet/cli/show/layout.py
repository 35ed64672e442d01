"""`motet show layout`: who keeps, sums and gathers what in a layout, and the proof that it is right, without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from motet.parallel.layout import Layout
    from motet.parallel.step_plan.plan import StepPlan
    from motet.train.job import Job

MAX_SHOWN_RANKS = 16  # Ranks that the table has a line for


def layout(
    words: Annotated[str, typer.Argument(metavar="LAYOUT", help='Such as "dp=8 zero=3 shard_group=4".')],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Settings of the job to replace.")
    ] = None,
    job: Annotated[str, typer.Option(help="The job whose model is spread, and whose batch is read.")] = "tiny",
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Who keeps, sums and gathers what in a layout, and a proof that every element and row counts once."""
    from motet.core.errors import InputError
    from motet.monitor.console import print_json, stdout_console
    from motet.parallel.step_plan.check import prove_collective_programs, prove_step_plan
    from motet.train.job import load_job
    from motet.train.launch.preflight import check_job

    loaded_job = load_job(job, [*(f"layout.{word}" for word in words.split()), *(overrides or [])])
    if loaded_job.layout.dp is None:
        raise InputError(f"layout {words!r} does not say for how many ranks; add dp=8, say")
    if loaded_job.layout.uses_server_processes:
        raise InputError(
            "layout.data = 'parameter_server' with layout.server.transport = 'point-to-point' has no plan beforehand, since "
            "whoever is there does the work; set layout.server.transport=collectives, or leave layout.data out"
        )
    resolved_layout = check_job(loaded_job, loaded_job.layout.dp)
    plan = _step_plan(loaded_job, resolved_layout)
    proof = prove_step_plan(plan)
    programs = sorted({str(one) for one in prove_collective_programs(resolved_layout, loaded_job.communication)})
    report = {"job": loaded_job.name, **_plan_report(plan, resolved_layout), "proof": vars(proof), "programs": programs}
    if json:
        print_json(report)
        return
    stdout_console().print(_table(report))
    stdout_console().print(_sentences(report), highlight=False)


def _step_plan(job: Job, resolved_layout: Layout) -> StepPlan:
    from motet.models.spec.model_spec import spec_from_settings
    from motet.parallel.step_plan.plan import ParameterInventory, make_step_plan
    from motet.precision.recipe import RECIPES

    shapes = {p.name: p.shape for p in spec_from_settings(job.model).named_parameters()}
    parameters = ParameterInventory(shapes, {name: len(shape) < 2 for name, shape in shapes.items()})
    recipe, independent_replicas = RECIPES[job.precision.recipe], job.outer.every is not None
    return make_step_plan(
        parameters,
        resolved_layout,
        recipe,
        settings=job.communication,
        batch_sequences=job.data.batch_sequences,
        independent_replicas=independent_replicas,
    )


def _plan_report(plan: StepPlan, resolved_layout: Layout) -> dict[str, Any]:
    from motet.parallel.data_parallel.zero import ZERO_STAGES
    from motet.parallel.step_plan.plan import updated_ranges

    sharded_state = vars(ZERO_STAGES[resolved_layout.zero])
    return {
        "zero": resolved_layout.zero,
        "owned": resolved_layout.bucket_owners is not None,
        "keeps": {
            what: "its share" if of_all and resolved_layout.shards > 1 else "whole"
            for what, of_all in sharded_state.items()
        },
        "course": [{"verb": move.kind, "sets": move.rank_groups} for move in plan.comm_units[0].schedule],
        "meetings": plan.outer_groups,
        "ranks": [
            {
                "rank": rank,
                "updates": sum(stop - first for first, stop in updated_ranges(plan, rank % plan.ranks).values()),
                "rows": [[part.start, part.stop] for part in parts],
            }
            for rank, parts in enumerate(plan.rows_by_rank)
        ],
    }


def _table(report: dict[str, Any]) -> Table:
    from rich.table import Table

    keeps = ", ".join(f"{what} {how}" for what, how in report["keeps"].items())
    table = Table(title=f"{report['job']}, zero = {report['zero']}: {keeps}")
    table.add_column("rank", justify="right")
    table.add_column("updates", justify="right")
    table.add_column("rows of the batch, by micro-batch")
    for rank in report["ranks"][:MAX_SHOWN_RANKS]:
        rows = ", ".join(f"{first}-{stop - 1}" for first, stop in rank["rows"])
        table.add_row(str(rank["rank"]), f"{rank['updates']:,}", rows)
    if len(report["ranks"]) > MAX_SHOWN_RANKS:
        table.add_row("...", "", f"{len(report['ranks']) - MAX_SHOWN_RANKS} more")
    return table


_COLLECTIVE_SENTENCES = {
    "reduce_scatter": "Gradients are summed, a share to each{owner}, over ranks {sets}.",
    "all_reduce": "{what} are summed over ranks {sets}.",
    "norm": "The norm counts the sums of ranks {sets}.",
    "all_gather": "{what} come back from ranks {sets}.",
    "keep_secondary": "Second copies are shared by ranks {sets}.",
}


def _sentences(report: dict[str, Any]) -> str:
    collectives = [move for move in report["course"] if move["verb"] == "norm" or len(move["sets"][0]) > 1]
    subject = "Shares" if any(move["verb"] == "reduce_scatter" for move in collectives) else "Gradients"
    owner = ", the owner of a bucket all of it" * report["owned"]
    lines = [
        _COLLECTIVE_SENTENCES[move["verb"]].format(sets=_format_groups(move["sets"]), what=subject, owner=owner)
        for move in collectives
        if move["verb"] in _COLLECTIVE_SENTENCES
    ]
    if report["meetings"]:
        lines = ["Of the first replica, like which all others take their steps:", *lines]
        lines.append(f"Replicas meet over ranks {_format_groups(report['meetings'])}.")
    proof = report["proof"]
    names = (("ranks", "rank", "ranks"), ("microbatches", "micro-batch", "micro-batches"), ("copies", "copy", "copies"))
    ranks, microbatches, copies = (f"{proof[key]} {one if proof[key] == 1 else many}" for key, one, many in names)
    lines.append(
        f"Proven: each of {proof['elements']:,} elements of {proof['parameters']} parameters is updated once in "
        f"{copies}, with the gradients of {ranks} x {microbatches}, each once, gets back to every rank, and counts once in "
        f"the norm; each of {proof['rows']} rows is read once."
    )
    if report["programs"]:
        lines.append(f"Proven, too: {', '.join(report['programs'])}.")
    return "\n".join(lines)


def _format_groups(groups: tuple[tuple[int, ...], ...]) -> str:
    """The first few, `0 1 2 3 | 4 5 6 7`."""
    shown = [" ".join(map(str, ranks[:8])) + " ..." * (len(ranks) > 8) for ranks in groups[:4]]
    return " | ".join(shown) + " | ..." * (len(groups) > 4)
