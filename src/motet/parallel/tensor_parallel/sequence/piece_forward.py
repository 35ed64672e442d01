"""Forwards of a rank that holds a piece of the sequence: do they compute what the whole sequence computes?

Whatever the rank would get from others is taken from a record of the forward of the whole sequence, and everything that
it computes is compared with that record. So ranks are proven one after another, by forwards of the module itself.
"""

from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from motet.models.blocks import find_blocks
from motet.models.dropout_mask import Spans
from motet.models.layout_invariant_dropout import LayoutInvariantDropoutMode, row_split
from motet.parallel.model_sharding import BOUNDARY_OPERATIONS, BoundaryComm, BoundarySide
from motet.parallel.tensor_parallel.dropout_split import split_by_tokens
from motet.parallel.torch_private import tree_leaves, tree_map_only

_TOLERANCE = 1e-12  # Of the norm of a difference, relative to the norm of the whole
Argument = int | str  # Position or keyword


@dataclass(frozen=True)
class ModuleCall:
    """A call of a module in the forward of the whole sequence."""

    arguments: Mapping[Argument, Any]
    output: Any
    argument_values: Mapping[Argument, Any]  # As they were in the call: a tensor may be changed in place afterwards
    output_values: Any
    place: tuple[int, int]  # Numbers of its begin and its end among those of all calls


@dataclass
class CallRecord:
    """All calls in one forward of the whole sequence, and the number of its rows."""

    calls: dict[str, list[ModuleCall]] = field(default_factory=lambda: defaultdict(list))
    result: Any = None
    rows: int = 0


@dataclass(frozen=True)
class PieceFailure:
    """The place where the forward on a part of the tokens differs from that of all tokens."""

    problem: str
    module: str = ""  # The innermost one that ran; empty outside of the blocks
    opened: tuple[BoundaryComm, ...] = ()  # The region that it was in
    whole_input: BoundaryComm | None = None  # This communication is not needed: the tensor is no piece


class _PieceMismatchError(Exception):
    pass


class _WholeInputError(Exception):
    def __init__(self, comm: BoundaryComm) -> None:
        super().__init__("a tensor that is no piece")
        self.comm = comm


def is_close(a: Tensor, b: Tensor, scale: float = 0.0) -> bool:
    """Whether two tensors differ by rounding alone; `scale` is a norm below which b counts as rounding."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    difference = torch.linalg.vector_norm(torch.where(a == b, 0, a - b))  # Both may be infinite, as in masks
    return bool(difference <= _TOLERANCE * max(float(torch.linalg.vector_norm(b.masked_fill(b.isinf(), 0))), scale))


def _arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[Argument, Any]:
    values: dict[Argument, Any] = dict(enumerate(args))
    values.update(kwargs)
    return values


class _HookedForward(ABC):
    """Hooks around each call of some modules."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.modules, self.running, self.counts = modules, list[str](), Counter[str]()

    @contextmanager
    def hooked(self) -> Iterator[None]:
        with ExitStack() as hooks:
            for name, module in self.modules.items():
                enter, leave = partial(self._enter, name), partial(self._leave, name)
                hooks.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(leave, with_kwargs=True).remove)
            yield

    def _enter(self, name: str, *call: Any) -> Any:
        _, args, kwargs = call
        values = self.enter(name, _arguments(args, kwargs))
        self.running.append(name)
        self.counts[name] += 1
        return tuple(values[i] for i in range(len(args))), {key: values[key] for key in kwargs}

    def _leave(self, name: str, *call: Any) -> Any:
        _, args, kwargs, output = call
        output = self.leave(name, _arguments(args, kwargs), output)
        self.running.pop()
        return output

    @abstractmethod
    def enter(self, name: str, arguments: dict[Argument, Any]) -> Mapping[Argument, Any]:
        """The arguments with which a call goes on."""

    @abstractmethod
    def leave(self, name: str, arguments: dict[Argument, Any], output: Any) -> Any:
        """Replace what a call returns."""


class _CallRecorder(_HookedForward):
    def __init__(self, module: nn.Module) -> None:
        super().__init__(dict(module.named_modules()))
        self.blocks = set(find_blocks(module))
        self.record, self.begun, self.number = CallRecord(), list[tuple[int, dict[Argument, Any]]](), 0

    def enter(self, name: str, arguments: dict[Argument, Any]) -> Mapping[Argument, Any]:
        self.number += 1
        is_block = self.modules[name] in self.blocks  # Which runs again, so that a cache must be that of its call
        self.begun.append((self.number, copy_of_arguments(arguments) if is_block else _snapshot(arguments)))
        return arguments

    def leave(self, name: str, arguments: dict[Argument, Any], output: Any) -> Any:
        self.number += 1
        begin, values = self.begun.pop()
        call = ModuleCall(arguments, output, values, _snapshot(output), (begin, self.number))
        self.record.calls[name].append(call)
        return output


def _snapshot(values: Any) -> Any:
    return tree_map_only(Tensor, lambda t: t.detach().clone(), values)


def copy_of_arguments(arguments: Mapping[Argument, Any]) -> dict[Argument, Any]:
    """The arguments with copies of tensors and objects, such as a cache of keys, as far as they can be copied."""
    copies = dict[Argument, Any]()
    for key, value in arguments.items():
        try:
            copies[key] = deepcopy(value)
        except (TypeError, RuntimeError, AttributeError):
            copies[key] = _snapshot(value)
    return copies


def record_calls(module: nn.Module, forward: Callable[[], Tensor], rows: int) -> CallRecord:
    """The calls of all modules in a forward of whole sequences."""
    recorder = _CallRecorder(module)
    recorder.record.rows = rows
    with recorder.hooked(), same_dropout(rows, module):
        recorder.record.result = forward()
    return recorder.record


@contextmanager
def same_dropout(rows: int, module: nn.Module | None = None) -> Iterator[None]:
    """Every run draws the same masks, or its part of them."""
    with LayoutInvariantDropoutMode(0, module).for_rows(0, torch.arange(rows)):
        yield


def is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


class PieceForward(_HookedForward):
    """The forward of one rank, which holds a piece of each stream; subclasses communicate."""

    def __init__(
        self, modules: Mapping[str, nn.Module], comms: Sequence[BoundaryComm], *, index: int, degree: int
    ) -> None:
        super().__init__(modules)
        self.index, self.degree, self.length, self.lies = index, degree, 0, "same"
        self.opened: list[BoundaryComm] = []
        self.comms: dict[tuple[str, BoundarySide], list[BoundaryComm]] = defaultdict(list)
        self.shared: dict[BoundaryComm, tuple[Tensor, Tensor]] = {}  # What was communicated, and what came of it
        for comm in comms:
            for name in (comm.module, *comm.shared_by):
                self.comms[name, comm.side].append(comm)

    @abstractmethod
    def communicate(self, comm: BoundaryComm, name: str, x: Tensor) -> Tensor:
        """Do a comm where module `name` reads or returns `x`."""

    def pass_boundaries(self, name: str, side: BoundarySide, values: dict[Argument, Any]) -> None:
        for comm in self.comms[name, side]:
            sent, received = self.shared.get(comm, (None, None))
            readable = [key for key, x in values.items() if x is not None and (x is sent or x is received)]
            if name in comm.shared_by and readable:
                values[readable[0]] = received
                continue
            x = values[comm.argument]
            values[comm.argument] = self.communicate(comm, name, x)
            self.shared[comm] = x, values[comm.argument]
            self.lies = BOUNDARY_OPERATIONS[comm.operation, side][1]
            self.opened = [*self.opened, comm] if self.lies == "parallel" else []

    def enter(self, name: str, arguments: dict[Argument, Any]) -> Mapping[Argument, Any]:
        self.pass_boundaries(name, "input", arguments)
        return arguments

    def leave(self, name: str, arguments: dict[Argument, Any], output: Any) -> Any:
        if not self.comms[name, "output"]:
            return output
        several = output_items(output)
        self.pass_boundaries(name, "output", cast(dict[Argument, Any], several))
        return type(output)(several.values()) if isinstance(output, tuple | list) else several[0]

    def piece(self, x: Tensor, dim: int) -> Tensor:
        """The piece of a tensor on this rank."""
        return x.chunk(self.degree, dim)[self.index]

    def split_row(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], Spans]:
        """The shape of a whole row for dropout, and where it is here."""
        if self.lies == "split":
            return split_by_tokens(self.degree, self.index)(shape)
        return shape, [[(0, size)] for size in shape]

    @contextmanager
    def hooked(self) -> Iterator[None]:
        token = row_split.set(self.split_row)
        try:
            with super().hooked():
                yield
        finally:
            row_split.reset(token)


class _ComparedPiece(PieceForward):
    """Takes from the record what other ranks would send, and compares everything with it."""

    def __init__(self, record: CallRecord, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.record = record
        # A module that reads something else than in the whole is accepted if what its caller, at this depth, makes of
        # it is right: an expert reads other tokens.
        self.suspicion: tuple[int, str] | None = None

    def call(self, name: str) -> ModuleCall:
        return self.record.calls[name][self.counts[name] - (name in self.running)]

    def enter(self, name: str, arguments: dict[Argument, Any]) -> Mapping[Argument, Any]:
        has_comm = bool(self.comms[name, "input"])
        if has_comm or (self.lies == "split" and not self.suspicion):
            problem = self.input_difference(name, arguments)
            if problem and (has_comm or not self.running):
                raise _PieceMismatchError(problem)
            self.suspicion = self.suspicion or ((len(self.running), problem) if problem else None)
        return super().enter(name, arguments)

    def leave(self, name: str, arguments: dict[Argument, Any], output: Any) -> Any:
        output = super().leave(name, arguments, output)
        depth, problem = self.suspicion or (len(self.running), None)
        if self.lies == "split" and depth == len(self.running):
            values = self.call(name).output_values
            if difference := self.difference(output, values, f"the output of {name}"):
                raise _PieceMismatchError(problem or difference)
            self.suspicion = None
        return output

    def input_difference(self, name: str, arguments: Mapping[Argument, Any]) -> str | None:
        if self.counts[name] == len(self.record.calls[name]):
            return f"{name} runs more often on a part of the tokens than on all"
        values = self.call(name).argument_values
        return self.difference([arguments.get(key) for key in values], [*values.values()], f"what {name} reads")

    def difference(self, here: Any, wanted: Any, noun: str) -> str | None:
        for a, b in zip(tree_leaves(here), tree_leaves(wanted), strict=False):
            if is_float(a) and is_float(b) and not self.is_piece(a, b):
                return f"{noun}, of shape {list(a.shape)} on a part of the tokens, is no part of that of all tokens"
        return None

    def is_piece(self, here: Tensor, complete: Tensor) -> bool:
        if here.shape == complete.shape:
            return is_close(here, complete)
        dims = [dim for dim, sizes in enumerate(zip(here.shape, complete.shape, strict=False)) if len(set(sizes)) > 1]
        if here.ndim != complete.ndim or len(dims) != 1 or here.shape[dims[0]] * self.degree != complete.shape[dims[0]]:
            return False
        return is_close(here, self.piece(self.join_pieces(complete, dims[0]), dims[0]))

    def join_pieces(self, complete: Tensor, dim: int) -> Tensor:
        """The pieces of all ranks, joined: where rows and tokens are one dimension, tokens are in another order."""
        rows = self.record.rows
        if dim or rows == 1 or complete.shape[0] != rows * self.length:
            return complete
        pieces: Tensor = complete.unflatten(0, (rows, self.degree, -1)).transpose(0, 1)
        return pieces.flatten(0, 2)

    def communicate(self, comm: BoundaryComm, name: str, x: Tensor) -> Tensor:
        call = self.call(name)
        if comm.operation in ("gather", "replicate"):
            if comm.side == "output":
                return cast(Tensor, output_items(call.output_values)[cast(int, comm.argument)])
            complete: Tensor = call.argument_values[comm.argument]
            if x.shape == complete.shape:
                raise _WholeInputError(comm)
            return self.join_pieces(complete, comm.dim)
        if comm.operation == "split" and self.lies == "same" and comm.side == "input":
            self.length = x.shape[comm.dim]
        return self.piece(x, comm.dim) if comm.operation in ("split", "scatter") else x


def output_items(output: Any) -> dict[int, Any]:
    """Outputs of a module by their indices; a single tensor has the index 0."""
    return dict(enumerate(output if isinstance(output, tuple | list) else (output,)))


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
    run = _ComparedPiece(record, names, comms, index=index, degree=degree)
    try:
        with same_dropout(record.rows, module), run.hooked():
            result = forward()
    except Exception as error:  # noqa: BLE001  # whatever a model does with tensors that are too short
        problem = " ".join(str(error).split()) or type(error).__name__
        whole_input = error.comm if isinstance(error, _WholeInputError) else None
        return PieceFailure(problem, run.running[-1] if run.running else "", tuple(run.opened), whole_input)
    leaves = zip(tree_leaves(result), tree_leaves(record.result), strict=True)
    if all(is_close(a, b) for a, b in leaves if is_float(b)):
        return None
    return PieceFailure("the result is another one, since something outside of the blocks reads what is in them")
