"""How a training framework executes a step: what time and memory depend on besides model, layout and hardware.

Each constant belongs to a framework or a class of kernels, never to a model or a measured run.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class SoftwareStack:
    """The properties of a framework."""

    name: str
    # Times that kernels bound by memory read or write what a forward saves, beyond what products read and write.
    elementwise_passes: float
    # `unfused` writes scores and probabilities of all pairs of query and key to memory.
    attention: Literal["flash", "unfused"] = "flash"
    kernels_per_block: int = 30  # Launched by a forward of one transformer block
    hides_data_parallel: bool = True  # Gradients are reduced and parameters gathered while blocks compute
    tensor_parallel_hidden: float = 0.0  # The part of the collectives on activations that products hide
    expert_parallel_hidden: float = 0.0  # The part of all-to-all that other work hides
    pipeline_hidden: bool = True  # Messages between stages travel while the stages compute
    keeps_logits: bool = True  # The loss keeps logits in float32; otherwise output head and loss are fused
    allocator: Literal["torch", "expandable"] = "torch"


STACKS: dict[str, SoftwareStack] = {
    stack.name: stack
    for stack in (
        SoftwareStack("motet", 2.5, kernels_per_block=45, keeps_logits=False),
        SoftwareStack("torchtitan-eager", 4.5, kernels_per_block=60),
        SoftwareStack("torchtitan-compiled", 1.3, kernels_per_block=20),
        SoftwareStack("megatron", 1.5, tensor_parallel_hidden=0.6),
        SoftwareStack("megatron-deterministic", 1.5, hides_data_parallel=False),
        SoftwareStack("megatron-2021", 2.0, attention="unfused", hides_data_parallel=False, pipeline_hidden=False),
        SoftwareStack("megatron-deepspeed", 2.0, attention="unfused", hides_data_parallel=False, pipeline_hidden=False),
        SoftwareStack("deepspeed", 2.5, attention="unfused"),
        SoftwareStack("llm-foundry", 2.5),
    )
}
