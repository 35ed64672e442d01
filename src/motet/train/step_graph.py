"""The plan of a step of a job, and its timeline, without torch."""

from collections.abc import Sequence
from dataclasses import replace

from motet.core.dtypes import DTYPE_BYTES
from motet.models.spec.model_spec import ModelSpec, spec_from_settings
from motet.parallel.layout import Layout, parse_stages
from motet.parallel.model_inventory import ModelInventory, inventory_of_spec
from motet.parallel.model_sharding import PIPELINE_DIMENSION, TENSOR_DIMENSION, ModelSharding
from motet.parallel.pipeline.stages.stage_balance import balance_stages, check_stages, costs_of_spec
from motet.parallel.step_plan.activation_traffic import ActivationCollective, activation_collectives
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
from motet.train.proof.proof_of_job import keep_proof_of_job, read_proof_of_job


def step_plan_of_job(
    job: Job, layout: Layout, inventory: ModelInventory | None = None, *, model_sharding: ModelSharding | None = None
) -> StepPlan:
    """The plan of a model that is known by its sizes; by default all of it is trained, and nothing of it is split."""
    return make_step_plan(
        inventory or inventory_of_spec(spec_from_settings(job.model)),
        layout,
        job.precision.resolved,
        settings=job.communication,
        batch_sequences=job.data.batch_sequences,
        independent_replicas=job.outer.every is not None,
        model_sharding=model_sharding,
    )


def step_plan_of_split_job(job: Job, layout: Layout) -> StepPlan:
    """The plan of a job whose layers or blocks ranks may split.

    The split is proven on the job's module, with torch, unless an earlier run with the same job has kept the proof.
    """
    if layout.dims.size(TENSOR_DIMENSION, PIPELINE_DIMENSION) == 1:
        return step_plan_of_job(job, layout)
    if (known := read_proof_of_job(job, layout)) is not None:
        inventory, sharding = known
    else:
        from motet.train.proposed_sharding import sharding_of_job

        inventory, sharding = sharding_of_job(job, layout)
        keep_proof_of_job(job, layout, inventory=inventory, sharding=sharding)
    return step_plan_of_job(job, layout, inventory, model_sharding=sharding)


def predicted_stages(job: Job, layout: Layout) -> ModelSharding:
    """The stages of a model that is known by its sizes, without what crosses their borders; none without a pipeline.

    Tensors of several stages, such as tied embeddings, are those of the first one alone.
    """
    if layout.dims.size(PIPELINE_DIMENSION) == 1:
        return ModelSharding()
    stage_ranks = layout.pipeline_schedule(layout.sharding.microbatches).stage_ranks
    costs = costs_of_spec(spec_from_settings(job.model), batch_shape(job, 1), job.precision.resolved.compute)
    cuts = job.layout.stages
    stages = balance_stages(costs, len(stage_ranks)) if cuts is None else parse_stages(cuts)
    check_stages(stages, len(costs.times), f"the model of job {job.name!r}")
    return ModelSharding(stages=stages, stage_ranks=stage_ranks)


def step_timeline(job: Job, plan: StepPlan, communication: float) -> tuple[tuple[TimelineNode, ...], NodeTimes]:
    """The graph, and the start and stop of each node, in units of the time to compute a step."""
    recipe, rows = job.precision.resolved, len(plan.rows_by_rank[0][0])
    collectives = activation_collectives(plan, batch_shape(job, rows), recipe)
    segments = model_segments(job, rows, collectives)
    nodes = build_step_graph(segments, plan, recipe)
    flops = 3 * sum(segment.flops for segment in segments) * plan.microbatches
    # An all-reduce moves this, times (N - 1) / N.
    all_reduce_bytes = 2.0 * DTYPE_BYTES[recipe.reduce] * _spec_on_rank(job).parameter_count
    rates = {"compute": 1 / flops, "network": communication / all_reduce_bytes}
    return nodes, compute_node_times(nodes, lambda node: node.work * rates[node.resource])


def model_segments(job: Job, rows: int, collectives: Sequence[ActivationCollective] = ()) -> list[ModelSegment]:
    """A segment for each repetition of each block on a rank, with micro-batches of `rows` sequences. Activations are
    communicated in the segment that has the module; what is in no module belongs to the last, as the loss does."""
    shape, segments = batch_shape(job, rows), list[ModelSegment]()
    for block in _spec_on_rank(job).blocks:
        for i, parameters in enumerate(block.parameters_by_repetition(), start=block.first_index):
            name = block.name if block.repeat == 1 else f"{block.name} {i}"
            segments.append(ModelSegment(name, block.forward_flops(shape), frozenset(p.name for p in parameters)))
    for each in collectives:
        prefix = f"{each.module}."
        owners = (i for i, segment in enumerate(segments) if any(p.startswith(prefix) for p in segment.parameters))
        owner, field = next(owners, len(segments) - 1), f"{each.moment}_bytes"
        sent = DTYPE_BYTES[each.dtype] * each.numel * (1 + (each.collective == "all-reduce"))
        segments[owner] = replace(segments[owner], **{field: getattr(segments[owner], field) + sent})
    return segments


def _spec_on_rank(job: Job) -> ModelSpec:
    spec, degree = spec_from_settings(job.model), job.layout.dims.size(TENSOR_DIMENSION)
    return spec.on_rank(degree, sequence=job.layout.sp) if degree > 1 else spec
