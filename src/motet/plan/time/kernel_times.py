"""The time that one rank computes on a block: products, attention and kernels that are bound by memory.

A kernel takes its FLOPs over the rate that large kernels of its kind reach, plus its bytes over the bandwidth that
streaming reaches: small products are slow because their bytes do not shrink as fast as their FLOPs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from motet.core.dtypes import DTYPE_BYTES
from motet.models.spec.layer_specs import (
    AttentionSpec,
    BlockSpec,
    MatmulSpec,
    MicroBatchShape,
    SavedActivation,
    SavedAttentionMatrix,
)
from motet.plan.planned_layout import Recompute
from motet.plan.planned_step import is_expert
from motet.plan.software_stack import SoftwareStack

_PRODUCT_BYTES = {"float8": 1.0, "float4": 0.5}
_BACKWARD_PRODUCTS = 2  # One for the gradient of the input, one for that of the weight
_BACKWARD_ATTENTION = 2.5  # It computes the scores again
_BACKWARD_PASSES = 2


@dataclass(frozen=True)
class DeviceRates:
    """The rates that kernels reach on a device."""

    product_flops: Mapping[str, float]  # By dtype of the inputs; large products
    attention_flops: Mapping[str, float]  # Fused attention by kind of kernel, forward
    attention_backward_flops: Mapping[str, float]
    memory_Bps: float  # noqa: N815 - a unit; streaming kernels
    launch_s: float  # From one kernel to the next, if the host is what limits


@dataclass(frozen=True)
class BlockTimes:
    """Seconds of one block and one micro-batch on one rank, without collectives."""

    forward_s: float
    backward_s: float  # Without what is computed again
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
    sequence_parts: int = 1  # Ranks that share a sequence: the queries of each see the keys of all

    def block(self, block: BlockSpec, shape: MicroBatchShape, recompute: Recompute) -> BlockTimes:
        """The times of one block."""
        forward = backward = weight = up = 0.0
        layer, weights = block.layer, {p.name: p.numel for p in block.layer.parameters}
        for operation in layer.operations:
            if isinstance(operation, AttentionSpec):
                continue
            numel = weights.get(operation.parameter, operation.in_features * operation.out_features)
            of_inputs, of_weights = self._product(operation, shape, numel, is_in_block=block.input is not None)
            forward, backward, weight = forward + of_inputs, backward + of_inputs + of_weights, weight + of_weights
            up += of_inputs if "_up." in operation.parameter else 0.0
        attention, attention_backward = self._attention(block, shape)
        streams = self._elementwise_bytes(block, shape) / self.rates.memory_Bps
        logits = 0.0 if block.input is not None else self._loss_s(block, shape)
        products_s = forward
        forward += attention + streams + logits
        backward += attention_backward + _BACKWARD_PASSES * streams + logits
        recomputed = 0.0
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
        return BlockTimes(forward, backward, min(weight, backward), recomputed)

    def launch_s(self, block: BlockSpec) -> float:
        """Seconds in which the host launches the kernels of a forward."""
        if block.input is None:
            return 0.0
        has_experts = any(is_expert(parameter.name) for parameter in block.layer.parameters)
        kernels = self.stack.kernels_per_block + has_experts * self.stack.kernels_of_experts
        return kernels * self.rates.launch_s

    def _product(
        self, product: MatmulSpec, shape: MicroBatchShape, numel: int, *, is_in_block: bool
    ) -> tuple[float, float]:
        """(Seconds of the product, which the gradient of its input takes too; seconds of the weight's gradient)."""
        name = product.parameter
        dtype = self.matmul if is_in_block and "router" not in name else self.compute
        width, tokens = _PRODUCT_BYTES.get(dtype) or DTYPE_BYTES[dtype], _tokens(product, shape)
        flops = 2 * tokens * product.in_features * product.out_features
        compute_bytes = DTYPE_BYTES[self.compute]
        read = tokens * product.in_features * width + numel * width + tokens * product.out_features * compute_bytes
        if dtype in _PRODUCT_BYTES:  # Inputs are cast first, by kernels that read and write them
            read += self.stack.cast_passes * tokens * product.in_features * compute_bytes
            read += self.stack.cast_passes * tokens * product.out_features * compute_bytes / 2
        rate = self.rates.product_flops[dtype] * (self.stack.expert_efficiency if is_expert(name) else 1)
        seconds = flops / rate + read / self.rates.memory_Bps
        # Gradients of weights are added to their sums in a wide dtype.
        return seconds, seconds + 2 * DTYPE_BYTES["float32"] * numel / self.rates.memory_Bps

    def _attention(self, block: BlockSpec, shape: MicroBatchShape) -> tuple[float, float]:
        forward = backward = 0.0
        for operation in block.layer.operations:
            if not isinstance(operation, AttentionSpec):
                continue
            if self.stack.attention == "unfused":
                flops = operation.flops(shape, "full") * self.sequence_parts
                pairs = (
                    shape.rows
                    * shape.length_of(operation.queries)
                    * shape.length_of(operation.keys)
                    * self.sequence_parts
                )
                moved = pairs * operation.heads * self.stack.bytes_per_score
                rate = self.rates.product_flops[self.compute]
                seconds = flops / rate + moved / self.rates.memory_Bps
                forward, backward = forward + seconds, backward + 2 * seconds
                continue
            flops = operation.flops(shape, "causal") * self.sequence_parts
            forward += flops / self.rates.attention_flops[self.stack.attention]
            backward += _BACKWARD_ATTENTION * flops / self.rates.attention_backward_flops[self.stack.attention]
        return forward, backward

    def _elementwise_bytes(self, block: BlockSpec, shape: MicroBatchShape) -> float:
        saved = (t for t in block.layer.saved if not isinstance(t, SavedAttentionMatrix))
        kept = sum(t.bytes(shape, self.compute) for t in saved if _is_per_token(t))
        return self.stack.elementwise_passes * kept

    def _loss_s(self, block: BlockSpec, shape: MicroBatchShape) -> float:
        heads = (o for o in block.layer.operations if isinstance(o, MatmulSpec))
        logits = sum(_tokens(operation, shape) * operation.out_features for operation in heads)
        return logits * self.stack.bytes_per_logit / self.rates.memory_Bps


def _tokens(product: MatmulSpec, shape: MicroBatchShape) -> int:
    return shape.part_of_sequence(product.sequence_ranks).count(product.per) * product.uses_per_token


def _is_per_token(tensor: SavedActivation) -> bool:
    return tensor.per in ("token", "source") and tensor.dtype == "compute"
