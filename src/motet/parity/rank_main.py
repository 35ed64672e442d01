"""The ranks of a verification: the same processes do all layouts, since starting processes takes seconds."""

import time
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import torch

from motet.parallel.model_sharding import ModelSharding
from motet.parallel.process.launch_environment import RankEnvironment
from motet.parallel.process.process_group import RankGroup, start_process_group
from motet.parity.candidate_layouts import CandidateLayout, make_candidate
from motet.parity.record import record_verification_steps as recording
from motet.parity.record.record_verification_steps import OVERFLOW_PHASE, record_overflow
from motet.parity.subjects.job_subject import JobVerificationSubject
from motet.train.launch.failures import StopFlag
from motet.train.launch.run_folder import read_stored_job


def record_layouts_on_rank(rank_env: RankEnvironment, stop: StopFlag, folder: str, *layouts: str) -> int:
    """Run the layouts on this rank; layouts with the same number of ranks share a process group."""
    stop.exit_on_sigterm()
    torch.set_num_threads(1)
    job, path = read_stored_job(Path(folder)), Path(folder)
    candidates = [make_candidate(job, layout) for layout in layouts]
    for world, group_of_layouts in groupby(enumerate(candidates), lambda each: each[1].world):
        if rank_env.rank >= world:  # Not a rank of these layouts
            continue
        indexed = list(group_of_layouts)
        shardings = dict[object, ModelSharding]()  # Known to all ranks of this group, which look for others together
        previous = recording.RecordFolder(path, indexed[0][0] - 1, 1)
        while previous.layout_index >= 0 and not previous.is_done():  # It may take longer than a group's timeout
            time.sleep(0.1)
        world_env = replace(rank_env, world=world, local_world=world, rendezvous=f"{rank_env.rendezvous}-{world}")
        with start_process_group(world_env, "cpu", job.run.timeout_s, cpu_backend=job.run.cpu_backend) as group:
            for layout_index, candidate in indexed:
                # Cut rows have a proof of their tokens, and calls of attention
                split = candidate.split, candidate.context_ranks > 1
                records, known = recording.RecordFolder(path, layout_index, world), shardings.get(split)
                shardings[split] = _record_layout(candidate, group, records, model_sharding=known)
    return 0


def _record_layout(
    candidate: CandidateLayout,
    group: RankGroup,
    records: recording.RecordFolder,
    *,
    model_sharding: ModelSharding | None,
) -> ModelSharding:
    """Record a layout, and return how its ranks split the model; the first layout with such a split looks for it."""
    subject, used = JobVerificationSubject(candidate.job, model_sharding), list[ModelSharding]()

    def keep(sharding: ModelSharding) -> None:
        used.append(sharding)
        records.save_model_sharding(group.rank, sharding)

    subfolder = records.checkpoint_subfolder
    with subject.numerics():
        steps = recording.record_phases(
            subject, group, records.folder, checkpoint_subfolder=subfolder, on_sharding=keep
        )
        for at, recorded in steps:
            records.save(at, group.rank, recorded)
    if (native := records.folder / recording.NATIVE_FOLDER).exists():
        native_subject = JobVerificationSubject(make_candidate(read_stored_job(native), candidate.layout).job, *used)
        compute = getattr(torch, native_subject.job.precision.resolved.compute)
        for at, recorded in recording.record_native_steps(native_subject, group, native, compute=compute):
            records.save(at, group.rank, recorded)
        if native_subject.job.precision.recipe == "fp16":
            own_folder = records.folder / subfolder / "overflow"
            recorded = record_overflow(native_subject, group, native, rank_folder=own_folder)
            records.save(recording.RecordedStepKey(OVERFLOW_PHASE, 0), group.rank, recorded)
    records.mark_done(group.rank)
    return used[0]
