"""A stack of transformer blocks, and the ways in which tensor-parallel ranks split it: by motet, by torch, by hand.

A `Stack` does forward and backward on the whole input, or under sequence parallelism on the rank's part of it, and
gives the sum of squares of its output that the rank computes.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from motet.core.trace import install_sink
from motet.models.settings import DecoderSettings
from motet.models.spec.layer_specs import MicroBatchShape
from motet.models.spec.model_spec import spec_from_settings
from motet.parallel.linear import LinearProducts
from motet.parallel.model_sharding import TENSOR_DIMENSION, ModelSharding
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.process.module_inventory import inventory_of_module
from motet.parallel.process.process_group import RankGroup
from motet.parallel.tensor_parallel.sharded_module import shard_module
from motet.parallel.tensor_parallel.sharding_proposal import ProofForwards, proof_lengths, propose_sharding

SEED, HEAD_DIM = 5, 64
# The names of torch 2.13, since its old ones warn at each call.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
Stack = Callable[[Tensor], float]


@dataclass(frozen=True)
class StackSize:
    """The sizes of a stack and of its input."""

    layers: int
    hidden: int
    rows: int
    length: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    def sent_bytes(self, ranks: int, sequence: bool) -> int:
        """Bytes that a rank sends for a layer by rings: four all-reduces; or with sequence parallelism four
        all-gathers, four reduce-scatters, and two all-gathers of inputs that were not saved."""
        return (10 if sequence else 8) * (ranks - 1) * self.tokens * self.hidden * 4 // ranks

    def saved_bytes(self, ranks: int, sequence: bool) -> int:
        """Bytes that a rank keeps for the backward of a layer, by the spec of a decoder with the same layers."""
        decoder = DecoderSettings(
            vocab_size=2, context=self.length, layers=1, hidden=self.hidden, heads=self.hidden // HEAD_DIM,
            ffn_hidden=4 * self.hidden, gated=False, activation="gelu", norm="layer", positions="none",
        )  # fmt: skip
        block = spec_from_settings(decoder).on_rank(ranks, sequence=sequence).blocks[1]
        return block.saved_bytes(MicroBatchShape(self.rows, self.length), "float32")


class Attention(nn.Module):
    """Causal attention over as many heads as its projections have."""

    def __init__(self, hidden: int, local: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(hidden, local, bias=False) for _ in range(3))
        self.output = nn.Linear(local, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(attend(self.query(x), self.key(x), self.value(x)))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """Two linear layers with GELU between them."""

    def __init__(self, hidden: int, local: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, local, bias=False), nn.Linear(local, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A block whose norms come before attention and feed-forward network."""

    def __init__(self, hidden: int, ranks: int = 1) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(hidden), Attention(hidden, hidden // ranks)
        self.ffn_norm, self.ffn = nn.LayerNorm(hidden), FeedForward(hidden, 4 * hidden // ranks)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.ffn(self.ffn_norm(x))  # type: ignore[no-any-return]


def attend(*projected: Tensor) -> Tensor:
    """[R, T, heads x dim] of queries, keys and values -> the same of the outputs."""
    q, k, v = (x.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for x in projected)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class BlockStack(nn.Module):
    """Blocks one after another, written for one device."""

    def __init__(self, size: StackSize) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.blocks = nn.ModuleList(Block(size.hidden) for _ in range(size.layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def stack_of(module: Callable[[Tensor], Tensor], parameters: list[nn.Parameter]) -> Stack:
    """Forward and backward of a module, whose gradients are thrown away."""

    def step(x: Tensor) -> float:
        loss = module(x).square().sum()
        loss.backward()
        for parameter in parameters:
            parameter.grad = None
        return float(loss.detach())

    return step


class SentBytes:
    """A sink that adds up the bytes which this rank sends."""

    total = 0

    def on_span(self, action: str, start_s: float, duration_s: float, depth: int) -> None:
        pass

    def on_count(self, name: str, value: float) -> None:
        self.total += round(value) if name == "sent_bytes" else 0


def sent_bytes(stack: Stack, x: Tensor) -> int:
    """Bytes that this rank sends in a step on the backend motet; no other counts them."""
    with install_sink(sink := SentBytes()):
        stack(x)
    return sink.total


def sent_and_saved_bytes(stack: Stack, x: Tensor, parameters: Iterable[Tensor]) -> tuple[int, int]:
    """Bytes that this rank sends in a step, and bytes that autograd keeps from forward to backward."""
    kept: dict[int, torch.UntypedStorage] = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # Held, so that no other storage gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        sent = sent_bytes(stack, x)
    return sent, sum(storage.nbytes() for storage in kept.values())


# --- motet's ---------------------------------------------------------------------------------------


def motet_stack(size: StackSize, group: dist.ProcessGroup, sequence: bool, *, pieces: int = 1) -> Stack:
    """The blocks, split as motet finds and proves it; activations are communicated in pieces."""
    module = BlockStack(size)
    split_module(module, size, group, sequence=sequence, pieces=pieces)
    return stack_of(module, list(module.parameters()))


def split_module(
    module: nn.Module,
    size: StackSize,
    group: dist.ProcessGroup,
    *,
    sequence: bool = False,
    rules: Mapping[str, str] | None = None,
    pieces: int = 1,
) -> ModelSharding:
    """Let a module compute this rank's part of it: with the local parameters, and hooks that communicate."""
    ranks = RankGroup(dist.get_rank(group), dist.get_world_size(group), group, torch.device("cpu"))
    dims = ParallelDims(((TENSOR_DIMENSION, ranks.world),))
    inputs = [torch.randn(1, length, size.hidden, dtype=torch.float64) for length in proof_lengths(dims, size.length)]
    forwards = ProofForwards([partial(module, x.requires_grad_()) for x in inputs])
    sharding = propose_sharding(module, forwards, dims, splits_sequence=sequence, rules=rules)
    if sequence:  # The input and the output of the stack are this rank's tokens already
        outside = ("split", "input"), ("gather", "output")
        inside = tuple(comm for comm in sharding.boundary_comms if (comm.operation, comm.side) not in outside)
        sharding = replace(sharding, boundary_comms=inside)
    shard_module(module, sharding, dims, group=ranks, products=LinearProducts(), pieces=pieces)
    for tensor in inventory_of_module(module, {}).tensors:
        spec = sharding.spec(tensor, {TENSOR_DIMENSION: ranks.rank}, dims)
        assert spec is not None
        parameter = module.get_parameter(tensor.name)
        for dim, spans in enumerate(spec.spans):
            parts = [parameter.detach().narrow(dim, first, stop - first) for first, stop in spans]
            parameter.data = torch.cat(parts, dim).contiguous()
    return sharding


# --- torch's own -----------------------------------------------------------------------------------


def torch_stack(size: StackSize, group: dist.ProcessGroup, sequence: bool) -> Stack:
    """`parallelize_module`, as torch's tutorial of tensor parallelism does it."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    module = BlockStack(size)
    columns = ("attention.query", "attention.key", "attention.value", "ffn.up")
    plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
    rows = {"output_layouts": Shard(1)} if sequence else {}
    plan |= {name: RowwiseParallel(**rows) for name in ("attention.output", "ffn.down")}
    if sequence:
        plan |= {name: SequenceParallel() for name in ("attention_norm", "ffn_norm")}
        whole = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
        plan |= {name: PrepareModuleInput(**whole) for name in ("attention", "ffn")}
    # DTensor caches its plans by mesh, and takes meshes of the same ranks and names for one, whatever their groups.
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(group.group_name,))
    for block in module.blocks:
        parallelize_module(block, mesh, plan)
    return stack_of(module, list(module.parameters()))


# --- by hand, as Megatron-LM does it ----------------------------------------------------------------


def hand_written_stack(size: StackSize, group: dist.ProcessGroup, sequence: bool) -> Stack:
    """Blocks of local weights, whose collectives stand in the code of the block."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    whole = BlockStack(size)
    block_of = _SequenceParallelBlock if sequence else _TensorParallelBlock
    blocks = nn.ModuleList(block_of(size.hidden, ranks) for _ in range(size.layers))
    for local, block in zip(blocks, whole.blocks, strict=True):
        local.group = group  # type: ignore[assignment]
        for name, parameter in block.named_parameters():
            dim = 1 if name.endswith(("output.weight", "down.weight")) else 0
            value = parameter if "norm" in name else parameter.chunk(ranks, dim)[rank]
            local.get_parameter(name).data.copy_(value.detach())
    return stack_of(nn.Sequential(*blocks), list(blocks.parameters()))


class _TensorParallelBlock(Block):
    group: Any

    def forward(self, x: Tensor) -> Tensor:
        x = x + _Sum.apply(self.attention(_Copy.apply(self.attention_norm(x), self.group)), self.group)
        return x + _Sum.apply(self.ffn(_Copy.apply(self.ffn_norm(x), self.group)), self.group)  # type: ignore[no-any-return]


class _SequenceParallelBlock(Block):
    group: Any

    def forward(self, x: Tensor) -> Tensor:
        attention, ffn = self.attention, self.ffn
        weights = attention.query.weight, attention.key.weight, attention.value.weight
        attended = attend(*_GatheredColumns.apply(self.attention_norm(x), self.group, *weights))
        x = x + _Scatter.apply(attention.output(attended), self.group)
        (up,) = _GatheredColumns.apply(self.ffn_norm(x), self.group, ffn.up.weight)
        return x + _Scatter.apply(ffn.down(F.gelu(up)), self.group)  # type: ignore[no-any-return]


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


class _GatheredColumns(torch.autograd.Function):
    """Products of gathered tokens with weights. Saves the local tokens, and gathers them again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        ctx.save_for_backward(x, *weights)
        whole = gather_tokens(x, group)
        return tuple(F.linear(whole, weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, *weights = ctx.saved_tensors
        whole = gather_tokens(x, ctx.group).flatten(0, 1)
        summed = gradients[0] @ weights[0]
        for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
            summed += gradient @ weight
        weight_gradients = [gradient.flatten(0, 1).T @ whole for gradient in gradients]
        return scatter_tokens(summed, ctx.group), None, *weight_gradients


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return scatter_tokens(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gather_tokens(gradient, ctx.group), None


def gather_tokens(x: Tensor, group: Any) -> Tensor:
    """[R, T / ranks, H] of each rank -> [R, T, H]."""
    parts = x.new_empty(dist.get_world_size(group), *x.shape)
    all_gather(parts.flatten(0, 1), x.contiguous(), group=group)
    return parts.transpose(0, 1).flatten(1, 2)


def scatter_tokens(x: Tensor, group: Any) -> Tensor:
    """The sum over the ranks of [R, T, H] -> this rank's tokens of it."""
    parts = x.unflatten(1, (dist.get_world_size(group), -1)).transpose(0, 1).contiguous()
    part = torch.empty_like(parts[0])
    reduce_scatter(part, parts.flatten(0, 1), group=group)
    return part


STACKS: dict[str, Callable[[StackSize, dist.ProcessGroup, bool], Stack]] = {
    "motet": motet_stack,
    "torch": torch_stack,
    "hand": hand_written_stack,
}
