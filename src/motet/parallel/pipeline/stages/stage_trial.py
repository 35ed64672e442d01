"""Runs of a module as the whole and as one stage, in one process, for a proof of its stages.

While a stage runs, every parameter that it does not hold is NaN, and what it receives is what the whole has there.
Before the stages run, from the last to the first, the whole module runs with NaN alone, so that an attribute which a
block leaves for a later one has no value, either.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor, nn

from motet.core.errors import InputError, check_input
from motet.models.blocks import named_blocks
from motet.models.layout_invariant_dropout import LayoutInvariantDropoutMode
from motet.parallel.model_sharding import ModelSharding
from motet.parallel.pipeline.stages.stage_module import PipelineStages
from motet.parallel.process.module_inventory import persistent_buffers
from motet.parallel.proof.comparison import ProofMismatchError, is_close, text_of_failure
from motet.parallel.proof.module_calls import ModuleCall, record_calls
from motet.parallel.proof.nested_tensors import Path
from motet.parallel.proof.proof_values import local_values, replaced_items

LOSS: Path = ("loss",)
is_same = partial(is_close, nan_is_equal=True)


@dataclass(frozen=True)
class SizedForward:
    """A forward of a module to its loss, and the sizes of its micro-batch, such as `rows` and `tokens`."""

    forward: Callable[[], Tensor]
    sizes: Mapping[str, int]


@dataclass
class TrialRun:
    """A forward of the whole module, or of one stage."""

    calls: dict[str, list[ModuleCall]]  # Of blocks
    buffers: dict[str, Tensor]  # After it
    results: dict[Path, Tensor]  # The loss at LOSS, or what a stage sends, by the path in the arguments of a block
    received: dict[Path, Tensor] = field(default_factory=dict)

    def call(self, block: str) -> ModuleCall:
        """The call of a block."""
        return self.calls[block][0]

    def differentiate(self, gradients: Mapping[Path, Tensor | None]) -> dict[Path, Tensor | None]:
        """Add to the gradients of parameters, from these of results; returns those of what a stage received."""
        pairs = [(tensor, gradients.get(path)) for path, tensor in self.results.items() if tensor.requires_grad]
        pairs = [(tensor, gradient) for tensor, gradient in pairs if gradient is not None or LOSS in self.results]
        if pairs:
            tensors, gradients_of_results = zip(*pairs, strict=True)
            torch.autograd.backward(tensors, gradients_of_results, retain_graph=True)
        return {path: tensor.grad for path, tensor in self.received.items()}


class StageTrials:
    """A module with random values in float64, its forwards of several sizes, and a run of each as the whole."""

    def __init__(self, module: nn.Module, forwards: Sequence[SizedForward]) -> None:
        self.module, self.forwards = module, forwards
        self.blocks = named_blocks(module)
        self._dropout = LayoutInvariantDropoutMode(0, module)
        self._parameters = dict(module.named_parameters(remove_duplicate=False))
        self.buffers_before = self._buffers()
        self.wholes = [self._run_whole(index) for index in range(len(forwards))]
        self.names = list(self.wholes[0].calls)  # Of the blocks, in the order in which they are called
        self._check_calls()

    def _check_calls(self) -> None:
        """Refuse a module whose blocks cannot be divided among stages."""
        self.check(
            self.blocks,
            "it has no list of blocks, which are items of an nn.ModuleList that share no parameters, or of an "
            "nn.Sequential of modules with modules inside",
        )
        self.check(
            self.names, f"a forward calls none of its {len(self.blocks)} blocks, such as {next(iter(self.blocks))}"
        )
        for name, calls in self.wholes[0].calls.items():
            kind = type(self.blocks[name]).__name__
            check_input(
                len(calls) == 1,
                f"layout.pp cannot cut {kind} {name}: a forward calls it several times, and a stage computes a block "
                "once; leave layout.pp out, or give each call another block",
            )
        orders = [list(run.calls) for run in self.wholes]
        self.check(orders.count(self.names) == len(orders), "micro-batches of other sizes call other blocks")
        losses = [run.results[LOSS] for run in self.wholes]
        self.check(all(loss.isfinite().all() for loss in losses), "its loss is not finite with random parameters")
        for name in self.names:
            call = self.wholes[0].call(name)
            self.check(call.left, f"block {name} returns {type(call.output).__name__}, in which no tensor was seen")

    def check(self, is_valid: object, problem: str) -> None:
        """Refuse the model unless it is valid."""
        if not is_valid:
            self.refuse(problem)

    def refuse(self, problem: str) -> NoReturn:
        """Refuse the model."""
        name = type(self.module).__name__
        raise InputError(f"layout.pp cannot cut {name} into stages: {problem}; leave layout.pp out")

    def _run_whole(self, index: int) -> TrialRun:
        with self._inside(index, "as a whole") as calls:
            loss = self.forwards[index].forward()
            return TrialRun(calls, self._buffers(), {LOSS: loss})

    def gradients_of_whole(self, index: int) -> dict[str, Tensor]:
        """The gradients of parameters in the whole, whose forward has run before."""
        with self._inside(index, "as a whole"):
            self.wholes[index].differentiate({})
        return self.pop_gradients()

    def pop_gradients(self) -> dict[str, Tensor]:
        """The gradients that parameters have, which have none after it."""
        gradients = {name: p.grad for name, p in self.module.named_parameters() if p.grad is not None}
        self.module.zero_grad()
        return gradients

    def expected_after(self, index: int, blocks: range) -> Mapping[Path, Tensor]:
        """The arguments of the block after these in the whole, or its loss."""
        run = self.wholes[index]
        return run.results if blocks.stop == len(self.names) else run.call(self.names[blocks.stop]).entered

    def forget(self, index: int) -> None:
        """Let NaN be in whatever a forward leaves in attributes."""
        forward = self.forwards[index].forward
        # With NaN as values a module may fail in any way, and then has left what it can
        with self._without(()), self._repeatable(index), self._copied_buffers(), torch.no_grad(), suppress(Exception):
            forward()

    @contextmanager
    def stage_run(
        self, index: int, stage: int, held: Collection[str], *, sharding: ModelSharding
    ) -> Iterator[TrialRun]:
        """Run one stage, which receives what the whole has there; a backward is done inside.

        `held` are its parameters.
        """
        wires_in, wires_out = (((), *sharding.wires, ())[stage + i] for i in (0, 1))
        paths, first = [wire.place for wire in wires_out] or [LOSS], self.names[sharding.stages[stage].start]
        entered = self.wholes[index].call(first).entered
        received = {wire.place: entered[wire.place].clone().requires_grad_(wire.needs_gradient) for wire in wires_in}
        stages = PipelineStages(self.module, sharding)
        try:
            with self._without(held), self._inside(index, f"as a stage from {first} on") as calls:
                sent = stages.run(stage, self.forwards[index].forward, list(received.values()))
                yield TrialRun(calls, self._buffers(), dict(zip(paths, sent, strict=False)), received)
        finally:
            stages.remove()

    @contextmanager
    def _inside(self, index: int, what: str) -> Iterator[dict[str, list[ModuleCall]]]:
        """Record a forward, which can be repeated; refuse the module if it raises something."""
        try:
            with self._repeatable(index), self._copied_buffers(), record_calls(self.blocks) as calls:
                yield calls
        except (InputError, ProofMismatchError):
            raise
        except Exception as error:  # noqa: BLE001  # a module may raise anything, in particular when its tensors are NaN
            self.refuse(f"it fails {what}, in float64 with random parameters ({text_of_failure(error)})")

    def _repeatable(self, index: int) -> AbstractContextManager[object]:
        """Inside, a forward draws the same dropout masks each time, and a backward those of its forward."""
        return self._dropout.for_rows(0, torch.arange(self.forwards[index].sizes["rows"]))

    def _without(self, held: Collection[str]) -> AbstractContextManager[None]:
        """Inside, parameters are NaN unless they are held under one of their names."""
        kept = {self._parameters[name] for name in held}
        missing = {
            name: nn.Parameter(torch.full((), torch.nan, dtype=p.dtype).expand(p.shape), requires_grad=False)
            for name, p in self._parameters.items()
            if p not in kept and p.is_floating_point()
        }
        return local_values(self.module, missing)

    def _buffers(self) -> dict[str, Tensor]:
        return {name: buffer.clone() for name, buffer in persistent_buffers(self.module).items()}

    def _copied_buffers(self) -> AbstractContextManager[None]:
        """Inside, buffers are copies, so that those of the module keep their values."""
        copies = {buffer: buffer.clone() for buffer in self.module.buffers()}
        parts = [part._buffers for part in self.module.modules()]
        return replaced_items([(of, {name: b if b is None else copies[b] for name, b in of.items()}) for of in parts])
