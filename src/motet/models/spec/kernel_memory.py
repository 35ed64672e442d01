"""The bytes that the kernels of a block take besides saved activations, as torch runs them without a compiler.

A forward makes tensors that nothing keeps. A backward goes through the saved tensors in reverse: the kernel that reads
one makes gradients of its output, its input and its weight, and then the tensor is freed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeGuard

from motet.core.units import DTYPE_BYTES
from motet.models.arch.logit_slices import LOGITS_BLOCK_BYTES, SOFTMAX_CHUNK_BYTES, even_row_slices
from motet.models.spec.layer_specs import (
    AttentionSpec,
    BackwardKernel,
    BlockPolicy,
    BlockSpec,
    MatmulSpec,
    MicroBatchShape,
)

# Times the size of a saved tensor that the kernel which reads it takes in backward. A gated activation copies the gate
# and makes its activation; its backward has the gradients of its output, of both halves of its input, of their product,
# and a copy of the gate.
_TEMPORARIES: Mapping[BackwardKernel, int] = {
    "gated activation": 3, "activation": 2, "norm": 2, "queries and keys": 2, "weighted sum": 2
}  # fmt: skip


@dataclass(frozen=True)
class BackwardMoment:
    """One kernel of a backward."""

    left: int  # Bytes of the block's saved tensors that are alive
    workspace: int
    gradient: int = 0  # Bytes of the gradient of a weight, until it is added to its sum
    finishes: str = ""  # The layer, or its parameter, whose gradients are complete


def recomputed_bytes(block: BlockSpec, shape: MicroBatchShape, dtype: str, *, policy: BlockPolicy) -> int:
    """The saved tensors of a block that backward computes again: not the input, nor products that were kept."""
    if policy == "none" or block.input is None:
        return 0
    again = (tensor for tensor in block.layer.saved[1:] if not (policy == "selective" and tensor.is_product))
    return sum(tensor.bytes(shape, dtype) for tensor in again)


def forward_workspace(block: BlockSpec, shape: MicroBatchShape, dtype: str, *, splits_vocabulary: bool = False) -> int:
    """The most bytes of a forward besides its saved tensors; ranks may split the vocabulary."""
    if block.input is None:
        return _head_workspace(block, shape, dtype, splits_vocabulary=splits_vocabulary)
    gated = (tensor for tensor in block.layer.saved if tensor.kernel == "gated activation")
    results = (tensor.bytes(shape, dtype) // 2 for tensor in gated)  # Gate and up are one tensor
    stream = _bytes_of_stream(block, shape, dtype)
    sums = (stream + tensor.bytes(shape, dtype) for tensor in block.layer.saved if tensor.kernel == "weighted sum")
    return max(2 * stream, *results, *sums, *_exchanged_in_forward(block, shape, dtype), 0)


def _exchanged_in_forward(block: BlockSpec, shape: MicroBatchShape, dtype: str) -> Iterator[int]:
    """Bytes of each attention of ranks that share rows, without those of tensors that the block saves after it."""
    for each in block.layer.operations:
        if isinstance(each, AttentionSpec) and each.exchange is not None:
            first = 1 + max((i for i, tensor in enumerate(block.layer.saved) if tensor.name in each.reads), default=-1)
            after = sum(tensor.bytes(shape, dtype) for tensor in block.layer.saved[first:])
            yield each.exchange.forward - after


def _head_workspace(block: BlockSpec, shape: MicroBatchShape, dtype: str, *, splits_vocabulary: bool) -> int:
    """The features that the head reads, a block of logits, and the probabilities of a chunk of its rows."""
    if not block.has_fused_head:
        return 0
    width, wide = DTYPE_BYTES[dtype], max(DTYPE_BYTES[dtype], DTYPE_BYTES["float32"])
    head = next(each for each in reversed(block.layer.operations) if isinstance(each, MatmulSpec))
    rows, entries = shape.count(head.per), head.out_features
    block_rows = LOGITS_BLOCK_BYTES[shape.device] // (width * entries)
    logits: int = next(even_row_slices(rows, block_rows)).stop
    chunks = [*even_row_slices(logits, SOFTMAX_CHUNK_BYTES["cpu"] // (wide * entries))]
    # The chunk before is alive, and torch copies logits of a narrow dtype before their softmax
    live_chunks = 1 if splits_vocabulary else min(len(chunks), 2) + (wide > width)
    if shape.device == "cuda" and dtype != "float64":  # A kernel overwrites the logits without a copy
        live_chunks = 0
    features = shape.count("token") + (rows if head.per == "target" else 0)
    scaled = logits * head.in_features * width  # Bytes of rows times their weights
    return (
        features * head.in_features * width
        + logits * entries * width
        + max(live_chunks * int(chunks[0].stop) * wide * entries, scaled)
    )


def backward_moments(block: BlockSpec, shape: MicroBatchShape, dtype: str) -> Iterator[BackwardMoment]:
    """The kernels of a backward of a block, in their order, from the gradient of its output on. A block without known
    saved tensors has one for each parameter."""
    width = DTYPE_BYTES[dtype]
    if not block.layer.saved:
        for parameter in reversed([each for each in block.layer.parameters if each.gradient == "backward"]):
            yield BackwardMoment(0, 0, parameter.numel * width, parameter.name)
        return
    if not block.layer.has_backward:
        return
    left = sum(tensor.bytes(shape, dtype) for tensor in block.layer.saved)
    products = {each.parameter.removesuffix(".weight"): each for each in block.layer.operations if _is_product(each)}
    attention = {each.name: each for each in block.layer.operations if isinstance(each, AttentionSpec)}
    sizes = {tensor.name: tensor.bytes(shape, dtype) for tensor in block.layer.saved}
    read_by_attention = {name for each in attention.values() for name in each.reads}
    stream = _bytes_of_stream(block, shape, dtype)
    for tensor in reversed(block.layer.saved):
        size, layer = sizes[tensor.name], tensor.name.rpartition(".")[0]
        freed = 0 if tensor.name in read_by_attention else size
        if tensor.kernel == "product" and layer in products:  # Some products of a trace are not operations
            for product in (products.get(f"{layer}.adapter_a"), products[layer]):
                if product is not None and product.backward_products:
                    yield _moment_of_product(product, block, shape, dtype=dtype, left=left)
        elif tensor.kernel == "attention":
            operation = attention[layer]
            vectors = 2 * operation.heads * (operation.key_dim + operation.value_dim)
            exchanged = operation.exchange and operation.exchange.backward
            yield BackwardMoment(left, stream + (exchanged or vectors * shape.count(operation.queries) * width))
            freed += sum(sizes.get(name, 0) for name in operation.reads)
        else:
            times = 1 if tensor.kernel == "norm" and block.input is None else _TEMPORARIES.get(tensor.kernel, 0)
            yield BackwardMoment(left, stream + times * size, finishes=layer if tensor.kernel == "norm" else "")
        left -= freed
    table = next((each for each in block.layer.parameters if each.name == "embedding.weight"), None)
    if table is not None and table.is_trained:
        rows = shape.count("token") * table.shape[-1] * width
        yield BackwardMoment(0, rows, table.numel * width, "embedding")


def _moment_of_product(
    product: MatmulSpec, block: BlockSpec, shape: MicroBatchShape, *, dtype: str, left: int
) -> BackwardMoment:
    width, stream = DTYPE_BYTES[dtype], _bytes_of_stream(block, shape, dtype)
    tokens = shape.part_of_sequence(product.sequence_ranks).count(product.per)
    gathered = stream * (block.input is not None and block.input.bytes(shape, dtype) < stream)
    visits = tokens * product.uses_per_token
    grad_output = gathered if product.sums_outputs else visits * product.out_features * width
    workspace = stream + grad_output + visits * product.in_features * width
    matrix = product.in_features * product.out_features
    numels = (each.numel for each in block.layer.parameters if each.name == product.parameter)  # All experts
    grad_weight = next(numels, matrix) * width * product.weight_gradient
    return BackwardMoment(left, workspace, grad_weight, product.parameter.removesuffix(".weight"))


def _is_product(operation: object) -> TypeGuard[MatmulSpec]:
    return isinstance(operation, MatmulSpec)


def _bytes_of_stream(block: BlockSpec, shape: MicroBatchShape, dtype: str) -> int:
    """The input of a block with all its tokens, or of a head."""
    if block.input is not None:
        return replace(block.input, sequence_ranks=1).bytes(shape, dtype)
    sizes = (tensor.bytes(shape, dtype) for tensor in block.layer.saved if tensor.kernel == "norm")
    return max(sizes, default=0)
