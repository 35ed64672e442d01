"""Forwards of a rank that holds a piece of the sequence: do they compute what the whole sequence computes?

Whatever the rank would get from others is taken from a record of the forward of the whole sequence, and everything that
it computes is compared with that record. So ranks are proven one after another, by forwards of the module itself.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from motet.models.layout_invariant_dropout import LayoutInvariantDropoutMode
from motet.parallel.model_sharding import BoundaryComm
from motet.parallel.proof.comparison import ProofMismatchError, is_close
from motet.parallel.proof.module_calls import ModuleCall, record_calls
from motet.parallel.proof.nested_tensors import Arguments, output_items, tensors_by_path
from motet.parallel.proof.part_run import BEFORE, PartProposal, PartRun


@dataclass
class CallRecord:
    """All calls in one forward of the whole sequence, and the number of its rows."""

    calls: Mapping[str, list[ModuleCall]]
    result: Any
    rows: int


@dataclass(frozen=True)
class PieceFailure:
    """The place where the forward on a part of the tokens differs from that of all tokens."""

    problem: str
    module: str = ""  # The innermost one that ran; empty outside of the blocks
    opened: tuple[BoundaryComm, ...] = ()  # The region that it was in
    whole_input: BoundaryComm | None = None  # This communication is not needed: the tensor is no piece


class _WholeInputError(Exception):
    def __init__(self, comm: BoundaryComm) -> None:
        super().__init__("a tensor that is no piece")
        self.comm = comm


@torch.no_grad()
def record_forward(module: nn.Module, forward: Callable[[], Tensor], rows: int) -> CallRecord:
    """The calls of all modules in a forward of whole sequences."""
    with same_dropout(rows, module), record_calls(dict(module.named_modules())) as calls:
        result = forward()
    return CallRecord(calls, result, rows)


@contextmanager
def same_dropout(rows: int, module: nn.Module) -> Iterator[None]:
    """Every run draws the same masks, or its part of them."""
    with LayoutInvariantDropoutMode(0, module).for_rows(0, torch.arange(rows)):
        yield


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


class _ComparedPiece(PartRun):
    """The forward of one rank, which holds a piece of each stream. Layers that ranks split are whole here.

    It takes from the record what other ranks would send, and compares everything with it.
    """

    def __init__(self, record: CallRecord, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, rows=record.rows, **kwargs)
        self.record, self.opened = record, list[BoundaryComm]()
        # A module that reads something else than in the whole is accepted if what its caller, at this depth, makes of
        # it is right: an expert reads other tokens.
        self.suspicion: tuple[int, str] | None = None

    def call(self, name: str) -> ModuleCall:
        return self.record.calls[name][self.counts[name] - (name in self.running)]

    def enter(self, name: str, arguments: Arguments) -> Arguments:
        has_comm = (name, "input") in self.comms_at
        if has_comm or (self.lies == "split" and not self.suspicion):
            problem = self.input_difference(name, arguments)
            if problem and (has_comm or not self.running):
                raise ProofMismatchError(problem, module=name, tensor="input")
            self.suspicion = self.suspicion or ((len(self.running), problem) if problem else None)
        return super().enter(name, arguments)

    def leave(self, name: str, arguments: Arguments, output: Any) -> Any:
        output = super().leave(name, arguments, output)
        depth, problem = self.suspicion or (len(self.running), None)
        if self.lies == "split" and depth == len(self.running):
            values = self.call(name).output_values
            if difference := self.difference(output, values, f"the output of {name}"):
                raise ProofMismatchError(problem or difference, module=name, tensor="output")
            self.suspicion = None
        return output

    def set_layout(self, comm: BoundaryComm, name: str) -> None:
        super().set_layout(comm, name)
        self.opened = [*self.opened, comm] if self.lies == "parallel" else []

    def input_difference(self, name: str, arguments: Arguments) -> str | None:
        if self.counts[name] == len(self.record.calls[name]):
            return f"{name} runs more often on a part of the tokens than on all"
        return self.difference(arguments, self.call(name).argument_values, f"what {name} reads")

    def difference(self, here: Any, wanted: Any, noun: str) -> str | None:
        tensors = dict(tensors_by_path(here))
        for path, b in tensors_by_path(wanted):
            a = tensors.get(path)
            if a is not None and _is_float(a) and _is_float(b) and not self.is_piece(a, b):
                return f"{noun}, of shape {list(a.shape)} on a part of the tokens, is no part of that of all tokens"
        return None

    def is_piece(self, here: Tensor, complete: Tensor) -> bool:
        if here.shape == complete.shape:
            return is_close(here, complete)
        dims = [dim for dim, sizes in enumerate(zip(here.shape, complete.shape, strict=False)) if len(set(sizes)) > 1]
        if here.ndim != complete.ndim or len(dims) != 1 or here.shape[dims[0]] * self.ranks != complete.shape[dims[0]]:
            return False
        return is_close(here, self.piece(complete, dims[0]))

    def communicate(self, comm: BoundaryComm, name: str, x: Tensor) -> Tensor:
        if BEFORE[comm.operation] == "piece":
            call, argument = self.call(name), comm.argument
            is_input = comm.side == "input"
            complete: Tensor = (call.argument_values if is_input else output_items(call.output_values))[argument]
            if is_input and x.shape == complete.shape:
                raise _WholeInputError(comm)
            return self.arrange(complete, comm.dim)
        self.note_length(comm, x)
        return x.chunk(self.ranks, comm.dim)[self.rank or 0] if comm.operation in ("split", "scatter") else x


@torch.no_grad()
def failure_on_piece(
    module: nn.Module,
    forward: Callable[[], Tensor],
    record: CallRecord,
    *,
    comms: Sequence[BoundaryComm],
    index: int,
    degree: int,
) -> PieceFailure | None:
    """A difference between the forward of a rank, which has a piece of each stream, and the recorded one, if any."""
    names = {name: m for name, m in module.named_modules() if name in record.calls}
    run = _ComparedPiece(record, names, PartProposal(tuple(comms)), ranks=degree, rank=index)
    try:
        with same_dropout(record.rows, module), run.hooked():
            result = forward()
    except Exception as error:  # noqa: BLE001  # whatever a model does with tensors that are too short
        problem = " ".join(str(error).split()) or type(error).__name__
        whole_input = error.comm if isinstance(error, _WholeInputError) else None
        return PieceFailure(problem, run.running[-1] if run.running else "", tuple(run.opened), whole_input)
    tensors, expected = dict(tensors_by_path(result)), dict(tensors_by_path(record.result))
    if all(is_close(tensors[path], value) for path, value in expected.items() if _is_float(value)):
        return None
    return PieceFailure("the result is another one, since something outside of the blocks reads what is in them")
