"""How a training framework executes a step: what time and memory depend on besides model, layout and hardware.

Each constant belongs to a framework or a class of kernels, never to a model or a measured run.
"""

from dataclasses import dataclass
from typing import Literal

from motet.plan.memory.memory_constants import MemoryKind


@dataclass(frozen=True)
class SoftwareStack:
    """The properties of a framework."""

    name: str
    # Times that kernels bound by memory read or write what a forward saves, beyond what products read and write.
    elementwise_passes: float
    # `unfused` attention writes scores and probabilities of all pairs of query and key to memory.
    # FlashAttention 1 of 2022, FlashAttention 2 of 2023, or `flash-3`, cuDNN's kernels in Transformer Engine.
    attention: Literal["flash-1", "flash-2", "flash-3", "unfused"] = "flash-2"
    bytes_per_score: float = 11.6  # Of `unfused` attention, moved for each pair of query and key in a forward
    bytes_per_logit: float = 14.0  # Moved by a forward of the loss, and again by its backward
    cast_passes: float = 1.6  # Times that casts to float8 with a scale for a tensor read or write an input of a product
    block_cast_passes: float = 4.3  # The same of formats with scales of blocks, which are cast in rows and in columns
    expert_efficiency: float = 0.76  # Of products of experts, which are many and small, over that of other products
    kernels_per_block: float = 30  # Launched by a forward of one transformer block
    kernels_of_experts: float = 230  # Launched in addition by a forward of a block with experts
    kernels_per_expert: float = 21  # Launched in addition for each expert that a rank holds
    sharded_efficiency: float = 1.0  # Of the bandwidth that gathers of stage 3 could reach
    block_overhead_s: float = 0.0  # Of a block and micro-batch, each in forward and backward, that nothing hides
    gathers_per_block: int = 1  # Collectives in which stage 3 gathers the parameters of a block
    hides_data_parallel: bool = True  # Gradients are reduced and parameters gathered while blocks compute
    tensor_parallel_hidden: float = 0.0  # The part of the collectives on activations that products hide
    expert_parallel_hidden: float = 0.8  # The part of all-to-all that other work hides
    context_parallel_hidden: float = 0.47  # The part of the exchange of keys and values that attention hides
    contention: float = 0.48  # Seconds by which a second of hidden communication slows computation down
    waits_for_kernels: bool = False  # The host launches a kernel when the one before it is done
    step_overhead_s: float = 0.006  # Of the host, for each step
    optimizer_passes: float = 1.0  # Times that an update takes as long as reading and writing what it needs
    pipeline_hidden: bool = True  # Messages between stages travel while the stages compute
    keeps_logits: bool = True  # The loss keeps logits in float32; otherwise output head and loss are fused
    balances_stages: bool = False  # By the time of blocks, if a layout names no stages
    memory: MemoryKind = "megatron"


STACKS: dict[str, SoftwareStack] = {
    stack.name: stack
    for stack in (
        SoftwareStack("motet", 2.5, kernels_per_block=45, keeps_logits=False, memory="motet"),
        # The same on processors, which copy messages themselves.
        SoftwareStack(
            "motet-cpu",
            2.8,
            bytes_per_logit=30,
            kernels_per_block=80,
            step_overhead_s=0.002,
            optimizer_passes=1.25,
            hides_data_parallel=False,
            pipeline_hidden=False,
            contention=1.0,
            keeps_logits=False,
            balances_stages=True,
            memory="motet",
        ),
        SoftwareStack("torchtitan-eager", 3.6, kernels_per_block=60, memory="fsdp-eager"),
        SoftwareStack("torchtitan-compiled", 1.2, kernels_per_block=20, memory="fsdp"),
        SoftwareStack("torchtitan-async-tp", 1.7, kernels_per_block=20, tensor_parallel_hidden=0.4, memory="fsdp"),
        SoftwareStack("megatron", 1.8, attention="flash-3", tensor_parallel_hidden=0.48),
        SoftwareStack("megatron-unfused", 1.9, attention="unfused"),
        SoftwareStack("megatron-deterministic", 2.5, hides_data_parallel=False),
        SoftwareStack("megatron-2021", 1.5, attention="unfused", hides_data_parallel=False, pipeline_hidden=False),
        SoftwareStack(
            "megatron-deepspeed",
            2.2,
            kernels_per_block=80,
            attention="unfused",
            hides_data_parallel=False,
            pipeline_hidden=False,
            memory="megatron-deepspeed",
        ),
        SoftwareStack(
            "megatron-deepspeed-blocking",
            8.7,
            kernels_per_block=135,  # About 80, each of which the host launches and then waits for
            attention="unfused",
            hides_data_parallel=False,
            pipeline_hidden=False,
            waits_for_kernels=True,
            memory="megatron-deepspeed",
        ),
        SoftwareStack(
            "deepspeed", 2.85, attention="unfused", gathers_per_block=4, sharded_efficiency=0.1, memory="deepspeed"
        ),
        SoftwareStack("llm-foundry", 1.55, attention="flash-1", memory="fsdp-fused-loss"),
    )
}
