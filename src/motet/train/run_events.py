"""What a run says of itself at its start, after each step and at its end, as events for the monitor."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from torch import nn

from motet.core.errors import CheckpointSaveError, MotetError, NumericalMismatchError, TrainingDivergedError
from motet.monitor.events import Event, RunEnded, RunEndReason, StepDone
from motet.train.step import StepResult


def count_parameters(module: nn.Module) -> int:
    """Each tensor once, however often the module uses it."""
    return sum(p.numel() for p in module.parameters())


@dataclass(frozen=True)
class StepEventMaker:
    """Turns the result of a step into its event."""

    flops_per_step: float | None  # Of the model's arithmetic, over the global batch; None when they are not known
    peak_flops: float | None  # Of all ranks together
    memory_bytes: Callable[[], int]
    epoch_at: Callable[[int], float]

    def __call__(self, done: int, result: StepResult, seconds: float) -> StepDone:
        flops_fraction = None
        if self.flops_per_step is not None and self.peak_flops is not None:
            flops_fraction = self.flops_per_step / (seconds * self.peak_flops)
        return StepDone(
            step=done,
            loss=result.loss,
            target_tokens=result.targets,
            tokens=result.tokens,
            learning_rate=result.learning_rate,
            grad_norm=result.grad_norm,
            skipped=not result.is_finite,
            step_time_s=seconds,
            tokens_per_s=result.tokens / seconds,
            mfu=flops_fraction,
            memory_bytes=self.memory_bytes(),
            epoch=self.epoch_at(done),
            server=result.server_work,
        )


@dataclass
class RunProgress:
    """How far the run is; the loop moves it on."""

    completed_steps: int
    total_steps: int


_REASONS: dict[type[MotetError], RunEndReason] = {
    TrainingDivergedError: "diverged",
    NumericalMismatchError: "disagreed",
    CheckpointSaveError: "save_failed",
}


@contextmanager
def report_run_end(emit_event: Callable[[Event], None], progress: RunProgress) -> Iterator[None]:
    """Whatever ends the run, the last event says so."""
    try:
        yield
    except BaseException as error:
        reason = next((reason for kind, reason in _REASONS.items() if isinstance(error, kind)), "failed")
        message = str(error) if isinstance(error, MotetError) else f"{type(error).__name__}: {error}"
        with suppress(MotetError):  # that this could not be written is not what ended the run
            emit_event(RunEnded(reason=reason, steps=progress.completed_steps, message=message))
        raise
    emit_event(
        RunEnded(
            reason="finished" if progress.completed_steps >= progress.total_steps else "stopped",
            steps=progress.completed_steps,
        )
    )
