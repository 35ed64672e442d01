"""The live bytes of a step on all ranks of a job: measured on CPU ranks of this machine, or predicted alone."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from motet.cluster.host_limits import read_memory_limits, usable_cores
from motet.core.errors import InputError, MotetError, RankFailedError, check_input
from motet.core.text_files import to_toml, write_file_atomically
from motet.core.units import format_bytes
from motet.models.spec.layer_specs import MatmulSpec
from motet.models.spec.model_spec import ModelSpec
from motet.parallel.layout import Layout
from motet.parallel.model_sharding import PIPELINE_DIMENSION, TENSOR_DIMENSION, inventory_of_spec
from motet.parallel.step_plan.plan import StepPlan
from motet.train.job import Job
from motet.train.job_step_plan import predicted_stages, step_plan_of_job
from motet.train.launch.entry_points import LogFunction
from motet.train.launch.run_folder import JOB_FILE, job_to_tree
from motet.train.launch.supervisor import LaunchSpec, launch_ranks, locked_temporary_folder
from motet.train.memory_check.step_prediction import StepMemory, knows_activations, model_spec, predict_timeline

_RANKS_PER_CORE, _MIN_RANKS = 2, 4  # More ranks than that wait for one another
MAX_PREDICTED_RANKS = 64
_PROCESS_BYTES = 256 << 20  # Memory of a rank besides its tensors: torch, its threads and its heap
_WORKSPACE = 0.25  # Fraction of the predicted bytes; measured: 0.1 to 0.25
_STDERR_FD = 2


def predict_step_memory(job: Job, layout: Layout) -> list[StepMemory]:
    """The predicted timelines of all ranks of a model that is known by its sizes; of many ranks, one for each stage."""
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
    timelines = {part: predict_timeline(job, plan, layout, rank=part) for part in {rank // parts for rank in ranks}}
    return [StepMemory(rank, None, timelines[rank // parts], is_exact) for rank in ranks]


def _plan_of_sizes(job: Job, layout: Layout) -> StepPlan:
    """The plan of the model that one tensor-parallel rank computes, for the ranks of one index along `tp`. No split is
    proven, since a proof takes the module itself."""
    spec, degree = model_spec(job), layout.dims.size(TENSOR_DIMENSION)
    assert spec is not None
    not_split = {TENSOR_DIMENSION: 1, "sp": False, "rules": {}, "require_split": 0.5}
    one_of_them = job.model_copy(update={"layout": job.layout.model_copy(update=not_split)})
    sharding = predicted_stages(job, layout)
    sharding = replace(sharding, stage_tensors=_tensors_of_two_stages(spec, sharding.stages))
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


def reason_to_predict(job: Job, layout: Layout, ranks: int) -> str:
    """Why this machine should not measure a step, or nothing."""
    most = max(_MIN_RANKS, _RANKS_PER_CORE * usable_cores())
    if ranks > most:
        return f"{ranks} ranks are more than the {most} that this machine measures, so the bytes are predicted"
    if model_spec(job) is None:  # The ranks check their memory
        return ""
    peaks = [each.predicted.peak for each in predict_step_memory(job, layout)]
    needed = int(sum(peaks) * (1 + _WORKSPACE)) + ranks * _PROCESS_BYTES
    limit = min(read_memory_limits(), key=lambda each: each.total_bytes * (1 if each.is_shared else ranks))
    available = limit.total_bytes * (1 if limit.is_shared else ranks)
    if needed > available:
        return (
            f"a step of {ranks} rank{'s' * (ranks > 1)} takes {format_bytes(needed)}, but {limit.name} "
            f"{format_bytes(limit.total_bytes)}, so the bytes are predicted"
        )
    return ""


def measure_step_memory(job: Job, ranks: int, environment: Mapping[str, str], *, log: LogFunction) -> list[StepMemory]:
    """Measure a step on CPU ranks that this call starts. The data of the job must be prepared."""
    job = job.model_copy(update={"run": job.run.model_copy(update={"ranks": ranks, "device": "cpu"})})
    with locked_temporary_folder() as folder:
        write_file_atomically(folder / JOB_FILE, to_toml(job_to_tree(job)).encode())
        command = ("motet.train.memory_check.step_memory:measure_on_rank", str(folder))
        spec = LaunchSpec(command, ranks, environment, folder, stdout_fd=_STDERR_FD, stop_message="stopping")
        exit_status = launch_ranks(replace(spec, timeout_s=job.run.timeout_s), log)
        exit_status.raise_if_stopped()
        if exit_status.message:
            kinds = {kind.exit_code: kind for kind in (InputError, RankFailedError)}
            kind = kinds.get(exit_status.exit_code, MotetError)
            raise kind("\n".join(filter(None, [exit_status.message, exit_status.traceback])))
        files = [folder / f"memory-{rank}.json" for rank in range(ranks)]
        return [StepMemory.from_json(json.loads(file.read_text(encoding="utf-8"))) for file in files]
