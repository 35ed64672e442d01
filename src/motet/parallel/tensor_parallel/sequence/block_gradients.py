"""Gradients of one block on pieces of the sequence: whose are partial sums, whose are complete, and that of the stream.

The block runs as the whole and as each rank, which has a piece of the stream at both ends. A layer that is split is
whole here, and each rank has an equal share of its output in the sum over ranks.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor, nn

from motet.parallel.model_sharding import TENSOR_DIMENSION, BoundaryComm
from motet.parallel.proof.comparison import ProofMismatchError, is_close, sum_of, typical_size
from motet.parallel.proof.module_calls import ModuleCall
from motet.parallel.proof.nested_tensors import output_items
from motet.parallel.proof.part_proof import compare_border_gradients, compare_values
from motet.parallel.proof.part_run import PartProposal
from motet.parallel.tensor_parallel.sequence.piece_forward import PieceRun, copy_of_arguments, is_float, same_dropout

Argument = int | str  # Position or keyword
_ARGUMENT = "its argument "


class _BlockRun(PieceRun):
    def communicate(self, comm: BoundaryComm, name: str, x: Tensor) -> Tensor:
        if comm.operation == "copy":  # Before layers that are whole here
            return x
        is_share = self.rank is not None and comm.operation in ("sum", "scatter")
        return super().communicate(comm, name, x / self.ranks if is_share else x)


@dataclass(frozen=True)
class BlockGradients:
    """One block, the call that is repeated, and what is expected of the gradients of its parameters."""

    name: str
    block: nn.Module
    call: ModuleCall
    hidden: Argument
    output: Argument
    comms: tuple[BoundaryComm, ...]  # Without those of the ends of the stream
    in_regions: frozenset[str]  # Parameters that the proof of a region is about
    whole_modules: tuple[str, ...]  # Modules that every rank computes for all tokens

    def mistake(self, rows: int, degree: int) -> str | None:
        """A gradient that is neither a partial sum nor complete where it must be, in words."""
        block = deepcopy(self.block).requires_grad_()
        try:
            reference = self._run(block, rows, ranks=degree)
            runs = [self._run(block, rows, ranks=degree, rank=i, reference=reference) for i in range(degree)]
            compare_values(runs, reference)
            compare_border_gradients(runs, reference)
        except ProofMismatchError as mismatch:
            return str(mismatch)
        except Exception as error:  # noqa: BLE001  # whatever a model does with tensors that are too short
            return f"it cannot run again on a part of the tokens: {' '.join(str(error).split())}"
        gradients = {name: gradient for name, gradient in reference.gradients.items() if isinstance(name, str)}
        typical = typical_size(gradients.values())
        for name, gradient in gradients.items():
            parts = [run.gradients.get(name, torch.zeros_like(gradient)) for run in runs]
            if not self._is_expected(name, gradient, parts, scale=typical * sqrt(gradient.numel())):
                return f"the gradient of {name} does not follow from those of parts of the tokens"
        return None

    def _is_expected(self, name: str, complete: Tensor, parts: Sequence[Tensor], *, scale: float) -> bool:
        def is_each(factor: float) -> bool:
            return all(is_close(part, complete * factor, scale) for part in parts)

        if name.startswith(_ARGUMENT):  # What enters a region is a share of each rank here
            return is_each(1) or is_each(1 / len(parts))
        if name in self.in_regions:
            return True
        if any(name.startswith(f"{module}.") for module in self.whole_modules):
            return is_each(1)
        return is_close(sum_of(parts), complete, scale)

    def _run(
        self, block: nn.Module, rows: int, *, ranks: int, rank: int | None = None, reference: PieceRun | None = None
    ) -> PieceRun:
        ends = [
            BoundaryComm(self.name, "input", self.hidden, "split", TENSOR_DIMENSION, 1),
            BoundaryComm(self.name, "output", self.output, "gather", TENSOR_DIMENSION, 1),
        ]
        modules = {".".join(filter(None, (self.name, inner))): part for inner, part in block.named_modules()}
        run = _BlockRun(modules, PartProposal((*ends, *self.comms)), ranks=ranks, rank=rank, reference=reference)
        arguments = copy_of_arguments(self.call.argument_values)
        floats = {key: value.requires_grad_() for key, value in arguments.items() if is_float(value)}
        run.rows, run.length = rows, floats[self.hidden].shape[1]
        positional = [arguments[i] for i in range(sum(isinstance(key, int) for key in arguments))]
        keywords = {key: value for key, value in arguments.items() if isinstance(key, str)}
        differentiated = {f"{self.name}.{name}": p for name, p in block.named_parameters() if p.is_floating_point()}
        differentiated |= {f"{_ARGUMENT}{key!r}": value for key, value in floats.items() if key != self.hidden}
        with same_dropout(rows), torch.enable_grad():
            run.run(lambda: output_items(block(*positional, **keywords))[self.output], lambda: differentiated)
        return run
