"""The training loop: steps, with evaluation, checkpoints and their reports in between, until the end or a stop."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from motet.core.errors import NumericalMismatchError, TrainingDivergedError
from motet.core.trace import span
from motet.monitor.events import CheckpointSaved, EvaluationDone, Event, StepDone
from motet.train.evaluation import EvaluationResult
from motet.train.job import Job
from motet.train.optimizer.lr_schedule import learning_rate_factor
from motet.train.run_events import RunProgress
from motet.train.state import TrainingState
from motet.train.step import StepResult

DIVERGENCE_REMEDY = (
    "lower optimizer.learning_rate, lengthen the warm-up or look at the data, then start again (--resume continues "
    "from the last checkpoint, if there is one)"
)


class StepRunner(Protocol):
    """Who does the steps."""

    def step(self, step: int, learning_rate: float, stop: bool = False, last: bool = False) -> StepResult: ...


@dataclass(frozen=True)
class TrainingLoop:
    """What a loop works with. `tell` reaches the sinks on rank 0 and nobody on the others."""

    job: Job
    step_runner: StepRunner
    state: TrainingState
    progress: RunProgress
    evaluate: Callable[[str], EvaluationResult | None]  # Of a split; None when the job keeps nothing apart for it
    # (step, result, seconds) -> the event, with what only the assembly knows (FLOPs, memory, spans).
    make_step_event: Callable[[int, StepResult, float], StepDone]
    emit_event: Callable[[Event], None]
    stop_requested: Callable[[], bool]

    def run(self) -> None:
        """Train on from where `progress` is, to the last step or until a stop is requested, and save."""
        progress = self.progress
        stop = False
        end = min(progress.total_steps, self.job.run.stop_at or progress.total_steps)
        while progress.completed_steps < end and not stop:
            result, seconds = self._step(progress.completed_steps)
            progress.completed_steps, stop = progress.completed_steps + 1, result.stop_requested
            with span("log"):
                self.emit_event(self.make_step_event(progress.completed_steps, result, seconds))
            self._check_replica_disagreement(progress.completed_steps, result)
            self._check_divergence(progress.completed_steps, result)
            last = progress.completed_steps == end or stop
            if last or self._is_due(progress.completed_steps, self.job.checkpoint.every):
                self._save(progress.completed_steps)
            if (
                self._is_due(progress.completed_steps, self.job.monitor.evaluate_every)
                or progress.completed_steps == progress.total_steps
            ):
                self._evaluate(progress.completed_steps, "validation")
        if progress.completed_steps == progress.total_steps:
            self._evaluate(progress.completed_steps, "test")

    def _step(self, step: int) -> tuple[StepResult, float]:
        factor = learning_rate_factor(self.job.optimizer.schedule, step, self.progress.total_steps)
        start_s = time.perf_counter()
        with span("step"):
            learning_rate, last = factor * self.job.optimizer.learning_rate, step + 1 == self.progress.total_steps
            result = self.step_runner.step(step, learning_rate, self.stop_requested(), last)
        return result, time.perf_counter() - start_s

    def _check_divergence(self, done: int, result: StepResult) -> None:
        """Every rank has the same result, so every rank comes to the same decision."""
        run, skipped = self.job.run, result.skipped_steps
        if skipped == 0 or (run.on_nan == "skip" and skipped < run.max_skips):
            return
        values_text = f" (loss {result.loss}, gradient norm {result.grad_norm})"
        nonfinite_quantity = "its loss" if not math.isfinite(result.loss) else "a gradient"
        if result.is_finite:  # it was another step, or another replica
            nonfinite_quantity, values_text = "a loss or gradient of some replica since their last meeting", ""
        times = f" for {skipped} steps in a row" if skipped > 1 else ""
        if times and run.on_nan == "skip":
            times += f", which is {'' if skipped == run.max_skips else 'more than '}run.max_skips"
        raise TrainingDivergedError(
            f"stopped at step {done}: {nonfinite_quantity} is not finite{times}{values_text}; its update was not applied; {DIVERGENCE_REMEDY}; "
            "run.on_nan=skip leaves such steps out"
        )

    def _check_replica_disagreement(self, done: int, result: StepResult) -> None:
        """Every rank has the reports of all."""
        if result.replica_check is None:
            return
        self.emit_event(result.replica_check)
        if result.replica_check.violations and self.job.monitor.replica_check_action == "stop":
            first, *others = result.replica_check.violations
            remaining_text = f" (events.jsonl has {len(others)} more of this step)" if others else ""
            raise NumericalMismatchError(
                f"stopped at step {done}, which is not saved: {first}{remaining_text}; try other devices, or `motet verify` with "
                "this job and layout, and continue from the last checkpoint with --resume; monitor.replica_check_action=warn goes on"
            )

    def _evaluate(self, done: int, split: str) -> None:
        with span("evaluate"):
            evaluation = self.evaluate(split)
        if evaluation is not None:
            self.emit_event(
                EvaluationDone(
                    step=done,
                    split=split,
                    loss=evaluation.loss,
                    targets=evaluation.targets,
                    perplexity=evaluation.perplexity,
                    accuracy=evaluation.accuracy,
                )
            )
            if not math.isfinite(evaluation.loss):
                raise TrainingDivergedError(
                    f"stopped at step {done}: the {split} loss after it is {evaluation.loss}; {DIVERGENCE_REMEDY}"
                )

    def _save(self, done: int) -> None:
        start_s = time.perf_counter()
        with span("checkpoint"):
            path, size_bytes = self.state.save(done)
        self.emit_event(
            CheckpointSaved(
                step=done,
                path=str(Path(path.parent.name) / path.name),
                size_bytes=size_bytes,
                duration_s=time.perf_counter() - start_s,
            )
        )

    @staticmethod
    def _is_due(done: int, every: int | None) -> bool:
        return every is not None and done % every == 0
