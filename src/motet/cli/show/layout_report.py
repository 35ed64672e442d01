"""The output of `motet show layout`: the plan of a layout, and the proof that it is right."""

from typing import Any

from rich.table import Table

from motet.core.errors import InputError, check_input
from motet.models.spec.model_spec import spec_from_settings
from motet.monitor.stdout_stderr import print_json, stdout_console
from motet.parallel.data_parallel.data_sharding import DataParallelSharding
from motet.parallel.data_parallel.zero import sharded_states
from motet.parallel.model_inventory import inventory_of_spec
from motet.parallel.step_plan.check import prove_collective_programs, prove_step_plan
from motet.parallel.step_plan.plan import StepPlan, make_step_plan, updated_ranges
from motet.train.job import load_job
from motet.train.launch.preflight import check_job

_MAX_SHOWN_RANKS = 16

_COLLECTIVE_SENTENCES = {
    "reduce_scatter": "Gradients are summed, a shard to each{owner}, over ranks {groups}.",
    "all_reduce": "{subject} are summed over ranks {groups}.",
    "norm": "The norm counts the sums of ranks {groups}.",
    "all_gather": "{subject} come back from ranks {groups}.",
    "keep_secondary": "Second copies are sharded over ranks {groups}.",
}


def show_layout(words: str, overrides: list[str], job_name: str, *, json: bool) -> None:
    """Print what each rank of a layout does, after proving that every element and row counts once."""
    job = load_job(job_name, [*(f"layout.{word}" for word in words.split()), *overrides])
    if job.layout.dp is None:
        raise InputError(f"layout {words!r} does not say for how many ranks; add dp=8, say")
    check_input(
        not job.layout.uses_server_processes,
        "layout.data = 'parameter_server' with layout.server.transport = 'point-to-point' has no plan beforehand, "
        "since any worker may do any work; set layout.server.transport=collectives, or leave layout.data out",
    )
    layout = check_job(job, job.layout.dims.ranks)
    plan = make_step_plan(
        inventory_of_spec(spec_from_settings(job.model)),
        layout,
        job.precision.resolved,
        settings=job.communication,
        batch_sequences=job.data.batch_sequences,
        independent_replicas=job.outer.every is not None,
    )
    report = {
        "job": job.name,
        **_plan_report(plan, layout.sharding),
        "proof": vars(prove_step_plan(plan)),
        "programs": sorted({str(program) for program in prove_collective_programs(layout.sharding, job.communication)}),
    }
    if json:
        print_json(report)
    else:
        stdout_console().print(_table(report))
        stdout_console().print("\n".join(_sentences(report)), highlight=False)


def _plan_report(plan: StepPlan, sharding: DataParallelSharding) -> dict[str, Any]:
    return {
        "zero": sharding.zero,
        "uses_server_shards": sharding.bucket_owners is not None,
        "state_placement": {
            state: "sharded" if is_sharded and sharding.shards > 1 else "replicated"
            for state, is_sharded in sharded_states(sharding.zero).items()
        },
        "schedule": [{"kind": each.kind, "rank_groups": each.rank_groups} for each in plan.comm_units[0].schedule],
        "outer_groups": plan.outer_groups,
        "ranks": [
            {
                "rank": rank,
                "updated_elements": sum(b - a for a, b in updated_ranges(plan, rank % plan.dims.ranks).values()),
                "rows": [[part.start, part.stop] for part in parts],
            }
            for rank, parts in enumerate(plan.rows_by_rank)
        ],
    }


def _table(report: dict[str, Any]) -> Table:
    placement = ", ".join(f"{state.replace('_', ' ')} {how}" for state, how in report["state_placement"].items())
    table = Table(title=f"{report['job']}, zero = {report['zero']}: {placement}")
    table.add_column("rank", justify="right")
    table.add_column("updates", justify="right")
    table.add_column("rows of the batch, by micro-batch")
    for rank in report["ranks"][:_MAX_SHOWN_RANKS]:
        rows = ", ".join(f"{first}-{stop - 1}" for first, stop in rank["rows"])
        table.add_row(str(rank["rank"]), f"{rank['updated_elements']:,}", rows)
    if report["ranks"][_MAX_SHOWN_RANKS:]:
        table.add_row("...", "", f"{len(report['ranks']) - _MAX_SHOWN_RANKS} more")
    return table


def _sentences(report: dict[str, Any]) -> list[str]:
    collectives = [each for each in report["schedule"] if each["kind"] == "norm" or len(each["rank_groups"][0]) > 1]
    subject = "Shards" if any(each["kind"] == "reduce_scatter" for each in collectives) else "Gradients"
    owner = ", the owner of a bucket all of it" * report["uses_server_shards"]
    sentences = [(_COLLECTIVE_SENTENCES.get(each["kind"], ""), each["rank_groups"]) for each in collectives]
    lines = [s.format(groups=_format_groups(g), subject=subject, owner=owner) for s, g in sentences if s]
    if report["outer_groups"]:
        lines = ["Steps of the first replica; all others take the same:", *lines]
        lines.append(f"Replicas take an outer step over ranks {_format_groups(report['outer_groups'])}.")
    proof = report["proof"]
    names = (("ranks", "rank", "ranks"), ("microbatches", "micro-batch", "micro-batches"), ("copies", "copy", "copies"))
    ranks, microbatches, copies = (f"{proof[key]} {word if proof[key] == 1 else words}" for key, word, words in names)
    lines.append(
        f"Proven: each of {proof['elements']:,} elements of {proof['parameters']} parameters is updated once in "
        f"{copies}, with the gradients of {ranks} x {microbatches}, each once, gets back to every rank, and counts "
        f"once in the norm; each of {proof['rows']} rows is read once."
    )
    if report["programs"]:
        lines.append(f"Proven, too: {', '.join(report['programs'])}.")
    return lines


def _format_groups(groups: tuple[tuple[int, ...], ...]) -> str:
    """Format the first few groups: `0 1 2 3 | 4 5 6 7`."""
    shown = [" ".join(map(str, ranks[:8])) + " ..." * (len(ranks) > 8) for ranks in groups[:4]]
    return " | ".join(shown) + " | ..." * (len(groups) > 4)
