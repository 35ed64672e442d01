"""The output of `motet show layout`: the plan of a layout, and the proof that it is right.

The output of `motet show layout --roles`: the split of each parameter, and the parameters that stay whole.

The output of `motet show layout --cluster`: hosts, devices, groups of ranks, and the bytes between stages.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from motet.cli.job_arguments import load_job_or_config
from motet.cli.output import OutputLine, log, print_lines, table_lines
from motet.cli.show.attention_output import attention_lines, attention_report, attention_sentence
from motet.cluster.cluster import Cluster
from motet.collectives.cost.alpha_beta import RankGroups
from motet.core.errors import check_input
from motet.core.trace import log_if_slow
from motet.core.units import format_bytes
from motet.memory.policy_choice import Place
from motet.monitor.stdout_stderr import print_json, stdout_console
from motet.parallel.data_parallel.comm_units import SyncGroupPlan
from motet.parallel.data_parallel.communication.communication_settings import communication_cluster
from motet.parallel.data_parallel.zero import MOMENTS, CommUnitAction, UnitSchedule, sharded_states
from motet.parallel.layout import Layout, parse_layout, resolve_dims
from motet.parallel.model_sharding import CONTEXT_DIMENSION, PIPELINE_DIMENSION, TENSOR_DIMENSION, ShardRule
from motet.parallel.pipeline.border_bytes import border_traffic, sends_slices, sent_bytes_by_place
from motet.parallel.rank_placement import group_links, rank_groups, rank_places
from motet.parallel.roles_of_tensors import TensorRole, tensor_roles
from motet.parallel.step_plan.check import MAX_PROVEN_RANKS, prove_collective_programs, prove_step_plan
from motet.parallel.step_plan.expert_traffic import sent_expert_bytes
from motet.parallel.step_plan.memory import model_state_memory, peak_transient_bytes
from motet.parallel.step_plan.plan import StepPlan, make_step_plan, updated_ranges
from motet.parallel.step_plan.sent_activations import HostActivations
from motet.parallel.step_plan.traffic import host_link_bytes, sent_activation_bytes, sent_bytes_per_step, state_files
from motet.parallel.sync_groups import pipeline_groups
from motet.train.job import Job, batch_shape
from motet.train.job_step_plan import (
    block_policies,
    describe_repeated_work,
    recomputed_blocks,
    repeated_work,
    split_warnings,
    step_plan_of_split_job,
)
from motet.train.launch.preflight import check_job
from motet.train.memory_check.step_prediction import bytes_elsewhere, predict_host_activations

_HEADER = ("tensor", "count", "shape", "split", "on a rank", "gradient summed over", "reason")


def show_roles(job: Job, plan: StepPlan, *, json: bool) -> None:
    """Print the role of each parameter, and the work that every tensor-parallel rank repeats."""
    roles, dims = tensor_roles(plan.inventory, plan.model_sharding, plan.dims), dict(plan.dims.sizes)
    if json:
        unsplit = [{"module": module, "reason": why} for module, why in plan.model_sharding.unsplit_streams]
        report = {"tensors": [vars(role) for role in roles], "unsplit_streams": unsplit}
        print_json({"job": job.name, "dims": dims, **report, "repeated": repeated_work(job, plan)})
        return
    sizes = " x ".join(f"{name} {size}" for name, size in dims.items() if size > 1)
    table = table_lines(map(_cells, roles), header=_HEADER)
    print_lines(f"{job.name}, {sizes}: how ranks split the parameters", "", *table)
    streams = (f"All tokens on every rank, {module}: {why}." for module, why in plan.model_sharding.unsplit_streams)
    print_lines("", *_whole_lines(roles), *streams, describe_repeated_work(job, plan))


def _cells(role: TensorRole) -> tuple[str, ...]:
    shape, local_shape = (" x ".join(map(str, each)) or "1" for each in (role.shape, role.local_shape))
    partial_over = " ".join(role.partial_over) or "-"
    return role.name, str(role.count), shape, role.split, local_shape, partial_over, role.reason


def _whole_lines(roles: Iterable[TensorRole]) -> Iterator[str]:
    by_reason: dict[str, list[TensorRole]] = {}
    for role in (role for role in roles if role.split == "whole"):
        by_reason.setdefault(role.reason, []).append(role)
    for reason, members in by_reason.items():
        elements, names = sum(role.count * prod(role.shape) for role in members), (role.name for role in members)
        why = "" if reason == ShardRule().reason else f" ({reason})"
        yield f"Left whole, {elements:,} parameters{why}: {', '.join(names)}."


_MAX_SHOWN_HOSTS = 16
_MAX_SHOWN_GROUPS = 4
_MAX_PLACED_RANKS = 8


def placement_report(job: Job, layout: Layout, plan: StepPlan, *, cluster: Cluster) -> dict[str, Any]:
    """The hosts, devices, groups and bytes of a layout, as plain values."""
    places = rank_places(plan, cluster)
    return {
        "cluster": cluster.name,
        "hosts": cluster.hosts,
        "devices_per_host": cluster.devices_per_host,
        "places": [{**vars(each), "blocks": [[b.start, b.stop - 1] for b in each.blocks]} for each in places],
        "groups": [
            {"purpose": each.purpose, "ranks": each.groups, **vars(each.links)} for each in rank_groups(plan, cluster)
        ],
        "pipeline": _pipeline_traffic(job, layout, plan, cluster=cluster) if plan.model_sharding.stages else None,
        "gradients": list(_gradient_traffic(job, layout, plan, cluster=cluster)),
    }


def _pipeline_traffic(job: Job, layout: Layout, plan: StepPlan, *, cluster: Cluster) -> dict[str, Any]:
    """The messages of a micro-batch at each border between stages, and the bytes that each rank sends in a step."""
    sharding, dims, shape = plan.model_sharding, plan.dims, batch_shape(job, len(plan.rows_by_rank[0][0]))
    degree, local = dims.size(TENSOR_DIMENSION), cluster.devices_per_host
    is_sliced = sends_slices(job.communication.slice_activations, degree=degree, local_ranks=local, ranks=dims.ranks)
    sizes = plan.part_on_rank(shape, 0).sizes_by_name
    compute, slices = job.precision.resolved.compute, degree if is_sliced else 1
    traffic, borders = border_traffic(sharding, sizes, compute=compute, slices=slices), []
    for stage, border in enumerate(traffic):
        first, second = (sharding.rank_of_stage(each, dims) for each in (stage, stage + 1))
        pairs = [(ranks[first], ranks[second]) for ranks in pipeline_groups(dims)]
        links = vars(group_links(pairs, cluster)) if first != second else None
        borders.append({"stages": [stage, stage + 1], **vars(border), "links": links})
    schedule = layout.pipeline_schedule(plan.microbatches)
    return {
        "schedule": layout.schedule,
        "microbatches": plan.microbatches,
        "slices": slices,
        "borders": borders,
        "sent_bytes_by_pipeline_rank": sent_bytes_by_place(schedule, traffic),
        "times_one_chunk": schedule.crossings / (schedule.ranks - 1),
    }


def _gradient_traffic(job: Job, layout: Layout, plan: StepPlan, *, cluster: Cluster) -> Iterator[dict[str, Any]]:
    """The bytes that rank 0 sends and the memory that it needs for gradients, reduced as often as can be chosen."""
    recipe, moments, dims = job.precision.resolved, job.optimizer.moments_per_parameter, plan.dims
    if max((len(r) for each in plan.groups for r in each.group.sum_groups), default=0) > MAX_PROVEN_RANKS:
        return  # The schedule of a backend's collective takes long to make for more ranks
    splits_backward = dims.size(PIPELINE_DIMENSION) > 1 and layout.pipeline_schedule(plan.microbatches).splits_backward
    shards_gradients = sharded_states(layout.zero).gradients
    has_choice = shards_gradients and plan.microbatches > 1 and not splits_backward
    for when in ("microbatch", "step") if has_choice else ("step",):
        chosen = replace(layout, sharding=replace(layout.sharding, reduces_once=when == "step"))
        made = make_step_plan(
            plan.inventory,
            chosen,
            recipe,
            settings=job.communication,
            batch_sequences=plan.batch_sequences,
            model_sharding=plan.model_sharding,
            places=job.memory.places,
        )
        hosts = tuple(rank // cluster.devices_per_host for rank in range(dims.ranks))
        sent = sent_bytes_per_step(made, recipe, settings=job.communication, rank=0, hosts=hosts)
        kept = model_state_memory(made, recipe, moments_per_parameter=moments, rank=0).gradients
        yield {
            "reduce_gradients": when,
            "sent_bytes": vars(sent),
            "gradient_bytes": kept,
            "transient_bytes": peak_transient_bytes(made, recipe, rank=0),
        }


def placement_lines(report: dict[str, Any]) -> Iterator[OutputLine]:
    """The report as text, with a column for each device of a host."""
    yield from _host_lines(report)
    yield ""
    groups = [(each["purpose"], _ranks_text(each["ranks"]), _links_text(each)) for each in report["groups"]]
    yield from table_lines(groups, header=("group", "ranks", "slowest link"))
    if report["pipeline"]:
        yield ""
        yield from _pipeline_lines(report["pipeline"])
    yield ""
    rows = [
        (
            each["reduce_gradients"],
            format_bytes(sum(each["sent_bytes"].values())),
            format_bytes(each["gradient_bytes"]),
            format_bytes(each["transient_bytes"]),
        )
        for each in report["gradients"]
    ]
    header = ("gradients reduced each", "rank 0 sends in a step", "gradients kept", "besides at the peak")
    yield from table_lines(rows, header=header) if rows else ()


def _host_lines(report: dict[str, Any]) -> Iterator[OutputLine]:
    width, places = report["devices_per_host"], report["places"]
    yield f"{report['cluster']}: {report['hosts']} hosts of {width} devices"
    rows = []
    for host in range(min(report["hosts"], _MAX_SHOWN_HOSTS)):
        cells = [_cell(place) for place in places[host * width : (host + 1) * width]]
        for number, line in enumerate(zip(*cells, strict=True)):
            rows.append(("" if number else f"host {host}", *line, *[""] * (width - len(cells))))
    yield from table_lines(rows)
    if report["hosts"] > _MAX_SHOWN_HOSTS:
        yield f"... and {report['hosts'] - _MAX_SHOWN_HOSTS} more hosts"


def _cell(place: dict[str, Any]) -> tuple[str, ...]:
    coordinates = " ".join(f"{name}{index}" for name, index in place["coordinates"].items())
    return f"rank {place['rank']}", coordinates, *([_blocks_text(place["blocks"])] if place["blocks"] else [])


def _pipeline_lines(report: dict[str, Any]) -> Iterator[OutputLine]:
    rows = []
    for each in report["borders"]:
        sizes = (format_bytes(each[f"{kind}_bytes"]) if each["links"] else "-" for kind in ("activation", "gradient"))
        link = _links_text(each["links"]) if each["links"] else "on one rank"
        rows.append(("-".join(map(str, each["stages"])), *sizes, link))
    yield from table_lines(rows, header=("stages", "activation of a micro-batch", "gradient", "slowest link"))
    times = report["times_one_chunk"]
    more = f", {times:.3g} times what one stage a rank would send" * (times != 1)
    sent = ", ".join(map(format_bytes, report["sent_bytes_by_pipeline_rank"]))
    yield (
        f"With {report['microbatches']} micro-batches ({report['schedule']}) the ranks of a pipeline send {sent} in a "
        f"step{more}."
    )
    if report["slices"] > 1:
        yield f"Each of {report['slices']} tensor-parallel ranks sends a slice of an activation that all have."


def _blocks_text(blocks: Sequence[Sequence[int]]) -> str:
    return "blocks " + " ".join(f"{first}-{last}" if first < last else str(first) for first, last in blocks)


def _links_text(links: dict[str, Any]) -> str:
    where = "between hosts" if links["crosses_hosts"] else "inside of a host"
    return f"{where}, {links['bandwidth_Bps'] / 1e9:.4g} GB/s"


def _ranks_text(groups: Sequence[Sequence[int]]) -> str:
    """The first groups, such as `0 1 | 2 3 | ...`, and how many there are."""
    texts = (" ".join(map(str, r[:_MAX_PLACED_RANKS])) + " ..." * (len(r) > _MAX_PLACED_RANKS) for r in groups)
    shown = " | ".join(list(texts)[:_MAX_SHOWN_GROUPS])
    return shown + f" | ... ({len(groups)} groups)" * (len(groups) > _MAX_SHOWN_GROUPS)


_MAX_SHOWN_RANKS = 16
_MAX_REPORTED_RANKS = 256  # A report on more ranks has some of them


def show_layout(
    words: str, overrides: list[str], job_name: str, *, ranks: int | None, cluster: str | None, roles: bool, json: bool
) -> None:
    """Print the work of each rank of a layout, after proving that every element and row counts once; or the places of
    ranks on a cluster; or the roles of tensors."""
    parse_layout(words)  # Its errors quote the layout
    job = load_job_or_config(job_name, [*(f"layout.{word}" for word in words.split()), *overrides])
    needed = job.layout.dims.ranks
    ranks = ranks or (needed if job.layout.dp else max(needed, job.run.ranks))
    dims = resolve_dims(job.layout, ranks)
    if job.layout.dp is None and not roles:
        log(f"{job.name} on {ranks} ranks (--ranks): layout 'dp={dims.size('dp')} {words}'")
    check_input(
        job.layout.dims.size(TENSOR_DIMENSION) > 1 or not roles,
        f"layout {words!r} splits no tensor, so there are no roles to show; add {TENSOR_DIMENSION}=2, say",
    )
    check_input(
        not job.layout.uses_server_processes,
        "layout.data = 'parameter_server' with layout.server.transport = 'point-to-point' has no plan beforehand, "
        "since any worker may do any work; set layout.server.transport=collectives, or leave layout.data out",
    )
    with log_if_slow(log, f"planning and proving a step of {ranks:,} ranks ..."):
        _show_plan(job, check_job(job, ranks), cluster=cluster, roles=roles, json=json)


def _show_plan(job: Job, layout: Layout, *, cluster: str | None, roles: bool, json: bool) -> None:
    hosts = communication_cluster(cluster, layout.dims.ranks) if cluster else None
    plan = step_plan_of_split_job(job, layout)
    if roles:
        show_roles(job, plan, json=json)
        return
    report = {
        "job": job.name,
        **_plan_report(plan, layout, job),
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
        attention = [*attention_lines(report["attention"]), ""] if report["attention"] else []
        print_lines(*_rank_lines(report), "", *_action_lines(report), "", *attention)
        stdout_console().print("\n".join(_sentences(report)), highlight=False)


def _plan_report(plan: StepPlan, layout: Layout, job: Job) -> dict[str, Any]:
    recipe, sharding, places = job.precision.resolved, layout.sharding, _PlacesOfRanks(job, plan, layout)
    shape, ranks = batch_shape(job, len(plan.rows_by_rank[0][0])), _reported_ranks(plan)
    states = sharded_states(sharding.zero, reduces_once=sharding.reduces_once)
    return {
        "zero": sharding.zero,
        "states": plan.states,
        "delays": plan.delays,
        "activations": job.memory.activations,
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
        "sent_activation_bytes_of_first_rank": vars(
            sent_activation_bytes(plan, shape, recipe, rank=0, policies=block_policies(job, plan))
        ),
        "sent_expert_bytes_of_first_rank": vars(
            sent_expert_bytes(
                *(job.model, plan, layout),
                shape=shape,
                recipe=recipe,
                rank=0,
                recomputed=recomputed_blocks(job, plan),
            )
        ),
        "attention": attention_report(job, plan, shape),
        "ranks": [
            {
                "rank": rank,
                "updated_elements": sum(b - a for a, b in updated_ranges(plan, rank % plan.dims.ranks).values()),
                **places.bytes_of(rank % plan.dims.ranks),
                "rows": [[part.start, part.stop] for part in parts],
                "places": plan.context.partition(shape.length).spans(coordinates.get(CONTEXT_DIMENSION, 0)),
            }
            for rank, parts, coordinates in (
                (rank, plan.rows_by_rank[rank], plan.dims.coordinates(rank % plan.dims.ranks)) for rank in ranks
            )
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
    """Each action once, in the order of a step, with its units."""
    units: dict[tuple[CommUnitAction, RankGroups], list[str]] = {}
    for group in plan.groups:
        names: dict[int, tuple[UnitSchedule, list[str]]] = {}
        for unit in group.units:
            names.setdefault(id(unit.schedule), (unit.schedule, []))[1].append(unit.name)
        for action, names_of_units in ((action, each) for schedule, each in names.values() for action in schedule):
            units.setdefault((action, _global_ranks(group, action)), []).extend(names_of_units)
    return [
        {name: getattr(action, name) for name in ("kind", "moment", "tensor")}
        | {"overlaps": action.overlaps or (plan.delays and action.kind == "update")}
        | {"rank_groups": rank_groups, "units": names}
        for (action, rank_groups), names in sorted(units.items(), key=lambda row: MOMENTS.index(row[0][0].moment))
    ]


def _global_ranks(plan: SyncGroupPlan, action: CommUnitAction) -> RankGroups:
    groups = [tuple(ranks[i] for i in group) for ranks in plan.group.sum_groups for group in action.rank_groups]
    return tuple(ranks for ranks in groups if action.kind != "norm" or plan.counted_names(ranks[0]))


PLACES_BEYOND_DEVICE: dict[Place, tuple[Place, ...]] = {"device": (), "host": ("host",), "disk": ("host", "disk")}


def _places_beyond_device(report: dict[str, Any]) -> tuple[Place, ...]:
    places = PLACES_BEYOND_DEVICE[report["states"]]
    return places or PLACES_BEYOND_DEVICE[report["activations"]]


@dataclass(frozen=True)
class _PlacesOfRanks:
    """The bytes that ranks keep on their devices, on their hosts and on disk, and the bytes that move in a step."""

    job: Job
    plan: StepPlan
    layout: Layout
    _activations: dict[tuple[int, int], HostActivations] = field(default_factory=dict)  # By stage and rows

    def bytes_of(self, rank: int) -> dict[str, int]:
        """The bytes of one rank."""
        plan, recipe, optimizer = self.plan, self.job.precision.resolved, self.job.optimizer
        state = model_state_memory(plan, recipe, moments_per_parameter=optimizer.moments_per_parameter, rank=rank)
        activations, link = self._activations_of(rank), host_link_bytes(plan, recipe, rank=rank)
        elsewhere = bytes_elsewhere(plan, recipe, optimizer, rank=rank, activations=activations.peak_bytes)
        kinds, updated = optimizer.moment_kinds, 0
        if plan.states == "disk":
            files = state_files(plan, recipe, moment_kinds=kinds, rank=rank)
            updated = sum(layout.update_bytes for layout in files)
        return {
            "state_bytes": state.in_place("device", plan.states).total,
            "host_bytes": elsewhere["host"],
            "disk_bytes": elsewhere["disk"],
            "disk_bytes_read": updated + link.read,
            "disk_bytes_written": updated,
            "sent_to_host": link.to_host,
            "sent_to_device": link.to_device,
            "activations_to_host": activations.to_host,
            "activations_to_device": activations.to_device,
        }

    def _activations_of(self, rank: int) -> HostActivations:
        rows = len(self.plan.rows_by_rank[rank][0])
        key = self.plan.dims.coordinates(rank).get(PIPELINE_DIMENSION, 0), rows
        if key not in self._activations:
            self._activations[key] = predict_host_activations(self.job, self.plan, self.layout, rank=rank)
        return self._activations[key]


def _rank_lines(report: dict[str, Any]) -> Iterator[OutputLine]:
    placement = ", ".join(f"{state.replace('_', ' ')} {how}" for state, how in report["state_placement"].items())
    yield f"{report['job']}, zero = {report['zero']}: {placement}"
    rows, places = list[tuple[str, ...]](), _places_beyond_device(report)
    for rank in report["ranks"][:_MAX_SHOWN_RANKS]:
        parts = ", ".join(f"{first}-{stop - 1}" for first, stop in rank["rows"])
        sizes = [format_bytes(rank[f"{place}_bytes"]) for place in ("state", *places)]
        tokens = ", ".join(f"{first}-{stop - 1}" for first, stop in rank["places"])
        shown = [tokens] if report["attention"] else []
        rows.append((str(rank["rank"]), f"{rank['updated_elements']:,}", *sizes, parts, *shown))
    more = len(report["ranks"][_MAX_SHOWN_RANKS:]) + report["ranks_left_out"]
    if more:
        rows.append(("...", "", "", *("" for _ in places), f"{more} more", *[""] * bool(report["attention"])))
    kept = ("keeps on device" if places else "keeps", *(f"on {place}" for place in places))
    split = ["tokens of each row"] if report["attention"] else []
    header = ("rank", "updates", *kept, "rows of the batch, by micro-batch", *split)
    yield from table_lines(rows, header=header, right=range(3 + len(places)))


def _action_lines(report: dict[str, Any]) -> Iterator[OutputLine]:
    dims = " x ".join(f"{name} {size}" for name, size in report["dims"].items() if size > 1)
    replicas = " of the first replica; all others take the same" * bool(report["outer_groups"])
    yield f"the actions of a step{f' of {dims}' * (' x ' in dims)}{replicas}"
    rows = []
    for row in report["schedule"]:
        moment = row["moment"].replace("_", " ").replace("microbatch", "micro-batch") + ", overlaps" * row["overlaps"]
        units = " ... ".join(dict.fromkeys((row["units"][0], row["units"][-1])))
        rows.append((moment, row["kind"].replace("_", "-"), row["tensor"], _format_groups(row["rank_groups"]), units))
    yield from table_lines(rows, header=("moment", "action", "tensor", "ranks", "units"))


def _sentences(report: dict[str, Any]) -> list[str]:
    outer = report["outer_groups"]
    lines = [f"Replicas take an outer step over ranks {_format_groups(outer)}."] if outer else []
    if sent := report["sent_bytes_of_first_rank"]:
        lines.append(f"Rank 0 sends {_format_traffic(sent)} in a step.")
    for key, purpose in (("activation", "activations of split layers"), ("expert", "the choices of experts")):
        if any((sent := report[f"sent_{key}_bytes_of_first_rank"]).values()):
            lines.append(f"For {purpose} it sends {_format_traffic(sent)} as well.")
    if report["attention"]:
        lines.append(attention_sentence(report["attention"]))
    first = report["ranks"][0]
    if report["states"] != "device":
        down, up = (format_bytes(first[key]) for key in ("sent_to_host", "sent_to_device"))
        read, written = (format_bytes(first[key]) for key in ("disk_bytes_read", "disk_bytes_written"))
        moved = f"reads and writes {read}" if read == written else f"reads {read} and writes {written}"
        files = f", which {moved} of files" * bool(first["disk_bytes"])
        lines.append(f"Rank 0 sends {down} of gradients to its host{files}, and gets {up} of parameters back.")
        if report["delays"]:
            lines.append("The host updates with these gradients while the next step computes, and sends at its end.")
    if sent := first["activations_to_host"]:
        down, up = format_bytes(sent), format_bytes(first["activations_to_device"])
        lines.append(f"Rank 0 sends {down} of activations to its host, and gets {up} of them back.")
    elif report["activations"] != "device":
        lines.append("Rank 0 sends no activations to its host as far as their sizes are known before a run.")
    lines += report["warnings"]
    lines += _proof_sentences(report)
    return lines


def _proof_sentences(report: dict[str, Any]) -> list[str]:
    proof = report["proof"]
    names = (("ranks", "rank", "ranks"), ("microbatches", "micro-batch", "micro-batches"), ("copies", "copy", "copies"))
    ranks, microbatches, copies = (f"{proof[key]} {word if proof[key] == 1 else words}" for key, word, words in names)
    pairs = ", each token of a row by one rank, and the key of each pair reaches the rank with its query"
    lines = [
        f"Proven: each of {proof['elements']:,} elements of {proof['parameters']} parameters is in one shard of "
        f"{copies}, for whose update {ranks} x {microbatches} add their gradients; each of {proof['rows']} rows is "
        f"read once{pairs * bool(report['attention'])}."
    ]
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
