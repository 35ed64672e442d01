"""The output of `motet show layout`: the plan of a layout, and the proof that it is right."""

from collections.abc import Sequence
from typing import Any

from rich.table import Column, Table

from motet.cli.output import print_lines
from motet.cli.show.layout_roles import show_roles
from motet.cli.show.placement_output import placement_lines, placement_report
from motet.collectives.cost.alpha_beta import RankGroups
from motet.core.errors import check_input
from motet.core.units import format_bytes
from motet.monitor.stdout_stderr import print_json, stdout_console
from motet.parallel.data_parallel.comm_units import SyncGroupPlan
from motet.parallel.data_parallel.communication.communication_settings import communication_cluster
from motet.parallel.data_parallel.data_sharding import DataParallelSharding
from motet.parallel.data_parallel.unit_schedule import CommUnitAction, UnitSchedule
from motet.parallel.data_parallel.zero import MOMENTS, sharded_states
from motet.parallel.model_sharding import PIPELINE_DIMENSION, TENSOR_DIMENSION
from motet.parallel.step_plan.activation_traffic import sent_activation_bytes
from motet.parallel.step_plan.check import MAX_PROVEN_RANKS, prove_collective_programs, prove_step_plan
from motet.parallel.step_plan.memory import model_state_memory
from motet.parallel.step_plan.plan import StepPlan, updated_ranges
from motet.parallel.step_plan.traffic import sent_bytes_per_step
from motet.train.cost_of_split import split_warnings
from motet.train.flops import batch_shape
from motet.train.job import Job, load_job
from motet.train.job_step_plan import step_plan_of_split_job
from motet.train.launch.preflight import check_job

_MAX_SHOWN_RANKS = 16
_MAX_REPORTED_RANKS = 256  # Of more ranks, the report has some


def show_layout(
    words: str, overrides: list[str], job_name: str, *, cluster: str | None, roles: bool, json: bool
) -> None:
    """Print what each rank of a layout does, after proving that every element and row counts once; or where
    the ranks lie on a cluster; or the roles of tensors."""
    job = load_job(job_name, [*(f"layout.{word}" for word in words.split()), *overrides])
    check_input(job.layout.dp is not None or roles, f"layout {words!r} does not say for how many ranks; add dp=8, say")
    check_input(
        job.layout.dims.size(TENSOR_DIMENSION) > 1 or not roles,
        f"layout {words!r} splits no tensor, so there are no roles to show; add {TENSOR_DIMENSION}=2, say",
    )
    check_input(
        not job.layout.uses_server_processes,
        "layout.data = 'parameter_server' with layout.server.transport = 'point-to-point' has no plan beforehand, "
        "since any worker may do any work; set layout.server.transport=collectives, or leave layout.data out",
    )
    layout = check_job(job, job.layout.dims.ranks)
    hosts = communication_cluster(cluster, layout.dims.ranks) if cluster else None
    plan = step_plan_of_split_job(job, layout)
    if roles:
        show_roles(job, plan, json=json)
        return
    report = {
        "job": job.name,
        **_plan_report(plan, layout.sharding, job),
        "warnings": list(filter(None, split_warnings(job, plan, cluster=hosts))),
        "split_proof": plan.model_sharding.proof,
        "proof": vars(prove_step_plan(plan)),
        "programs": sorted({str(program) for program in prove_collective_programs(layout.sharding, job.communication)}),
    }
    placement = placement_report(job, layout, plan, cluster=hosts) if hosts else None
    if json:
        print_json(report | ({"placement": placement} if placement else {}))
    elif placement:
        print_lines(f"{job.name}, layout '{layout}'", *placement_lines(placement), "", *_sentences(report))
    else:
        stdout_console().print(_rank_table(report), _action_table(report))
        stdout_console().print("\n".join(_sentences(report)), highlight=False)


def _plan_report(plan: StepPlan, sharding: DataParallelSharding, job: Job) -> dict[str, Any]:
    recipe, moments = job.precision.resolved, job.optimizer.moments_per_parameter
    shape, ranks = batch_shape(job, len(plan.rows_by_rank[0][0])), _reported_ranks(plan)
    states = sharded_states(sharding.zero, reduces_once=sharding.reduces_once)
    return {
        "zero": sharding.zero,
        "uses_server_shards": sharding.bucket_owners is not None,
        "state_placement": {
            state: "sharded" if is_sharded and sharding.shards > 1 else "replicated"
            for state, is_sharded in states._asdict().items()
        },
        "dims": dict(plan.dims.sizes),
        "schedule": _action_rows(plan),
        "outer_groups": plan.outer_groups,
        # The schedule of a backend's collective takes long to make for more ranks.
        "sent_bytes_of_first_rank": vars(sent_bytes_per_step(plan, recipe, settings=job.communication, rank=0))
        if max(len(ranks) for each in plan.groups for ranks in each.group.sum_groups) <= MAX_PROVEN_RANKS
        else None,
        "sent_activation_bytes_of_first_rank": vars(sent_activation_bytes(plan, shape, recipe, rank=0)),
        "ranks": [
            {
                "rank": rank,
                "updated_elements": sum(b - a for a, b in updated_ranges(plan, rank % plan.dims.ranks).values()),
                "state_bytes": model_state_memory(
                    plan, recipe, moments_per_parameter=moments, rank=rank % plan.dims.ranks
                ).total,
                "rows": [[part.start, part.stop] for part in parts],
            }
            for rank, parts in ((rank, plan.rows_by_rank[rank]) for rank in ranks)
        ],
        "ranks_left_out": len(plan.rows_by_rank) - len(ranks),
    }


def _reported_ranks(plan: StepPlan) -> Sequence[int]:
    """All ranks; or if these are many, the first rank of each stage, or the first ranks of a model without stages."""
    count = len(plan.rows_by_rank)
    if count <= _MAX_REPORTED_RANKS:
        return range(count)
    stages = plan.dims.group_of(0, PIPELINE_DIMENSION)
    return (stages if len(stages) > 1 else range(count))[:_MAX_SHOWN_RANKS]


def _action_rows(plan: StepPlan) -> list[dict[str, Any]]:
    """Each action once, in the order of a step, with the units that it is for."""
    units: dict[tuple[CommUnitAction, RankGroups], list[str]] = {}
    for group in plan.groups:
        names: dict[int, tuple[UnitSchedule, list[str]]] = {}
        for unit in group.units:
            names.setdefault(id(unit.schedule), (unit.schedule, []))[1].append(unit.name)
        for action, names_of_units in ((action, each) for schedule, each in names.values() for action in schedule):
            units.setdefault((action, _global_ranks(group, action)), []).extend(names_of_units)
    return [
        {name: getattr(action, name) for name in ("kind", "moment", "tensor", "overlaps")}
        | {"rank_groups": rank_groups, "units": names}
        for (action, rank_groups), names in sorted(units.items(), key=lambda row: MOMENTS.index(row[0][0].moment))
    ]


def _global_ranks(plan: SyncGroupPlan, action: CommUnitAction) -> RankGroups:
    groups = [tuple(ranks[i] for i in group) for ranks in plan.group.sum_groups for group in action.rank_groups]
    return tuple(ranks for ranks in groups if action.kind != "norm" or plan.counted_names(ranks[0]))


def _rank_table(report: dict[str, Any]) -> Table:
    placement = ", ".join(f"{state.replace('_', ' ')} {how}" for state, how in report["state_placement"].items())
    right = (Column(name, justify="right") for name in ("rank", "updates", "keeps"))
    title = f"{report['job']}, zero = {report['zero']}: {placement}"
    table = Table(*right, "rows of the batch, by micro-batch", title=title)
    for rank in report["ranks"][:_MAX_SHOWN_RANKS]:
        rows = ", ".join(f"{first}-{stop - 1}" for first, stop in rank["rows"])
        table.add_row(str(rank["rank"]), f"{rank['updated_elements']:,}", format_bytes(rank["state_bytes"]), rows)
    more = len(report["ranks"][_MAX_SHOWN_RANKS:]) + report["ranks_left_out"]
    if more:
        table.add_row("...", "", "", f"{more} more")
    return table


def _action_table(report: dict[str, Any]) -> Table:
    dims = " x ".join(f"{name} {size}" for name, size in report["dims"].items() if size > 1)
    replicas = " of the first replica; all others take the same" * bool(report["outer_groups"])
    title = f"the actions of a step{f' of {dims}' * (' x ' in dims)}{replicas}"
    table = Table("moment", "action", "tensor", "ranks", "units", title=title)
    for row in report["schedule"]:
        moment = row["moment"].replace("_", " ").replace("microbatch", "micro-batch") + ", overlaps" * row["overlaps"]
        units = " ... ".join(dict.fromkeys((row["units"][0], row["units"][-1])))
        kind, groups = row["kind"].replace("_", "-"), _format_groups(row["rank_groups"])
        table.add_row(moment, kind, row["tensor"], groups, units)
    return table


def _sentences(report: dict[str, Any]) -> list[str]:
    outer = report["outer_groups"]
    lines = [f"Replicas take an outer step over ranks {_format_groups(outer)}."] if outer else []
    if sent := report["sent_bytes_of_first_rank"]:
        lines.append(f"Rank 0 sends {_format_traffic(sent)} in a step.")
    if any((sent := report["sent_activation_bytes_of_first_rank"]).values()):
        lines.append(f"For activations of split layers it sends {_format_traffic(sent)} as well.")
    lines += report["warnings"]
    proof = report["proof"]
    names = (("ranks", "rank", "ranks"), ("microbatches", "micro-batch", "micro-batches"), ("copies", "copy", "copies"))
    ranks, microbatches, copies = (f"{proof[key]} {word if proof[key] == 1 else words}" for key, word, words in names)
    lines.append(
        f"Proven: each of {proof['elements']:,} elements of {proof['parameters']} parameters is in one shard of "
        f"{copies}, for whose update {ranks} x {microbatches} add their gradients; each of {proof['rows']} rows is "
        "read once."
    )
    if report["split_proof"]:
        lines.append(f"The split of the model is {report['split_proof']}.")
    if report["programs"]:
        lines.append(f"Proven, too: {', '.join(report['programs'])}.")
    return lines


def _format_traffic(sent: dict[str, int]) -> str:
    return ", ".join(f"{format_bytes(n)} in {name.replace('_', '-')}s" for name, n in sent.items() if n) or "nothing"


def _format_groups(groups: tuple[tuple[int, ...], ...]) -> str:
    """Format the first few groups: `0 1 2 3 | 4 5 6 7`."""
    shown = [" ".join(map(str, ranks[:8])) + " ..." * (len(ranks) > 8) for ranks in groups[:4]]
    return " | ".join(shown) + " | ..." * (len(groups) > 4)
