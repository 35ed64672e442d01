"""A step in float16 whose gradients overflow on one rank, and a step that continues from the checkpoint after it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from motet.parallel.process.process_group import RankGroup
from motet.parity.record.engine_hooks import patched_method
from motet.parity.record.record_verification_steps import (
    VerificationSubject,
    VerificationSubjectOnRank,
    step_checkpoint_path,
)
from motet.parity.record.tensor_recorder import RecordedTensor, TensorRecorder
from motet.train.engine import StepStats, TrainingEngine

OVERFLOW_PHASE = "with an overflow on one rank"


def record_overflow(
    subject: VerificationSubject, group: RankGroup, folder: Path, *, rank_folder: Path
) -> list[RecordedTensor]:
    """Numbers of a rank: with the scale of the job, when the gradients of the last rank overflow, and after that step.

    All steps begin with the state of one device in `folder`; the checkpoint of the ranks goes to `rank_folder`.
    """
    recorder, last_step = TensorRecorder(), subject.steps - 1

    def add(name: str, value: float) -> None:
        recorder.add_scalar("loss scale", name, value)

    with subject.numerics():
        on_rank = subject.build(group, rank_folder)
        on_rank.state.restore(step_checkpoint_path(folder, last_step))
        optimizer = on_rank.engine.optimizer
        add("scale", optimizer.loss_scale)
        stats, clipped = _run_step(on_rank, last_step)
        add("norm", stats.grad_norm)
        add("clipped", clipped)
        on_rank.state.restore(step_checkpoint_path(folder, last_step))
        updates = list[None]()
        with ExitStack() as stack:
            stack.enter_context(patched_method(optimizer, "update", lambda *_: updates.append(None)))
            if group.rank == group.world - 1:
                stack.enter_context(_infinite_norm(on_rank.engine))
            stats, _ = _run_step(on_rank, last_step)
        add("is skipped", float(stats.is_overflow and not updates))
        add("scale after it", optimizer.loss_scale)
        on_rank.state.save(last_step)
        on_rank = subject.build(group, rank_folder)
        on_rank.state.restore(step_checkpoint_path(rank_folder, last_step))
        optimizer = on_rank.engine.optimizer
        add("scale from a checkpoint", optimizer.loss_scale)
        first_scale = int(recorder.records[0].value)
        if optimizer.loss_scaler and optimizer.loss_scale == first_scale:  # A static one does not change
            optimizer.loss_scaler = replace(optimizer.loss_scaler, scale=first_scale // 2 or 2)
        add("other scale", optimizer.loss_scale)
        stats, clipped = _run_step(on_rank, last_step)
        add("norm with the other scale", stats.grad_norm)
        add("clipped with the other scale", clipped)
    return recorder.records


def _run_step(subject: VerificationSubjectOnRank, step: int) -> tuple[StepStats, float]:
    """The outcome of a step, and the norm of the gradients that the optimizer of this rank gets."""
    engine, outcomes = subject.engine, list[StepStats]()
    update = engine.update

    def observed(*args: Any, **kwargs: Any) -> StepStats:
        outcomes.append(update(*args, **kwargs))
        return outcomes[-1]

    with patched_method(engine, "update", observed), engine.optimizer.capture_gradients() as captured:
        subject.step(step, TensorRecorder())
        engine.synchronize()
    return outcomes[0], float(
        torch.stack([g.double().square().sum() for g in captured] or [torch.zeros(())]).sum().sqrt()
    )


@contextmanager
def _infinite_norm(engine: TrainingEngine) -> Iterator[None]:
    """The gradients of this rank overflow: its summand of the squared norm is infinite."""
    original = engine.optimizer.squared_norm

    def overflowing() -> Tensor:
        return torch.full_like(original(), torch.inf)  # Ranks may compute it together

    with patched_method(engine.optimizer, "squared_norm", overflowing):
        yield
