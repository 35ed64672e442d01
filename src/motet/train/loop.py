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
from motet.train.evaluate import Evaluation
from motet.train.job import Job
from motet.train.schedule import learning_rate_factor
from motet.train.state import RunState
from motet.train.step import StepResult
from motet.train.telling import Progress

REMEDY = (
    "lower optimizer.learning_rate, lengthen the warm-up or look at the data, then start again (--resume continues "
    "from the last checkpoint, if there is one)"
)


class Steps(Protocol):
    """Who does the steps."""

    def step(self, number: int, learning_rate: float, stop: bool = False, last: bool = False) -> StepResult: ...


@dataclass(frozen=True)
class Loop:
    """What a loop works with. `tell` reaches the sinks on rank 0 and nobody on the others."""

    job: Job
    stepper: Steps
    state: RunState
    progress: Progress
    evaluate: Callable[[str], Evaluation | None]
    """Of a split; None when the job keeps nothing apart for it."""
    describe: Callable[[int, StepResult, float], StepDone]
    """(step, result, seconds) -> the event, with what only the assembly knows (FLOPs, memory, spans)."""
    tell: Callable[[Event], None]
    stop_requested: Callable[[], bool]

    def run(self) -> None:
        """Train on from where `progress` is, to the last step or until a stop is requested, and save."""
        at = self.progress
        stop = False
        end = min(at.steps, self.job.run.stop_at or at.steps)
        while at.done < end and not stop:
            result, seconds = self._step(at.done)
            at.done, stop = at.done + 1, result.stop_requested
            with span("log"):
                self.tell(self.describe(at.done, result, seconds))
            self._refuse_disagreement(at.done, result)
            self._refuse_divergence(at.done, result)
            last = at.done == end or stop
            if last or self._due(at.done, self.job.checkpoint.every):
                self._save(at.done)
            if self._due(at.done, self.job.monitor.evaluate_every) or at.done == at.steps:
                self._evaluate(at.done, "validation")
        if at.done == at.steps:
            self._evaluate(at.done, "test")

    def _step(self, number: int) -> tuple[StepResult, float]:
        factor = learning_rate_factor(self.job.optimizer.schedule, number, self.progress.steps)
        start_s = time.perf_counter()
        with span("step"):
            rate, last = factor * self.job.optimizer.learning_rate, number + 1 == self.progress.steps
            result = self.stepper.step(number, rate, self.stop_requested(), last)
        return result, time.perf_counter() - start_s

    def _refuse_divergence(self, done: int, result: StepResult) -> None:
        """Every rank has the same result, so every rank comes to the same decision."""
        run, skipped = self.job.run, result.skipped
        if skipped == 0 or (run.on_nan == "skip" and skipped < run.max_skips):
            return
        what = f" (loss {result.loss}, gradient norm {result.grad_norm})"
        wrong = "its loss" if not math.isfinite(result.loss) else "a gradient"
        if result.finite:  # it was another step, or another replica
            wrong, what = "a loss or gradient of some replica since their last meeting", ""
        times = f" for {skipped} steps in a row" if skipped > 1 else ""
        if times and run.on_nan == "skip":
            times += f", which is {'' if skipped == run.max_skips else 'more than '}run.max_skips"
        raise TrainingDivergedError(
            f"stopped at step {done}: {wrong} is not finite{times}{what}; its update was not applied; {REMEDY}; "
            "run.on_nan=skip leaves such steps out"
        )

    def _refuse_disagreement(self, done: int, result: StepResult) -> None:
        """Every rank has the reports of all."""
        if result.compared is None:
            return
        self.tell(result.compared)
        if result.compared.violations and self.job.monitor.replica_check_action == "stop":
            first, *others = result.compared.violations
            more = f" (events.jsonl has {len(others)} more of this step)" if others else ""
            raise NumericalMismatchError(
                f"stopped at step {done}, which is not saved: {first}{more}; try other devices, or `motet verify` with "
                "this job and layout, and continue from the last checkpoint with --resume; monitor.watch=warn goes on"
            )

    def _evaluate(self, done: int, split: str) -> None:
        with span("evaluate"):
            judged = self.evaluate(split)
        if judged is not None:
            self.tell(
                EvaluationDone(
                    step=done,
                    split=split,
                    loss=judged.loss,
                    targets=judged.targets,
                    perplexity=judged.perplexity,
                    accuracy=judged.accuracy,
                )
            )
            if not math.isfinite(judged.loss):
                raise TrainingDivergedError(
                    f"stopped at step {done}: the {split} loss after it is {judged.loss}; {REMEDY}"
                )

    def _save(self, done: int) -> None:
        start_s = time.perf_counter()
        with span("checkpoint"):
            path, size_bytes = self.state.save(done)
        self.tell(
            CheckpointSaved(
                step=done,
                path=str(Path(path.parent.name) / path.name),
                size_bytes=size_bytes,
                duration_s=time.perf_counter() - start_s,
            )
        )

    @staticmethod
    def _due(done: int, every: int | None) -> bool:
        return every is not None and done % every == 0
