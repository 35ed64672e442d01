"""The sizes of the activations that ranks communicate, measured in forwards of the whole module."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from motet.core.batch import Batch
from motet.models.arch.loss import set_vocabulary_shard
from motet.models.spec.layer_specs import CountedPer, MicroBatchShape
from motet.parallel.model_sharding import LOSS, ActivationSize, BoundaryComm, ModelSharding
from motet.parallel.proof.module_calls import ModuleCall, record_calls
from motet.parallel.proof.proof_values import random_values
from motet.parallel.tensor_parallel.boundary_hooks import argument_key

# (rows, tokens, source tokens) at most of two forwards, which show the counts that a size is proportional to.
_MEASURED_SIZES = ((2, 8, 12), (1, 12, 8))
_LOSS_REDUCTIONS = 2  # Reductions of the largest logits and of sums; a third one has the gradient of the head's input
_COUNTED_PER: tuple[CountedPer, ...] = get_args(CountedPer)
_MeasuredCalls = list[tuple[int, bool]]  # (elements, whether their gradient is needed) of each call


def with_activation_sizes(
    sharding: ModelSharding, module: nn.Module, forward: Callable[[Batch], object], *, batch: Batch
) -> ModelSharding:
    """The same sharding, whose comms have sizes of their activations. `forward` runs the module on parts of a batch;
    parameters may be on the meta device."""
    batches = [batch.first_tokens(*sizes) for sizes in _MEASURED_SIZES]
    with random_values(module, keeps_frozen=True), torch.enable_grad():
        runs = [_run(sharding, module, partial(forward, each)) for each in batches]
    shapes = [_shape_of(each, run) for each, run in zip(batches, runs, strict=True)]
    sized, fused_heads = list[BoundaryComm](), runs[0].fused_heads
    for comm, *calls_of_runs in zip(sharding.boundary_comms, *(run.calls for run in runs), strict=True):
        # A loss that computes its logits takes only tokens with a target.
        order = ("target", *_COUNTED_PER) if comm.module in fused_heads else _COUNTED_PER
        sizes = (_size(calls, shapes, order=order) for calls in zip(*calls_of_runs, strict=False))
        sized.append(replace(comm, sizes=tuple(filter(None, sizes))))
    return replace(sharding, boundary_comms=tuple(sized))


@dataclass
class _MeasuredRun:
    """The calls of each comm in a forward. It stands in for the ranks of a `VocabularyShard` that has all entries."""

    calls: list[_MeasuredCalls] = field(default_factory=list)
    size: int = 0
    start: int = 0
    loss_reductions: _MeasuredCalls = field(default_factory=list)
    fused_heads: set[str] = field(default_factory=set)  # Heads whose logits the loss computes

    @property
    def stop(self) -> int:
        return self.size

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"]) -> Tensor:
        self.loss_reductions.append((tensor.numel(), True))
        return tensor

    def gather_logits(self, local_logits: Tensor) -> Tensor:
        return local_logits


def _run(sharding: ModelSharding, module: nn.Module, forward: Callable[[], object]) -> _MeasuredRun:
    comms, run = sharding.boundary_comms, _MeasuredRun()
    modules = {comm.module: module.get_submodule(comm.module) for comm in comms}
    with record_calls(modules, copies=False) as recorded, ExitStack() as hooks:
        if sharding.head_tensors:
            weight = sharding.head_tensors[0]
            run.size = module.get_parameter(weight).shape[sharding.rule(weight).splits[0].dim]
            set_vocabulary_shard(module, run)
            hooks.callback(set_vocabulary_shard, module, None)
        forward()
    heads = {comm.module for comm in comms if comm.argument == LOSS}
    for comm in comms:
        if comm.argument == LOSS:
            calls = run.loss_reductions[:_LOSS_REDUCTIONS]
        elif comm.module in heads and comm.side == "input" and comm.module not in recorded:
            calls = run.loss_reductions[_LOSS_REDUCTIONS:]
            run.fused_heads.add(comm.module)
        else:
            calls = [_measured(comm, call, modules[comm.module]) for call in recorded.get(comm.module, ())]
        run.calls.append(calls)
    return run


def _measured(comm: BoundaryComm, call: ModuleCall, module: nn.Module) -> tuple[int, bool]:
    """The elements that a call of the comm's module reads or returns there, and whether their gradient is needed."""
    if comm.side == "input":
        args = tuple(value for key, value in call.arguments.items() if isinstance(key, int))
        kwargs = {key: value for key, value in call.arguments.items() if isinstance(key, str)}
        activation = call.arguments[argument_key(comm.argument, module, args, kwargs=kwargs)]
    else:
        activation = call.output if isinstance(call.output, Tensor) else call.output[comm.argument]
    return activation.numel(), activation.requires_grad


def _shape_of(batch: Batch, run: _MeasuredRun) -> MicroBatchShape:
    """The shape of a measured batch; a loss reduces a number for each of its targets first."""
    source = 0 if batch.source is None else batch.source.shape[1]
    rows, tokens = batch.tokens.shape
    targets = next((numel for numel, _ in run.loss_reductions), None)
    return MicroBatchShape(rows, tokens, source, targets=targets)


def _size(
    calls: Sequence[tuple[int, bool]], shapes: Sequence[MicroBatchShape], *, order: Iterable[CountedPer]
) -> ActivationSize | None:
    """The width for each count that a size is proportional to; None if it grows differently."""
    (numel, needs_gradient), *_ = calls
    for per in order:
        counts = [shape.count(per) for shape in shapes]
        width = numel // max(counts[0], 1)
        if all(count > 0 and each == width * count for (each, _), count in zip(calls, counts, strict=True)):
            return ActivationSize(width, per, needs_gradient)
    return None
