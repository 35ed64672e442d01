"""The memory of a proof that runs all of a model in float64, and a refusal where it is not there."""

from torch import nn

from motet.cluster.memory_limits import read_memory_limits
from motet.core.errors import InputError
from motet.core.units import format_bytes
from motet.models.blocks import find_blocks
from motet.parallel.proof.proof_values import LARGE_MODEL

# Values, gradients of the whole and of its parts, and the parts themselves, in float64 (measured: 35 for GPT-2).
_BYTES_PER_ELEMENT = 36


def bytes_of_proof(module: nn.Module) -> int:
    """The memory for the proof of a module, whose equal blocks share their memory if it is large."""
    elements = sum(parameter.numel() for parameter in module.parameters())
    if elements > LARGE_MODEL:
        blocks = [tuple((name, p.shape) for name, p in block.named_parameters()) for block in find_blocks(module)]
        sizes = {shapes: sum(shape.numel() for _, shape in shapes) for shapes in blocks}
        elements += sum(sizes.values()) - sum(sizes[shapes] for shapes in blocks)
    return elements * _BYTES_PER_ELEMENT


def check_memory_of_proof(module: nn.Module, reason: str) -> None:
    """Refuse a module that is too large to be proven; `reason` says why a smaller model does not stand for it."""
    needed, limit = bytes_of_proof(module), min(read_memory_limits(), key=lambda each: each.total_bytes)
    if needed > limit.total_bytes:
        raise InputError(
            f"layout.tp and layout.pp split a model after a proof, which takes about {format_bytes(needed)} for "
            f"{type(module).__name__}, and {limit.name} {format_bytes(limit.total_bytes)}; no smaller model stands for "
            f"it: {reason}. Let model.factory take its sizes as arguments by their usual names, such as hidden_size, "
            "num_hidden_layers and num_attention_heads, so that motet can make a smaller one, or leave out layout.tp "
            "and layout.pp"
        )
