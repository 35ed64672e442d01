"""The sharding of a model, from the proven sharding of its smaller twin."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import reduce
from typing import Any

from motet.core.errors import InputError
from motet.parallel.context_parallel.attention_calls import AttentionCall
from motet.parallel.model_sharding import (
    LOSS,
    TENSOR_DIMENSION,
    ActivationSize,
    ActivationSplit,
    BoundaryComm,
    DimensionSplit,
    InputWidth,
    ModelSharding,
    ShardRule,
)
from motet.parallel.pipeline.stage_wires import BlockOutput, StageWire
from motet.parallel.process.module_inventory import inventory_of_module
from motet.parallel.proof.twin_match import SizePairs, TwinMatch, TwinMismatchError

# Sizes in the reason of a rule, such as `2 of 16 elements` and `520 entries`.
_SIZES_IN_WORDS = re.compile(
    r"\b\d+(?= (?:of \d+ elements|and \d+ (?:heads|units)|elements|entries|heads|units|input features)\b)|"
    r"(?<=use a divisor of )\d+\b|(?<=use a divisor or a multiple of )\d+\b"
)
_PADDING_IN_WORDS = re.compile(r"\b\d+(?= of padding\b)")


@dataclass(frozen=True)
class TwinTransfer:
    """The proven sharding of a twin, and its match with the model."""

    match: TwinMatch
    proven: ModelSharding
    degree: int
    twin_degree: int  # Ranks over which the twin is split, which may be fewer
    attention: tuple[AttentionCall, ...] = ()  # Calls of attention of the model itself, whose rows ranks split

    def sharding(self, stages: Sequence[range] = (), stage_ranks: Sequence[int] = ()) -> ModelSharding:
        """The sharding of the model, with these stages."""
        split = ModelSharding(
            rules=dict(self._rules()),
            boundary_comms=tuple(self._boundary_comms()),
            attributes=tuple(self._attributes()),
            input_widths=tuple(self._input_widths()),
            activations=tuple(self._activations()),
            head_tensors=self.proven.head_tensors,
            unsplit_streams=tuple(self._unsplit_streams()),
            attention=self._attention(),
        )
        if not stages:
            return split
        blocks = self.match.full.blocks
        return replace(
            split,
            stages=tuple(stages),
            stage_ranks=tuple(stage_ranks),
            stage_tensors=self._stage_tensors(stages),
            wires=tuple(tuple(self._wires(stage.start)) for stage in stages[1:]),
            block_names=tuple(blocks),
            block_outputs=tuple(self._block_output(block) for block in blocks),
        )

    def _attention(self) -> tuple[AttentionCall, ...]:
        """The calls of the model, each of which a call of the twin stands for."""
        for call in self.attention:
            twin_name = self.match.name_in_twin(call.module)
            kinds = {(each.causal, each.window is None) for each in self.proven.attention if each.module == twin_name}
            if (call.causal, call.window is None) not in kinds:
                raise TwinMismatchError(f"{twin_name} of the smaller model attends in another way than {call.module}")
        return self.attention

    # --- tensor parallelism --------------------------------------------------------------------------------

    def _rules(self) -> Iterator[tuple[str, ShardRule]]:
        for name, parameter in self.match.full.module.named_parameters():
            rule = self.proven.rules.get(self.match.name_in_twin(name))
            if rule is None:
                continue
            sizes = self._sizes(name)
            splits = tuple(_full_split(split, sizes) for split in rule.splits)
            twin_parameter = self.match.twin.module.get_parameter(self.match.name_in_twin(name))
            for small, split in zip(rule.splits, splits, strict=True):
                self._check_split(
                    name, split, small, lengths=(parameter.shape[split.dim], twin_parameter.shape[split.dim])
                )
            reason = self._words_on_ranks(_full_words(rule.reason, sizes))
            if splits:
                padding = -parameter.shape[splits[0].dim] % self.degree
                reason = _PADDING_IN_WORDS.sub(str(padding), reason)
            yield name, replace(rule, splits=splits, reason=reason)

    def _check_split(
        self, name: str, split: DimensionSplit, twin_split: DimensionSplit, *, lengths: tuple[int, int]
    ) -> None:
        """Refuse a split that the ranks of the model divide differently from the ranks of the twin."""
        length, twin_length = lengths
        if split.parts and sum(split.parts) != length:
            raise TwinMismatchError(f"{name} has {length} elements, and its fused parts {split.parts}")
        try:
            split.local_spans(length, ranks=self.degree, index=0)
        except InputError as error:
            raise TwinMismatchError(f"{name}: {error}") from error
        parts = zip(split.parts or (length,), twin_split.parts or (twin_length,), strict=True)
        for part, twin_part in parts:
            units, twin_units = -(-part // split.unit), -(-twin_part // twin_split.unit)
            is_alike = (units < self.degree, units % self.degree == 0) == (
                twin_units < self.twin_degree,
                twin_units % self.twin_degree == 0,
            )
            if not is_alike:
                raise TwinMismatchError(
                    f"{self.degree} ranks have other shares of the {units} units of {name} than {self.twin_degree} "
                    f"ranks of the smaller model's {twin_units}"
                )

    def _words_on_ranks(self, text: str) -> str:
        return text.replace(f"{TENSOR_DIMENSION} = {self.twin_degree}", f"{TENSOR_DIMENSION} = {self.degree}")

    def _boundary_comms(self) -> Iterator[BoundaryComm]:
        """The comms in the order of a forward: those of a block where it runs, others where they are between blocks."""
        twin_blocks, by_block, between = self.match.twin.blocks, dict[str, list[BoundaryComm]](), dict[str, list[Any]]()
        last = ""
        for comm in self.proven.boundary_comms:
            block = self._twin_block(comm.module)
            if block and block != last and block in by_block:
                raise TwinMismatchError(f"ranks communicate in {block} in several turns")
            last = block or last
            (by_block if block else between).setdefault(last, []).append(comm)
        ends = {"": "", **{b: f for f, b in self.match.twin_of.items() if self.match.full.places[f][2]}}
        unknown = [block for block in between if block not in ends]
        if unknown:
            raise TwinMismatchError(f"ranks communicate outside of blocks after {unknown[0]}")
        assert set(by_block) <= set(twin_blocks)
        places = {ends[block]: comms for block, comms in between.items()}
        for block in ("", *self.match.full.blocks):
            if block:
                yield from (self._comm(comm, block) for comm in by_block.get(self.match.twin_of[block], ()))
            yield from (self._comm(comm, "") for comm in places.get(block, ()))

    def _comm(self, comm: BoundaryComm, block: str) -> BoundaryComm:
        sizes = self.match.sizes[block]
        return replace(
            comm,
            module=self._full_name(comm.module, block),
            shared_by=tuple(self._full_name(name, block) for name in comm.shared_by),
            sizes=comm.sizes if comm.argument == LOSS else tuple(_full_size(each, sizes) for each in comm.sizes),
        )

    def _attributes(self) -> Iterator[tuple[str, str, int]]:
        for module, attribute, local in self.proven.attributes:
            twin_value = _value_of(self.match.twin.module.get_submodule(module), attribute)
            for block in self._full_blocks(module):
                name = self._full_name(module, block)
                value = _value_of(self.match.full.module.get_submodule(name), attribute)
                local_value = self._local_value(
                    f"{name}.{attribute}", value, twin_value=twin_value, local=local, block=block
                )
                yield name, attribute, local_value

    def _local_value(self, name: str, value: int, *, twin_value: int, local: int, block: str) -> int:
        """The value of a number on a rank: its part of a width or of heads, one of several units that ranks share, or,
        for a number of heads in each of those, the number on a rank."""
        degree, twin_degree, ratio = self.degree, self.twin_degree, Fraction(local, twin_value)
        shared = self._shared_units(block)
        ratios = [(Fraction(1, few), Fraction(1, many)) for few, many in shared]
        ratios += [(Fraction(few, twin_degree), Fraction(many, degree)) for few, many in shared]
        values = {full_ratio * value for twin_ratio, full_ratio in ratios if twin_ratio == ratio}
        if local == -(-twin_value // twin_degree) and (twin_value % twin_degree == 0) == (value % degree == 0):
            values.add(Fraction(-(-value // degree)))
        numbers = [int(each) for each in values if each.denominator == 1]
        if len(numbers) == 1:
            return numbers[0]
        raise TwinMismatchError(
            f"{name} = {value} cannot be split over {TENSOR_DIMENSION} = {self.degree} as the smaller model's "
            f"{twin_value} is, of which a rank has {local}"
        )

    def _shared_units(self, block: str) -> set[tuple[int, int]]:
        """(Units of the twin, units of the model) of tensors in a block whose units several ranks share."""
        shared = set[tuple[int, int]]()
        for name, parameter in self.match.full.module.get_submodule(block).named_parameters():
            full_name = f"{block}.{name}" if block else name
            twin_name = self.match.name_in_twin(full_name)
            for split in self.proven.rules.get(twin_name, ShardRule()).splits:
                twin_units = self.match.twin.module.get_parameter(twin_name).shape[split.dim] // split.unit
                if not split.parts and 1 < twin_units < self.twin_degree:
                    unit = _full_split(split, self._sizes(full_name)).unit
                    shared.add((twin_units, parameter.shape[split.dim] // unit))
        return shared

    def _input_widths(self) -> Iterator[InputWidth]:
        for each in self.proven.input_widths:
            for block in self._full_blocks(each.module):
                readers = tuple(self._full_name(name, block) for name in each.readers)
                yield replace(
                    each,
                    module=self._full_name(each.module, block),
                    readers=readers,
                    ranks=self._full_ranks(each.ranks),
                )

    def _full_ranks(self, ranks: int) -> int:
        return self.degree if ranks == self.twin_degree else ranks

    def _activations(self) -> Iterator[ActivationSplit]:
        for entry in self.proven.activations:
            for block in self._full_blocks(entry.module):
                sizes = self.match.sizes[block]
                splits = tuple(_full_split(split, sizes) for split in entry.splits)
                yield replace(entry, module=self._full_name(entry.module, block), splits=splits)

    def _unsplit_streams(self) -> Iterator[tuple[str, str]]:
        for module, reason in self.proven.unsplit_streams:
            for block in self._full_blocks(module):
                words = self._words_on_ranks(_full_words(reason, self.match.sizes[block]))
                yield self._full_name(module, block), words

    # --- pipeline stages -----------------------------------------------------------------------------------

    def _stage_tensors(self, stages: Sequence[range]) -> dict[str, tuple[int, ...]]:
        """Stages of tensors that do not follow from the number of a block, from the blocks that need them."""
        full, number = self.match.full.blocks, {name: i for i, name in enumerate(self.match.twin.blocks)}
        twins = [number[self.match.twin_of[block]] for block in full]
        tensors, by_number = dict[str, tuple[int, ...]](), ModelSharding(stages=tuple(stages))
        known = {each.name: each for each in inventory_of_module(self.match.full.module, {}).tensors}
        for name, needed in self.proven.stage_tensors.items():
            if self._twin_block(name):
                raise TwinMismatchError(f"another block than its own needs {name}")
            blocks = {i for i, twin in enumerate(twins) if twin in self._blocks_of_stages(needed)}
            tensor_stages = tuple(i for i, stage in enumerate(stages) if blocks.intersection(stage))
            if name not in known or by_number.stages_of(known[name]) != tensor_stages:
                tensors[name] = tensor_stages
        return tensors

    def _blocks_of_stages(self, stages: Sequence[int]) -> set[int]:
        return {block for stage in stages for block in self.proven.stages[stage]}

    def _wires(self, block: int) -> Iterator[StageWire]:
        """The wires into a stage that begins with this block: those of the twin between blocks that are alike."""
        border = self.match.border_like(block)
        stage = next(i for i, stage in enumerate(self.proven.stages) if stage.start == border)
        sizes = self.match.sizes[self.match.full.blocks[block]]
        for wire in self.proven.wires[stage - 1]:
            ranks = (1, 1) if wire.is_replicated else (self.degree, self.twin_degree)
            yield replace(wire, dims=tuple(_full_dim(dim, sizes, ranks) for dim in wire.dims))

    def _block_output(self, block: str) -> BlockOutput:
        index = self.proven.block_names.index(self.match.twin_of[block])
        return _full_output(self.proven.block_outputs[index], self.match.sizes[block])

    # --- names ---------------------------------------------------------------------------------------------

    def _sizes(self, name: str) -> SizePairs:
        return self.match.sizes[self.match.block_around(name)]

    def _twin_block(self, name: str) -> str:
        """The block of the twin that is, or holds, a module or tensor."""
        return next((b for b in self.match.twin.blocks if name == b or name.startswith((f"{b}.", f"{b}["))), "")

    def _full_blocks(self, name: str) -> list[str]:
        """The blocks of the model that have a module of the twin; one without a name if no block holds it."""
        block = self._twin_block(name)
        return [full for full, twin in self.match.twin_of.items() if twin == block] if block else [""]

    def _full_name(self, name: str, block: str) -> str:
        """The name of a module of the twin in a block of the model."""
        twin_block = self._twin_block(name)
        if not block and twin_block:
            raise TwinMismatchError(f"{name} belongs together with modules of other blocks")
        return block + name[len(twin_block) :] if twin_block else name


def _full_split(split: DimensionSplit, sizes: SizePairs) -> DimensionSplit:
    unit = split.unit if split.unit == 1 else sizes.full_size(split.unit)

    def full_part(part: int) -> int:
        try:
            return sizes.full_size(part)
        except TwinMismatchError:  # A number of heads that no tensor has as its width
            if split.unit == 1 or part % split.unit:
                raise
            return sizes.full_size(part // split.unit) * unit

    return replace(split, parts=tuple(map(full_part, split.parts)), unit=unit)


def _full_size(size: ActivationSize, sizes: SizePairs) -> ActivationSize:
    return size if size.width <= 1 else replace(size, width=sizes.full_size(size.width))


def _full_dim(dim: int | str, sizes: SizePairs, ranks: tuple[int, int]) -> int | str:
    """The size of the model for a dimension of a wire, or for that of one of `ranks`: the model's, and the twin's."""
    degree, twin_degree = ranks
    if isinstance(dim, int):
        if twin_degree > 1 and sizes.is_known(dim * twin_degree):
            return sizes.full_size(dim * twin_degree) // degree
        return dim if dim <= 1 else sizes.full_size(dim)
    number, is_split, _ = dim.partition(" / ")  # A number that ranks split is written as a text
    if not is_split:
        return dim
    return f"{sizes.full_size(int(number)) if number.isdigit() else number} / {degree}"


def _full_output(output: BlockOutput, sizes: SizePairs) -> BlockOutput:
    dims = output.dims and tuple(sizes.full_size(d) if isinstance(d, int) and d > 1 else d for d in output.dims)
    return replace(output, dims=dims, items=tuple((key, _full_output(item, sizes)) for key, item in output.items))


def _full_words(text: str, sizes: SizePairs) -> str:
    """A reason with the known sizes of the model."""

    def enlarge(match: re.Match[str]) -> str:
        try:
            return str(sizes.full_size(int(match[0])))
        except TwinMismatchError:
            return match[0]

    return _SIZES_IN_WORDS.sub(enlarge, text)


def _value_of(module: object, attribute: str) -> int:
    value: Any = reduce(getattr, attribute.split("."), module)
    assert isinstance(value, int), f"{attribute} of {type(module).__name__} is not an integer"
    return value
