"""Layouts verified on the ranks of the pool, with a mistake in place or none."""

import atexit
import shutil
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from motet.parallel.model_sharding import ModelSharding
from motet.parallel.process.process_group import RankGroup
from motet.parity.candidate_layouts import make_candidate
from motet.parity.compare.reference_runs import ReferenceRuns, run_reference
from motet.parity.diagnose.single_device_recompute import recompute_layout
from motet.parity.layout_verdict import LayoutVerdict, verify_recorded_steps
from motet.parity.record.record_verification_steps import RecordedStep, record_phases
from motet.parity.subjects.job_subject import JobVerificationSubject
from motet.train.job import Job
from parity import (  # noqa: F401  # they register
    planted_data,
    planted_pipelines,
    planted_places,
    planted_recomputation,
    planted_splits,
    planted_states,
    planted_steps,
    planted_sums,
)
from parity.faults import FAULTS
from ranks import Ranks
from train.runs import small_job

STEPS = 3
ROWS = 12


@dataclass(frozen=True)
class Reference:
    job: Job
    runs: ReferenceRuns
    folder: Path


@lru_cache(maxsize=8)
def reference(model: str, settings: tuple[str, ...] = ()) -> Reference:
    folder = Path(tempfile.mkdtemp(prefix="motet-subject-"))
    atexit.register(shutil.rmtree, folder)
    job = small_job(
        folder, f"run.steps={STEPS}", f"data.batch_sequences={ROWS}", "checkpoint.keep=1000",
        "monitor.evaluate_batches=3", "data.validation_fraction=0.3", "optimizer.clip_norm=0.05", *settings,
        model=model,
    )  # fmt: skip
    return Reference(job, run_reference(JobVerificationSubject(job), folder), folder)


def records_of_rank(
    group: RankGroup, job: Job, folder: Path, own: str, name: str
) -> tuple[list[RecordedStep], list[ModelSharding]]:
    """The records of all phases, and how the ranks split the model."""
    subject, shardings = JobVerificationSubject(job), list[ModelSharding]()
    with FAULTS[name].plant(group.rank) if name else nullcontext(), subject.numerics():
        phases = record_phases(subject, group, folder, checkpoint_subfolder=own, on_sharding=shardings.append)
        return list(phases), shardings


def verified(ranks: Ranks, reference: Reference, layout: str, name: str = "") -> LayoutVerdict:
    candidate = make_candidate(reference.job, layout)
    world, job = candidate.world, candidate.job
    own = tempfile.mkdtemp(dir=reference.folder, prefix="own-")
    done = ranks.run(world, records_of_rank, job, reference.folder, Path(own).name, name, timeout_s=120)
    steps = [of_rank for of_rank, _ in done]
    recorded = {of_ranks[0][0]: [records for _, records in of_ranks] for of_ranks in zip(*steps, strict=True)}
    recompute = recompute_layout(JobVerificationSubject(job, *done[0][1]), world, reference.runs)
    return verify_recorded_steps(layout, recompute, recorded)
