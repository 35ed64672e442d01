"""The residual stream of one list of blocks, and the communication with which ranks split it along tokens."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from motet.parallel.model_sharding import (
    TENSOR_DIMENSION,
    ActivationSplit,
    BoundaryComm,
    BoundarySide,
    DimensionSplit,
    ShardRule,
)
from motet.parallel.proof.module_calls import ModuleCall
from motet.parallel.proof.nested_tensors import output_items
from motet.parallel.proof.part_run import PartProposal
from motet.parallel.tensor_parallel.find_regions import is_inside
from motet.parallel.tensor_parallel.sequence.piece_forward import CallRecord, PieceFailure
from motet.parallel.tensor_parallel.split_regions import SplitRegion

_PARTIAL = ShardRule(
    partial_over=(*ShardRule().partial_over, TENSOR_DIMENSION),
    reason="whole; each rank uses it for its part of the tokens",
)
Argument = int | str  # Position or keyword
_Splits = tuple[DimensionSplit, ...]
_ALONG_TOKENS: _Splits = (DimensionSplit(1, TENSOR_DIMENSION),)
_Place = tuple[str, Argument, tuple[str, ...]]  # A module, its argument, and other modules that read the same tensor


class BlockStream:
    """Blocks that run one after another, and what was found out about the communication that they need."""

    def __init__(
        self, module: nn.Module, blocks: Sequence[str], regions: Sequence[SplitRegion], *, records: Sequence[CallRecord]
    ) -> None:
        self.module, self.blocks, self.records, self.calls = module, blocks, records, records[0].calls
        self.regions = [region for region in regions if any(map(self._path, _layers(region)))]
        self.columns = [columns for region in self.regions for columns in region.columns]
        self.rows = [row for region in self.regions for row in region.rows]
        self.hidden: dict[str, Argument] = {}  # The argument of each block that is the stream
        self.output: Argument = 0  # The index in what a block returns
        # By paths in a block, which all blocks have in common.
        self._levels: dict[str, int] = {}  # How far outside of its column layers a tensor is gathered
        self._unsplit: set[tuple[str, Argument]] = set()  # What column layers, or modules that mix tokens, get whole
        self._mixing: set[str] = set()  # Modules that get the whole sequence
        self._tried: set[str] = set()

    def problem(self, degree: int) -> str | None:
        """Why this is no stream of tokens that ranks could split, if it is none."""
        for region in self.regions:
            if not region.columns or not all(map(self._path, _layers(region))):
                return f"the split of {region.module or 'the model'} reaches beyond its blocks"
        problems = (self._chain_problem(record, degree) for record in self.records)
        if problem := next((problem for problem in problems if problem), None):
            return problem
        rows = (row for row in self.rows if self._tokens_dim(row, "output", 0) is None)
        return next((f"what {row} returns has no dimension of tokens" for row in rows), None)

    def _chain_problem(self, record: CallRecord, degree: int) -> str | None:
        calls = [record.calls[name] for name in self.blocks]
        for name, calls_of_block in zip(self.blocks, calls, strict=True):
            if len(calls_of_block) != 1:
                return f"{name} runs {len(calls_of_block)} times in a forward"
        links = [_links(a[0], b[0]) for a, b in pairwise(calls)]
        for name, pairs in zip(self.blocks[1:], links, strict=True):
            if not pairs:
                return f"{name} does not read what the block before it returns"
        first = links[0] if links else _same_shapes(calls[0][0])
        if not first:
            return f"no argument of {self.blocks[0]} has the shape of what it returns"
        self.output, argument = first[0]
        self.hidden = dict(zip(self.blocks, (argument, *(pairs[0][1] for pairs in links)), strict=True))
        ends = calls[0][0].arguments.get(argument), output_items(calls[-1][0].output).get(self.output)
        shapes = {tuple(each.shape) if isinstance(each, Tensor) else () for each in ends}
        rows, length, *_ = (*next(iter(shapes)), 0, 0)
        if len(shapes) != 1 or rows != record.rows or length % degree:
            return f"{degree} ranks cannot split activations of shape {sorted(shapes)} along dimension 1"
        return None

    # --- what it takes to split it ---------------------------------------------------------------------

    def change_comms(self, failure: PieceFailure) -> bool:
        """Change the communication around the place of a failure; False if nothing is left to try."""
        if comm := failure.whole_input:
            self._unsplit.add((self._key(comm), comm.argument if comm.operation == "replicate" else 0))
            return True
        if failure.opened:
            return self._gather_further_out([comm for comm in failure.opened if comm.operation == "gather"])
        return self._surround(failure.module)

    def _gather_further_out(self, comms: Sequence[BoundaryComm]) -> bool:
        columns = {self._path(columns[0]): columns for columns in self.columns}  # Of one of the blocks
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
        """Places where what columns read may be gathered: themselves, and the input of modules around them."""
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

    # --- what follows from it --------------------------------------------------------------------------

    def rules(self) -> dict[str, ShardRule]:
        """The rules of parameters of the blocks that are in no region, and are used for a part of the tokens."""
        in_regions = {name for region in self.regions for name in region.rules}
        names = [name for name, _ in self.module.named_parameters() if self._path(name)]
        mixing = self.mixing_modules()
        return {n: _PARTIAL for n in names if n not in in_regions and not any(is_inside(n, m) for m in mixing)}

    def activations(self) -> list[ActivationSplit]:
        """How activations lie at the ends of blocks, in modules that mix tokens, and after layers that are split."""
        inputs: dict[str, _Splits] = {
            **dict.fromkeys(self.blocks, _ALONG_TOKENS),
            **dict.fromkeys(self.mixing_modules(), ()),
        }
        outputs: dict[str, _Splits] = {**dict.fromkeys(self.blocks, _ALONG_TOKENS), self.blocks[-1]: ()}
        outputs |= {row: _ALONG_TOKENS for row in self.rows if self._tokens_dim(row, "output", 0) == 1}
        for region in self.regions:
            # Where rows and tokens are one dimension, ranks gather them in another order.
            inside = [columns for columns in region.columns if self._opening(columns).dim != 0]
            for layer in (layer for columns in inside for layer in columns):
                dim, name = self.calls[layer][0].output.ndim - 1, f"{layer}.weight"
                shape, rule = self.module.get_parameter(name).shape, region.rules.get(name, ShardRule())
                outputs[layer] = tuple(split.moved(dim, shape[split.dim]) for split in rule.splits)
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
        """How activations are split between the start of a region and its next row layer."""
        for region in self.regions:
            for columns in region.columns:
                after = [row for row in region.rows if self.calls[row][0].place > self.calls[columns[0]][0].place]
                name = f"{after[0]}.weight"
                split = region.rules[name].splits[0]
                yield self._opening(columns).module, (self.module.get_parameter(name).shape[split.dim], split)


def _layers(region: SplitRegion) -> list[str]:
    return [*(layer for columns in region.columns for layer in columns), *region.rows]


def _is_stream(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 3


def _links(a: ModuleCall, b: ModuleCall) -> list[tuple[Argument, Argument]]:
    """Pairs of what the first call returned and the second one read."""
    outputs = [(index, value) for index, value in output_items(a.output).items() if _is_stream(value)]
    return [(index, key) for index, value in outputs for key, other in b.arguments.items() if other is value]


def _same_shapes(call: ModuleCall) -> list[tuple[Argument, Argument]]:
    outputs = [(index, value) for index, value in output_items(call.output).items() if _is_stream(value)]
    arguments = [(key, value) for key, value in call.arguments.items() if _is_stream(value)]
    return [(index, key) for index, value in outputs for key, other in arguments if other.shape == value.shape]
