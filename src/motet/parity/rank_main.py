"""What the ranks of layouts do that are verified, one layout after another, and the files that they leave of it.

The same processes do them all, in groups of as many as a layout has: to start some takes seconds.
"""

import time
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import torch

from motet.parallel.process.launch_environment import RankEnvironment
from motet.parallel.process.process_group import RankGroup, start_process_group
from motet.parity.candidate_layouts import CandidateLayout, make_candidate
from motet.parity.compare.native_precision import record_native_step
from motet.parity.compare.reference_runs import phases_and_steps, record_phases
from motet.parity.record.tensor_recorder import RecordedTensor
from motet.parity.subjects.job_subject import JobVerificationSubject
from motet.train.launch.failures import StopFlag
from motet.train.launch.run_folder import read_stored_job

POLL_S = 0.1
NATIVE_PHASE = ("in its own precision", 0)  # After all phases in float64


def record_layouts_on_rank(rank_env: RankEnvironment, stop: StopFlag, folder: str, *layouts: str) -> int:
    """What a rank does that verifies layouts, one after another; each leaves what it has seen of each step."""
    stop.exit_on_sigterm()
    torch.set_num_threads(1)
    job = read_stored_job(Path(folder))
    candidates = [make_candidate(job, layout) for layout in layouts]
    for world, candidates_of_world in groupby(enumerate(candidates), lambda each: each[1].world):
        if rank_env.rank >= world:  # it waits for the next ones, or is done
            continue
        own_candidates = list(candidates_of_world)
        first_index = own_candidates[0][0]
        while (
            first_index and not done_file(Path(folder), first_index - 1, 0).exists()
        ):  # longer than a group has patience
            time.sleep(POLL_S)
        world_env = replace(rank_env, world=world, local_world=world, rendezvous=f"{rank_env.rendezvous}-{world}")
        with start_process_group(world_env, "cpu", job.run.timeout_s, job.run.cpu_backend) as group:
            for layout_index, candidate in own_candidates:
                _record_layout(candidate, group, Path(folder), layout_index)
    return 0


def _record_layout(candidate: CandidateLayout, group: RankGroup, folder: Path, layout_index: int) -> None:
    _record_phases(JobVerificationSubject(candidate.job), group, folder, layout_index)
    if (native_job_folder := native_folder(folder)).exists():
        records = record_native_step(
            JobVerificationSubject(make_candidate(read_stored_job(native_job_folder), candidate.layout).job),
            group,
            native_job_folder,
        )
        save_records(records, records_file(folder, layout_index, NATIVE_PHASE, group.rank))
    done_file(folder, layout_index, group.rank).touch()


def _record_phases(subject: JobVerificationSubject, group: RankGroup, folder: Path, layout_index: int) -> None:
    """All phases of a layout, for whoever compares."""
    with subject.numerics():
        for phase, step, records in record_phases(subject, group, folder, f"layout-{layout_index}"):
            save_records(records, records_file(folder, layout_index, (phase, step), group.rank))


def native_folder(folder: Path) -> Path:
    """Of the job in its own precision, if it is to be judged in it."""
    return folder / "native"


def records_file(folder: Path, layout_index: int, phase_and_step: tuple[str, int], rank: int) -> Path:
    return folder / f"layout-{layout_index}-{phase_and_step[0].replace(' ', '-')}-{phase_and_step[1]}-rank-{rank}.pt"


def recorded_phases(folder: Path, layout_index: int, steps: int) -> list[tuple[str, int]]:
    """The phases that a layout has done."""
    return [at for at in phases_and_steps(steps) if records_file(folder, layout_index, at, 0).exists()]


def done_file(folder: Path, layout_index: int, rank: int) -> Path:
    return folder / f"layout-{layout_index}-done-{rank}"


def load_records(folder: Path, layout_index: int, world: int, phase: str, step: int) -> list[list[RecordedTensor]]:
    """By each rank."""
    files = (records_file(folder, layout_index, (phase, step), rank) for rank in range(world))
    return [[RecordedTensor(*each) for each in torch.load(file, weights_only=True)] for file in files]


def save_records(records: list[RecordedTensor], path: Path) -> None:
    torch.save([tuple(each) for each in records], path)
