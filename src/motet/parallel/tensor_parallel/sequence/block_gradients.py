"""Gradients of one block on pieces of the sequence: a thread for each rank runs forward and backward of a copy.

The threads communicate as ranks do. A layer that is split is whole here, and each rank has an equal share of its output
in the sum over ranks. What is proven is whose gradients are partial sums, whose are complete, and that of the stream.
"""

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from threading import Barrier, BrokenBarrierError, Thread
from typing import Any, cast

import torch
from torch import Tensor, nn

from motet.parallel.model_sharding import BoundaryComm, BoundaryOperation
from motet.parallel.tensor_parallel.sequence.piece_forward import (
    Argument,
    ModuleCall,
    PieceForward,
    copy_of_arguments,
    is_close,
    is_float,
    output_items,
    same_dropout,
)
from motet.precision.float64_mode import use_float64

_TIMEOUT_S = 300
_STREAM, _ARGUMENT = "its stream", "its argument "


class _RankThreads:
    """Threads that exchange tensors: each gets those of all."""

    def __init__(self, degree: int) -> None:
        self.barrier = Barrier(degree, timeout=_TIMEOUT_S)
        self.tensors: list[Any] = [None] * degree

    def exchange(self, index: int, x: Tensor) -> list[Tensor]:
        self.tensors[index] = x
        self.barrier.wait()
        tensors = list(self.tensors)
        self.barrier.wait()
        return tensors

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """The results of all ranks, or the first error that is not about another rank."""
        results: list[Any] = [None] * self.barrier.parties
        errors: list[Exception] = []

        def run_rank(index: int) -> None:
            try:
                with use_float64():
                    results[index] = function(index)
            except Exception as error:  # noqa: BLE001  # raised again in the thread that waits
                errors.append(error)
                self.barrier.abort()

        threads = [Thread(target=run_rank, args=(index,), daemon=True) for index in range(self.barrier.parties)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in sorted(errors, key=lambda e: isinstance(e, BrokenBarrierError)):
            raise error
        return results


class _SimulatedComm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *place: Any) -> Tensor:
        rank, comm = ctx.rank, ctx.comm = place
        return cast(Tensor, rank.perform(comm.operation, x, comm.dim))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.rank.perform(ctx.comm.conjugate, gradient, ctx.comm.dim), None, None


class _SimulatedRank(PieceForward):
    def __init__(self, threads: _RankThreads, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.threads, self.lies = threads, "split"

    def communicate(self, comm: BoundaryComm, name: str, x: Tensor) -> Tensor:
        share = x / self.degree if comm.operation in ("sum", "scatter") else x  # Of a layer that is whole here
        return cast(Tensor, _SimulatedComm.apply(share, self, comm))  # type: ignore[no-untyped-call]  # untyped in torch

    def perform(self, operation: BoundaryOperation, x: Tensor, dim: int) -> Tensor:
        if operation in ("copy", "split"):
            return x.view_as(x) if operation == "copy" else self.piece(x, dim).clone()
        tensors = self.threads.exchange(self.index, x.detach())
        if operation in ("gather", "replicate"):
            return torch.cat(tensors, dim)
        total = torch.stack(tensors).sum(0)
        return total if operation == "sum" else self.piece(total, dim).clone()


@dataclass(frozen=True)
class BlockGradients:
    """One block, the call that is repeated, and what is expected of the gradients of its parameters."""

    name: str
    block: nn.Module
    call: ModuleCall
    hidden: Argument
    output: int
    comms: tuple[BoundaryComm, ...]  # Without those of the ends of the stream
    in_regions: frozenset[str]  # Parameters that the proof of a region is about
    whole_modules: tuple[str, ...]  # Modules that every rank computes for all tokens

    def mistake(self, rows: int, degree: int) -> str | None:
        """A gradient that is neither a partial sum nor complete where it must be, in words."""
        hidden = self.call.argument_values[self.hidden]
        cotangent = torch.randn_like(output_items(self.call.output_values)[self.output])
        threads = _RankThreads(degree)

        def run_rank(index: int) -> dict[str, Tensor]:
            modules = {f"{self.name}.{n}" if n else self.name: m for n, m in deepcopy(self.block).named_modules()}
            run = _SimulatedRank(threads, modules, self.comms, index=index, degree=degree)
            return self._gradients(run.piece(hidden, 1), run.piece(cotangent, 1), rows=rows, run=run)

        try:
            complete, parts = self._gradients(hidden, cotangent, rows=rows), threads.run(run_rank)
        except Exception as error:  # noqa: BLE001  # whatever a model does with tensors that are too short
            return f"it cannot run again on a part of the tokens: {' '.join(str(error).split())}"
        norm = float(torch.stack([torch.linalg.vector_norm(g) for g in complete.values()]).square().sum().sqrt())
        numel = sum(g.numel() for g in complete.values())
        for name, gradient in complete.items():
            scale = norm * (gradient.numel() / numel) ** 0.5
            if not self._is_expected(name, gradient, [part[name] for part in parts], scale=scale):
                return f"the gradient of {name} does not follow from those of parts of the tokens"
        return None

    def _is_expected(self, name: str, complete: Tensor, parts: list[Tensor], *, scale: float) -> bool:
        def is_each(factor: float) -> bool:
            return all(is_close(part, complete * factor, scale) for part in parts)

        if name == _STREAM:
            return is_close(torch.cat(parts, 1), complete, scale)
        if name.startswith(_ARGUMENT):  # What enters a region is a share of each rank here
            return is_each(1) or is_each(1 / len(parts))
        if name in self.in_regions:
            return True
        if any(name.startswith(f"{module}.") for module in self.whole_modules):
            return is_each(1)
        return is_close(torch.stack(parts).sum(0), complete, scale)

    def _gradients(
        self, hidden: Tensor, cotangent: Tensor, *, rows: int, run: "_SimulatedRank | None" = None
    ) -> dict[str, Tensor]:
        block = run.modules[self.name] if run else deepcopy(self.block)
        parameters = {f"{self.name}.{n}": p for n, p in block.named_parameters() if p.is_floating_point()}
        copies = copy_of_arguments(self.call.argument_values)
        arguments = {key: value.requires_grad_() if is_float(value) else value for key, value in copies.items()}
        arguments[self.hidden] = hidden.clone().requires_grad_()
        positional = [arguments[i] for i in range(sum(isinstance(key, int) for key in arguments))]
        keywords = {key: value for key, value in arguments.items() if isinstance(key, str)}
        with same_dropout(rows), torch.enable_grad(), run.hooked() if run else nullcontext():
            for parameter in parameters.values():
                parameter.requires_grad_()
            output = output_items(block(*positional, **keywords))[self.output]
            others = {key: value for key, value in arguments.items() if is_float(value) and key != self.hidden}
            inputs = {_STREAM: arguments[self.hidden], **{f"{_ARGUMENT}{key!r}": v for key, v in others.items()}}
            inputs |= parameters
            gradients = torch.autograd.grad(output, [*inputs.values()], cotangent, allow_unused=True)
        return {n: torch.zeros_like(t) if g is None else g for (n, t), g in zip(inputs.items(), gradients, strict=True)}
