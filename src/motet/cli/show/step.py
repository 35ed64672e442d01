"""`motet show step`: what waits for what in a step of data parallelism, drawn, without torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from motet.cli.collectives.list_algorithms import check_writable, print_lines, write_output_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from motet.parallel.layout import Layout
    from motet.parallel.step_plan.timeline import CommUnitVolume, ModelSegment, TimelineNode
    from motet.train.job import Job


def step(
    source: Annotated[str, typer.Argument(metavar="JOB", help="A job file, or the name of a built-in job.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Settings of the job to replace.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="How many train it.")] = 2,
    communication: Annotated[
        float,
        typer.Option(
            min=0.0, help="Time to all-reduce the gradients over the time to compute a step, for the drawing."
        ),
    ] = 0.5,
    svg: Annotated[Path | None, typer.Option(help="Write a picture to this file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What waits for what in a step: gradients, messages, updates, and the next forward."""
    from motet.monitor.console import print_json, stdout_console
    from motet.parallel.step_plan import draw
    from motet.train.job import load_job
    from motet.train.launch.preflight import check_job

    check_writable(svg)
    job = load_job(source, overrides or [])
    layout = check_job(job, ranks)
    nodes, times = step_timeline(job, layout, communication)
    title = f"{job.name}: zero = {layout.zero}, {ranks} ranks, overlap = {job.communication.overlap!r}"
    note = f"drawn for a network that all-reduces the gradients in {communication:g} of the time to compute a step"
    if svg is not None:
        write_output_file(svg, draw.draw_svg(nodes, times, title, note))
    if json:
        print_json({"job": job.name, "ranks": ranks, "communication": communication, "nodes": _node_rows(nodes, times)})
    elif svg is not None:
        print_lines(f"{svg} is written")
    else:
        stdout_console().print(f"{title}; {note}\n\n{draw.draw_text(nodes, times)}", markup=False, highlight=False)


def step_timeline(
    job: Job, layout: Layout, communication: float
) -> tuple[tuple[TimelineNode, ...], dict[str, tuple[float, float]]]:
    """The graph, and when each node begins and ends, in steps' worth of computing."""
    from motet.parallel.step_plan.timeline import build_step_graph, compute_node_times

    layer_spans, messages = layers_and_messages(job, layout)
    nodes = build_step_graph(layer_spans, messages, layout, job.communication)
    flops = 3 * sum(stretch.flops for stretch in layer_spans) * layout.microbatches
    rates = {"compute": 1 / flops, "network": communication / _all_reduce_bytes(job)}
    return nodes, compute_node_times(nodes, lambda node: node.work * rates[node.resource])


def _node_rows(nodes: Sequence[TimelineNode], times: dict[str, tuple[float, float]]) -> list[dict[str, object]]:
    return [
        {
            "name": node.name,
            "kind": node.kind,
            "lane": node.resource,
            "after": list(node.depends_on),
            "start": times[node.name][0],
            "stop": times[node.name][1],
        }
        for node in nodes
    ]


def layers_and_messages(job: Job, layout: Layout) -> tuple[list[ModelSegment], list[CommUnitVolume]]:
    """The stretches are the repetitions of the model's blocks, as far as they compute or have parameters."""
    from motet.models.spec.model_spec import spec_from_settings
    from motet.parallel.step_plan.timeline import ModelSegment
    from motet.train.flops import batch_shape

    spec = spec_from_settings(job.model)
    shape = batch_shape(job, layout.rows_per_microbatch(job.data.batch_sequences))
    layer_spans: list[ModelSegment] = []
    sizes: dict[str, int] = {}
    blocks: set[str] = set()
    for block in spec.blocks:
        parameters = list(block.named_parameters())
        parameters_per_block = len(parameters) // block.repeat
        for i in range(block.repeat):
            name = block.name if block.repeat == 1 else f"{block.name} {block.first_index + i}"
            layer_sizes = {
                p.name: p.numel for p in parameters[i * parameters_per_block : (i + 1) * parameters_per_block]
            }
            layer_spans.append(ModelSegment(name, block.forward_flops(shape), frozenset(layer_sizes)))
            sizes |= layer_sizes
            if block.repeat > 1:
                blocks.add(name)
    return layer_spans, _fsdp_unit_messages(job, layer_spans, sizes, blocks) if layout.zero == 3 else _bucket_messages(
        job, layout, sizes
    )


def _all_reduce_bytes(job: Job) -> float:
    """Bytes of an all-reduce of all gradients, but for the factor (N - 1) / N."""
    from motet.core.dtypes import DTYPE_BYTES
    from motet.models.spec.model_spec import spec_from_settings
    from motet.precision.recipe import RECIPES

    return 2.0 * DTYPE_BYTES[RECIPES[job.precision.recipe].reduce] * spec_from_settings(job.model).parameter_count


def _bucket_messages(job: Job, layout: Layout, sizes: dict[str, int]) -> list[CommUnitVolume]:
    from motet.core.dtypes import DTYPE_BYTES
    from motet.parallel.data_parallel.zero import make_buckets
    from motet.parallel.step_plan.timeline import CommUnitVolume
    from motet.precision.recipe import RECIPES

    recipe = RECIPES[job.precision.recipe]
    width = DTYPE_BYTES[recipe.reduce]
    gathered = width if layout.zero == 0 else DTYPE_BYTES[recipe.compute]
    buckets = make_buckets({name: (0, size) for name, size in sizes.items()}, layout, recipe, job.communication)
    return [
        CommUnitVolume(f"bucket {i}", frozenset(m.name for m in b.members), width * b.length, gathered * b.length)
        for i, b in enumerate(buckets)
    ]


def _fsdp_unit_messages(
    job: Job, layer_spans: Sequence[ModelSegment], sizes: dict[str, int], blocks: set[str]
) -> list[CommUnitVolume]:
    """Stage 3: each block, and all else; the last used is sent first."""
    from motet.core.dtypes import DTYPE_BYTES
    from motet.parallel.step_plan.timeline import CommUnitVolume
    from motet.precision.recipe import RECIPES

    recipe = RECIPES[job.precision.recipe]

    def message(name: str, parameters: frozenset[str], is_block: bool) -> CommUnitVolume:
        count = sum(sizes[parameter] for parameter in parameters)
        return CommUnitVolume(
            name, parameters, DTYPE_BYTES[recipe.reduce] * count, DTYPE_BYTES[recipe.compute] * count, is_block
        )

    root_parameters = frozenset[str]().union(*(s.parameters for s in layer_spans if s.name not in blocks))
    units = [message(s.name, s.parameters, True) for s in reversed(layer_spans) if s.name in blocks]
    return [*units, message("the rest", root_parameters, False)]
