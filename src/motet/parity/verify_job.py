"""Layouts against one device: the reference here, then the ranks of each layout, and a verdict on what they have."""

import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Event

from motet.core.errors import InputError
from motet.core.toml_writer import to_toml
from motet.parity.candidate_layouts import CandidateLayout, make_candidate
from motet.parity.compare.native_precision import NativePrecisionCheck, add_native_precision, run_native_reference
from motet.parity.compare.reference_runs import ReferenceRuns, run_reference, single_thread
from motet.parity.diagnose.explain_difference import make_layout_verdict
from motet.parity.diagnose.single_device_recompute import SingleDeviceRecompute
from motet.parity.layout_verdict import LayoutVerdict, failed_verdict, self_difference_verdict
from motet.parity.rank_main import NATIVE_PHASE, done_file, load_records, native_folder, recorded_phases
from motet.parity.shrink_job import make_small_job
from motet.parity.subjects.job_subject import JobVerificationSubject
from motet.parity.verify_parameter_server import ParameterServerVerifier
from motet.train.job import Job
from motet.train.launch.preflight import check_job
from motet.train.launch.run_folder import JOB_FILE
from motet.train.launch.supervisor import LaunchExitStatus, LaunchSpec, launch_ranks, rank_environment

STEPS = 3
POLL_S = 0.1
MIN_ROWS, MAX_ROWS = 8, 64  # Of a batch; more only if a layout by itself needs more
RANK_FUNCTION = "motet.parity.rank_main:record_layouts_on_rank"
LogFunction = Callable[[str], None]
VerdictCallback = Callable[[LayoutVerdict], None]
STDERR_FD = 2


@dataclass(frozen=True)
class VerificationPlan:
    """A small job, and the layouts in which it is to compute what one device does."""

    job: Job  # In float64
    candidates: Sequence[CandidateLayout]
    native_job: Job  # The same in its own precision


def make_verification_plans(job: Job, layouts: Sequence[str], log: LogFunction) -> list[VerificationPlan]:
    """One for layouts that can cut a batch of few rows evenly, with those of few ranks first."""
    if job.outer.every is not None:
        raise InputError(
            f"outer.every = {job.outer.every}: replicas that train apart do not compute what one device does; leave it "
            "out, and verify how each replica is spread"
        )
    candidates = [make_candidate(job, layout) for layout in layouts]
    for key in ("compress_gradients", "compress_parameters"):
        if (codec := getattr(job.communication, key)) is not None:
            log(f"communication.{key} = {codec!r} loses bits by design and is left out here")
    return [_make_plan(job, some) for some in _group_by_batch_rows(sorted(candidates, key=lambda each: each.world))]


def supported_layouts(job: Job, layouts: Sequence[str], log: LogFunction) -> list[str]:
    """Those that the job can have, and why it cannot have the others."""
    refused: dict[str, InputError] = {}
    for layout in layouts:
        try:
            make_verification_plans(job, [layout], lambda text: None)
        except InputError as error:
            refused[layout] = error
    if len(refused) == len(layouts):
        raise refused[layouts[-1]]
    for layout, reason in refused.items():
        log(f"left out: {layout}: {str(reason).removeprefix(f'layout {layout!r}: ')}")
    return [layout for layout in layouts if layout not in refused]


def _group_by_batch_rows(candidates: Sequence[CandidateLayout]) -> Iterator[list[CandidateLayout]]:
    group: list[CandidateLayout] = []
    for candidate in candidates:
        if group and _batch_rows([each.microbatches for each in (*group, candidate)]) > MAX_ROWS:
            yield group
            group = []
        group.append(candidate)
    yield group


def _make_plan(job: Job, candidates: Sequence[CandidateLayout]) -> VerificationPlan:
    """A job of the same structure that is small, with a batch that all layouts can cut evenly; or that none of several
    ranks can, where they need not."""
    small_job = make_small_job(
        job, _batch_rows([candidate.microbatches for candidate in candidates]) + bool(job.run.reproducible), STEPS
    )
    small_candidates = [make_candidate(small_job, candidate.layout) for candidate in candidates]
    for candidate in small_candidates:
        check_job(candidate.job, candidate.world)
    return VerificationPlan(small_job, small_candidates, small_job.model_copy(update={"precision": job.precision}))


def _batch_rows(microbatch_counts: Sequence[int]) -> int:
    """As few as can be cut into any of these, with two or more in each, and eight or more in all."""
    unit = math.lcm(*microbatch_counts)
    return unit * math.ceil(max(MIN_ROWS, 2 * max(microbatch_counts)) / unit)


def verify_job_layouts(
    plan: VerificationPlan, environment: Mapping[str, str], log: LogFunction, on_verdict: VerdictCallback
) -> list[LayoutVerdict]:
    """All verdicts; each is shown as it comes, those of few ranks first."""
    with tempfile.TemporaryDirectory(prefix="motet-verify-") as name:
        folder = Path(name)
        (folder / "logs").mkdir()
        start_s = time.perf_counter()
        reference_runs, native_check = run_reference(JobVerificationSubject(_write_job(plan.job, folder)), folder), None
        verdicts: list[LayoutVerdict] = []

        def add_verdict(verdict: LayoutVerdict) -> None:
            verdicts.append(verdict)
            on_verdict(verdict)

        if reference_runs.self_difference is not None:
            for candidate in plan.candidates:
                add_verdict(self_difference_verdict(candidate.layout, *reference_runs.self_difference))
            return verdicts
        if plan.native_job.precision.recipe != plan.job.precision.recipe or plan.job.run.reproducible:
            native_subject = JobVerificationSubject(_write_job(plan.native_job, native_folder(folder)))
            native_check = run_native_reference(
                native_subject, native_folder(folder), reference_runs.step_references[0].microbatch_dependent
            )
        log(f"one device: {STEPS} steps, and again from perturbed parameters: {time.perf_counter() - start_s:.1f} s")
        layout_verifier = _LayoutVerifier(reference_runs, native_check, environment, log, add_verdict)
        recorded_candidates = [
            candidate for candidate in plan.candidates if not candidate.job.layout.uses_server_processes
        ]
        layout_verifier.verify_all(recorded_candidates)
        server_verifier = ParameterServerVerifier(plan.job, reference_runs, environment)
        for candidate in plan.candidates:
            if candidate.job.layout.uses_server_processes:
                start_s = time.perf_counter()
                add_verdict(replace(server_verifier.verdict(candidate), seconds=time.perf_counter() - start_s))
        return verdicts


def _write_job(job: Job, folder: Path) -> Job:
    """For ranks to read."""
    folder.mkdir(exist_ok=True)
    tree = job.model_dump(exclude_none=True, exclude_unset=True)
    if job.optimizer.clip_norm is None:  # whose default is not None
        tree.setdefault("optimizer", {})["clip_norm"] = False
    (folder / JOB_FILE).write_text(to_toml(tree))
    return job


@dataclass(frozen=True)
class _LayoutVerifier:
    """Of layouts, each on ranks of its own."""

    reference_runs: ReferenceRuns
    native_check: NativePrecisionCheck | None
    environment: Mapping[str, str]
    log: LogFunction
    on_verdict: VerdictCallback

    def verify_all(self, remaining: list[CandidateLayout]) -> None:
        """Layouts that ranks do one after another, those with few ranks first."""
        while remaining:
            count, exit_status = self._run_ranks(remaining)
            exit_status.raise_if_stopped()
            remaining = remaining[count:]
            if remaining:  # the first that is left ended the others with it
                if exit_status.traceback:
                    self.log(exit_status.traceback)
                self.on_verdict(
                    failed_verdict(
                        remaining.pop(0).layout, exit_status.message or "its ranks ended", exit_status.exit_code
                    )
                )

    def _run_ranks(self, candidates: Sequence[CandidateLayout]) -> tuple[int, LaunchExitStatus]:
        """How many came to their end; each is judged while the ranks do the next one."""
        folder = self.reference_runs.folder
        for stale_file in folder.glob("layout-*"):
            shutil.rmtree(stale_file) if stale_file.is_dir() else stale_file.unlink()
        launch_settings = LaunchSpec(
            command=(
                sys.executable,
                "-m",
                "motet.cli.rank_main",
                RANK_FUNCTION,
                str(folder),
                *(each.layout for each in candidates),
            ),
            ranks=max(each.world for each in candidates),
            environment=rank_environment(self.environment, 1),
            log_folder=folder / "logs",
            stdout_fd=STDERR_FD,
            stop_message="stopping",
        )
        ranks_ended = Event()
        with ThreadPoolExecutor(1) as pool:  # not the ranks there: signals reach the main thread
            try:
                verified_count = pool.submit(self._verify_as_completed, candidates, ranks_ended)
                exit_status = launch_ranks(launch_settings, self.log)
            finally:
                ranks_ended.set()
            return verified_count.result(), exit_status

    def _verify_as_completed(self, candidates: Sequence[CandidateLayout], ranks_ended: Event) -> int:
        previous_s = time.perf_counter()
        for layout_index, candidate in enumerate(candidates):
            while not (is_done := self._is_done(candidate, layout_index)) and not ranks_ended.wait(POLL_S):
                pass
            if not is_done and not self._is_done(candidate, layout_index):  # it may have come with the end
                return layout_index
            verdict = self._make_verdict(candidate, layout_index)
            now_s = time.perf_counter()
            self.on_verdict(replace(verdict, seconds=now_s - previous_s))
            previous_s = now_s
            shutil.rmtree(self.reference_runs.folder / f"layout-{layout_index}")
            for file in self.reference_runs.folder.glob(f"layout-{layout_index}-*-rank-*.pt"):
                file.unlink()
        return len(candidates)

    def _is_done(self, candidate: CandidateLayout, layout_index: int) -> bool:
        return all(
            done_file(self.reference_runs.folder, layout_index, rank).exists() for rank in range(candidate.world)
        )

    def _make_verdict(self, candidate: CandidateLayout, layout_index: int) -> LayoutVerdict:
        read_records = partial(load_records, self.reference_runs.folder, layout_index, candidate.world)
        layout = candidate.job.layout_for(candidate.world)
        make_recompute = partial(
            SingleDeviceRecompute, JobVerificationSubject(candidate.job), layout, self.reference_runs
        )
        with single_thread():
            phases = recorded_phases(self.reference_runs.folder, layout_index, STEPS)
            verdict = make_layout_verdict(candidate.layout, make_recompute, self.reference_runs, phases, read_records)
            if not verdict.ok or self.native_check is None:
                return verdict
            microbatches = layout.reproducible_batch_size or candidate.microbatches
            return add_native_precision(
                verdict, *self.native_check.worst_and_first(microbatches, read_records(*NATIVE_PHASE))
            )
