"""The verification of a job: one device here, then the ranks of each layout, and a verdict on each."""

import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from time import perf_counter

import torch

from motet.core.errors import InputError, check_input
from motet.core.text_files import to_toml
from motet.core.trace import log_if_slow
from motet.data.corpus.prepare import prepare_data
from motet.parallel.model_sharding import TENSOR_DIMENSION, ModelSharding
from motet.parity.candidate_layouts import CandidateLayout, make_candidate
from motet.parity.compare import native_precision as precision
from motet.parity.compare.reference_runs import ReferenceRuns, run_reference
from motet.parity.diagnose.native_differences import NativeComparison
from motet.parity.diagnose.single_device_recompute import recompute_layout
from motet.parity.full_vocabulary import HeadVerdict, many_entries, verify_full_head
from motet.parity.layout_verdict import (
    LayoutVerdict,
    add_native_comparison,
    add_overflow_decisions,
    failed_verdict,
    self_difference_verdict,
    verify_recorded_steps,
)
from motet.parity.record import record_verification_steps as recording
from motet.parity.record.record_verification_steps import OVERFLOW_PHASE
from motet.parity.shrink_job import (
    KEPT_ENTRIES,
    MAX_LAYERS,
    MAX_TOKENS,
    SmallVocabularyJob,
    make_small_job,
    vocabulary_entries,
    with_small_vocabulary,
)
from motet.parity.subjects.job_subject import JobVerificationSubject
from motet.parity.verify_parameter_server import ParameterServerVerifier
from motet.precision.recipe import PrecisionSettings
from motet.train.job import Job
from motet.train.launch.entry_points import LogFunction
from motet.train.launch.preflight import check_data, check_job
from motet.train.launch.run_folder import JOB_FILE
from motet.train.launch.supervisor import LaunchExitStatus, LaunchSpec, launch_ranks

STEPS = 3
NATIVE_LOSS_SCALE = 2048  # In fp16: the losses of a small batch do not overflow with it
POLL_S = 0.1
MIN_ROWS, MAX_ROWS = 8, 64  # Limits on the rows of a batch; a single layout may need more
VerdictCallback = Callable[[LayoutVerdict], None]
STDERR_FD = 2


@dataclass(frozen=True)
class VerificationPlan:
    """A small job, and the layouts that should compute the same as one device."""

    job: Job  # The job in float64
    candidates: Sequence[CandidateLayout]
    native_job: Job  # The job in its own precision
    entries: int | None = None  # Entries of the job's vocabulary, which the small job may not have; None: unknown


def make_verification_plans(job: Job, layouts: Sequence[str], log: LogFunction) -> list[VerificationPlan]:
    """One plan per group of layouts that can split one small batch evenly; layouts of few ranks come first."""
    for key in ("compress_gradients", "compress_parameters"):
        if (codec := getattr(job.communication, key)) is not None:
            log(f"communication.{key} = {codec!r} loses bits by design and is left out here")
    if job.memory.update == "delayed":
        log("memory.update = 'delayed' is another training by design: its updates are verified without a delay")
    candidates = _make_candidates(job, layouts)
    return _make_plans(with_small_vocabulary(job, {each.tensor_ranks for each in candidates}, log), candidates)


def _make_candidates(job: Job, layouts: Sequence[str]) -> list[CandidateLayout]:
    check_input(
        job.outer.every is None,
        f"outer.every = {job.outer.every}: independent replicas compute other numbers than one device; leave it "
        "out, and verify the layout of each replica",
    )
    return [make_candidate(job, layout) for layout in layouts]


def _make_plans(small: SmallVocabularyJob, candidates: Sequence[CandidateLayout]) -> list[VerificationPlan]:
    ordered = sorted(candidates, key=lambda each: (max(each.blocks, MAX_LAYERS), each.world))
    return [_make_plan(small, some) for some in _group_by_size(ordered)]


def refused_layouts(job: Job, layouts: Sequence[str]) -> dict[str, InputError]:
    """The layouts that the job cannot have, and why; raise if it can have none."""
    refused: dict[str, InputError] = {}
    for layout in layouts:
        try:
            _make_plans(SmallVocabularyJob(job), _make_candidates(job, [layout]))
        except InputError as error:
            refused[layout] = error
    if len(refused) == len(layouts):
        raise refused[layouts[-1]]
    return refused


def _group_by_size(candidates: Sequence[CandidateLayout]) -> Iterator[list[CandidateLayout]]:
    group: list[CandidateLayout] = []
    for candidate in candidates:
        has_more_blocks = group and candidate.blocks > max(MAX_LAYERS, *(each.blocks for each in group))
        if has_more_blocks or (group and _batch_rows([c.microbatches for c in (*group, candidate)]) > MAX_ROWS):
            yield group
            group = []
        group.append(candidate)
    yield group


def _make_plan(small: SmallVocabularyJob, candidates: Sequence[CandidateLayout]) -> VerificationPlan:
    """A small job whose batch all layouts split evenly, plus a row that none divides if the job is reproducible."""
    job = small.job
    rows = _batch_rows([candidate.microbatches for candidate in candidates]) + bool(job.run.reproducible)
    blocks = max(candidate.blocks for candidate in candidates)
    splits_tokens, problem = any(candidate.job.layout.sp for candidate in candidates), InputError("")
    for max_tokens in range(MAX_TOKENS, MAX_TOKENS - (MAX_TOKENS // 4 if splits_tokens else 1), -1):
        small_job = make_small_job(job, rows, STEPS, max_tokens=max_tokens, blocks=blocks, degree=small.degree)
        small_candidates = [make_candidate(small_job, candidate.layout) for candidate in candidates]
        try:
            for candidate in small_candidates:
                check_job(candidate.job, candidate.world)
        except InputError as error:
            problem = problem if str(problem) else error
            continue
        native_job = small_job.model_copy(update={"precision": _without_overflow(job.precision)})
        return VerificationPlan(small_job, small_candidates, native_job, small.full_entries or vocabulary_entries(job))
    raise problem


def _without_overflow(settings: PrecisionSettings) -> PrecisionSettings:
    """The settings with a small, constant loss scale: a large one would still be searched for when the few compared
    steps end, and gradients that are not finite equal nothing."""
    is_dynamic = settings.recipe == "fp16" and settings.loss_scale == "dynamic"
    update = {"loss_scale_initial": NATIVE_LOSS_SCALE, "loss_scale_growth_steps": 2000}
    return settings.model_copy(update=update) if is_dynamic else settings


def _batch_rows(microbatch_counts: Sequence[int]) -> int:
    """The fewest rows that make any of these numbers of micro-batches, with at least two rows in each."""
    unit = math.lcm(*microbatch_counts)
    return unit * math.ceil(max(MIN_ROWS, 2 * max(microbatch_counts)) / unit)


def verify_full_heads(
    plans: Sequence[VerificationPlan], *, log: LogFunction, on_verdict: Callable[[HeadVerdict], None]
) -> None:
    """Report on heads with the job's entries, or more. In 16 bits one device may be wrong, too."""
    cases = dict.fromkeys(
        (plan.entries, each.tensor_ranks, getattr(torch, plan.native_job.precision.resolved.compute))
        for plan in plans
        for each in plan.candidates
    )
    for entries, ranks, dtype in cases:
        if entries is not None and (ranks > 1 or dtype.itemsize == 2):
            entries = entries if entries > KEPT_ENTRIES else many_entries(entries, ranks)
            with log_if_slow(log, f"comparing the head of {entries:,} entries on tp={ranks}"):
                verdict = verify_full_head(entries, ranks, dtype)
            on_verdict(verdict)


def verify_job_layouts(
    plan: VerificationPlan, environment: Mapping[str, str], *, log: LogFunction, on_verdict: VerdictCallback
) -> None:
    """Report the verdicts one by one; layouts of few ranks come first."""
    with tempfile.TemporaryDirectory(prefix="motet-verify-") as name:
        folder = Path(name)
        with log_if_slow(log, "preparing the data of the small job"):
            check_data(plan.job, prepare_data(plan.job.data))
        start_s = perf_counter()
        with log_if_slow(log, "computing the steps of one device"):
            runs = run_reference(JobVerificationSubject(_store_job(plan.job, folder)), folder)
        if runs.self_difference is not None:
            for candidate in plan.candidates:
                on_verdict(self_difference_verdict(candidate.layout, STEPS - 1, runs.self_difference))
            return
        native = None
        rank_candidates = [each for each in plan.candidates if not each.job.layout.uses_server_processes]
        server_candidates = [each for each in plan.candidates if each.job.layout.uses_server_processes]
        if plan.native_job.precision.recipe != plan.job.precision.recipe or plan.job.run.reproducible:
            own_folder, placements = folder / recording.NATIVE_FOLDER, runs.step_references[0].row_placements
            subject = JobVerificationSubject(_store_job(plan.native_job, own_folder))
            native = precision.run_native_reference(subject, own_folder, placements)
        log(f"one device: {STEPS} steps, and again from perturbed parameters: {perf_counter() - start_s:.1f} s")
        _RankLayoutVerifier(runs, native, environment, log, on_verdict).verify_all(rank_candidates)
        servers = ParameterServerVerifier(plan.job, runs, environment)
        for candidate in server_candidates:
            start_s = perf_counter()
            on_verdict(replace(servers.verdict(candidate), seconds=perf_counter() - start_s))


def _store_job(job: Job, folder: Path) -> Job:
    folder.mkdir(exist_ok=True)
    tree = job.model_dump(exclude_none=True, exclude_unset=True)
    if job.optimizer.clip_norm is None:  # Its default is not None
        tree.setdefault("optimizer", {})["clip_norm"] = False
    (folder / JOB_FILE).write_text(to_toml(tree))
    return job


@dataclass(frozen=True)
class _RankLayoutVerifier:
    """Layouts whose ranks leave records; this process compares a layout while the ranks do the next one."""

    reference_runs: ReferenceRuns
    native: precision.NativeReference | None
    environment: Mapping[str, str]
    log: LogFunction
    report: VerdictCallback
    # The spreads of each number of micro-batches and split of the model.
    spreads: dict[tuple[int, str], list[precision.SummationOrderSpread]] = field(default_factory=dict)

    def verify_all(self, remaining: list[CandidateLayout]) -> None:
        """Start the ranks again without a layout that failed, until none is left."""
        while remaining:
            count, exit_status = self._run_ranks(remaining)
            exit_status.raise_if_stopped()
            remaining = remaining[count:]
            if remaining and exit_status.traceback:
                self.log(exit_status.traceback)
            if remaining:
                reason = exit_status.message or "its ranks ended"
                self.report(failed_verdict(remaining.pop(0).layout, reason, exit_status.exit_code))

    def _run_ranks(self, candidates: Sequence[CandidateLayout]) -> tuple[int, LaunchExitStatus]:
        """The count of layouts that were done, and how the ranks ended."""
        folder = self.reference_runs.folder
        for stale in folder.glob("layout-*"):
            shutil.rmtree(stale) if stale.is_dir() else stale.unlink()
        command = ("motet.parity.rank_main:record_layouts_on_rank", str(folder), *(c.layout for c in candidates))
        (folder / "logs").mkdir(exist_ok=True)
        launch_spec = LaunchSpec(
            command=command,
            ranks=max(each.world for each in candidates),
            environment=self.environment,
            log_folder=folder / "logs",
            stdout_fd=STDERR_FD,
            stop_message="stopping",
        )
        ranks_ended = Event()
        with ThreadPoolExecutor(1) as pool:  # Signals reach the main thread, which launches
            try:
                count = pool.submit(self._compare_as_completed, candidates, ranks_ended)
                exit_status = launch_ranks(launch_spec, self.log)
            finally:
                ranks_ended.set()
            return count.result(), exit_status

    def _compare_as_completed(self, candidates: Sequence[CandidateLayout], ranks_ended: Event) -> int:
        start_s = perf_counter()
        for index, candidate in enumerate(candidates):
            records = recording.RecordFolder(self.reference_runs.folder, index, candidate.world, STEPS)
            with log_if_slow(self.log, f"comparing {candidate.layout}"):
                while not records.is_done() and not ranks_ended.wait(POLL_S):
                    pass
                if not records.is_done():
                    return index
                verdict = self._compare(candidate, records)
            end_s = perf_counter()
            self.report(replace(verdict, seconds=end_s - start_s))
            start_s = end_s
            records.delete()
        return len(candidates)

    def _compare(self, candidate: CandidateLayout, records: recording.RecordFolder) -> LayoutVerdict:
        subject = JobVerificationSubject(candidate.job, records.model_sharding())
        recompute = recompute_layout(subject, candidate.world, self.reference_runs)
        with recording.single_thread():
            verdict = verify_recorded_steps(candidate.layout, recompute, records)
            if verdict.ok and self.native is not None:
                spreads = self._spreads(self.native, candidate, records.model_sharding())
                recorded = {at: records[at] for at in recording.native_steps(STEPS)}
                own_job = make_candidate(self.native.subject.job, candidate.layout).job
                own_subject = JobVerificationSubject(own_job, subject.model_sharding)
                comparison = NativeComparison(self.native, spreads, recorded, own_subject)
                verdict = add_native_comparison(verdict, comparison)
                if verdict.ok and own_job.precision.recipe == "fp16":
                    decided = records[recording.RecordedStepKey(OVERFLOW_PHASE, 0)]
                    is_dynamic = own_job.precision.loss_scale == "dynamic"
                    dims = recompute.layout.dims
                    verdict = add_overflow_decisions(verdict, decided, dims, is_dynamic=is_dynamic)
        return verdict

    def _spreads(
        self, native: precision.NativeReference, candidate: CandidateLayout, sharding: ModelSharding
    ) -> list[precision.SummationOrderSpread]:
        """How far other orders of the sums of a layout are from one device."""
        key = candidate.device_microbatches(native.subject.batch_rows), candidate.split
        if key not in self.spreads:
            ranks = candidate.job.layout.dims.size(TENSOR_DIMENSION)
            self.spreads[key] = precision.measure_order_spreads(native, key[0], sharding=sharding, ranks=ranks)
        return self.spreads[key]
