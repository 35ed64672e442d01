"""A job as the planner reads it, without torch."""

from dataclasses import replace

from motet.core.errors import InputError, check_input
from motet.models.hf.hf_config import dropout_settings, read_config, settings_from_config
from motet.models.settings import EncoderDecoderSettings, TransformerSettings, UserModuleSettings
from motet.models.spec.model_spec import ModelSpec
from motet.parallel.layout import Layout
from motet.plan.frameworks import STACKS
from motet.plan.planned_step import POLICY_OF_BLOCKS, STEP_SETTINGS, PlannedModel, PlannedStep, Recompute
from motet.train.config_rules import reason_against_compiling
from motet.train.job import Job, batch_shape


def own_stack(job: Job) -> str:
    """The framework that motet is on GPUs: its blocks are compiled, or run eagerly in every layout."""
    return "motet-compiled" if reason_against_compiled_plan(job) is None else "motet"


def reason_against_compiled_plan(job: Job) -> str | None:
    """Why the blocks of a job run eagerly on GPUs in every layout."""
    if job.run.compile == "off":
        return "run.compile = 'off'"
    reason = reason_against_compiling(dict(job), without=STEP_SETTINGS)
    return "the dropout of the model's config" if reason is None and _drops_by_config(job) else reason


def _drops_by_config(job: Job) -> bool:
    model = job.model
    if not isinstance(model, UserModuleSettings) or model.hf_path is None:
        return False
    names = dropout_settings({**read_config(model.hf_path), **model.arguments})
    return any("summary" not in name and "classifier" not in name for name in names)  # Heads that a decoder has not


def planned_step(
    job: Job,
    layout: Layout,
    *,
    model: PlannedModel | None = None,
    stack: str = "motet",
    matmul: str | None = None,
    packed: bool = False,
) -> PlannedStep:
    """A step of a job with a layout; by default of the model that its settings describe."""
    recipe, data, row = job.precision.resolved, job.data, batch_shape(job, 1)
    if isinstance(job.model, UserModuleSettings) and not isinstance(model, ModelSpec):
        job.model.check_layers_are_known()
    states, framework = job.memory.optimizer, STACKS[stack]
    check_input(
        states == "device" or framework.memory == "motet",
        f"memory.optimizer = {states!r} is planned for motet, not for the framework {stack!r}; leave one of them out",
    )
    check_input(
        job.memory.activations == "device",
        f"memory.activations = {job.memory.activations!r} cannot be planned yet: the planner knows steps whose "
        "activations lie on the device; leave it out",
    )
    check_input(
        job.memory.parameters == "device",
        f"memory.parameters = {job.memory.parameters!r} cannot be planned yet: the planner knows steps whose "
        "parameters lie on the device; leave it out",
    )
    return PlannedStep(
        model or known_model(job),
        row.length,
        data.batch_sequences,
        layout,
        recipe,
        matmul or recipe.compute,
        framework,
        job.optimizer.moments_per_parameter,
        source=row.source_length,
        masked_fraction=data.mask_fraction if data.objective == "masked" else None,
        packed=packed,
        states=states,
        delays_update=job.memory.update == "delayed",
        communication=job.communication,
        attention=job.precision.attention,
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


def step_of_run(job: Job, step: PlannedStep, layout: Layout, *, stages: tuple[range, ...]) -> PlannedStep:
    """The step in the layout of a run; `stages` are the blocks of each stage of a pipeline."""
    policies: dict[str, Recompute] = {policy: recompute for recompute, policy in POLICY_OF_BLOCKS.items()}
    if job.memory.recompute not in policies:
        raise InputError(f"memory.recompute = {job.memory.recompute!r} is chosen while a run trains")
    planned = replace(layout, stages=stages if layout.pp > 1 else ())
    return replace(step, layout=planned, recompute=policies[job.memory.recompute])
