"""The plan of a step of a job, and its timeline, without torch."""

from collections.abc import Iterator

from motet.core.dtypes import DTYPE_BYTES
from motet.models.spec.model_spec import spec_from_settings
from motet.parallel.layout import Layout
from motet.parallel.model_inventory import ModelInventory, inventory_of_spec
from motet.parallel.step_plan.plan import StepPlan, make_step_plan
from motet.parallel.step_plan.timeline import (
    ModelSegment,
    NodeTimes,
    TimelineNode,
    build_step_graph,
    compute_node_times,
)
from motet.train.flops import batch_shape
from motet.train.job import Job


def step_plan_of_job(job: Job, layout: Layout, inventory: ModelInventory | None = None) -> StepPlan:
    """The plan of a model that is known by its sizes; by default all of it is trained."""
    return make_step_plan(
        inventory or inventory_of_spec(spec_from_settings(job.model)),
        layout,
        job.precision.resolved,
        settings=job.communication,
        batch_sequences=job.data.batch_sequences,
        independent_replicas=job.outer.every is not None,
    )


def step_timeline(job: Job, plan: StepPlan, communication: float) -> tuple[tuple[TimelineNode, ...], NodeTimes]:
    """The graph, and the start and stop of each node, in units of the time to compute a step."""
    segments, recipe = list(model_segments(job, len(plan.rows_by_rank[0][0]))), job.precision.resolved
    nodes = build_step_graph(segments, plan, recipe)
    flops = 3 * sum(segment.flops for segment in segments) * plan.microbatches
    # An all-reduce moves this, times (N - 1) / N.
    all_reduce_bytes = 2.0 * DTYPE_BYTES[recipe.reduce] * spec_from_settings(job.model).parameter_count
    rates = {"compute": 1 / flops, "network": communication / all_reduce_bytes}
    return nodes, compute_node_times(nodes, lambda node: node.work * rates[node.resource])


def model_segments(job: Job, rows: int) -> Iterator[ModelSegment]:
    """A segment for each repetition of each block of the model, with micro-batches of `rows` sequences."""
    shape = batch_shape(job, rows)
    for block in spec_from_settings(job.model).blocks:
        for i, parameters in enumerate(block.parameters_by_repetition(), start=block.first_index):
            name = block.name if block.repeat == 1 else f"{block.name} {i}"
            yield ModelSegment(name, block.forward_flops(shape), frozenset(p.name for p in parameters))
