"""Trains on one rank: steps, with evaluation, checkpoints and their reports in between, until the end or a stop."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from motet.checkpoint.background_writer import CheckpointSaver, SavedCheckpoint
from motet.cluster.host_limits import keep_freed_memory
from motet.core.errors import MotetError, ReplicaMismatchError, TrainingDivergedError
from motet.core.trace import log_if_slow, span
from motet.memory.tiers.device_limit import device_limit_of_run
from motet.monitor.events import (
    RUN_END_REASONS,
    CheckpointSaved,
    CheckpointStarted,
    EvaluationDone,
    Event,
    RunEnded,
    WarningIssued,
)
from motet.monitor.sinks import Callback
from motet.monitor.stdout_stderr import stderr_console
from motet.parallel.data_parallel.zero import sharded_states
from motet.parallel.process.launch_environment import RankEnvironment, threads_for
from motet.parallel.process.process_group import pick_device, start_process_group
from motet.train.build import build_components, precision_context
from motet.train.job import Job
from motet.train.launch.failures import StopFlag
from motet.train.optimizer.optimizer_settings import learning_rate_factor
from motet.train.run_report import RunReport, open_rank_monitor
from motet.train.state import ResumePoint
from motet.train.step import StepResult

DIVERGENCE_REMEDY = (
    "lower optimizer.learning_rate, lengthen the warm-up or look at the data, then start again (--resume continues "
    "from the last checkpoint, if there is one)"
)

# Freed blocks of memory that a process keeps for the next step. At stage 3 large ones are gathered and freed between
# gradients that stay: if they were kept, the heap would grow by the holes.
KEPT_BLOCK_BYTES, KEPT_BLOCK_BYTES_STAGE_3 = 32 << 20, 1 << 20

# Takes step, learning rate, whether to stop, whether it is the last, and whether to save: `TrainStep.step`, or the
# method of a coordinator.
StepFunction = Callable[[int, float, bool, bool, bool], StepResult]


@dataclass
class RunProgress:
    """How far the run is; the loop advances it."""

    completed_steps: int
    total_steps: int

    @property
    def is_finished(self) -> bool:
        return self.completed_steps >= self.total_steps


def run_rank(
    job: Job, rank_env: RankEnvironment, folder: Path, stop: StopFlag, callbacks: Sequence[Callback] = ()
) -> RunProgress:
    """Train on this rank, from the newest checkpoint in the run folder or else from the start."""
    device = pick_device(job.run.device, rank_env, share_device=job.run.share_device)
    gathers_parameters = sharded_states(job.layout.zero).parameters
    keep_freed_memory(up_to_bytes=KEPT_BLOCK_BYTES_STAGE_3 if gathers_parameters else KEPT_BLOCK_BYTES)
    if job.run.reproducible and device.type == "cuda":
        torch.use_deterministic_algorithms(True)
    torch.set_num_threads(threads_for(rank_env, job.run.requested_threads))
    process_group = start_process_group(
        rank_env, device, job.run.timeout_s, cpu_backend=job.run.cpu_backend, share_device=job.run.share_device
    )
    with process_group as group, precision_context(job, device):
        parts = build_components(job, group, folder)
        with closing(parts.engine.optimizer):
            resume_point = parts.state.restore_newest()  # It may refuse, so it comes before any event
            with open_rank_monitor(job, parts, callbacks) as monitor:
                return run_training(RunReport(job, parts, monitor), resume_point, stop)


def run_training(
    report: RunReport, resume_point: ResumePoint, stop: StopFlag, *, take_step: StepFunction | None = None
) -> RunProgress:
    """Train to the end or a stop; without `take_step` this rank takes the steps with its group."""
    report.report_start(resume_point)
    job, parts, emit_event = report.job, report.parts, report.monitor.on_event
    progress = RunProgress(resume_point.completed_steps, parts.total_steps)
    limit, known = job.memory.device_limit, parts.engine.recomputation.known_tensors
    with report_run_end(emit_event, progress):
        with device_limit_of_run(limit, parts.group.device, known=known):
            steps = nullcontext(take_step) if take_step else train_steps(report, progress)
            with ended_saves(parts.state.saver, emit_event), steps as step:
                TrainingLoop(job, report, progress, emit_event, step, stop, waits_for_saves=take_step is not None).run()
            if progress.is_finished:
                report.report_sample()
        if progress.is_finished and take_step is None:
            report.report_prediction()
    return progress


@contextmanager
def train_steps(report: RunReport, progress: RunProgress) -> Iterator[StepFunction]:
    """The steps of this rank with its group, for which a thread reads ahead."""
    job, steps = report.job, range(progress.completed_steps, _last_step(report.job, progress.total_steps))
    with report.parts.make_train_step(job).reading_ahead(job.data.prefetch, steps) as train_step:
        yield train_step.step


def _last_step(job: Job, total_steps: int) -> int:
    return min(total_steps, job.run.stop_at or total_steps)


@dataclass
class TrainingLoop:
    """The parts of a loop."""

    job: Job
    report: RunReport
    progress: RunProgress
    emit_event: Callable[[Event], None]  # Does nothing on ranks other than 0
    take_step: StepFunction
    stop: StopFlag
    waits_for_saves: bool = False  # The states are on servers, which go on
    _has_warned: bool = False  # That a save waits for the one before

    def run(self) -> None:
        """Train from where `progress` is to the last step, or until a stop is requested, and save."""
        progress, total, stop = self.progress, self.progress.total_steps, False
        first_step, saved_s = progress.completed_steps, time.monotonic()
        end = _last_step(self.job, total)
        while progress.completed_steps < end and not stop:
            result, seconds = self._step(progress.completed_steps, self._is_time_to_save(saved_s))
            done = progress.completed_steps = progress.completed_steps + 1
            stop = result.stop_requested
            with span("log"):
                self.report.report_step(done, result, seconds)
            self._check_replica_disagreement(done, result)
            self._check_divergence(done, result)
            if done == first_step + 1:
                self.report.parts.state.check_buffers()  # the first checkpoint may be hours away
            report_saved(self.emit_event, self._saver.take_saved())
            if done == end or stop or self.job.checkpoint.is_due(done) or result.save_requested:
                self._save(done, is_last=done == end or stop)
                saved_s = time.monotonic()
            if _is_due(done, self.job.monitor.evaluate_every) or done == total:
                self._evaluate(done, "validation")
        if first_step == total:  # the run was killed after its last checkpoint
            self._evaluate(total, "validation")
        if progress.completed_steps == total:
            self._evaluate(total, "test")

    def _is_time_to_save(self, saved_s: float) -> bool:
        """Whether the clock of rank 0 asks for a checkpoint after the next step; the sums of the step tell all."""
        minutes, is_first = self.job.checkpoint.minutes_between, self.report.parts.group.rank == 0
        return is_first and minutes is not None and time.monotonic() - saved_s >= 60 * minutes

    def _step(self, step: int, save: bool) -> tuple[StepResult, float]:
        optimizer, total = self.job.optimizer, self.progress.total_steps
        learning_rate = learning_rate_factor(optimizer.schedule, step, total) * optimizer.learning_rate
        start_s = time.perf_counter()
        with span("step"):
            # The save that has failed on one rank ends the run on all, at the next save
            is_ending = self.stop.is_requested() or self._saver.has_failed
            stop_requested = is_ending or self.report.monitor.is_output_closed
            result = self.take_step(step, learning_rate, stop_requested, step + 1 == total, save)
        return result, time.perf_counter() - start_s

    def _check_divergence(self, done: int, result: StepResult) -> None:
        run, skipped = self.job.run, result.skipped_steps
        if skipped == 0 or (run.on_nan == "skip" and skipped < run.max_skips):
            return
        if result.is_finite:  # another replica had the problem
            problem, values = "a loss or gradient of some replica since the last outer step", ""
        else:
            problem = "a gradient" if math.isfinite(result.loss) else "its loss"
            values = f" (loss {result.loss}, gradient norm {result.grad_norm})"
        times = f" for {skipped} steps in a row" if skipped > 1 else ""
        if times and run.on_nan == "skip":
            times += f", which is {'' if skipped == run.max_skips else 'more than '}run.max_skips"
        raise TrainingDivergedError(
            f"stopped at step {done}: {problem} is not finite{times}{values}; its update was not applied; "
            f"{DIVERGENCE_REMEDY}; run.on_nan=skip leaves such steps out"
        )

    def _check_replica_disagreement(self, done: int, result: StepResult) -> None:
        if result.replica_check is None:
            return
        self.emit_event(result.replica_check)
        if result.replica_check.violations and self.job.monitor.replica_check_action == "stop":
            first, *others = result.replica_check.violations
            more = f" (events.jsonl has {len(others)} more of this step)" if others else ""
            raise ReplicaMismatchError(
                f"stopped at step {done}, which is not saved: {first}{more}; try other devices, or `motet verify` with "
                "this job and layout, and continue from the last checkpoint with --resume; "
                "monitor.replica_check_action=warn goes on"
            )

    def _evaluate(self, done: int, split: str) -> None:
        with span("evaluate"):
            result = self.report.parts.evaluate(self.job, split)
        if result is None:
            return
        self.emit_event(EvaluationDone(step=done, split=split, perplexity=result.perplexity, **asdict(result)))
        if not math.isfinite(result.loss):
            problem = f"the {split} loss after it is {result.loss}"
            raise TrainingDivergedError(f"stopped at step {done}: {problem}; {DIVERGENCE_REMEDY}")

    @property
    def _saver(self) -> CheckpointSaver:
        return self.report.parts.state.saver

    def _save(self, done: int, *, is_last: bool) -> None:
        """Begin a save. The last one of a run is waited for, and one of an earlier step is complete before."""
        with span("checkpoint"):
            if self._saver.is_writing and not is_last and not self._has_warned:
                self._has_warned = True
                text = (
                    f"the checkpoint of step {done} is due and the one before it is still being written: training waits"
                )
                remedy = "save less often (checkpoint.every), or to a faster disk (run.folder); this is said once"
                self.emit_event(WarningIssued(text=f"{text}; {remedy}"))
            report_saved(self.emit_event, self._saver.finish())
            path = self.report.parts.state.start_save(done)
            self.emit_event(CheckpointStarted(step=done, path=_name_in_run(path)))
            if is_last or self.waits_for_saves or self.job.checkpoint.mode == "sync":
                with log_if_slow(self._tell, f"waiting until the checkpoint of step {done} is written ..."):
                    saved = self._saver.finish()
                report_saved(self.emit_event, saved)

    def _tell(self, text: str) -> None:
        if self.report.parts.group.rank == 0:
            stderr_console().print(text, highlight=False, soft_wrap=True)


def report_saved(emit_event: Callable[[Event], None], saved: SavedCheckpoint | None) -> None:
    """Report a checkpoint that has become complete, if there is one."""
    if saved is not None:
        fields = {name: value for name, value in asdict(saved).items() if name != "path"}
        emit_event(CheckpointSaved(path=_name_in_run(saved.path), **fields))


def _name_in_run(checkpoint: Path) -> str:
    return str(Path(checkpoint.parent.name) / checkpoint.name)


@contextmanager
def ended_saves(saver: CheckpointSaver, emit_event: Callable[[Event], None]) -> Iterator[None]:
    """After the block, which may fail, no save is under way: one that other ranks have written becomes complete."""
    try:
        yield
    finally:
        saved = saver.close()
        with suppress(MotetError):  # A failure to write this event did not end the run
            report_saved(emit_event, saved)


def _is_due(done: int, every: int | None) -> bool:
    return every is not None and done % every == 0


@contextmanager
def report_run_end(emit_event: Callable[[Event], None], progress: RunProgress) -> Iterator[None]:
    """Whatever ends the run, the last event reports it."""
    try:
        yield
    except BaseException as error:
        reason = RUN_END_REASONS.get(error.exit_code, "failed") if isinstance(error, MotetError) else "failed"
        message = str(error) if isinstance(error, MotetError) else f"{type(error).__name__}: {error}"
        with suppress(MotetError):  # a failure to write this event did not end the run
            emit_event(RunEnded(reason=reason, steps=progress.completed_steps, message=message))
        raise
    emit_event(RunEnded(reason="finished" if progress.is_finished else "stopped", steps=progress.completed_steps))
