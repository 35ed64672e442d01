"""Parameters, matrix products, attention and saved activations as plain values: the costs of a layer.
Each value says how it grows with the tokens, and which dimension tensor-parallel ranks split. `LayerSpec`s add up to
the blocks of a `ModelSpec` (models/spec/model_spec.py)."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import chain
from math import prod
from typing import ClassVar, Literal, NamedTuple

from motet.core.units import DTYPE_BYTES

# How often something occurs: for each token, source token of an encoder-decoder, token to be predicted, row, or
# position, or once per step. All rows share a position, unless they are packed with several documents.
CountedPer = Literal["token", "source", "target", "row", "position", "step"]

# `causal` counts only visible pairs of query and key, as if the diagonal halved the square. `full` counts all pairs,
# as many published FLOP rates do.
AttentionFlopsRule = Literal["causal", "full"]

# The backward of a block reads the saved tensors, recomputes all but products with weights, or recomputes everything.
BlockPolicy = Literal["none", "selective", "full"]

# The dimension that tensor-parallel ranks divide. `stream` is the residual stream inside the blocks; sequence
# parallelism divides its tokens.
SplitBy = Literal["none", "heads", "inner", "vocabulary", "stream"]

# The kernel of a backward that reads a saved tensor: a product with a weight, a norm, an activation function without or
# with a gate, the attention core (which reads its sums or probabilities), the kernels that make its queries and keys,
# or the head that is fused with its loss, which kept gradients.
BackwardKernel = Literal[
    "other",
    "product",
    "norm",
    "activation",
    "gated activation",
    "attention",
    "queries and keys",
    "fused head",
    "weighted sum",
]


@dataclass(frozen=True)
class DimensionUnits:
    """The dimension that ranks split. Units that they do not divide are padded, or shared if there are fewer."""

    split_by: SplitBy = "none"
    units: tuple[int, ...] = ()  # Units of each fused part, as 8 heads of queries, 2 of keys, 2 of values; empty: one
    region: SplitBy = "none"  # Ranks gather this part of the stream to split a region by its heads or inner width

    def local_size(self, size: int, ranks: int) -> int:
        """Elements that one rank holds of `size`, which all units have in equal parts."""
        units = self.units or (size,)
        return size // sum(units) * sum(-(-count // ranks) for count in units)


WHOLE, STREAM = DimensionUnits(), DimensionUnits("stream")


@dataclass(frozen=True)
class SplitDegrees:
    """The number of tensor-parallel ranks that split a model, and whether sequence parallelism splits its stream."""

    tensor: int
    sequence: bool = False
    not_split: frozenset[SplitBy] = frozenset()  # Units that these ranks cannot split, such as 3 heads over 2

    def local_size(self, split: DimensionUnits, size: int) -> tuple[int, int]:
        """(Elements that a rank holds of `size`, ranks over which their tokens are divided)."""
        kept_whole = self.not_split & {split.split_by, split.region}
        if split.split_by == "none" or "heads" in kept_whole:
            return size, 1
        if split.split_by == "stream" or kept_whole:  # A whole feed-forward network runs on the split stream
            return size, self.tensor if self.sequence else 1
        return split.local_size(size, self.tensor), 1


@dataclass(frozen=True)
class MicroBatchShape:
    """A micro-batch: `rows` sequences of `length` tokens, and their sources in an encoder-decoder."""

    rows: int
    length: int
    source_length: int = 0
    packed: bool = False  # Rows hold several documents, which do not see each other and restart their positions
    targets: int | None = None  # Masked tokens that an encoder predicts; all tokens if None
    variable_length: bool = False  # A kernel takes the starts of documents, where it can, in place of a mask
    device: Literal["cpu", "cuda"] = "cpu"  # Whose kernels compute

    @property
    def sizes_by_name(self) -> dict[str, int]:
        """Its sizes by the names that dimensions of wires between stages have."""
        return {"rows": self.rows, "tokens": self.length, "source tokens": self.source_length}

    def length_of(self, per: CountedPer) -> int:
        return self.source_length if per == "source" else self.length

    def count(self, per: CountedPer) -> int:
        tokens = self.rows * self.length_of(per)
        targets, positions = tokens if self.targets is None else self.targets, tokens if self.packed else self.length
        return {"target": targets, "row": self.rows, "position": positions, "step": 1}.get(per, tokens)

    def part_of_sequence(self, ranks: int) -> "MicroBatchShape":
        """The tokens of one of the ranks that split each sequence."""
        if ranks == 1:
            return self
        return _part_of_sequence(self, ranks)


@lru_cache(maxsize=1 << 12)
def _part_of_sequence(shape: MicroBatchShape, ranks: int) -> MicroBatchShape:
    return replace(shape, length=-(-shape.length // ranks), source_length=-(-shape.source_length // ranks))


@dataclass(frozen=True)
class ParameterSpec:
    """A named tensor."""

    name: str
    shape: tuple[int, ...]
    active_fraction: Fraction = Fraction(1)  # The fraction that one token uses: below 1 for experts
    split: DimensionUnits = WHOLE
    split_dim: int = 0
    gradient: Literal["backward", "forward", "none"] = "backward"  # The pass that makes it; a frozen parameter has none
    is_tied: bool = False  # The output head reads it, too

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_trained(self) -> bool:
        return self.gradient != "none"

    def on_rank(self, degrees: SplitDegrees) -> "ParameterSpec":
        """The shard of one rank."""
        shape = list(self.shape)
        shape[self.split_dim], _ = degrees.local_size(self.split, shape[self.split_dim])
        return replace(self, shape=tuple(shape), split=WHOLE)


@dataclass(frozen=True)
class MatmulSpec:
    """A product [n, in] x [in, out] with a parameter, where n is the count of `per`."""

    parameter: str
    in_features: int
    out_features: int
    per: CountedPer = "token"
    uses_per_token: int = 1  # Experts of this kind that each token visits
    split: DimensionUnits = WHOLE
    sums_outputs: bool = False  # Ranks split the inputs and add their outputs
    sequence_ranks: int = 1  # Ranks of which each computes its part of the tokens
    input_gradient: bool = True  # Backward computes it, but not where no parameter before the product is trained
    weight_gradient: bool = True  # Backward computes it, but not for a frozen weight
    result_dtype: str = "compute"  # As in `SavedActivation`
    takes_adapter: bool = True  # It is a linear layer, and no router

    @property
    def backward_products(self) -> int:
        """The number of products of the same FLOPs that a backward computes."""
        return self.input_gradient + self.weight_gradient

    def flops(self, shape: MicroBatchShape, attention: AttentionFlopsRule) -> int:
        """2 n in out."""
        count = shape.part_of_sequence(self.sequence_ranks).count(self.per)
        return 2 * count * self.uses_per_token * self.in_features * self.out_features

    @property
    def output(self) -> "SavedActivation":
        """The product, as selective recomputation keeps it. Outputs that ranks add up belong to the stream."""
        is_sum = self.sums_outputs and self.split != WHOLE
        split = replace(STREAM, region=self.split.split_by) if is_sum else self.split
        name = self.parameter.removesuffix(".weight") + ".output"
        return SavedActivation(name, self.out_features * self.uses_per_token, self.per, self.result_dtype, split)

    def can_split(self, ranks: int, *, is_fused: bool) -> bool:
        """Whether ranks can split it: gate and up in one product need a width that the ranks divide."""
        is_gated = self.split.split_by == "inner" and len(self.split.units) > 1
        return not (is_fused and is_gated and any(count % ranks for count in self.split.units))

    def on_rank(self, degrees: SplitDegrees) -> "MatmulSpec":
        """The part of the product that one rank computes."""
        size, ranks = degrees.local_size(self.split, self.in_features if self.sums_outputs else self.out_features)
        in_features, out_features = (size, self.out_features) if self.sums_outputs else (self.in_features, size)
        return replace(self, split=WHOLE, in_features=in_features, out_features=out_features, sequence_ranks=ranks)


class ExchangeBytes(NamedTuple):
    """Bytes of a micro-batch that attention takes on one of the ranks that share its rows, besides the stream."""

    forward: int
    backward: int
    kept: int = 0  # For backward, in the place of its queries, keys and values


@dataclass(frozen=True)
class AttentionSpec:
    """Scores of every query with every visible key, and the weighted sum of values."""

    name: str
    heads: int
    key_dim: int
    value_dim: int
    causal: bool = False
    window: int | None = None  # A query sees at most this many keys, itself included
    queries: CountedPer = "token"
    keys: CountedPer = "token"
    kv_heads: int | None = None  # As many as `heads` if None
    reads: tuple[str, ...] = ()  # The saved tensors that the backward of the fused kernel reads
    input_gradient: bool = True
    exchange: ExchangeBytes | None = None  # Where ranks share rows

    @property
    def backward_products(self) -> int:
        """FLOPs of a backward over those of a forward, without FLOPs that a fused kernel repeats."""
        return 2 * self.input_gradient

    def can_split(self, ranks: int, *, is_fused: bool) -> bool:
        """Whether each rank gets equally many heads. Keys and values outside of a fused product may be shared: the
        gradient of a fused weight is complete or a partial sum in all of its parts."""
        kv_heads = self.kv_heads or self.heads
        is_shared = not is_fused and ranks % kv_heads == 0
        return self.heads % ranks == 0 and (kv_heads % ranks == 0 or is_shared)

    def on_rank(self, degrees: SplitDegrees) -> "AttentionSpec":
        """The heads of one rank."""
        heads, _ = degrees.local_size(DimensionUnits("heads"), self.heads)
        kv_heads, _ = degrees.local_size(DimensionUnits("heads"), self.kv_heads or self.heads)
        return replace(self, heads=heads, kv_heads=kv_heads)

    def flops(self, shape: MicroBatchShape, attention: AttentionFlopsRule) -> int:
        """2 pairs heads (key_dim + value_dim)."""
        key_length = shape.length_of(self.keys)
        window = min(self.window or key_length, key_length)
        # The first `window` queries of a row see half of it on average: T w - w^2 / 2 pairs, T^2 / 2 without a window.
        twice_pairs = window * (2 * key_length - window) * shape.rows
        if not self.causal or attention == "full":
            twice_pairs = 2 * shape.count(self.queries) * key_length
        return twice_pairs * self.heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True)
class SavedActivation:
    """A tensor that autograd keeps from forward to backward."""

    name: str
    elements: int
    per: CountedPer = "token"
    dtype: str = "compute"  # `compute`, `wide` (float32, or float64 if that is the compute dtype), or a fixed dtype
    split: DimensionUnits = WHOLE
    sequence_ranks: int = 1  # Ranks of which each keeps its part of the tokens
    kernel: BackwardKernel = "other"
    is_product: bool = False  # The result of a product with a weight, which selective recomputation keeps
    is_kept: bool = True  # Not where no gradient needs it

    def bytes(self, shape: MicroBatchShape, compute: str) -> int:
        if not self.is_kept:
            return 0
        count = shape.part_of_sequence(self.sequence_ranks).count(self.per)
        return count * self.elements * _element_bytes(self.dtype, compute)

    def on_rank(self, degrees: SplitDegrees) -> "SavedActivation":
        """The part that one rank keeps."""
        elements, ranks = degrees.local_size(self.split, self.elements)
        return replace(self, split=WHOLE, elements=elements, sequence_ranks=ranks)


@dataclass(frozen=True)
class SavedAttentionMatrix:
    """Values for each pair of query and key: [rows or 1, heads, queries, keys]."""

    name: str
    heads: int = 1
    window: int | None = None
    # Kernels know full and plainly causal masks (`implicit`). Packed rows and windows need an `explicit` mask.
    saved_with: Literal["any mask", "implicit mask", "explicit mask"] = "any mask"
    rows: Literal["all", "packed", "one"] = "one"  # Kept for each row, for each row if rows are packed, or once
    queries: CountedPer = "token"
    keys: CountedPer = "token"
    dtype: str = "compute"
    split: DimensionUnits = WHOLE
    kernel: BackwardKernel = "other"
    is_kept: bool = True  # Not where no gradient needs it
    has_starts: bool = False  # The mask of documents or a window, which a kernel of variable length does not need
    is_product: ClassVar[bool] = False

    def on_rank(self, degrees: SplitDegrees) -> "SavedAttentionMatrix":
        """The part that one rank keeps."""
        return replace(self, split=WHOLE, heads=degrees.local_size(self.split, self.heads)[0])

    def bytes(self, shape: MicroBatchShape, compute: str) -> int:
        keys = shape.length_of(self.keys)
        mask = "explicit mask" if shape.packed or keys > (self.window or keys) else "implicit mask"
        is_replaced = self.has_starts and shape.variable_length
        if not self.is_kept or is_replaced or self.saved_with not in ("any mask", mask):
            return 0
        rows = shape.rows if self.rows == "all" or (self.rows == "packed" and shape.packed) else 1
        return rows * self.heads * shape.length_of(self.queries) * keys * _element_bytes(self.dtype, compute)


def _element_bytes(dtype: str, compute: str) -> int:
    wide = "float64" if compute == "float64" else "float32"
    return DTYPE_BYTES[{"compute": compute, "wide": wide}.get(dtype, dtype)]


@dataclass(frozen=True)
class LayerSpec:
    """A layer with its parameters, operations and saved tensors; layers add up to a block."""

    parameters: tuple[ParameterSpec, ...] = ()
    operations: tuple[MatmulSpec | AttentionSpec, ...] = ()
    saved: tuple[SavedActivation | SavedAttentionMatrix, ...] = ()

    @cached_property
    def has_backward(self) -> bool:
        """Whether a gradient goes into it: it is trained, or something before it is."""
        gradients = (o.backward_products > 0 for o in self.operations), (p.is_trained for p in self.parameters)
        return not (self.operations or self.parameters) or any(chain(*gradients))

    def __add__(self, more: "LayerSpec") -> "LayerSpec":
        return LayerSpec(self.parameters + more.parameters, self.operations + more.operations, self.saved + more.saved)

    def on_rank(self, degrees: SplitDegrees) -> "LayerSpec":
        """The layer's part on one rank."""
        return LayerSpec(
            tuple(parameter.on_rank(degrees) for parameter in self.parameters),
            tuple(operation.on_rank(degrees) for operation in self.operations),
            tuple(saved.on_rank(degrees) for saved in self.saved),
        )


@dataclass(frozen=True)
class BlockSpec:
    """A run of equal blocks of a model, such as its 32 transformer blocks. Sizes are those of one block."""

    name: str
    layer: LayerSpec
    prefix: str = ""  # Prefix of its parameters' names; `{i}` stands for the block's index
    repeat: int = 1
    first_index: int = 0
    input: SavedActivation | None = None  # All that full recomputation keeps; None: it cannot be recomputed
    # Kept once if later blocks are recomputed, which need them again as arguments, such as a mask
    arguments: tuple[SavedActivation | SavedAttentionMatrix, ...] = ()
    local_products: tuple[SavedActivation, ...] | None = None  # A rank's results that were added up, not the parts

    def saved(
        self, policy: BlockPolicy = "none", *, is_first: bool = False
    ) -> tuple[SavedActivation | SavedAttentionMatrix, ...]:
        """The tensors that one block keeps. The input of the first one is whole: the block splits the stream."""
        if policy == "none" or self.input is None or not self.layer.has_backward:
            return self.layer.saved
        block_input = replace(self.input, sequence_ranks=1) if is_first else self.input
        return (block_input, *self.products) if policy == "selective" else (block_input,)

    @property
    def products(self) -> tuple[SavedActivation, ...]:
        """The results of products with weights."""
        products = (each.output for each in self.layer.operations if isinstance(each, MatmulSpec))
        return tuple(products) if self.local_products is None else self.local_products

    def on_rank(self, degrees: SplitDegrees) -> "BlockSpec":
        """The part of one rank."""
        return replace(
            self,
            layer=self.layer.on_rank(degrees),
            input=self.input and self.input.on_rank(degrees),
            arguments=tuple(tensor.on_rank(degrees) for tensor in self.arguments),
            local_products=tuple(product.on_rank(degrees) for product in self.products),
        )

    @property
    def has_fused_head(self) -> bool:
        """Whether it has an output head that is fused with its loss."""
        return any(tensor.kernel == "fused head" for tensor in self.layer.saved)

    @property
    def parameter_count(self) -> int:
        """Parameters of one block."""
        return sum(p.numel for p in self.layer.parameters)

    @property
    def trained_count(self) -> int:
        """Parameters of one block that are not frozen."""
        return sum(p.numel for p in self.layer.parameters if p.is_trained)

    @property
    def active_parameter_count(self) -> int:
        """Parameters of one block that a token uses: only the experts that it is sent to."""
        return int(sum(p.numel * p.active_fraction for p in self.layer.parameters))

    def parameters_by_repetition(self) -> Iterator[list[ParameterSpec]]:
        """The parameters of each repetition, with their full names."""
        for i in range(self.first_index, self.first_index + self.repeat):
            prefix = self.prefix.format(i=i)
            yield [replace(parameter, name=prefix + parameter.name) for parameter in self.layer.parameters]

    def forward_flops(self, shape: MicroBatchShape, attention: AttentionFlopsRule = "causal") -> int:
        """FLOPs of one block."""
        return sum(operation.flops(shape, attention) for operation in self.layer.operations)

    def training_flops(self, shape: MicroBatchShape, attention: AttentionFlopsRule = "causal") -> int:
        """FLOPs of forward and backward of one block."""
        return sum((1 + each.backward_products) * each.flops(shape, attention) for each in self.layer.operations)

    def saved_bytes(self, shape: MicroBatchShape, dtype: str, policy: BlockPolicy = "none") -> int:
        """Saved activations of one block when the compute dtype is `dtype`."""
        return sum(tensor.bytes(shape, dtype) for tensor in self.saved(policy))


class SameBlock:
    """A block in a cache: its layer, whose tensors are many, is compared by identity; its repetitions do not count."""

    __slots__ = ("block",)

    def __init__(self, block: BlockSpec) -> None:
        """The key keeps the layer alive, so that no other layer has its identity."""
        self.block = block

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameBlock) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def _values(self) -> tuple[object, ...]:
        return id(self.block.layer), self.block.input
