"""Faults that are planted on one rank, or on all, in the second of three steps; and what replica checks find."""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from motet.core.batch import Batch
from motet.parallel.data_parallel.flat_parameters import LocalShard
from motet.parallel.data_parallel.fsdp import local_shard
from motet.parallel.process.process_group import RankGroup
from motet.train.build import TrainingComponents, precision_context
from motet.train.engine import StepStats
from motet.train.job import Job
from motet.train.replica_check.checker import LocalStepResult
from motet.train.step import MicroBatchLoop, TrainStep
from train.runs import small_job
from train.unsplit import build_unsplit

Plant = Callable[[TrainingComponents, TrainStep], TrainStep]
STEPS = 3
FP32 = "precision.recipe=fp32"


def watched(group: RankGroup, job: Job, plant: Plant | str = "", on: int | None = 1) -> tuple[Any, dict[str, Tensor]]:
    """The differences that ranks report in three steps, with a fault planted in the second, on one rank or on all."""
    with precision_context(job), tempfile.TemporaryDirectory() as folder:
        parts, runner = build_unsplit(job, group, Path(folder))
        found, stepper = [], replace(parts.make_train_step(job), runner=runner)
        for number in range(STEPS):
            if plant and number == 1 and on in (None, group.rank):
                stepper = (PLANTS[plant] if isinstance(plant, str) else plant)(parts, stepper)
            compared = stepper.step(number, 1e-3, last=number == STEPS - 1).replica_check
            found += [compared] if compared else []
        parts.engine.synchronize()
        return found, {name: local_shard(p).values.clone() for name, p in parts.model.module.named_parameters()}


def job_of(folder: Path, *overrides: str, model: str = "decoder", every: str = "monitor.replica_check_every=1") -> Job:
    return small_job(folder, *([every] if every else []), *overrides, model=model)


def flipped(tensor: Tensor, place: int) -> None:
    """One bit of it; not the lowest, which the next update may round away."""
    with torch.no_grad():
        tensor.detach().view(-1)[place : place + 1].view(torch.uint8)[1] ^= 1


def parameter_flips(parts: TrainingComponents, stepper: TrainStep) -> TrainStep:
    flipped(parts.model.module.get_parameter("blocks.1.ffn.down.weight"), 7)
    return stepper


def moment_flips(parts: TrainingComponents, stepper: TrainStep) -> TrainStep:
    state = parts.engine.optimizer.state()
    moments = (part for name, part in state.items() if name.startswith("exp_avg/") and isinstance(part, LocalShard))
    flipped(next(part.values for part in moments if part.values.numel() > 3), 3)
    return stepper


def reads(stepper: TrainStep, batch: Callable[[int, range], Batch]) -> TrainStep:
    """The rank reads other things in its steps, and the right ones when it looks at its neighbour's."""
    return replace(stepper, runner=replace(runner_of(stepper), batch_source=SimpleNamespace(batch=batch)))


def other_rows(parts: TrainingComponents, stepper: TrainStep) -> TrainStep:
    def shifted(step: int, rows: range) -> Batch:
        by = -1 if rows.start else 1
        return parts.data.batch(step, range(rows.start + by, rows.stop + by))

    return reads(stepper, shifted)


def read_other(parts: TrainingComponents, stepper: TrainStep, name: str, change: Callable[[Tensor], Any]) -> TrainStep:
    def changed(step: int, rows: range) -> Batch:
        batch = parts.data.batch(step, rows)
        values = getattr(batch, name).clone()
        change(values)
        return replace(batch, **{name: values})

    return reads(stepper, changed)


def other_files(parts: TrainingComponents, stepper: TrainStep) -> TrainStep:
    return read_other(parts, stepper, "tokens", lambda tokens: tokens[0, 0].add_(1))


def fewer_targets(parts: TrainingComponents, stepper: TrainStep) -> TrainStep:
    return read_other(parts, stepper, "weights", lambda weights: weights[0].zero_())


def other_norm(parts: TrainingComponents, stepper: TrainStep) -> TrainStep:
    engine = parts.engine
    right = engine.update

    def update(*given: Any, **named: Any) -> StepStats:
        done = right(*given, **named)
        return replace(done, grad_norm=done.grad_norm * (1 + 2**-52))

    vars(engine)["update"] = update
    return stepper


def other_sums(parts: TrainingComponents, stepper: TrainStep) -> TrainStep:
    right = parts.engine.optimizer.sharded_parameters.end_backward

    def end_backward() -> None:
        right()
        first = parts.engine.optimizer.sharded_parameters.engines[0]
        first.reduced_gradients(first.plan.shapes)[0].view(-1)[:1].add_(2**-10)

    vars(parts.engine.optimizer.sharded_parameters)["end_backward"] = end_backward
    return stepper


def wrong_arithmetic(parts: TrainingComponents, stepper: TrainStep) -> TrainStep:
    """A linear layer of this rank is off by a five-hundredth."""
    linear = next(m for m in parts.model.module.modules() if isinstance(m, nn.Linear))
    linear.register_forward_hook(lambda module, given, result: result * (1 + 2**-9))
    return stepper


def tensor_of(parts: TrainingComponents, name: str) -> Tensor:
    """The part that this rank holds of a parameter or buffer, or of the optimizer's state as `KIND/NAME`."""
    if "/" in name:
        shard = parts.engine.optimizer.state()[name]
        assert isinstance(shard, LocalShard)
        return shard.values
    module = parts.model.module
    buffers, parameters = dict(module.named_buffers()), dict(module.named_parameters())
    return buffers[name] if name in buffers else local_shard(parameters[name]).values


def flip_of(name: str) -> Plant:
    """A bit of a tensor flips in the step, after its start and before its first forward."""

    def plant(parts: TrainingComponents, stepper: TrainStep) -> TrainStep:
        right = stepper.runner.run

        def run(step: int, *, keep_batches: bool) -> LocalStepResult:
            flipped(tensor_of(parts, name).data, 0)
            return right(step, keep_batches=keep_batches)

        return replace(stepper, runner=SimpleNamespace(run=run))

    return plant


def runner_of(stepper: TrainStep) -> MicroBatchLoop:
    assert isinstance(stepper.runner, MicroBatchLoop)
    return stepper.runner


def other_without_gradients(parts: TrainingComponents, stepper: TrainStep) -> TrainStep:
    """A step whose forward without gradients uses another kernel."""
    right = parts.model.loss_sum

    def loss_sum(batch: Batch) -> Tensor:
        return right(batch) if torch.is_grad_enabled() else right(batch) * (1 + 2**-9)

    assert stepper.replica_checker is not None
    model = replace(parts.model, loss_sum=loss_sum)
    checker = replace(stepper.replica_checker, model=model)
    return replace(stepper, runner=replace(runner_of(stepper), model=model), replica_checker=checker)


PLANTS: dict[str, Plant] = {
    plant.__name__: plant
    for plant in (
        parameter_flips, moment_flips, other_rows, other_files, fewer_targets, other_norm, other_sums, wrong_arithmetic,
        other_without_gradients,
    )
}  # fmt: skip
