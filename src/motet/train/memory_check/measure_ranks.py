"""The live bytes of a step on all ranks of a job, measured on CPU ranks of this machine."""

import json
from collections.abc import Mapping
from dataclasses import replace

from motet.cluster.host_limits import read_memory_limits, usable_cores
from motet.core.errors import InputError, MotetError, RankFailedError
from motet.core.text_files import to_toml, write_file_atomically
from motet.core.units import format_bytes
from motet.parallel.layout import Layout
from motet.train.job import Job
from motet.train.launch.entry_points import LogFunction
from motet.train.launch.run_folder import JOB_FILE, job_to_tree
from motet.train.launch.supervisor import LaunchSpec, launch_ranks, locked_temporary_folder
from motet.train.memory_check.predicted_ranks import predict_step_memory
from motet.train.memory_check.step_prediction import StepMemory, model_spec

_RANKS_PER_CORE, _MIN_RANKS = 2, 4  # More ranks than that wait for one another
_PROCESS_BYTES = 256 << 20  # Memory of a rank besides its tensors: torch, its threads and its heap
_WORKSPACE = 0.25  # Fraction of the predicted bytes; measured: 0.1 to 0.25
_STDERR_FD = 2


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
