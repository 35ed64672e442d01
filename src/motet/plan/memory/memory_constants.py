"""The memory that frameworks and allocators take beyond the tensors of a model.

Each constant belongs to a framework.
"""

from dataclasses import dataclass
from typing import Literal

MemoryKind = Literal["motet", "megatron", "megatron-deepspeed", "deepspeed", "fsdp"]


@dataclass(frozen=True)
class MemoryConstants:
    """Bytes and shares of a framework."""

    bytes_per_logit: float  # Logits, their softmax and gradient
    fragmentation: float  # Of what is not state, beyond allocated tensors
    workspace_bytes: float  # Of matrix products, flat buffers of collectives, and small tensors
    context_bytes: float  # Of the device's context and of collectives
    origin: str
    gradients_twice: bool = False  # Gradients of a backward are kept in the compute dtype next to their sums
    saved_products: float = 1.0  # The part of the products that selective recomputation keeps
    keeps_inputs_in_matmul_dtype: bool = False  # Inputs of products, in float8 or float4
    saved_on_host: bool = False  # Inputs of recomputed blocks
    gathers_stage_once: bool = False  # A stage of a pipeline keeps gathered parameters, and gradients that are whole


MEMORY_CONSTANTS: dict[MemoryKind, MemoryConstants] = {
    "motet": MemoryConstants(0.0, 0.05, 0.0, 1.5e9, "assumed"),
    "megatron": MemoryConstants(
        8.1,
        0.03,
        120e6,
        1.5e9,
        "logits in 16 and 32 bits and a part of their gradient: fitted to Megatron-core's tests",
        keeps_inputs_in_matmul_dtype=True,
    ),
    "megatron-deepspeed": MemoryConstants(
        10.0, 0.08, 7.5e9, 2.5e9, "flat buffers of collectives: fitted to the rows of BLOOM", gradients_twice=True
    ),
    "deepspeed": MemoryConstants(
        10.0, 0.08, 1e9, 2.5e9, "assumed: stage 3 with the inputs of recomputed blocks on the host", saved_on_host=True
    ),
    "fsdp": MemoryConstants(
        12.0,
        0.08,
        150e6,
        2.5e9,
        "logits in 32 bits and their gradient: fitted to torchtitan's rows; every second product is kept, "
        "as its source says",
        saved_products=0.5,
        gathers_stage_once=True,
    ),
}
