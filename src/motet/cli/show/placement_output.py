"""The output of `motet show layout --cluster`: hosts, devices, groups of ranks, and the bytes between stages."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from motet.cluster.cluster import Cluster
from motet.core.units import format_bytes
from motet.parallel.layout import Layout
from motet.parallel.model_sharding import PIPELINE_DIMENSION, TENSOR_DIMENSION
from motet.parallel.pipeline.border_bytes import border_traffic, sends_slices, sent_bytes_by_place
from motet.parallel.rank_placement import group_links, rank_groups, rank_places
from motet.parallel.step_plan.check import MAX_PROVEN_RANKS
from motet.parallel.step_plan.memory import model_state_memory, peak_transient_bytes
from motet.parallel.step_plan.plan import StepPlan, make_step_plan
from motet.parallel.step_plan.traffic import sent_bytes_per_step
from motet.parallel.sync_groups import pipeline_groups
from motet.train.flops import batch_shape
from motet.train.job import Job

_MAX_SHOWN_HOSTS = 16
_MAX_SHOWN_GROUPS = 4
_MAX_SHOWN_RANKS = 8


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
    sizes = {"rows": shape.rows, "tokens": shape.length, "source tokens": shape.source_length}
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
        return  # The schedule of a backend's collective takes long to make for more
    splits_backward = dims.size(PIPELINE_DIMENSION) > 1 and layout.pipeline_schedule(plan.microbatches).splits_backward
    has_choice = layout.sharding.zero > 1 and plan.microbatches > 1 and not splits_backward
    for when in ("microbatch", "step") if has_choice else ("step",):
        chosen = replace(layout, sharding=replace(layout.sharding, reduces_once=when == "step"))
        made = make_step_plan(
            plan.inventory,
            chosen,
            recipe,
            settings=job.communication,
            batch_sequences=plan.batch_sequences,
            model_sharding=plan.model_sharding,
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


def placement_lines(report: dict[str, Any]) -> Iterator[str]:
    """The report as text, with a column for each device of a host."""
    yield from _host_lines(report)
    yield ""
    groups = [(each["purpose"], _ranks_text(each["ranks"]), _links_text(each)) for each in report["groups"]]
    yield from _aligned([("group", "ranks", "slowest link"), *groups])
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
    yield from _aligned([header, *rows]) if rows else ()


def _host_lines(report: dict[str, Any]) -> Iterator[str]:
    width, places = report["devices_per_host"], report["places"]
    yield f"{report['cluster']}: {report['hosts']} hosts of {width} devices"
    rows = []
    for host in range(min(report["hosts"], _MAX_SHOWN_HOSTS)):
        cells = [_cell(place) for place in places[host * width : (host + 1) * width]]
        for number, line in enumerate(zip(*cells, strict=True)):
            rows.append(("" if number else f"host {host}", *line, *[""] * (width - len(cells))))
    yield from _aligned(rows)
    if report["hosts"] > _MAX_SHOWN_HOSTS:
        yield f"... and {report['hosts'] - _MAX_SHOWN_HOSTS} more hosts"


def _cell(place: dict[str, Any]) -> tuple[str, ...]:
    coordinates = " ".join(f"{name}{index}" for name, index in place["coordinates"].items())
    return f"rank {place['rank']}", coordinates, *([_blocks_text(place["blocks"])] if place["blocks"] else [])


def _pipeline_lines(report: dict[str, Any]) -> Iterator[str]:
    rows = []
    for each in report["borders"]:
        sizes = (format_bytes(each[f"{what}_bytes"]) if each["links"] else "-" for what in ("activation", "gradient"))
        link = _links_text(each["links"]) if each["links"] else "on one rank"
        rows.append(("-".join(map(str, each["stages"])), *sizes, link))
    yield from _aligned([("stages", "activation of a micro-batch", "gradient", "slowest link"), *rows])
    times = report["times_one_chunk"]
    more = f", {times:.3g} times what one stage a rank would send" * (times != 1)
    sent = ", ".join(map(format_bytes, report["sent_bytes_by_pipeline_rank"]))
    yield (
        f"With {report['microbatches']} micro-batches ({report['schedule']}) the ranks of a pipeline send {sent} in a "
        f"step{more}."
    )
    if report["slices"] > 1:
        yield f"Each of {report['slices']} tensor-parallel ranks sends a slice of what all of them have."


def _blocks_text(blocks: Sequence[Sequence[int]]) -> str:
    return "blocks " + " ".join(f"{first}-{last}" if first < last else str(first) for first, last in blocks)


def _links_text(links: dict[str, Any]) -> str:
    where = "between hosts" if links["crosses_hosts"] else "inside of a host"
    return f"{where}, {links['bandwidth_Bps'] / 1e9:.4g} GB/s"


def _ranks_text(groups: Sequence[Sequence[int]]) -> str:
    """The first groups, such as `0 1 | 2 3 | ...`, and how many there are."""
    texts = (" ".join(map(str, r[:_MAX_SHOWN_RANKS])) + " ..." * (len(r) > _MAX_SHOWN_RANKS) for r in groups)
    shown = " | ".join(list(texts)[:_MAX_SHOWN_GROUPS])
    return shown + f" | ... ({len(groups)} groups)" * (len(groups) > _MAX_SHOWN_GROUPS)


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
