"""The plan of a step of a job, without torch."""

from motet.models.spec.model_spec import spec_from_settings
from motet.parallel.layout import Layout, parse_stages
from motet.parallel.model_inventory import ModelInventory, inventory_of_spec
from motet.parallel.model_sharding import PIPELINE_DIMENSION, TENSOR_DIMENSION, ModelSharding
from motet.parallel.pipeline.stages.stage_balance import balance_stages, check_stages, costs_of_spec
from motet.parallel.step_plan.plan import StepPlan, make_step_plan
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
