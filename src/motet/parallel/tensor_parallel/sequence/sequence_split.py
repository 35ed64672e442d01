"""Sequence parallelism: the residual stream of a list of blocks is split along tokens, where a proof allows it.

Each rank holds a piece of the sequence from the input of the first block to the output of the last. Column layers
gather the pieces, row layers reduce-scatter their sums, and a module that mixes tokens but is not split gets the whole
sequence. The proof finds the communication that a list of blocks needs by running it on pieces (sequence_split.py).
Where a piece computes other values than the whole, the proof changes the communication around that place, until nothing
differs. If nothing is left to change, the stream stays whole, and a sentence gives the reason.

Forwards of a rank that holds a piece of the sequence, compared with those of the whole sequence.

Tensors that the rank would get from others come from a record of the forward of the whole sequence, and all tensors
that it computes are compared with that record. So ranks are proven one after another, by forwards of the module itself.

The residual stream of one list of blocks, and the communication with which ranks split it along tokens.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from motet.models.layout_invariant_dropout import LayoutInvariantDropoutMode
from motet.models.user_module import named_blocks
from motet.parallel.model_sharding import (
    TENSOR_DIMENSION,
    ActivationSplit,
    BoundaryComm,
    BoundarySide,
    DimensionSplit,
    ShardRule,
)
from motet.parallel.proof.comparison import ProofMismatchError, is_close
from motet.parallel.proof.module_calls import Arguments, ModuleCall, output_items, record_calls, tensors_by_path
from motet.parallel.proof.part_proof import BEFORE, PartProof, PartProposal, PartRun
from motet.parallel.proof.proof_values import random_values
from motet.parallel.tensor_parallel.split_proposals import is_inside
from motet.parallel.tensor_parallel.split_regions import ProvenSplits, SplitRegion, WholeRegion


@dataclass
class CallRecord:
    """All calls in one forward of the whole sequence, and the number of its rows."""

    calls: Mapping[str, list[ModuleCall]]
    result: Any
    rows: int
    row_parts: Sequence[Sequence[Tensor]] = ()  # Tensors of which code needs complete rows, by call


@dataclass(frozen=True)
class PieceFailure:
    """The place where the forward on a part of the tokens differs from that of all tokens."""

    problem: str
    module: str = ""  # The innermost module that ran; empty outside of the blocks
    opened: tuple[BoundaryComm, ...] = ()  # The region that it was in
    whole_input: BoundaryComm | None = None  # This communication is not needed: the tensor is not a piece


class _WholeInputError(Exception):
    def __init__(self, comm: BoundaryComm) -> None:
        super().__init__("a tensor that is not a piece")
        self.comm = comm


@torch.no_grad()
def record_forward(module: nn.Module, forward: Callable[[], Tensor], rows: int) -> CallRecord:
    """The calls of all modules in a forward of whole sequences."""
    run = PartRun({}, PartProposal(()), ranks=1)
    with same_dropout(rows, module), record_calls(dict(module.named_modules())) as calls, run.hooked():
        result = forward()
    return CallRecord(calls, result, rows, run.row_parts)


@contextmanager
def same_dropout(rows: int, module: nn.Module) -> Iterator[None]:
    """Every run draws the same masks, or its part of them."""
    with LayoutInvariantDropoutMode(0, module).for_rows(0, torch.arange(rows)):
        yield


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


class _ComparedPiece(PartRun):
    """The forward of one rank, which holds a piece of each stream. Layers that ranks split are whole here.

    It takes from the record the tensors that other ranks would send, and compares everything with it.
    """

    def __init__(self, record: CallRecord, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, rows=record.rows, **kwargs)
        self.record, self.opened = record, list[BoundaryComm]()
        # A module that reads other values than in the whole is accepted if the result of its caller, at this depth,
        # is right: an expert reads other tokens.
        self.suspicion: tuple[int, str] | None = None

    def complete_rows(self, index: int) -> Sequence[Tensor]:
        """The tensors of the whole sequence in one call of `on_whole_rows`."""
        return self.record.row_parts[index]

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
        return self.difference(arguments, self.call(name).argument_values, f"the input of {name}")

    def difference(self, here: Any, wanted: Any, noun: str) -> str | None:
        tensors = dict(tensors_by_path(here))
        for path, b in tensors_by_path(wanted):
            a = tensors.get(path)
            if a is not None and _is_float(a) and _is_float(b) and not self.is_piece(a, b):
                return f"{noun}, of shape {list(a.shape)} on a part of the tokens, is not a part of that of all tokens"
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
    return PieceFailure("the result differs, since something outside of the blocks reads tensors inside of them")


_PARTIAL = ShardRule(
    partial_over=(*ShardRule().partial_over, TENSOR_DIMENSION),
    reason="whole; each rank uses it for its part of the tokens",
)
Argument = int | str  # Position or keyword
_Splits = tuple[DimensionSplit, ...]
_ALONG_TOKENS: _Splits = (DimensionSplit(1, TENSOR_DIMENSION),)
_Place = tuple[str, Argument, tuple[str, ...]]  # A module, its argument, and other modules that read the same tensor


class BlockStream:
    """Blocks that run one after another, and the findings about the communication that they need."""

    def __init__(
        self, module: nn.Module, blocks: Sequence[str], regions: Sequence[SplitRegion], *, records: Sequence[CallRecord]
    ) -> None:
        self.module, self.blocks, self.records, self.calls = module, blocks, records, records[0].calls
        self.regions = [region for region in regions if any(map(self._path, _layers(region)))]
        self.columns = [columns for region in self.regions for columns in region.columns]
        self.rows = [row for region in self.regions for row in region.rows]
        self.hidden: dict[str, Argument] = {}  # The argument of each block that is the stream
        self.output: Argument = 0  # The index in a block's output
        # By paths in a block, which all blocks have in common.
        self._levels: dict[str, int] = {}  # Number of modules around its column layers at which a tensor is gathered
        self._unsplit: set[tuple[str, Argument]] = set()  # Whole arguments of column layers, or modules that mix tokens
        self._mixing: set[str] = set()  # Modules that get the whole sequence
        self._tried: set[str] = set()

    def problem(self, degree: int) -> str | None:
        """The reason why ranks cannot split this as a stream of tokens, if there is one."""
        for region in self.regions:
            if not region.columns or not all(map(self._path, _layers(region))):
                return f"the split of {region.module or 'the model'} reaches beyond its blocks"
        problems = (self._chain_problem(record, degree) for record in self.records)
        if problem := next((problem for problem in problems if problem), None):
            return problem
        rows = (row for row in self.rows if self._tokens_dim(row, "output", 0) is None)
        return next((f"the output of {row} has no dimension of tokens" for row in rows), None)

    def _chain_problem(self, record: CallRecord, degree: int) -> str | None:
        calls = [record.calls[name] for name in self.blocks]
        for name, calls_of_block in zip(self.blocks, calls, strict=True):
            if len(calls_of_block) != 1:
                return f"{name} runs {len(calls_of_block)} times in a forward"
        links = [_links(a[0], b[0]) for a, b in pairwise(calls)]
        for name, pairs in zip(self.blocks[1:], links, strict=True):
            if not pairs:
                return f"{name} does not read the output of the block before it"
        first = links[0] if links else _same_shapes(calls[0][0])
        if not first:
            return f"no argument of {self.blocks[0]} has the shape of its output"
        self.output, argument = first[0]
        self.hidden = dict(zip(self.blocks, (argument, *(pairs[0][1] for pairs in links)), strict=True))
        ends = calls[0][0].arguments.get(argument), output_items(calls[-1][0].output).get(self.output)
        shapes = {tuple(each.shape) if isinstance(each, Tensor) else () for each in ends}
        rows, length, *_ = (*next(iter(shapes)), 0, 0)
        if len(shapes) != 1 or rows != record.rows or length % degree:
            return f"{degree} ranks cannot split activations of shape {sorted(shapes)} along dimension 1"
        return None

    # --- the communication for the split ---------------------------------------------------------------

    def change_comms(self, failure: PieceFailure) -> bool:
        """Change the communication around the place of a failure; False if nothing is left to try."""
        if comm := failure.whole_input:
            self._unsplit.add((self._key(comm), comm.argument if comm.operation == "replicate" else 0))
            return True
        if failure.opened:
            return self._gather_further_out([comm for comm in failure.opened if comm.operation == "gather"])
        return self._surround(failure.module)

    def _gather_further_out(self, comms: Sequence[BoundaryComm]) -> bool:
        columns = {self._path(columns[0]): columns for columns in self.columns}  # Columns of one of the blocks
        levels = {key: self._levels.get(key, 0) + 1 for key in map(self._key, comms)}
        levels = {key: level for key, level in levels.items() if level < len(self._places(columns[key]))}
        self._levels.update(levels)
        return bool(levels)

    def _surround(self, module: str) -> bool:
        """Give a module the whole sequence; if that was of no use, the module around it."""
        while (path := self._path(module)) in self._tried:
            self._mixing.discard(path)
            module = module.rpartition(".")[0]
        inside = [columns for columns in self.columns if is_inside(columns[0], module)]
        if not path or inside or any(is_inside(row, module) for row in self.rows):
            comms = [comm for columns in inside if path for comm in [self._opening(columns)]]
            return self._gather_further_out([comm for comm in comms if comm.operation == "gather"])
        self._tried.add(path)
        self._mixing.add(path)
        return True

    def comms(self) -> list[BoundaryComm]:
        """The communication of its blocks, in the order of a forward."""
        first, last = self.blocks[0], self.blocks[-1]
        comms = [
            BoundaryComm(first, "input", self.hidden[first], "split", TENSOR_DIMENSION, 1),
            BoundaryComm(last, "output", self.output, "gather", TENSOR_DIMENSION, 1),
            *map(self._opening, self.columns),
            *(comm for module in self.mixing_modules() for comm in self._comms_around(module)),
        ]
        for row in self.rows:
            dim = self._tokens_dim(row, "output", 0)
            comms.append(BoundaryComm(row, "output", 0, "scatter", TENSOR_DIMENSION, -1 if dim is None else dim))
        return sorted(comms, key=lambda comm: self.calls[comm.module][0].place[comm.side == "output"])

    def _opening(self, columns: tuple[str, ...]) -> BoundaryComm:
        places, key = self._places(columns), self._path(columns[0])
        module, argument, readers = places[self._levels.get(key, 0)]
        dim = self._tokens_dim(module, "input", argument)
        if dim is None or (key, 0) in self._unsplit:
            module, argument, readers = places[0]
            return BoundaryComm(module, "input", argument, "copy", TENSOR_DIMENSION, shared_by=readers)
        return BoundaryComm(module, "input", argument, "gather", TENSOR_DIMENSION, dim, readers)

    def _places(self, columns: tuple[str, ...]) -> list[_Place]:
        """Places where the input of columns may be gathered: themselves, and the input of modules around them."""
        argument, tensor = next((k, v) for k, v in self.calls[columns[0]][0].arguments.items() if isinstance(v, Tensor))
        places: list[_Place] = [(columns[0], argument, columns[1:])]
        module = columns[0].rpartition(".")[0]
        while self._path(module):
            calls = self.calls.get(module, []) if all(is_inside(layer, module) for layer in columns) else []
            arguments = [key for call in calls[:1] for key, value in call.arguments.items() if value is tensor]
            places += [(module, argument, columns) for argument in arguments[:1]]
            module = module.rpartition(".")[0]
        return places

    def _comms_around(self, module: str) -> Iterator[BoundaryComm]:
        call, path = self.calls[module][0], self._path(module)
        for argument in call.arguments:
            dim = self._tokens_dim(module, "input", argument)
            if dim is not None and (path, argument) not in self._unsplit:
                yield BoundaryComm(module, "input", argument, "replicate", TENSOR_DIMENSION, dim)
        for index in output_items(call.output):
            dim = self._tokens_dim(module, "output", index)
            if dim is not None:
                yield BoundaryComm(module, "output", index, "split", TENSOR_DIMENSION, dim)

    def mixing_modules(self) -> list[str]:
        """Modules that every rank computes for the whole sequence."""
        names = (f"{block}.{path}" for block in self.blocks for path in sorted(self._mixing))
        return [name for name in names if name in self.calls]

    def _tokens_dim(self, module: str, side: BoundarySide, key: Argument) -> int | None:
        """The dimension of tokens in a tensor [R, T, H] or [R T, H] that a module reads or returns, if it has one."""
        dims = set[int | None]()
        for record in self.records:
            first, call = record.calls[self.blocks[0]][0], record.calls[module][0]
            rows, length, *_ = first.arguments[self.hidden[self.blocks[0]]].shape
            value = call.arguments[key] if side == "input" else output_items(call.output)[key]
            shape = value.shape if isinstance(value, Tensor) and value.is_floating_point() else ()
            is_flat = len(shape) == 2 and shape[0] == rows * length
            dims.add(1 if len(shape) == 3 and shape[:2] == (rows, length) else 0 if is_flat else None)
        return dims.pop() if len(dims) == 1 else None

    def _path(self, module: str) -> str:
        """The path of a module within its block; empty for others."""
        return next((module.removeprefix(f"{block}.") for block in self.blocks if module.startswith(f"{block}.")), "")

    def _key(self, comm: BoundaryComm) -> str:
        is_at_column = any(comm.module in columns for columns in self.columns) or not comm.shared_by
        return self._path(comm.module if is_at_column else comm.shared_by[0])

    # --- the results of the split ----------------------------------------------------------------------

    def rules(self) -> dict[str, ShardRule]:
        """The rules of parameters of the blocks that are in no region, and are used for a part of the tokens."""
        in_regions = {name for region in self.regions for name in region.rules}
        names = [name for name, _ in self.module.named_parameters() if self._path(name)]
        mixing = self.mixing_modules()
        return {n: _PARTIAL for n in names if n not in in_regions and not any(is_inside(n, m) for m in mixing)}

    def activations(self) -> list[ActivationSplit]:
        """The splits of activations at the ends of blocks, in modules that mix tokens, and after split layers."""
        inputs: dict[str, _Splits] = {
            **dict.fromkeys(self.blocks, _ALONG_TOKENS),
            **dict.fromkeys(self.mixing_modules(), ()),
        }
        outputs: dict[str, _Splits] = {**dict.fromkeys(self.blocks, _ALONG_TOKENS), self.blocks[-1]: ()}
        outputs |= {row: _ALONG_TOKENS for row in self.rows if self._tokens_dim(row, "output", 0) == 1}
        for region in self.regions:
            # Where rows and tokens are one dimension, ranks gather them in another order.
            inside = [columns for columns in region.columns if self._opening(columns).dim != 0]
            layers, first = [layer for columns in inside for layer in columns], {n: c[0] for n, c in self.calls.items()}
            outputs |= dict(splits_of_outputs(self.module, region, layers, calls=first))
        entries = [ActivationSplit(module, "input", splits) for module, splits in inputs.items()]
        return [*entries, *(ActivationSplit(module, "output", splits) for module, splits in outputs.items())]

    def proposal(self) -> PartProposal:
        """The split of its regions, and of the stream between their layers."""
        rules = {name: rule for region in self.regions for name, rule in region.rules.items()}
        return PartProposal(
            tuple(self.comms()),
            {name: rule.splits[0] for name, rule in rules.items() if rule.splits},
            tuple(attribute for region in self.regions for attribute in region.attributes),
            input_widths=tuple(width for region in self.regions for width in region.input_widths),
            added_once=tuple(f"{row}.bias" for row in self.rows),
            inner=dict(self._inner_splits()),
        )

    def _inner_splits(self) -> Iterator[tuple[str, tuple[int, DimensionSplit]]]:
        """The splits of activations between the start of a region and its next row layer."""
        for region in self.regions:
            for columns in region.columns:
                after = [row for row in region.rows if self.calls[row][0].place > self.calls[columns[0]][0].place]
                name = f"{after[0]}.weight"
                split = region.rules[name].splits[0]
                yield self._opening(columns).module, (self.module.get_parameter(name).shape[split.dim], split)


def splits_of_outputs(
    module: nn.Module, region: SplitRegion, readers: Iterable[str], *, calls: Mapping[str, ModuleCall]
) -> Iterator[tuple[str, tuple[DimensionSplit, ...]]]:
    """The splits of the outputs of column layers of a region. Readers without a weight have summands of gradients."""
    for layer in readers:
        if rule := region.rules.get(name := f"{layer}.weight"):
            dim, shape = calls[layer].output.ndim - 1, module.get_parameter(name).shape
            yield layer, tuple(split.moved(dim, shape[split.dim]) for split in rule.splits)


def _layers(region: SplitRegion) -> list[str]:
    return [*(layer for columns in region.columns for layer in columns), *region.rows]


def _is_stream(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 3


def _links(a: ModuleCall, b: ModuleCall) -> list[tuple[Argument, Argument]]:
    """(Index of an output of the first call, key of the argument of the second call that is the same tensor)."""
    outputs = [(index, value) for index, value in output_items(a.output).items() if _is_stream(value)]
    return [(index, key) for index, value in outputs for key, other in b.arguments.items() if other is value]


def _same_shapes(call: ModuleCall) -> list[tuple[Argument, Argument]]:
    outputs = [(index, value) for index, value in output_items(call.output).items() if _is_stream(value)]
    arguments = [(key, value) for key, value in call.arguments.items() if _is_stream(value)]
    return [(index, key) for index, value in outputs for key, other in arguments if other.shape == value.shape]


_MIXES_TOKENS = "it computes a token from others, so every rank computes it for the whole sequence"


@dataclass(frozen=True)
class SequenceSplit:
    """The split of residual streams along tokens. Regions outside of `blocks` communicate as they do without it."""

    blocks: tuple[str, ...] = ()  # Blocks whose stream is split
    boundary_comms: tuple[BoundaryComm, ...] = ()  # Comms of these blocks, in the order of a forward
    activations: tuple[ActivationSplit, ...] = ()
    rules: Mapping[str, ShardRule] = field(default_factory=dict)  # Rules of these blocks' parameters outside of regions
    unsplit: tuple[WholeRegion, ...] = ()  # Lists of blocks whose stream is not split, and modules that mix tokens


def prove_sequence_split(
    module: nn.Module, forwards: Sequence[Callable[[], Tensor]], splits: ProvenSplits, *, degree: int, rows: int = 1
) -> SequenceSplit:
    """Split the stream of each list of blocks that computes the same on `degree` pieces as on the whole.

    `forwards` run the module on `rows` sequences of two lengths that the degree divides.
    """
    streams, unsplit = list[BlockStream](), list[WholeRegion]()
    with random_values(module):
        proof = PartProof(module, forwards, degree, partial(same_dropout, rows, module), rows)
        records = [record_forward(module, forward, rows) for forward in forwards]
        for name, blocks in _lists_of_blocks(module, records[0]).items():
            stream = BlockStream(module, blocks, splits.regions, records=records)
            problem = stream.problem(degree) or _complete([*streams, stream], forwards, degree)
            problem = problem or _gradient_problem(stream, proof)
            if problem is None:
                streams.append(stream)
                unsplit += [WholeRegion(inner, _MIXES_TOKENS) for inner in stream.mixing_modules()]
            else:
                unsplit.append(WholeRegion(name, f"its residual stream is not split along tokens: {problem}"))
    return SequenceSplit(
        tuple(name for stream in streams for name in stream.blocks),
        tuple(comm for stream in streams for comm in stream.comms()),
        tuple(entry for stream in streams for entry in stream.activations()),
        {name: rule for stream in streams for name, rule in stream.rules().items()},
        tuple(unsplit),
    )


def _lists_of_blocks(module: nn.Module, record: CallRecord) -> dict[str, list[str]]:
    """The names of the blocks that run, in the order in which they do, by the name of their list."""
    called = [name for name in named_blocks(module) if name in record.calls]
    lists: dict[str, list[str]] = {}
    for name in sorted(called, key=lambda name: record.calls[name][0].place):
        lists.setdefault(name.rpartition(".")[0], []).append(name)
    return lists


def _complete(streams: Sequence[BlockStream], forwards: Sequence[Callable[[], Tensor]], degree: int) -> str | None:
    """Change the communication of the last stream until pieces compute the same as the whole, or say why not."""
    *_, stream = streams
    while True:
        comms = [comm for each in streams for comm in each.comms()]
        runs = ((f, r, i) for f, r in zip(forwards, stream.records, strict=True) for i in {degree - 1, 0})
        failures = (failure_on_piece(stream.module, f, r, comms=comms, index=i, degree=degree) for f, r, i in runs)
        failure = next((failure for failure in failures if failure), None)
        if failure is None:
            return None
        if not stream.change_comms(failure):
            return f"{failure.module or 'the model'} computes other values on a part of the tokens: {failure.problem}"


def _gradient_problem(stream: BlockStream, proof: PartProof) -> str | None:
    """A parameter whose gradients on ranks are neither parts of a sum nor complete where they must be, in words."""
    partial_names = stream.rules().keys() | {
        name
        for region in stream.regions
        for name, rule in region.rules.items()
        if TENSOR_DIMENSION in rule.partial_over
    }
    try:
        sums = proof.partial_sums(stream.proposal())
    except ProofMismatchError as mismatch:
        return str(mismatch)
    wrong = (name for name, is_partial in sums.items() if is_partial != (name in partial_names))
    return next((f"the gradient of {name} does not follow from those of parts of the tokens" for name in wrong), None)
