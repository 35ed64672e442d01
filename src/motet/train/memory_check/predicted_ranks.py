"""The live bytes of a step on all ranks of a job, predicted without torch, and the limit of a device that they pass."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile

from motet.core.errors import InputError, check_input
from motet.core.units import format_bytes
from motet.memory.policy_choice import Place
from motet.models.spec.layer_specs import MatmulSpec
from motet.models.spec.model_spec import ModelSpec
from motet.parallel.data_parallel.zero import sharded_states
from motet.parallel.layout import Layout
from motet.parallel.model_sharding import PIPELINE_DIMENSION, TENSOR_DIMENSION, inventory_of_spec
from motet.parallel.step_plan.attention_traffic import attention_of_spec
from motet.parallel.step_plan.plan import StepPlan
from motet.train.config_rules import check_compositions
from motet.train.job import Job, with_overrides
from motet.train.job_step_plan import predicted_stages, step_plan_of_job
from motet.train.memory_check.step_prediction import (
    StepMemory,
    bytes_elsewhere,
    knows_activations,
    model_spec,
    predict_host_activations,
    predict_timeline,
)

MAX_PREDICTED_RANKS = 64


def predict_step_memory(job: Job, layout: Layout, *, is_packed: bool = False) -> list[StepMemory]:
    """The predicted timelines of all ranks of a model that is known by its sizes; of many ranks, one for each stage.
    `is_packed` says that rows hold several documents."""
    check_input(
        model_spec(job) is not None,
        f"job {job.name!r}: the sizes of its model are known to the ranks alone, so its memory can be measured but not "
        "predicted; leave --predict out, and use a model and a layout that fit this machine",
    )
    plan, count = _plan_of_sizes(job, layout), layout.dims.ranks
    ranks = (
        range(count) if count <= MAX_PREDICTED_RANKS else range(0, count, count // layout.dims.size(PIPELINE_DIMENSION))
    )
    parts, is_exact = layout.dims.size(TENSOR_DIMENSION), knows_activations(job)
    # Tensor-parallel ranks, which are neighbours, keep the same numbers of bytes.
    timelines = {
        part: predict_timeline(job, plan, layout, rank=part, is_packed=is_packed)
        for part in {rank // parts for rank in ranks}
    }
    places = {part: _places_of_rank(job, plan, layout, rank=part) for part in timelines}
    return [StepMemory(rank, None, timelines[rank // parts], is_exact, places[rank // parts]) for rank in ranks]


def _places_of_rank(job: Job, plan: StepPlan, layout: Layout, *, rank: int) -> dict[Place, int]:
    activations = predict_host_activations(job, plan, layout, rank=rank).peak_bytes
    return bytes_elsewhere(plan, job.precision.resolved, job.optimizer, rank=rank, activations=activations)


def _plan_of_sizes(job: Job, layout: Layout) -> StepPlan:
    """The plan of the model that one tensor-parallel rank computes, for the ranks of one index along `tp`. No split is
    proven, since a proof takes the module itself."""
    spec, degree = model_spec(job), layout.dims.size(TENSOR_DIMENSION)
    assert spec is not None
    not_split = {TENSOR_DIMENSION: 1, "sp": False, "rules": {}, "require_split": 0.5}
    one_of_them = job.model_copy(update={"layout": job.layout.model_copy(update=not_split)})
    sharding = predicted_stages(job, layout)
    sharding = replace(
        sharding,
        stage_tensors=_tensors_of_two_stages(spec, sharding.stages),
        attention=attention_of_spec(spec) if layout.cuts_rows else (),
    )
    part = one_of_them.layout_for(layout.dims.ranks // degree)
    return step_plan_of_job(one_of_them, part, inventory_of_spec(spec), model_sharding=sharding)


def _tensors_of_two_stages(spec: ModelSpec, stages: Sequence[range]) -> dict[str, tuple[int, ...]]:
    """Tensors that blocks of a stage use and another stage owns, such as tied embeddings."""
    parts = [spec.on_stage(stage) for stage in stages]
    owners = {
        parameter.name: stage
        for stage, part in enumerate(parts)
        for block in part.blocks
        for parameters in block.parameters_by_repetition()
        for parameter in parameters
    }
    used = dict[str, set[int]]()
    for stage, part in enumerate(parts):
        for block in (block for block in part.blocks if "{i}" not in block.prefix):
            for each in block.layer.operations:
                if isinstance(each, MatmulSpec) and owners.get(each.parameter, stage) != stage:
                    used.setdefault(each.parameter, {owners[each.parameter]}).add(stage)
    return {name: tuple(sorted(both)) for name, both in used.items()}


# --- the limit of a device ---------------------------------------------------------------------------


def check_device_limit(job: Job, ranks: int) -> None:
    """Refuse a `memory.device_limit` below the predicted peak of a rank, where the sizes of the model are known."""
    limit = job.memory.device_limit
    if limit is None or model_spec(job) is None:
        return
    largest = _largest_rank(job, ranks)
    if (peak := largest.predicted.peak) <= limit:
        return
    parts = sorted(largest.predicted.at_peak().items(), key=lambda part: -part[1])
    (first, first_size), (second, second_size), *_ = parts
    raise InputError(
        f"memory.device_limit = {limit} ({format_bytes(limit)}) is less than the {format_bytes(peak)} ({peak} bytes) "
        f"that a step is predicted to take on rank {largest.rank}, with {format_bytes(first_size)} of {first} and "
        f"{format_bytes(second_size)} of {second}; {_remedies(job, ranks, peak=peak)}"
    )


def _largest_rank(job: Job, ranks: int) -> StepMemory:
    return max(predict_step_memory(job, job.layout_for(ranks)), key=lambda memory: memory.predicted.peak)


def _remedies(job: Job, ranks: int, *, peak: int) -> str:
    """The settings that lower the predicted peak, with the peak that each leaves."""
    limit, helpful = job.memory.device_limit or 0, list[tuple[float, str]]()
    for settings in _settings_to_try(job, ranks):
        lower = [(left, setting) for setting in settings if (left := _peak_with(job, ranks, [setting])) < peak]
        if lower:
            helpful.append(next((each for each in lower if each[0] <= limit), min(lower)))
    if fitting := [f"set {setting}, which takes {format_bytes(left)}" for left, setting in helpful if left <= limit]:
        return ", or ".join([*fitting, "raise the limit"])
    names, together = "", float(peak)
    for count in range(2, len(helpful) + 1):
        words = [*dict.fromkeys(" ".join(setting for _, setting in helpful[:count]).split())]
        names, together = " and ".join(words), _peak_with(job, ranks, words)
        if together <= limit:
            return f"set {names}, which together take {format_bytes(together)}, or raise the limit"
    least = min([together, *(left for left, _ in helpful)])
    still = f"with {names} it takes {format_bytes(least)} still; " if helpful else ""
    return f"{still}raise the limit, use more ranks, or take a smaller model"


def _settings_to_try(job: Job, ranks: int) -> Iterator[Sequence[str]]:
    """Settings that may lower the peak, of each kind the mildest first."""
    layout, rows = job.layout_for(ranks), job.data.batch_sequences
    if job.memory.recompute not in ("full", "auto"):
        yield ["memory.recompute=full"]
    if layout.dims.ranks > 1:
        yield ["layout.zero=3"]
    degrees = (layout.dims.size(TENSOR_DIMENSION) << power for power in range(1, ranks.bit_length()))
    yield [f"layout.tp={degree}" for degree in takewhile(lambda degree: degree <= ranks, degrees)]
    counts = (layout.sharding.microbatches << power for power in range(1, rows.bit_length()))
    yield [f"layout.microbatches={count}" for count in takewhile(lambda count: count <= rows, counts)]
    if job.memory.optimizer == "device":
        yield ["memory.optimizer=host"]
    if job.memory.parameters == "device":
        is_gathered = sharded_states(layout.zero).parameters
        words = ["memory.optimizer=host"] * (job.memory.optimizer == "device") + ["layout.zero=3"] * (not is_gathered)
        yield [" ".join([*words, "memory.parameters=host"])]
    if job.memory.activations == "device" and job.memory.recompute != "auto":
        yield ["memory.activations=host"]


def _peak_with(job: Job, ranks: int, settings: list[str]) -> float:
    """The predicted peak with other settings; infinite where they do not work."""
    try:
        changed = with_overrides(job, [word for setting in settings for word in setting.split()], job.name)
        check_compositions(dict(changed))
        return _largest_rank(changed, ranks).predicted.peak
    except InputError:
        return float("inf")
