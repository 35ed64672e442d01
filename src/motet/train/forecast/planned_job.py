"""A job as the planner reads it, without torch."""

from motet.core.errors import InputError
from motet.models.hf.hf_config import read_config, settings_from_config
from motet.models.settings import EncoderDecoderSettings, TransformerSettings, UserModuleSettings
from motet.parallel.layout import Layout
from motet.plan.planned_layout import POLICY_OF_BLOCKS, PlannedLayout, Recompute
from motet.plan.planned_step import PlannedModel, PlannedStep
from motet.plan.software_stack import STACKS
from motet.train.flops import batch_shape
from motet.train.job import Job


def planned_step(
    job: Job,
    layout: PlannedLayout,
    *,
    model: PlannedModel | None = None,
    stack: str = "motet",
    matmul: str | None = None,
    packed: bool = False,
) -> PlannedStep:
    """A step of a job with a layout; by default of the model that its settings describe."""
    recipe, data, row = job.precision.resolved, job.data, batch_shape(job, 1)
    return PlannedStep(
        model or known_model(job),
        row.length,
        data.batch_sequences,
        layout,
        recipe,
        matmul or recipe.compute,
        STACKS[stack],
        job.optimizer.moments_per_parameter,
        source=row.source_length,
        masked_fraction=data.mask_fraction if data.objective == "masked" else None,
        packed=packed,
        communication=job.communication,
    )


def known_model(job: Job) -> TransformerSettings:
    """The sizes of the model of a job."""
    chosen = job.model
    if isinstance(chosen, UserModuleSettings):
        path = chosen.hf_path
        if path is None:
            raise InputError(
                f"model.factory = {chosen.factory!r}: the sizes of a function's module are not known; plan a built-in "
                "family or an hf: config"
            )
        model = settings_from_config({**read_config(path), **chosen.arguments})
    else:
        model = chosen
    if isinstance(model, EncoderDecoderSettings):
        raise InputError("model.family = 'encoder-decoder' cannot be planned yet; plan a decoder or an encoder")
    return model


def planned_layout(job: Job, layout: Layout, stages: tuple[range, ...] = ()) -> PlannedLayout:
    """The layout of a run; `stages` are the blocks of each stage of a pipeline."""
    sharding, dims = layout.sharding, layout.dims
    policies: dict[str, Recompute] = {policy: recompute for recompute, policy in POLICY_OF_BLOCKS.items()}
    if job.memory.recompute not in policies:
        raise InputError(f"memory.recompute = {job.memory.recompute!r} is chosen while a run trains")
    is_pipeline = dims.size("pp") > 1
    return PlannedLayout(
        dp=dims.size("dp"),
        zero=sharding.zero,
        shard_group=sharding.shards if sharding.shards < sharding.ranks and sharding.zero else None,
        reshard_after_forward=sharding.reshard_after_forward,
        reduce_gradients="step" if sharding.reduces_once else "microbatch",
        tp=dims.size("tp"),
        sp=job.layout.sp,
        pp=dims.size("pp"),
        chunks=layout.chunks if is_pipeline else 1,
        schedule=layout.schedule if is_pipeline else "1f1b",
        stages=",".join(f"{blocks.start}-{blocks.stop - 1}" for blocks in stages if is_pipeline) or None,
        microbatches=sharding.microbatches,
        recompute=policies[job.memory.recompute],
    )
