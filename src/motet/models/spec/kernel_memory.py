"""The bytes that the kernels of a block take besides saved activations, as torch runs them without a compiler.

A forward makes tensors that nothing keeps. A backward goes through the saved tensors in reverse: the kernel that reads
one makes gradients of its output, its input and its weight, and then the tensor is freed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeGuard

from motet.core.dtypes import DTYPE_BYTES
from motet.models.spec.layer_specs import AttentionSpec, BlockPolicy, BlockSpec, MatmulSpec, MicroBatchShape

# Measured on one thread of a CPU with 2 MiB of L2 cache per core, 2048 rows: chunks of 1-8 MiB of float32 are equal.
# The gradient of the weight is added once per block: at a vocabulary of 50257, blocks of 32 MiB take 1.6x as long as
# 200 MiB. Against logits, cross-entropy and their backward: 0.5x the time at 4096 in bfloat16, else 0.75-0.9x.
SOFTMAX_CHUNK_BYTES = {"cpu": 4 << 20}
DEFAULT_SOFTMAX_CHUNK_BYTES = 64 << 20
LOGITS_BLOCK_BYTES = 256 << 20

TARGET_COUNT_MULTIPLE = 64  # The masked head computes this many rows, or a multiple

# A gated activation copies the gate and makes its activation; its backward has the gradients of its output, of both
# halves of its input, of their product, and a copy of the gate.
_GATED_BACKWARD, _PLAIN_BACKWARD = 3, 2  # Times the input
_PRODUCTS_OF_SAVED = {"attention.qkv": "attention.qkv.output", "ffn.inner": "ffn.up.output"}  # The same memory
_READ_BY_ATTENTION = ("output.input", "qkv", "queries_keys")  # Freed when the kernel of fused attention has ended


@dataclass(frozen=True)
class BackwardMoment:
    """One kernel of a backward."""

    left: int  # Bytes of the block's saved tensors that are alive
    workspace: int
    gradient: int = 0  # Bytes of the gradient of a weight, until it is added to its sum
    finishes: str = ""  # The layer, or its parameter, whose gradients are complete


def even_row_slices(rows: int, max_rows: int) -> Iterator[slice]:
    """Equally long slices of at most `max_rows` rows, but of 8 at least."""
    count = max(1, -(-rows // max(8, max_rows)))
    size = -(-rows // count) if rows else 1
    return (slice(start, start + size) for start in range(0, rows, size))


def padded_targets(count: int) -> int:
    """The rows that the masked head computes for a number of targets."""
    return -(-max(count, 1) // TARGET_COUNT_MULTIPLE) * TARGET_COUNT_MULTIPLE


def recomputed_bytes(block: BlockSpec, shape: MicroBatchShape, dtype: str, *, policy: BlockPolicy) -> int:
    """The saved tensors of a block that backward computes again: not the input, nor products that were kept."""
    if policy == "none" or block.input is None:
        return 0
    kept = _PRODUCTS_OF_SAVED.keys() if policy == "selective" else ()
    return sum(tensor.bytes(shape, dtype) for tensor in block.layer.saved[1:] if tensor.name not in kept)


def forward_workspace(block: BlockSpec, shape: MicroBatchShape, dtype: str, *, splits_vocabulary: bool = False) -> int:
    """The most bytes of a forward besides what it saves; ranks may split the vocabulary."""
    if block.input is None:
        return _head_workspace(block, shape, dtype, splits_vocabulary=splits_vocabulary)
    stream = _bytes_of_stream(block, shape, dtype)
    sizes = {tensor.name: tensor.bytes(shape, dtype) for tensor in block.layer.saved}
    inner, result = sizes.get("ffn.inner", 0), sizes.get("ffn.down.input", 0)
    return max(2 * stream, result if inner > result else 0)


def _head_workspace(block: BlockSpec, shape: MicroBatchShape, dtype: str, *, splits_vocabulary: bool) -> int:
    """The features that the head reads, a block of logits, and the probabilities of a chunk of its rows."""
    if not any(tensor.name == "head.weight.gradient" for tensor in block.layer.saved):
        return 0
    width, wide = DTYPE_BYTES[dtype], max(DTYPE_BYTES[dtype], DTYPE_BYTES["float32"])
    head = next(each for each in reversed(block.layer.operations) if isinstance(each, MatmulSpec))
    rows, entries = shape.count(head.per), head.out_features
    logits: int = next(even_row_slices(rows, LOGITS_BLOCK_BYTES // (width * entries))).stop
    chunks = [*even_row_slices(logits, SOFTMAX_CHUNK_BYTES["cpu"] // (wide * entries))]
    live_chunks = 1 if splits_vocabulary else min(len(chunks), 2)  # That of the chunk before is alive
    features = shape.count("token") + (rows if head.per == "target" else 0)
    scaled = logits * head.in_features * width  # Rows times their weights
    return (
        features * head.in_features * width
        + logits * entries * width
        + max(live_chunks * int(chunks[0].stop) * wide * entries, scaled)
    )


def backward_moments(block: BlockSpec, shape: MicroBatchShape, dtype: str) -> Iterator[BackwardMoment]:
    """The kernels of a backward of a block, in their order, from the gradient of its output on. A block of which no
    saved tensor is known has one for each parameter."""
    width = DTYPE_BYTES[dtype]
    if not block.layer.saved:
        for parameter in reversed([each for each in block.layer.parameters if each.gradient == "backward"]):
            yield BackwardMoment(0, 0, parameter.numel * width, parameter.name)
        return
    sizes = {tensor.name: tensor.bytes(shape, dtype) for tensor in block.layer.saved}
    left = sum(tensor.bytes(shape, dtype) for tensor in block.layer.saved)
    products = {each.parameter.removesuffix(".weight"): each for each in block.layer.operations if _is_product(each)}
    attention = {each.name: each for each in block.layer.operations if isinstance(each, AttentionSpec)}
    stream = _bytes_of_stream(block, shape, dtype)
    for tensor in reversed(block.layer.saved):
        name, size = tensor.name, sizes[tensor.name]
        layer, _, kind = name.rpartition(".")
        if layer in products and kind == "input":
            product = products[layer]
            tokens = shape.part_of_sequence(product.sequence_ranks).count(product.per)
            gathered = stream * (block.input is not None and _bytes_of_input(block, shape, dtype) < stream)
            of_output = gathered if product.sums_outputs else tokens * product.out_features * width
            gradient = product.in_features * product.out_features * width
            yield BackwardMoment(left, stream + of_output + tokens * product.in_features * width, gradient, layer)
            left -= 0 if layer.endswith(".output") and f"{layer.removesuffix('.output')}.sums" in sizes else size
        elif layer in attention and kind in ("sums", "probabilities"):
            queries_keys = attention[layer].heads * attention[layer].key_dim
            values = attention[layer].heads * attention[layer].value_dim
            tokens = shape.count(attention[layer].queries)
            yield BackwardMoment(left, stream + (2 * queries_keys + 2 * values) * tokens * width)
            left -= size + sum(sizes.get(f"{layer}.{each}", 0) for each in _READ_BY_ATTENTION if kind == "sums")
        else:
            times = _temporaries(name, block, sizes)
            yield BackwardMoment(left, stream + times * size, finishes=layer if "norm" in layer else "")
            left -= 0 if f"{layer}.sums" in sizes and kind in _READ_BY_ATTENTION else size
    table = next((each for each in block.layer.parameters if each.name == "embedding.weight"), None)
    if table is not None:
        rows = shape.count("token") * table.shape[-1] * width
        yield BackwardMoment(0, rows, table.numel * width, "embedding")


def _temporaries(name: str, block: BlockSpec, sizes: dict[str, int]) -> int:
    """Times the size of a saved tensor that the kernel which reads it takes in backward."""
    if name == "ffn.inner":
        return _GATED_BACKWARD if sizes[name] > sizes.get("ffn.down.input", 0) else _PLAIN_BACKWARD
    if name.endswith("norm.input"):
        return 2 if block.input is not None else 1
    return 2 if name in ("attention.queries_keys", "attention.qkv") else 0


def _is_product(operation: object) -> TypeGuard[MatmulSpec]:
    return isinstance(operation, MatmulSpec)


def _bytes_of_input(block: BlockSpec, shape: MicroBatchShape, dtype: str) -> int:
    return block.input.bytes(shape, dtype) if block.input is not None else 0


def _bytes_of_stream(block: BlockSpec, shape: MicroBatchShape, dtype: str) -> int:
    """The input of a block with all its tokens, or of a head."""
    if block.input is not None:
        return replace(block.input, sequence_ranks=1).bytes(shape, dtype)
    sizes = (tensor.bytes(shape, dtype) for tensor in block.layer.saved if tensor.name.endswith("norm.input"))
    return max(sizes, default=0)
