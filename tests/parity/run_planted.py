"""Layouts verified on the ranks of the pool, with a mistake in place or none."""

import atexit
import shutil
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import torch

from motet.parallel.model_sharding import ModelSharding
from motet.parallel.process.process_group import RankGroup
from motet.parity.candidate_layouts import make_candidate
from motet.parity.compare import native_precision
from motet.parity.compare.reference_runs import ReferenceRuns, run_reference
from motet.parity.diagnose.native_differences import NativeComparison
from motet.parity.diagnose.single_device_recompute import recompute_layout
from motet.parity.layout_verdict import (
    LayoutVerdict,
    add_native_comparison,
    add_overflow_decisions,
    verify_recorded_steps,
)
from motet.parity.record.record_verification_steps import (
    RecordedStep,
    record_native_steps,
    record_overflow,
    record_phases,
)
from motet.parity.record.tensor_recorder import RecordedTensor
from motet.parity.subjects.job_subject import JobVerificationSubject
from motet.train.job import Job
from parity import (  # noqa: F401  # they register
    planted_boundaries,
    planted_context,
    planted_copies,
    planted_data,
    planted_experts,
    planted_loss_scales,
    planted_pipelines,
    planted_places,
    planted_recomputation,
    planted_splits,
    planted_states,
    planted_steps,
    planted_sums,
)
from parity.faults import FAULTS, Fault, Patch
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


@lru_cache(maxsize=8)
def native_reference(
    recipe: str, model: str = "decoder", settings: tuple[str, ...] = ()
) -> native_precision.NativeReference:
    """One device in the precision of a recipe."""
    folder = Path(tempfile.mkdtemp(prefix="motet-native-"))
    atexit.register(shutil.rmtree, folder)
    scale = ["precision.loss_scale_initial=8"] if recipe == "fp16" else []  # As `motet verify` takes
    common = [f"run.steps={STEPS}", "checkpoint.keep=10", *scale, *settings]
    job = small_job(folder, f"precision.recipe={recipe}", *common, model=model)
    return native_precision.run_native_reference(JobVerificationSubject(job), folder, {})


def sharding_on_rank(group: RankGroup, job: Job, folder: Path) -> ModelSharding:
    subject = JobVerificationSubject(job)
    with subject.numerics():
        return subject.build(group, folder).engine.plan.model_sharding


def native_steps_of_rank(
    group: RankGroup, subject: JobVerificationSubject, folder: Path, plant: Callable[[int], Patch]
) -> list[RecordedStep]:
    with plant(group.rank):
        compute = getattr(torch, subject.job.precision.resolved.compute)
        return list(record_native_steps(subject, group, folder, compute=compute))


@dataclass(frozen=True)
class NativeLayout:
    """A layout in the precision of a recipe, and how far other orders of its sums are from one device."""

    reference: native_precision.NativeReference
    subject: JobVerificationSubject
    world: int
    spreads: list[native_precision.SummationOrderSpread]


_NATIVE_LAYOUTS: dict[object, NativeLayout] = {}


def native_layout(ranks: Ranks, recipe: str, layout: str, model: str, settings: tuple[str, ...]) -> NativeLayout:
    key = recipe, layout, model, settings
    if key not in _NATIVE_LAYOUTS:
        native = native_reference(recipe, model, settings)
        candidate = make_candidate(native.subject.job, layout)
        world, sharding = candidate.world, ModelSharding()
        if candidate.tensor_ranks > 1 or candidate.blocks > 1:
            sharding = ranks.run(world, sharding_on_rank, candidate.job, native.folder, timeout_s=120)[0]
        parts = candidate.device_microbatches(native.subject.batch_rows)
        spreads = native_precision.measure_order_spreads(native, parts, sharding=sharding, ranks=candidate.tensor_ranks)
        subject = JobVerificationSubject(candidate.job, sharding if sharding.rules or sharding.stages else None)
        _NATIVE_LAYOUTS[key] = NativeLayout(native, subject, world, spreads)
    return _NATIVE_LAYOUTS[key]


def native_comparison(
    ranks: Ranks,
    recipe: str,
    layout: str,
    plant: Callable[[int], Patch],
    *,
    model: str = "decoder",
    settings: tuple[str, ...] = (),
) -> NativeComparison:
    """The steps of ranks in the precision of a recipe, with a mistake in place."""
    of = native_layout(ranks, recipe, layout, model, settings)
    done = ranks.run(of.world, native_steps_of_rank, of.subject, of.reference.folder, plant, timeout_s=120)
    recorded = {rank_steps[0][0]: [records for _, records in rank_steps] for rank_steps in zip(*done, strict=True)}
    return NativeComparison(of.reference, of.spreads, recorded, of.subject)


@lru_cache(maxsize=4)
def fp16_reference(model: str, settings: tuple[str, ...]) -> native_precision.NativeReference:
    """One device in float16, with the small scale that `motet verify` takes."""
    own = "precision.recipe=fp16", "precision.loss_scale_initial=2048"
    folder, job = Path(tempfile.mkdtemp(prefix="motet-subject-")), reference(model, settings).job
    atexit.register(shutil.rmtree, folder)
    precision = small_job(folder, *own).precision
    subject = JobVerificationSubject(job.model_copy(update={"precision": precision}))
    return native_precision.run_native_reference(subject, folder, {})


def overflow_of_rank(group: RankGroup, job: Job, folder: Path, own: Path, name: str) -> list[RecordedTensor]:
    with FAULTS[name].plant(group.rank) if name else nullcontext():
        return record_overflow(JobVerificationSubject(job), group, folder, rank_folder=own)


def with_overflow(
    ranks: Ranks, verdict: LayoutVerdict, model: str, settings: tuple[str, ...], name: str
) -> LayoutVerdict:
    """The verdict in float64, and that on the steps with an overflow."""
    native = fp16_reference(model, settings)
    candidate = make_candidate(native.subject.job, verdict.layout)
    own = Path(tempfile.mkdtemp(dir=native.folder, prefix="own-"))
    world = candidate.world
    records = ranks.run(world, overflow_of_rank, candidate.job, native.folder, own, name, timeout_s=120)
    dims = candidate.job.layout_for(world).dims
    return add_overflow_decisions(verdict, records, dims, is_dynamic=True)


def planted(name: str, rank: int) -> Patch:
    return FAULTS[name].plant(rank)


def verified_fault(ranks: Ranks, fault: Fault, layout: str) -> LayoutVerdict:
    """The verdict on a layout with a planted mistake."""
    if fault.recipe:
        start = LayoutVerdict(layout, True, 0.0, "")
        comparison = native_comparison(
            ranks, fault.recipe, layout, partial(planted, fault.name), model=fault.model, settings=fault.settings
        )
        return add_native_comparison(start, comparison)
    verdict = verified(ranks, reference(fault.model, fault.settings), layout, fault.name)
    is_right = verdict.ok and fault.is_fp16
    return with_overflow(ranks, verdict, fault.model, fault.settings, fault.name) if is_right else verdict


def verified(ranks: Ranks, reference: Reference, layout: str, name: str = "") -> LayoutVerdict:
    candidate = make_candidate(reference.job, layout)
    world, job = candidate.world, candidate.job
    own = tempfile.mkdtemp(dir=reference.folder, prefix="own-")
    done = ranks.run(world, records_of_rank, job, reference.folder, Path(own).name, name, timeout_s=120)
    steps = [rank_records for rank_records, _ in done]
    recorded = {rank_steps[0][0]: [records for _, records in rank_steps] for rank_steps in zip(*steps, strict=True)}
    recompute = recompute_layout(JobVerificationSubject(job, *done[0][1]), world, reference.runs)
    return verify_recorded_steps(layout, recompute, recorded)
