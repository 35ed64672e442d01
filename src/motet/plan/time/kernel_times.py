"""The time that one rank computes on a block: products, attention and kernels that are bound by memory.

Products take the time of their tiles (kernel_times.py), fused attention its FLOPs over a rate that grows with the
sequence and the size of a head, and all other kernels their bytes over the bandwidth that streaming reaches.

The time of a matrix product by its sizes.

A library cuts the result into tiles, which the compute units of a device process in rounds: the last round is rarely
full. It chooses the tile with the least time, and for few tiles also cuts the inner dimension. Each tile pays for its
prologue and epilogue as if the inner dimension were longer. Reading and writing overlap with that only in part.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil, inf
from typing import NamedTuple

from motet.core.units import DTYPE_BYTES
from motet.models.spec.layer_specs import (
    AttentionSpec,
    BlockSpec,
    MatmulSpec,
    MicroBatchShape,
    SameBlock,
    SavedActivation,
    SavedAttentionMatrix,
)
from motet.parallel.context_parallel.attention_tiles import PlaceVisibility
from motet.parallel.context_parallel.context_bytes import fullest_share
from motet.parallel.context_parallel.context_partition import ContextSplit
from motet.plan.frameworks import SoftwareStack
from motet.plan.planned_step import Recompute, SameObject, is_expert


class ProductSizes(NamedTuple):
    """`groups` products [rows, inner] x [inner, columns]."""

    rows: float
    columns: float
    inner: float
    groups: int = 1

    @property
    def flops(self) -> float:
        return 2.0 * self.groups * self.rows * self.columns * self.inner


# Rows and columns of a tile -> the share of the rate of the largest tile. Small tiles read their inputs more often.
# Assumed, after the rates that published benchmarks of CUTLASS show for forced tile sizes.
TILES = {(256, 128): 1.0, (128, 128): 0.95, (128, 64): 0.85, (64, 64): 0.7}
INNER_PARTS = (1, 2, 4, 8)  # Numbers of parts of the inner dimension


@dataclass(frozen=True)
class ProductRate:
    """The rate of products on a device with inputs of one dtype."""

    flops: float  # Rate for very large products
    units: int  # Compute units, each of which processes one tile at a time; none: a processor, whose tiles are small
    memory_Bps: float  # noqa: N815 - a unit
    # Time of a tile's prologue and epilogue, in elements of the inner dimension; on a processor, of each dimension
    tile_overhead: float
    exposed_memory: float  # The part of reads and writes, or of arithmetic, that the longer of both does not hide


def product_s(sizes: ProductSizes, rate: ProductRate, moved_bytes: float) -> float:
    """Seconds of a product that reads and writes `moved_bytes`."""
    arithmetic_s, memory_s = (
        tile_flops(sizes, rate.units, rate.tile_overhead) / rate.flops,
        moved_bytes / rate.memory_Bps,
    )
    return max(arithmetic_s, memory_s) + rate.exposed_memory * min(arithmetic_s, memory_s)


@lru_cache(maxsize=1 << 18)
def tile_flops(sizes: ProductSizes, units: int, tile_overhead: float) -> float:
    """The FLOPs for which all units are busy with the best tiles, at the rate of the largest tile."""
    rows, columns, inner, groups = sizes
    if not units:
        return 2.0 * groups * (rows + tile_overhead) * (columns + tile_overhead) * (inner + tile_overhead)
    best = inf
    for (tile_rows, tile_columns), share in TILES.items():
        tiles = groups * ceil(rows / tile_rows) * ceil(columns / tile_columns)
        each = 2.0 * tile_rows * tile_columns * units / share
        for parts in INNER_PARTS:
            rounds = -(-tiles * parts // units)
            best = min(best, rounds * each * (inner / parts + tile_overhead))
            if tiles * parts > 4 * units:  # More parts only add overhead
                break
    return best


_NARROW_BYTES = {"float8": 1.0, "mxfloat8": 33 / 32, "float4": 9 / 16}  # Bytes of an element, with the scales of blocks
_BACKWARD_ATTENTION = 2.5  # Backward computes the scores again
_WIDE_HEAD = 128  # Features of the heads whose rates the tables hold
_MOST_GAIN_OF_HEADS = 1.1
_BACKWARD_PASSES = 2
# Bytes of a row of queries or values. Unless it is a multiple, batched products take as long as in float32 without
# matrix units: BigScience's trials with heads of 108 and 150 features on A100 show it, for others it is assumed.
_ALIGNMENT = 16


@dataclass(frozen=True)
class DeviceRates:
    """The rates that kernels reach on a device."""

    product_flops: Mapping[str, float]  # Rates of very large products by dtype of the inputs
    units: int  # Compute units, each of which processes one tile of a product
    attention_flops: Mapping[str, float]  # Fused attention by kind of kernel, forward, of long sequences
    attention_backward_flops: Mapping[str, float]
    attention_ramp: float  # Tokens at which fused attention reaches half of its rate
    early_attention_ramp: float  # The same for `flash-1`, whose rate does not depend on the size of heads
    head_overhead: float  # Features of a head whose FLOPs take as long as the exponential of a score
    tile_overhead: float  # Prologue and epilogue of products: see ProductRate
    exposed_memory: float
    memory_Bps: float  # noqa: N815 - a unit; for streaming kernels
    launch_s: float  # Time from one kernel to the next, if the host limits it
    attention_tile: int = 1  # Keys that fused attention computes together, of which the causal mask leaves some out
    cores: int = 0  # Cores of a host that executes kernels itself, shared by its ranks; 0: devices
    # The time of a kernel while other ranks compute, over that of a rank alone: products and attention, streaming
    busy_factor: float = 1.0
    busy_memory_factor: float = 1.0

    def for_ranks(self, ranks: int, together: int) -> "DeviceRates":
        """The rates of each rank, where `together` of the ranks compute simultaneously."""
        if not self.cores or ranks == 1:
            return self
        share = max(1.0, together / self.cores)
        slowed = self.slowed(self.busy_factor * share, self.busy_memory_factor * share)
        return replace(slowed, launch_s=self.launch_s * share)

    def slowed(self, products: float, memory: float) -> "DeviceRates":
        """The rates of products and of attention, and the bandwidth of streaming, divided by factors."""
        return replace(
            self,
            product_flops=_divided(self.product_flops, products),
            attention_flops=_divided(self.attention_flops, products),
            attention_backward_flops=_divided(self.attention_backward_flops, products),
            memory_Bps=self.memory_Bps / memory,
        )


@dataclass(frozen=True)
class BlockTimes:
    """Seconds of one block and one micro-batch on one rank, without collectives."""

    forward_s: float
    backward_s: float  # Without recomputation
    weight_s: float  # The part of `backward_s` for gradients of weights, which some schedules delay
    recomputed_s: float

    def __add__(self, more: "BlockTimes") -> "BlockTimes":
        return BlockTimes(
            self.forward_s + more.forward_s,
            self.backward_s + more.backward_s,
            self.weight_s + more.weight_s,
            self.recomputed_s + more.recomputed_s,
        )


@dataclass(frozen=True)
class KernelTimes:
    """Times of kernels with a framework on a device."""

    rates: DeviceRates
    stack: SoftwareStack
    compute: str  # The dtype of activations
    matmul: str  # The dtype of the inputs of products inside of blocks
    context: ContextSplit = field(default_factory=ContextSplit)  # The queries of each rank see the keys of all

    def block(self, block: BlockSpec, shape: MicroBatchShape, recompute: Recompute) -> BlockTimes:
        """The times of one block, which are computed once for all layouts in which it is the same."""
        kernels = SameObject(self.rates), SameObject(self.stack), self.compute, self.matmul, self.context
        return _times_of_block(SameBlock(block), shape, recompute, kernels=kernels)

    def compute_block(self, block: BlockSpec, shape: MicroBatchShape, recompute: Recompute) -> BlockTimes:
        """The times of one block."""
        forward = backward = weight = up = 0.0
        layer, weights = block.layer, {p.name: p.numel for p in block.layer.parameters}
        for operation in layer.operations:
            if isinstance(operation, AttentionSpec):
                continue
            numel = weights.get(operation.parameter, operation.in_features * operation.out_features)
            times = self._product(operation, shape, numel, is_in_block=block.input is not None)
            weight_gradient_s = times[2] * operation.weight_gradient
            backward += times[1] * operation.input_gradient + weight_gradient_s
            forward, weight = forward + times[0], weight + weight_gradient_s
            up += times[0] if "_up." in operation.parameter else 0.0
        attention, attention_backward = self._attention(block, shape)
        streams = self._elementwise_bytes(block, shape) / self.rates.memory_Bps
        logits = 0.0 if block.input is not None else self._loss_s(block, shape)
        products_s = forward
        forward += attention + streams + logits
        backward += attention_backward + (_BACKWARD_PASSES * streams + logits) * layer.has_backward
        recomputed = 0.0
        launches = self.launch_s(block) if self.rates.cores else 0.0  # The host does nothing else meanwhile
        if block.input is not None:
            recomputed = {
                "none": 0.0,
                "full": forward,
                "selective": forward - products_s,
                "attention": attention,
                "activations": streams,
                "up-projections": up,
                "activations and up-projections": streams + up,
            }[recompute]
            recomputed += launches * (recompute != "none")
        forward, backward = forward + launches, backward + 2 * launches * layer.has_backward
        recomputed *= layer.has_backward
        return BlockTimes(forward, backward, min(weight, backward), recomputed)

    def launch_s(self, block: BlockSpec) -> float:
        """Seconds in which the host launches the kernels of a forward."""
        if block.input is None:
            return 0.0
        experts = max((p.shape[0] for p in block.layer.parameters if is_expert(p.name)), default=0)
        kernels = self.stack.kernels_per_block
        if experts:
            kernels += self.stack.kernels_of_experts + self.stack.kernels_per_expert * experts
        return kernels * self.rates.launch_s

    def _product(
        self, product: MatmulSpec, shape: MicroBatchShape, numel: int, *, is_in_block: bool
    ) -> tuple[float, float, float]:
        """Seconds of the product, of the gradient of its input, and of that of its weight."""
        name, inner, columns = product.parameter, product.in_features, product.out_features
        dtype = self.matmul if is_in_block and "router" not in name else self.compute
        wide = DTYPE_BYTES[self.compute]
        width = _NARROW_BYTES.get(dtype, float(wide))
        tokens = _tokens(product, shape)
        groups = max(1, round(numel / (inner * columns))) if is_expert(name) else 1
        share = self.stack.expert_efficiency if is_expert(name) else 1.0
        rate = self._rate(dtype, share)
        rows = tokens / groups
        weight_sum = 2 * DTYPE_BYTES["float32"] * numel  # Gradients of weights are added to their sums in a wide dtype
        times = (
            product_s(
                ProductSizes(rows, columns, inner, groups),
                rate,
                width * (tokens * inner + numel) + wide * tokens * columns,
            ),
            product_s(
                ProductSizes(rows, inner, columns, groups),
                rate,
                width * (tokens * columns + numel) + wide * tokens * inner,
            ),
            product_s(
                ProductSizes(inner, columns, rows, groups), rate, width * tokens * (inner + columns) + weight_sum
            ),
        )
        # Inputs are cast first, by kernels that read and write them; later products read them again.
        is_cast_once = dtype == "float8"
        passes = self.stack.cast_passes if is_cast_once else self.stack.block_cast_passes
        cast_bytes = passes * tokens * wide if dtype in _NARROW_BYTES else 0.0
        casts_s = cast_bytes * inner / self.rates.memory_Bps, cast_bytes * columns / self.rates.memory_Bps
        return times[0] + casts_s[0], times[1] + casts_s[1], times[2]

    def _attention(self, block: BlockSpec, shape: MicroBatchShape) -> tuple[float, float]:
        forward = backward = 0.0
        kind, parts = self._kind_of_attention(block), self.context.ranks
        for operation in block.layer.operations:
            if not isinstance(operation, AttentionSpec):
                continue
            keys = shape.length_of(operation.keys)
            if kind == "unfused":
                seconds = self._unfused_attention_s(operation, shape)
                forward, backward = forward + seconds, backward + 2 * seconds * operation.input_gradient
                continue
            flops = self._attention_flops(operation, shape) * parts * self._share_of_fullest_rank(operation, keys)
            share = self._share_of_attention(kind, (operation.key_dim + operation.value_dim) / 2, keys)
            forward += flops / (self.rates.attention_flops[kind] * share)
            backward_flops = _BACKWARD_ATTENTION * flops * operation.input_gradient
            backward += backward_flops / (self.rates.attention_backward_flops[kind] * share)
        return forward, backward

    def _share_of_fullest_rank(self, operation: AttentionSpec, keys: int) -> float:
        """The FLOPs of the rank with the most pairs of query and key, over the mean of the ranks that share rows."""
        partition = self.context.partition(keys * self.context.ranks)
        visible = PlaceVisibility(operation.causal, operation.window if operation.causal else None)
        return fullest_share(partition, visible, self.context.head_ranks) if self.context.ranks > 1 else 1.0

    def _kind_of_attention(self, block: BlockSpec) -> str:
        """cuDNN's fused attention had no sinks, which are learned logits in addition to those of keys."""
        has_sinks = any(parameter.name.endswith("attention.sinks") for parameter in block.layer.parameters)
        return "flash-2" if has_sinks and self.stack.attention == "flash-3" else self.stack.attention

    def _share_of_attention(self, kind: str, head: float, keys: int) -> float:
        """The share of the rate of long sequences and wide heads."""
        if kind == "flash-1":
            return keys / (keys + self.rates.early_attention_ramp)
        overhead = self.rates.head_overhead
        gain = head / (head + overhead) * (_WIDE_HEAD + overhead) / _WIDE_HEAD
        return min(_MOST_GAIN_OF_HEADS, gain) * keys / (keys + self.rates.attention_ramp)

    def _attention_flops(self, operation: AttentionSpec, shape: MicroBatchShape) -> float:
        """FLOPs of the kernel, which leaves out the tiles of keys of which a query sees none."""
        tile, keys = self.rates.attention_tile, shape.length_of(operation.keys)
        if tile == 1:
            return operation.flops(shape, "causal")
        full = operation.flops(shape, "full")
        if not operation.causal or operation.window is not None:
            return full  # A kernel that reads a mask computes all pairs
        seen = sum(min(tile, keys - start) * min(start + tile, keys) for start in range(0, keys, tile))
        return full * seen / keys**2

    def _unfused_attention_s(self, operation: AttentionSpec, shape: MicroBatchShape) -> float:
        """Two batched products of all pairs, and kernels that move the scores."""
        queries, keys = shape.length_of(operation.queries), shape.length_of(operation.keys) * self.context.ranks
        groups = shape.rows * operation.heads
        width = DTYPE_BYTES[self.compute]
        is_aligned = all(size * width % _ALIGNMENT == 0 for size in (operation.key_dim, operation.value_dim))
        rate = self._rate(self.compute if is_aligned or not self.rates.units else "float32")
        products = (
            ProductSizes(queries, keys, operation.key_dim, groups),
            ProductSizes(queries, operation.value_dim, keys, groups),
        )
        moved = groups * queries * keys * self.stack.bytes_per_score
        return sum(product_s(sizes, rate, 0.0) for sizes in products) + moved / self.rates.memory_Bps

    def _rate(self, dtype: str, share: float = 1.0) -> ProductRate:
        rates = self.rates
        flops = rates.product_flops[dtype] * share
        return ProductRate(flops, rates.units, rates.memory_Bps, rates.tile_overhead, rates.exposed_memory)

    def _elementwise_bytes(self, block: BlockSpec, shape: MicroBatchShape) -> float:
        saved = (t for t in block.layer.saved if not isinstance(t, SavedAttentionMatrix))
        kept = sum(replace(t, is_kept=True).bytes(shape, self.compute) for t in saved if _is_per_token(t))
        return self.stack.elementwise_passes * kept

    def _loss_s(self, block: BlockSpec, shape: MicroBatchShape) -> float:
        heads = (o for o in block.layer.operations if isinstance(o, MatmulSpec))
        logits = sum(_tokens(operation, shape) * operation.out_features for operation in heads)
        return logits * self.stack.bytes_per_logit / self.rates.memory_Bps


_Kernels = tuple[SameObject[DeviceRates], SameObject[SoftwareStack], str, str, ContextSplit]


@lru_cache(maxsize=1 << 14)
def _times_of_block(same: SameBlock, shape: MicroBatchShape, recompute: Recompute, *, kernels: _Kernels) -> BlockTimes:
    rates, stack, compute, matmul, context = kernels
    return KernelTimes(rates.value, stack.value, compute, matmul, context).compute_block(same.block, shape, recompute)


def _divided(rates: Mapping[str, float], by: float) -> dict[str, float]:
    return {name: rate / by for name, rate in rates.items()}


def _tokens(product: MatmulSpec, shape: MicroBatchShape) -> int:
    return shape.part_of_sequence(product.sequence_ranks).count(product.per) * product.uses_per_token


def _is_per_token(tensor: SavedActivation) -> bool:
    return tensor.per in ("token", "source") and tensor.dtype == "compute"
