"""The live bytes of a step on all ranks of a job: measured on CPU ranks of this machine, or predicted alone."""

import json
from collections.abc import Mapping
from dataclasses import replace

from motet.cluster.cpu_count import usable_cores
from motet.cluster.memory_limits import read_memory_limits
from motet.core.atomic_file import write_file_atomically
from motet.core.errors import InputError, MotetError, RankFailedError, check_input
from motet.core.toml_writer import to_toml
from motet.core.units import format_bytes
from motet.parallel.layout import Layout
from motet.parallel.model_sharding import PIPELINE_DIMENSION, TENSOR_DIMENSION
from motet.precision.state_bytes import parameter_state_bytes
from motet.train.job import Job
from motet.train.launch.entry_points import LogFunction
from motet.train.launch.run_folder import JOB_FILE, job_to_tree
from motet.train.launch.supervisor import LaunchSpec, launch_ranks
from motet.train.launch.temporary_folder import locked_temporary_folder
from motet.train.memory_check.step_prediction import StepMemory, knows_activations, model_spec, predict_timeline
from motet.train.step_graph import step_plan_of_split_job

_RANKS_PER_CORE, _MIN_RANKS = 2, 4  # More ranks than that wait for one another
MAX_PREDICTED_RANKS = 64
_PROCESS_BYTES = 256 << 20  # Of a rank besides its tensors: torch, its threads and its heap
_STDERR_FD = 2


def predict_step_memory(job: Job, layout: Layout) -> list[StepMemory]:
    """The predicted timelines of the first ranks of a model that is known by its sizes."""
    check_input(
        model_spec(job) is not None,
        f"job {job.name!r}: the sizes of its model are known to the ranks alone, so its memory can be measured but not "
        "predicted; leave --predict out, and use a model and a layout that fit this machine",
    )
    plan = step_plan_of_split_job(job, layout)
    ranks = range(min(layout.dims.ranks, MAX_PREDICTED_RANKS))
    is_exact = knows_activations(job)
    return [StepMemory(None, predict_timeline(job, plan, layout, rank=rank), is_exact) for rank in ranks]


def reason_to_predict(job: Job, layout: Layout, ranks: int) -> str:
    """Why this machine should not measure a step, or nothing."""
    most = max(_MIN_RANKS, _RANKS_PER_CORE * usable_cores())
    if ranks > most:
        return f"{ranks} ranks are more than the {most} that this machine measures, so the bytes are predicted"
    needed = _needed_bytes(job, layout) + ranks * _PROCESS_BYTES
    limit = min(read_memory_limits(), key=lambda each: each.total_bytes * (1 if each.is_shared else ranks))
    available = limit.total_bytes * (1 if limit.is_shared else ranks)
    if needed > available:
        return (
            f"a step of {ranks} rank{'s' * (ranks > 1)} takes {format_bytes(needed)}, but {limit.name} "
            f"{format_bytes(limit.total_bytes)}, so the bytes are predicted"
        )
    return ""


def _needed_bytes(job: Job, layout: Layout) -> int:
    """The bytes that the tensors of all ranks take in a step. Of layers or blocks that ranks split, whose plan takes a
    proof, one copy is counted; of a model that is known to the ranks alone, nothing."""
    spec = model_spec(job)
    if spec is None:
        return 0
    if layout.dims.size(TENSOR_DIMENSION, PIPELINE_DIMENSION) == 1:
        return sum(each.predicted.peak for each in predict_step_memory(job, layout))
    kept = parameter_state_bytes(job.precision.resolved, job.optimizer.moments_per_parameter)
    return layout.dims.size(TENSOR_DIMENSION) * spec.parameter_count * kept.total


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
