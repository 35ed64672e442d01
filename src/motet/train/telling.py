"""What a run says of itself at its start, after each step and at its end, as events for the monitor."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from torch import nn

from motet.core.errors import CheckpointSaveError, MotetError, NumericalMismatchError, TrainingDivergedError
from motet.monitor.events import Event, RunEnded, RunEndReason, StepDone
from motet.train.step import StepResult


def parameter_count(module: nn.Module) -> int:
    """Each tensor once, however often the module uses it."""
    return sum(p.numel() for p in module.parameters())


@dataclass(frozen=True)
class Describer:
    """Turns the result of a step into its event."""

    flops_per_step: float | None
    """Of the model's arithmetic, over the global batch; None when they are not known."""
    peak_flops: float | None
    """Of all ranks together."""
    memory_bytes: Callable[[], int]
    epoch_at: Callable[[int], float]

    def __call__(self, done: int, result: StepResult, seconds: float) -> StepDone:
        share = None
        if self.flops_per_step is not None and self.peak_flops is not None:
            share = self.flops_per_step / (seconds * self.peak_flops)
        return StepDone(
            step=done,
            loss=result.loss,
            target_tokens=result.targets,
            tokens=result.tokens,
            learning_rate=result.learning_rate,
            grad_norm=result.grad_norm,
            skipped=not result.finite,
            step_time_s=seconds,
            tokens_per_s=result.tokens / seconds,
            mfu=share,
            memory_bytes=self.memory_bytes(),
            epoch=self.epoch_at(done),
            server=result.server,
        )


@dataclass
class Progress:
    """How far the run is; the loop moves it on."""

    done: int
    steps: int


_REASONS: dict[type[MotetError], RunEndReason] = {
    TrainingDivergedError: "diverged",
    NumericalMismatchError: "disagreed",
    CheckpointSaveError: "save_failed",
}


@contextmanager
def told_to_the_end(tell: Callable[[Event], None], progress: Progress) -> Iterator[None]:
    """Whatever ends the run, the last event says so."""
    try:
        yield
    except BaseException as error:
        reason = next((reason for kind, reason in _REASONS.items() if isinstance(error, kind)), "failed")
        message = str(error) if isinstance(error, MotetError) else f"{type(error).__name__}: {error}"
        with suppress(MotetError):  # that this could not be written is not what ended the run
            tell(RunEnded(reason=reason, steps=progress.done, message=message))
        raise
    tell(RunEnded(reason="finished" if progress.done >= progress.steps else "stopped", steps=progress.done))
