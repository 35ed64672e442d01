"""Training frameworks as the planner knows them: constants of time and of memory, each with its origin.

They describe how a framework executes a step: the causes of time and memory besides model, layout and hardware.

Each constant belongs to a framework or a class of kernels, never to a model or a measured run.

The memory that frameworks and allocators take beyond the tensors that follow from a model, each with its origin.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

MemoryKind = Literal["motet", "megatron", "megatron-deepspeed", "deepspeed", "fsdp", "fsdp-eager", "fsdp-fused-loss"]
Origin = Literal["derived", "measured", "fitted", "assumed"]

# Where each number comes from: derived from the source of the framework, measured by others, fitted, or assumed.
CONSTANT_ORIGINS: dict[str, tuple[Origin, str]] = {
    "bytes_per_logit": ("derived", "the dtypes of the tensors of a loss that are alive at the same time"),
    "bytes_per_saved_logit": ("derived", "the softmax in float32, until the backward of the output"),
    "bytes_per_split_logit": ("derived", "the same for torch's loss over logits that tensor parallelism splits"),
    "fragmentation": ("fitted", "torchtitan's peak reserved memory on H100; for Megatron 3 % are assumed"),
    "workspace_bytes": (
        "derived",
        "32 MiB for cuBLAS in the forward's thread, the backward's, and for Transformer Engine",
    ),
    "expert_workspace_bytes": ("derived", "32 MiB for each of the 4 streams of Transformer Engine's grouped products"),
    "bucket_elements": ("derived", "default bucket of DeepSpeed's reductions and gathers"),
    "live_parameters": ("derived", "DeepSpeed's default of stage3_max_live_parameters"),
    "shard_copy_bytes": ("derived", "gradients of DeepSpeed's float16 optimizer: a flat copy and one in float32"),
    "expert_imbalance": ("assumed", "tokens of the fullest rank of experts over the mean"),
    "context_bytes": (
        "measured",
        "old torch: mean of 1271 MiB on V100 and 1573 MiB on A100, by BigScience; since it loads lazily, a third",
    ),
    "communicator_bytes": ("derived", "16 channels with buffers of 6 MiB in both directions"),
}


@dataclass(frozen=True)
class MemoryConstants:
    """Bytes, shares and habits of a framework."""

    bytes_per_logit: float  # Bytes in the loss: logits, their copies in float32, and gradients
    fragmentation: float  # Share of memory other than state, beyond allocated tensors
    context_bytes: float  # Memory of the device's context
    bytes_per_split_logit: float | None = None  # With logits that tensor parallelism splits; `bytes_per_logit` if None
    bytes_per_saved_logit: float = 4.0  # The same for each extra output of multi-token prediction
    workspace_bytes: float = 2 * 2**25
    expert_workspace_bytes: float = 0.0
    communicator_bytes: float = 2e8
    bucket_elements: float = 0.0  # Flat copies in which gradients are summed, and parameters gathered
    live_parameters: float = 0.0  # Most parameters that stage 3 keeps gathered; 0: those of a block and the next
    shard_copy_bytes: float = 0.0  # Copy of each element that a rank updates, where sums of gradients are in 16 bits
    # Saved tensors that a framework does not keep, by how their name ends
    left_out: tuple[str, ...] = field(default=("ffn.experts.result", "ffn.experts.stops", "attention.causal_mask"))
    weights_inside_experts: bool = False  # Activations of experts are weighted, not their results
    gradients_twice: bool = False  # Gradients of a backward are kept in the compute dtype next to their sums
    # Tensors that pipeline stages keep beyond inputs. DeepSpeed keeps the parts of outputs that its ranks of tensor
    # parallelism send, until their backward, and torch outputs and buffers of gradients of all micro-batches.
    kept_output_parts: int = 0  # Parts of each micro-batch in flight
    kept_outputs: int = 0  # Outputs of each micro-batch of a step
    splits_first_input: bool = True  # Sequence parallelism splits the input of a stage, not only inside of blocks
    kept_products: Literal["all", "every second", "every second, as compiled"] = "all"  # Kept when selective
    keeps_inputs_in_matmul_dtype: bool = False  # Inputs of products, in float8 or float4
    saved_on_host: bool = False  # Inputs of recomputed blocks
    simulates_kernels: bool = False  # Temporary memory is that of each kernel, as torch runs it
    forward_work: str = "logits"  # The category of temporary memory in a forward
    backward_work: str = "activation gradients"


EXPERT_IMBALANCE = 1.2
_FRAGMENTATION, _OLD_CONTEXT, _CONTEXT = 0.17, 1422 * 2**20, 0.5e9

MEMORY_CONSTANTS: dict[MemoryKind, MemoryConstants] = {
    "motet": MemoryConstants(
        0.0,
        0.05,
        _CONTEXT,
        workspace_bytes=0.0,
        left_out=(),
        splits_first_input=False,
        simulates_kernels=True,
        forward_work="workspace",
        backward_work="workspace",
    ),
    # Logits in 16 bits, and their softmax in float32, which becomes the gradient
    "megatron": MemoryConstants(
        6.0,
        0.03,
        _CONTEXT,
        workspace_bytes=3 * 2**25,
        expert_workspace_bytes=4 * 2**25,
        weights_inside_experts=True,
        keeps_inputs_in_matmul_dtype=True,
    ),
    "megatron-deepspeed": MemoryConstants(
        6.0,
        _FRAGMENTATION,
        _OLD_CONTEXT,
        bucket_elements=5e8,
        shard_copy_bytes=6.0,
        gradients_twice=True,
        kept_output_parts=1,
    ),
    "deepspeed": MemoryConstants(
        6.0, _FRAGMENTATION, _OLD_CONTEXT, bucket_elements=5e8, live_parameters=1e9, saved_on_host=True
    ),
}

# Log-softmax in float32, and the gradients of it and of logits; torch's loss over split logits has one more tensor.
_FSDP = MemoryConstants(
    12.0,
    _FRAGMENTATION,
    _CONTEXT,
    bytes_per_split_logit=16.0,
    kept_products="every second, as compiled",
    kept_outputs=2,
)
MEMORY_CONSTANTS |= {
    "fsdp": _FSDP,
    "fsdp-eager": replace(_FSDP, kept_products="every second"),
    "fsdp-fused-loss": replace(_FSDP, bytes_per_logit=4.0, bytes_per_split_logit=None),  # Logits and their gradient
}


@dataclass(frozen=True)
class SoftwareStack:
    """The properties of a framework."""

    name: str
    # Times that kernels bound by memory read or write the tensors that a forward saves, beyond the traffic of products.
    elementwise_passes: float
    # `unfused` attention writes scores and probabilities of all pairs of query and key to memory.
    # FlashAttention 1 of 2022, FlashAttention 2 of 2023, or `flash-3`, cuDNN's kernels in Transformer Engine.
    attention: Literal["flash-1", "flash-2", "flash-3", "unfused"] = "flash-2"
    bytes_per_score: float = 11.6  # Bytes that `unfused` attention moves for each pair of query and key in a forward
    bytes_per_logit: float = 14.0  # Bytes that a forward of the loss moves, and its backward again
    cast_passes: float = 1.6  # Times that casts to float8 with a scale for a tensor read or write an input of a product
    block_cast_passes: float = 4.3  # The same for formats with scales of blocks, which are cast in rows and in columns
    expert_efficiency: float = 0.76  # Rate of products of experts, which are many and small, over that of others
    kernels_per_block: float = 30  # Kernels launched by a forward of one transformer block
    kernels_of_experts: float = 230  # Kernels launched in addition by a forward of a block with experts
    kernels_per_expert: float = 21  # Kernels launched in addition for each expert that a rank holds
    sharded_efficiency: float = 1.0  # Share of the bandwidth that gathers of stage 3 could reach
    block_overhead_s: float = 0.0  # Exposed time of a block and micro-batch, in forward and in backward
    gathers_per_block: int = 1  # Collectives in which stage 3 gathers the parameters of a block
    hides_data_parallel: bool = True  # Gradients are reduced and parameters gathered while blocks compute
    tensor_parallel_hidden: float = 0.0  # The part of the collectives on activations that products hide
    expert_parallel_hidden: float = 0.8  # The part of all-to-all that other work hides
    context_parallel_hidden: float = 0.47  # The part of the exchange of keys and values that attention hides
    contention: float = 0.48  # Seconds by which a second of hidden communication slows computation down
    waits_for_kernels: bool = False  # The host launches a kernel when the one before it is done
    step_overhead_s: float = 0.006  # Host time of each step
    optimizer_passes: float = 1.0  # Time of an update over that of reading and writing its tensors
    pipeline_hidden: bool = True  # Messages between stages travel while the stages compute
    keeps_logits: bool = True  # The loss keeps logits in float32; otherwise output head and loss are fused
    balances_stages: bool = False  # Balance is by the time of blocks, if a layout names no stages
    memory: MemoryKind = "megatron"
    computes_on_gpus: bool = True
    # Frameworks whose published steps gave the constants and rates of kernels; empty: steps of the framework itself
    assumed_from: str = ""
    as_written: str = ""  # The stack of steps that cannot compile their blocks

    def assumption(self, has_measured_rates: bool) -> str:
        """A sentence on times that no step of the framework has checked; empty if there is nothing to say."""
        if not self.assumed_from or (has_measured_rates and not self.as_written):
            return ""
        if has_measured_rates:
            return "The bytes and the number of kernels of compiled blocks are assumed, from steps of torchtitan."
        return (
            f"The rates of motet's own kernels on GPUs are assumed, from steps of {self.assumed_from}, until the file "
            "of --cluster has measured [rates]."
        )


_FITTED = "torchtitan and Megatron"
_MOTET = SoftwareStack("motet", 2.5, kernels_per_block=45, keeps_logits=False, memory="motet", assumed_from=_FITTED)
# Bytes that the kernels between products move in compiled blocks of motet, over those of torch's own kernels, and the
# same of numbers of kernels. Assumed: torchtitan's fitted steps have 1.2 of 3.6 passes, and 20 of 60 kernels.
COMPILED_BYTES, COMPILED_KERNELS = 0.55, 1 / 3

STACKS: dict[str, SoftwareStack] = {
    stack.name: stack
    for stack in (
        _MOTET,
        # The same with `run.compile`
        replace(
            _MOTET,
            name="motet-compiled",
            elementwise_passes=COMPILED_BYTES * _MOTET.elementwise_passes,
            kernels_per_block=COMPILED_KERNELS * _MOTET.kernels_per_block,
            as_written="motet",
        ),
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
            computes_on_gpus=False,
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
