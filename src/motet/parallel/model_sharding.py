"""The split of a model's tensors and activations over tensor-parallel and pipeline ranks, as a value.

It stands outside of the model, whose code stays that of a single device. `ModelSharding()` splits nothing.

The tensors of a model as the single-device module has them: logical names and whole shapes.

Checkpoints, `motet verify` and the sharding of a model use logical names, whatever part of the tensor a rank holds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, product
from math import prod
from typing import Annotated, Literal

from pydantic import PlainSerializer, PlainValidator

from motet.core.errors import check_input
from motet.models.spec.layer_specs import CountedPer
from motet.models.spec.model_spec import ModelSpec
from motet.parallel.context_parallel.attention_calls import AttentionCall
from motet.parallel.context_parallel.context_partition import ContextOrder, ContextPartition
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.pipeline.stage_wires import BlockOutput, StageWire
from motet.parallel.shard_spec import HeldShards, ShardSpec

TensorKind = Literal["trained", "frozen", "statistics", "table", "load"]


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of the model; tied tensors are one tensor with several names.

    | kind | meaning |
    |---|---|
    | trained, frozen | a parameter, which the optimizer updates or not |
    | statistics | a buffer that a forward updates, such as the mean of a batch norm |
    | table | a buffer that is computed when the model is built, such as rotary angles |
    | load | a buffer of the load of each expert: its count, or the correction that follows from it |
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: TensorKind
    optimizer_group: int = 0
    aliases: tuple[str, ...] = ()
    block: int | None = None  # The number of the transformer block; None outside of the blocks
    # Blocks whose pipeline stages need the tensor, -1 for the last one. An inventory fills it in where it is empty: a
    # tensor that is defined before the blocks is needed with the first, one after them, or an alias, with the last.
    needed_with_blocks: tuple[int, ...] = ()


@dataclass(frozen=True)
class ModelInventory:
    """All tensors of a model, in the order of definition."""

    tensors: tuple[TensorInfo, ...]

    def __post_init__(self) -> None:
        filled, outside = [], 0
        for tensor in self.tensors:
            outside = outside if tensor.block is None else -1
            blocks = (outside if tensor.block is None else tensor.block, *(-1 for _ in tensor.aliases))
            filled.append(replace(tensor, needed_with_blocks=tensor.needed_with_blocks or blocks))
        object.__setattr__(self, "tensors", tuple(filled))

    @property
    def trained(self) -> tuple[TensorInfo, ...]:
        return tuple(tensor for tensor in self.tensors if tensor.kind == "trained")

    @property
    def parameter_count(self) -> int:
        """Elements of the parameters, trained and frozen."""
        return sum(prod(tensor.shape) for tensor in self.tensors if tensor.kind in ("trained", "frozen"))


def inventory_of_spec(spec: ModelSpec) -> ModelInventory:
    """The parameters of a model that is known by its sizes, in the optimizer groups of the default settings."""
    tensors, blocks = list[TensorInfo](), 0
    for block in spec.blocks:
        is_block = "{i}" in block.prefix
        for i, repetition in enumerate(block.parameters_by_repetition()):
            block_id = blocks + i if is_block else None
            for p in repetition:
                kind: TensorKind = "trained" if p.is_trained else "frozen"
                is_vector = len(p.shape) < 2 or (p.active_fraction < 1 and len(p.shape) == 2)  # Or one of each expert
                tensors.append(TensorInfo(p.name, p.shape, "float32", kind, is_vector, (), block_id))
        blocks += block.repeat if is_block else 0
    return ModelInventory(tuple(tensors))


# Written as (first, stop) where a sharding is sent to other ranks.
BlockRange = Annotated[
    range,
    PlainValidator(lambda value: value if isinstance(value, range) else range(*value)),
    PlainSerializer(lambda blocks: (blocks.start, blocks.stop)),
]
BoundarySide = Literal["input", "output"]
BoundaryOperation = Literal["copy", "sum", "gather", "scatter", "split", "replicate", "exchange"]
TENSOR_DIMENSION = "tp"  # Its ranks split the weights of each layer, and activations
PIPELINE_DIMENSION = "pp"  # Its ranks hold different blocks
CONTEXT_DIMENSION = "cp"  # Its ranks have different tokens of the same rows
LOSS = "loss"  # The argument of the output of a head whose logits stay split: the loss of the model adds over ranks


@dataclass(frozen=True)
class DimensionSplit:
    """One dimension of a tensor, split over one parallel dimension.

    Each rank gets equally many units of each fused part. Where a part has fewer units than there are ranks,
    neighbouring ranks share a unit. A tensor of one part, such as a vocabulary, may be uneven; zeros fill it up.
    """

    dim: int
    over: str
    parts: tuple[int, ...] = ()  # Lengths of fused parts, such as query, key and value; empty: one part
    unit: int = 1  # Elements that stay together, such as those of a head
    order: ContextOrder | None = None  # Ranks split tokens in this order, in pieces that may differ by one token

    def moved(self, dim: int, length: int) -> "DimensionSplit":
        """The same split of a dimension of as many elements, such as that of the output of a split layer."""
        return replace(self, dim=dim, parts=self.parts or (length,))

    def local_spans(self, length: int, *, ranks: int, index: int) -> tuple[tuple[tuple[int, int], ...], int]:
        """(Spans of the rank at `index`, elements of padding after them)."""
        if self.order is not None:
            return ContextPartition(length, ranks, self.order).spans(index), 0
        parts, spans, padding = self.parts or (length,), [], 0
        for start, part in zip(accumulate((0, *parts)), parts, strict=False):
            units = -(-part // self.unit)
            is_shared = units < ranks
            check_input(
                not (ranks % units if is_shared else units % ranks) or (len(parts) == 1 and not is_shared),
                f"{units} units of {self.unit} elements cannot be split over {self.over} = {ranks}; use a divisor or a "
                f"multiple of {units}",
            )
            width = self.unit * (1 if is_shared else -(-units // ranks))
            first = (index * units // ranks if is_shared else index) * width
            spans.append((start + min(first, part), start + min(first + width, part)))
            padding += width - (spans[-1][1] - spans[-1][0])
        return tuple(spans), padding


@dataclass(frozen=True)
class ShardRule:
    """The split of one parameter, and the dimensions to sum its gradient over after backward.

    | parameter | splits | partial_over |
    |---|---|---|
    | column, row, vocabulary | tp | dp cp |
    | bias after the sum | none | dp cp |
    | norm, router, unsplit weight | none | dp cp |
    | the same where activations are split along the sequence | none | dp cp tp |
    | key and value projection with fewer heads than ranks | tp, in units of a head | dp cp tp |
    | norm of each head | none | dp cp tp |

    Ranks add gradients only if they hold the same shard. A tensor that several stages hold is partial over pp as well.
    """

    splits: tuple[DimensionSplit, ...] = ()
    partial_over: tuple[str, ...] = ("dp", "cp")  # Dimensions whose ranks have partial sums of the gradient
    reason: str = "whole"


# (operation, side) -> how activations may lie before it, how they lie after it, the operation in backward. Inside a
# "parallel" or "exchanged" region ranks compute different parts of the same rows.
BOUNDARY_OPERATIONS: Mapping[tuple[BoundaryOperation, BoundarySide], tuple[tuple[str, ...], str, BoundaryOperation]] = {
    ("copy", "input"): (("same",), "parallel", "sum"),
    ("sum", "output"): (("parallel",), "same", "copy"),
    ("gather", "input"): (("split",), "parallel", "scatter"),
    ("scatter", "output"): (("parallel",), "split", "gather"),
    ("replicate", "input"): (("split",), "same", "split"),
    ("split", "input"): (("same",), "split", "gather"),
    ("split", "output"): (("same",), "split", "gather"),
    ("gather", "output"): (("parallel", "split"), "same", "split"),
    ("exchange", "input"): (("split",), "exchanged", "exchange"),
    ("exchange", "output"): (("exchanged",), "split", "exchange"),
}


@dataclass(frozen=True)
class ActivationSize:
    """The elements that one call communicates, on all ranks together."""

    width: int  # Elements for each unit of `per` in a micro-batch
    per: CountedPer = "token"
    needs_gradient: bool = True  # Otherwise nothing before it is trained


@dataclass(frozen=True)
class BoundaryComm:
    """Communication of an activation where it enters or leaves a module; `scatter` is a reduce-scatter."""

    module: str
    side: BoundarySide
    argument: int | str  # Its index or name, or LOSS
    operation: BoundaryOperation
    over: str
    dim: int = -1  # Dimension of the activation that is split outside of the region
    shared_by: tuple[str, ...] = ()  # Other modules that read the same tensor; the communication is done once
    sizes: tuple[ActivationSize, ...] = ()  # Size of each call in a forward

    @property
    def conjugate(self) -> BoundaryOperation:
        """The operation on the gradient in backward."""
        return BOUNDARY_OPERATIONS[self.operation, self.side][2]


@dataclass(frozen=True)
class InputWidth:
    """An argument of a module whose code computes with its width, and so must see the width on one rank."""

    module: str
    argument: int | str  # Its index or name
    ranks: int
    readers: tuple[str, ...]  # Layers in the module that get the argument itself


@dataclass(frozen=True)
class ActivationSplit:
    """The split of an activation where it enters or leaves a module.

    An entry of an input holds for everything that the modules inside return, unless they have an entry. One of several
    outputs is named after its index or key, such as `attention[1]`, or `[logits]` of the whole model. A split whose
    length its ranks do not divide, or whose units they share, says the length in `parts`.
    """

    module: str
    side: BoundarySide
    splits: tuple[DimensionSplit, ...] = ()  # Other dimensions are whole on each rank


@dataclass(frozen=True)
class ModelSharding:
    """Everything about the split of one model."""

    rules: Mapping[str, ShardRule] = field(default_factory=dict)  # By logical name; other tensors are whole
    boundary_comms: tuple[BoundaryComm, ...] = ()  # In the order of a forward
    attributes: tuple[tuple[str, str, int], ...] = ()  # (module, integer attribute, its value on a rank)
    activations: tuple[ActivationSplit, ...] = ()
    # Tensors of the head that are split by entries of the vocabulary, the weight first; they may belong to a table.
    head_tensors: tuple[str, ...] = ()
    # (Module or list of blocks, why every rank computes it for all tokens although the sequence is to be split)
    unsplit_streams: tuple[tuple[str, str], ...] = ()
    stages: tuple[BlockRange, ...] = ()  # Blocks of each pipeline stage. Empty: no stages
    stage_ranks: tuple[int, ...] = ()  # The pipeline rank of each stage. Empty: stage s is on rank s % pp
    # Tensors whose stages do not follow from their blocks -> stages that hold them
    stage_tensors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    wires: tuple[tuple[StageWire, ...], ...] = ()  # Tensors that cross the border between stages i and i + 1
    block_names: tuple[str, ...] = ()  # Names of the blocks that `stages` count, in the order of calls
    block_outputs: tuple[BlockOutput, ...] = ()  # Form of each block's output
    input_widths: tuple[InputWidth, ...] = ()  # Widths of inputs that modules see
    attention: tuple[AttentionCall, ...] = ()  # Calls whose queries and keys meet, in the order of a forward
    proof: str = ""  # The proof, where it did not run all of the model

    def rule(self, name: str) -> ShardRule:
        """The rule of a tensor."""
        return self.rules.get(name, ShardRule())

    def partial_over(self, tensor: TensorInfo) -> tuple[str, ...]:
        """Dimensions whose ranks have partial sums of the gradient of a tensor, or of the shard that they share."""
        over_stages = (PIPELINE_DIMENSION,) if len(self.stages_of(tensor)) > 1 else ()
        return (*self.rule(tensor.name).partial_over, *over_stages)

    def stages_of(self, tensor: TensorInfo) -> tuple[int, ...]:
        """Stages that hold a tensor; (0,) without stages."""
        if self.stages and tensor.name in self.stage_tensors:
            return self.stage_tensors[tensor.name]
        last = max((blocks.stop for blocks in self.stages), default=0) - 1
        needed = {last if block == -1 else block for block in tensor.needed_with_blocks}
        return tuple(i for i, blocks in enumerate(self.stages) if needed.intersection(blocks)) if self.stages else (0,)

    def rank_of_stage(self, stage: int, dims: ParallelDims) -> int:
        """The pipeline rank of a stage."""
        return self.stage_ranks[stage] if self.stage_ranks else stage % dims.size(PIPELINE_DIMENSION)

    def spec(self, tensor: TensorInfo, coordinates: Mapping[str, int], dims: ParallelDims) -> ShardSpec | None:
        """The shard of the rank at these coordinates, or None if none of its stages holds the tensor."""
        is_holder = coordinates.get(PIPELINE_DIMENSION, 0) in self._holders(tensor, dims)
        return self._shard(tensor, coordinates, dims) if is_holder or not self.stages else None

    def _holders(self, tensor: TensorInfo, dims: ParallelDims) -> set[int]:
        """The pipeline ranks whose stages hold a tensor."""
        return {self.rank_of_stage(stage, dims) for stage in self.stages_of(tensor)}

    def _shard(self, tensor: TensorInfo, coordinates: Mapping[str, int], dims: ParallelDims) -> ShardSpec:
        """The shard of a rank that holds the tensor."""
        spans, padding = list(ShardSpec.full(tensor.shape).spans), [0] * len(tensor.shape)
        for split in self.rule(tensor.name).splits:
            spans[split.dim], padding[split.dim] = split.local_spans(
                tensor.shape[split.dim], ranks=dims.size(split.over), index=coordinates.get(split.over, 0)
            )
        return ShardSpec(tensor.shape, tuple(spans), tuple(padding) if any(padding) else ())

    def specs(self, inventory: ModelInventory, dims: ParallelDims) -> dict[str, HeldShards]:
        """The shards of each tensor, by rank. Tensors that are split alike share one value."""
        known, specs = dict[object, HeldShards](), {}
        for tensor in inventory.tensors:
            key = tensor.shape, self.rule(tensor.name), self.stages_of(tensor)
            if key not in known:
                known[key] = self._held_shards(tensor, dims)
            specs[tensor.name] = known[key]
        return specs

    def _held_shards(self, tensor: TensorInfo, dims: ParallelDims) -> HeldShards:
        decisive, holders = {split.over for split in self.rule(tensor.name).splits}, self._holders(tensor, dims)
        over = {name: size for name, size in dims.sizes if name in decisive or name == PIPELINE_DIMENSION}
        places = {place: dict(zip(over, place, strict=True)) for place in product(*map(range, over.values()))}
        shards = {
            place: self._shard(tensor, at, dims)
            for place, at in places.items()
            if not self.stages or at.get(PIPELINE_DIMENSION, 0) in holders
        }
        return HeldShards(dims, tuple(over), shards)
