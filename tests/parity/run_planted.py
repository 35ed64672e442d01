"""Layouts verified on the ranks of the pool, with a mistake in place or none."""

import atexit
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

from motet.parallel.process.process_group import RankGroup
from motet.parity.candidate_layouts import make_candidate
from motet.parity.compare.reference_runs import ReferenceRuns, phases_and_steps, record_phases, run_reference
from motet.parity.diagnose.explain_difference import make_layout_verdict
from motet.parity.diagnose.single_device_recompute import SingleDeviceRecompute
from motet.parity.layout_verdict import LayoutVerdict
from motet.parity.record.tensor_recorder import RecordedTensor
from motet.parity.subjects.job_subject import JobVerificationSubject
from motet.train.job import Job
from parity import planted_data, planted_places, planted_states, planted_steps, planted_sums  # noqa: F401  # they register
from parity.faults import FAULTS
from ranks import Ranks
from train.runs import small_job

STEPS = 3
ROWS = 12


@dataclass(frozen=True)
class Subject:
    """A model, and what it computes on one device."""

    job: Job
    referred: ReferenceRuns
    folder: Path


@lru_cache(maxsize=8)
def subject(model: str, settings: tuple[str, ...] = ()) -> Subject:
    folder = Path(tempfile.mkdtemp(prefix="motet-subject-"))
    atexit.register(shutil.rmtree, folder)
    job = small_job(
        folder, f"run.steps={STEPS}", f"data.batch_sequences={ROWS}", "checkpoint.keep=1000",
        "monitor.evaluate_batches=3", "data.validation_fraction=0.3", "optimizer.clip_norm=0.05", *settings,
        model=model,
    )  # fmt: skip
    return Subject(job, run_reference(JobVerificationSubject(job), folder), folder)


Walked = list[tuple[str, int, list[RecordedTensor]]]


def walk_rank(group: RankGroup, job: Job, folder: Path, own: str, name: str) -> Walked:
    """On a rank: all that it has seen."""
    trial = JobVerificationSubject(job)
    with FAULTS[name].plant(group.rank) if name else nullcontext(), trial.numerics():
        return list(record_phases(trial, group, folder, own))


def verified(ranks: Ranks, of: Subject, layout: str, name: str = "") -> LayoutVerdict:
    """The verdict on a layout."""
    world = int(layout.split()[0].removeprefix("dp="))
    job = make_candidate(of.job, layout).job
    own = tempfile.mkdtemp(dir=of.folder, prefix="own-")
    walked: Sequence[Walked] = ranks.run(world, walk_rank, job, of.folder, Path(own).name, name, timeout_s=120)

    def seen(phase: str, step: int) -> list[list[RecordedTensor]]:
        return [next(each for at, number, each in rank if (at, number) == (phase, step)) for rank in walked]

    what_if = partial(SingleDeviceRecompute, JobVerificationSubject(job), job.layout_for(world), of.referred)
    done = [at for at in phases_and_steps(STEPS) if at in {(phase, number) for phase, number, _ in walked[0]}]
    return make_layout_verdict(layout, what_if, of.referred, done, seen)
