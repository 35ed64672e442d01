"""The time of a forward and a backward of each stage for one micro-batch, with the collectives inside of it.

Blocks whose parameters are gathered before they compute and whose gradients are reduced behind them (stage 3).

Kernels are one stream, collectives another, which executes them in the order in which they are issued. The gather of a
block is issued when the kernels of the block before it start, and its reduction when its own kernels end.

The groups of a layout on the hosts of a cluster, and the time of their collectives.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Literal, Protocol

from motet.core.units import DTYPE_BYTES
from motet.models.spec.layer_specs import AttentionSpec, BlockSpec, MatmulSpec
from motet.models.spec.model_spec import ModelSpec
from motet.parallel.data_parallel.zero import StageAction
from motet.parallel.layout import Layout
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.rank_placement import group_placement
from motet.plan.planned_step import ParameterCounts, PlannedStep, is_expert
from motet.plan.time.kernel_times import BlockTimes, DeviceRates, KernelTimes


@dataclass(frozen=True)
class ShardedBlock:
    """Seconds of a block and of its collectives."""

    forward_s: float
    backward_s: float
    gather_s: float  # Gather before its forward
    gather_again_s: float  # Gather before its backward
    scatter_s: float


# (Start, stop) of the gather of a block, of its computation, and of its reduction
BlockSpans = tuple[float, float, float, float, float, float]


def simulate_forward(blocks: Sequence[ShardedBlock], contention: float) -> list[BlockSpans]:
    """The spans of blocks in a forward. Collectives slow the kernels down that they overlap with."""
    return _simulate([(block.forward_s, block.gather_s, 0.0) for block in blocks], contention)


def simulate_backward(blocks: Sequence[ShardedBlock], contention: float, *, reduces: bool = True) -> list[BlockSpans]:
    """The spans of blocks in a backward, the last block first; without `reduces` it only adds gradients up."""
    order = reversed(blocks)
    return _simulate([(b.backward_s, b.gather_again_s, b.scatter_s if reduces else 0.0) for b in order], contention)


def end_s(spans: Sequence[BlockSpans]) -> float:
    """Seconds until both streams have nothing left to do."""
    return spans[-1][-1] if spans else 0.0


def _simulate(blocks: Sequence[tuple[float, float, float]], contention: float) -> list[BlockSpans]:
    """The spans of blocks of (computation, gather, reduction)."""
    network = start = end = issued = gathered = scatter_before_s = 0.0
    spans = list[BlockSpans]()
    for compute_s, gather_s, scatter_s in (*blocks, (0.0, 0.0, 0.0)):
        before = issued, gathered, start, end  # The gather and the computation of the block before
        issued = network if network > start else start
        network = gathered = issued + gather_s
        computed = network if network > end else end
        spans.append((*before, computed, computed + scatter_before_s))
        if scatter_before_s:
            network = computed + scatter_before_s
        start = end if end > gathered else gathered
        overlap_s = gather_s + scatter_s
        end = start + compute_s + contention * (overlap_s if overlap_s < compute_s else compute_s)
        scatter_before_s = scatter_s
    return spans[1:]


GroupName = Literal["tp", "cp", "ep", "shards", "replicas", "expert shards", "pp", "near"]


class CollectiveCosts(Protocol):
    """The time of a collective of a group, of which `ranks_per_host` are on one host."""

    def seconds(self, collective: str, size_bytes: float, *, ranks: int, ranks_per_host: int) -> float:
        """Seconds if all like groups of the hosts execute it."""


@dataclass(frozen=True)
class GroupTimes:
    """Times of collectives by the name of the group. Ranks of `tp` are neighbours, then those of `cp`, `dp`, `pp`."""

    layout: Layout
    devices_per_host: int
    costs: CollectiveCosts
    shards: int = 1  # Ranks of data and context parallelism over which gradients are scattered

    @cached_property
    def _placements(self) -> Mapping[str, tuple[int, int]]:
        layout = self.layout
        degrees = layout.pp, layout.dp, layout.cp, layout.tp
        experts = layout.ep, layout.expert_tp
        return _placements(degrees, experts, shards=self.shards, devices_per_host=self.devices_per_host)

    def placement(self, name: GroupName) -> tuple[int, int]:
        """(Ranks of the group, ranks of it on one host)."""
        return self._placements[name]

    def seconds(self, collective: str, size_bytes: float, name: GroupName) -> float:
        """The time of a collective; none in a group of one rank."""
        if not size_bytes:
            return 0.0
        ranks, per_host = self.placement(name)
        if ranks == 1:
            return 0.0
        return self.costs.seconds(collective, size_bytes, ranks=ranks, ranks_per_host=per_host)

    def action_s(
        self, action: StageAction, counts: ParameterCounts, width: float, *, is_scattered: bool, pieces: int = 1
    ) -> float:
        """The time of an action on parameters of `width` bytes, in `pieces` pieces unless it adds up shards.

        Gradients of experts are complete after the first sum: ranks that hold the same experts are one group.
        """
        assert action.over is not None
        if action.tensor == "parameters" and action.moment in ("forward", "backward"):
            counts = counts.with_frozen()
        collective, size = action.kind.replace("_", "-"), width * counts.dense
        if is_scattered:
            return self.seconds(collective, size / self.shards, action.over)
        seconds = pieces * self.seconds(collective, size / pieces, action.over)
        return seconds + self.seconds(collective, width * counts.experts, "expert shards")


@lru_cache(maxsize=1 << 14)  # Layouts that are compared have few different ones
def _placements(
    degrees: tuple[int, int, int, int], experts: tuple[int, int], *, shards: int, devices_per_host: int
) -> Mapping[str, tuple[int, int]]:
    """The placement of the groups of activations, of gradients and of experts."""
    pp, dp, cp, tp = degrees
    views = (
        (("pp", pp), ("replicas", dp * cp // shards), ("shards", shards), ("rest", tp)),
        (
            ("pp", pp),
            ("expert shards", max(1, dp * cp * tp // prod(experts))),
            ("ep", experts[0]),
            ("rest", experts[1]),
        ),
        (("pp", pp), ("dp", dp), ("cp", cp), ("tp", tp)),
    )
    return {
        # A message has two ends
        name: group_placement(ParallelDims(sizes), name, devices_per_host, neighbours=2 if name == "pp" else None)
        for sizes in views
        for name, _ in sizes
    }


@dataclass(frozen=True)
class PlannedBlock:
    """Seconds of one block and one micro-batch on one rank."""

    kernels: BlockTimes
    tensor_s: tuple[float, float, float] = (0.0, 0.0, 0.0)  # Exposed, in forward, backward and recomputation
    expert_s: tuple[float, float, float] = (0.0, 0.0, 0.0)
    context_s: tuple[float, float, float] = (0.0, 0.0, 0.0)
    launch_s: float = 0.0  # Time in which the host launches a forward's kernels: no rank is faster
    recomputes_all: bool = False  # The host launches the kernels of a forward again
    overhead_s: float = 0.0  # Added to forward, and to backward
    has_backward: bool = True

    def _sum(self, index: int) -> float:
        return self.tensor_s[index] + self.expert_s[index] + self.context_s[index]

    @property
    def forward_s(self) -> float:
        return max(self.kernels.forward_s + self._sum(0), self.launch_s) + self.overhead_s

    @property
    def backward_s(self) -> float:
        """Seconds of a backward, with recomputation."""
        if not self.has_backward:
            return 0.0
        backward = max(self.kernels.backward_s + self._sum(1), 2 * self.launch_s)
        return backward + self.recomputed_s + self.overhead_s

    @property
    def host_s(self) -> float:
        """The part of both for which the device waits for the host."""
        kernels = self.kernels.forward_s + self.kernels.backward_s + self.kernels.recomputed_s
        return self.forward_s + self.backward_s - kernels - sum(map(self._sum, range(3)))

    @property
    def recomputed_s(self) -> float:
        if not self.has_backward:
            return 0.0
        return max(self.kernels.recomputed_s + self._sum(2), self.launch_s if self.recomputes_all else 0.0)


class StageTimes:
    """The costs of the blocks of a step, each kind of block once."""

    def __init__(self, step: PlannedStep, rates: DeviceRates, groups: GroupTimes) -> None:
        self._step, self._groups = step, groups
        layout, kinds = step.layout, (step.recipe.compute, step.matmul)
        rank_rates = rates.for_ranks(layout.ranks, layout.ranks // layout.pp)
        self._kernels = KernelTimes(rank_rates, step.block_stack, *kinds, layout.context)
        self._costs = dict[tuple[str, int, int], PlannedBlock]()
        self._unsplit = {block.name: block for block in step.spec.blocks}

    def blocks(self, stage: ModelSpec) -> Iterator[tuple[BlockSpec, PlannedBlock]]:
        """The blocks of a stage, each kind with its repetitions."""
        for block in stage.blocks:
            key = block.name, len(block.layer.operations), len(block.layer.parameters)
            if key not in self._costs:
                self._costs[key] = self._block(block)
            yield block, self._costs[key]

    @cached_property
    def stages(self) -> tuple[tuple[tuple[BlockSpec, PlannedBlock], ...], ...]:
        """The blocks of each stage with their costs."""
        specs, kinds = self._step.stage_specs, self._step.stage_kinds
        kind_blocks = {kind: tuple(self.blocks(specs[kind])) for kind in {*kinds}}
        return tuple(kind_blocks[kind] for kind in kinds)

    def _block(self, block: BlockSpec) -> PlannedBlock:
        step = self._step
        kernels = self._kernels.block(block, step.shape, step.recompute)
        parts = self._tensor(block, kernels), self._expert(block), self._context(block, kernels)
        launch_s = self._kernels.launch_s(block)
        overhead_s = step.stack.block_overhead_s if block.input is not None else 0.0
        if step.stack.waits_for_kernels:
            overhead_s += launch_s
        is_again = step.recompute == "full" and block.input is not None
        if not block.layer.has_backward:
            parts = (parts[0][0], 0.0, 0.0), (parts[1][0], 0.0, 0.0), (parts[2][0], 0.0, 0.0)
        return PlannedBlock(kernels, *parts, launch_s, is_again, overhead_s, block.layer.has_backward)

    def _tensor(self, block: BlockSpec, kernels: BlockTimes) -> tuple[float, float, float]:
        """Collectives on activations: one sum of each product whose inputs are split, and one in its backward."""
        layout, shape = self._step.layout, self._step.shape
        if layout.tp == 1:
            return 0.0, 0.0, 0.0
        unsplit = self._unsplit[block.name].layer.operations
        sums = 0.0
        width = DTYPE_BYTES[self._step.recipe.compute]
        for before, after in zip(unsplit, block.layer.operations, strict=False):
            # An adapter's part of an output is summed with it
            is_adapter = isinstance(before, MatmulSpec) and before.parameter.endswith(".adapter_a")
            if isinstance(after, MatmulSpec) and isinstance(before, MatmulSpec) and not is_adapter:
                is_sum = before.sums_outputs and after.in_features < before.in_features
                # Input of an output head that is split by the vocabulary, whose gradient ranks add up
                is_head = block.input is None and after.out_features < before.out_features
                size = after.out_features if is_sum else after.in_features if is_head else 0
                sums += shape.count(after.per) * size * width
        if not sums:
            return 0.0, 0.0, 0.0
        groups = self._groups
        if layout.sp:
            halves = groups.seconds("reduce-scatter", sums, "tp"), groups.seconds("all-gather", sums, "tp")
            forward, backward = sum(halves), sum(halves) + halves[1]
        else:
            forward = backward = groups.seconds("all-reduce", sums, "tp")
        hidden = self._step.stack.tensor_parallel_hidden if layout.sp else 0.0
        exposed = (
            max(forward * (1 - hidden), forward - hidden * kernels.forward_s),
            max(backward * (1 - hidden), backward - hidden * kernels.backward_s),
        )
        return *exposed, exposed[0] if self._step.recompute == "full" and block.input is not None else 0.0

    def _expert(self, block: BlockSpec) -> tuple[float, float, float]:
        """All-to-all that brings tokens to their experts, and their results back."""
        layout, shape = self._step.layout, self._step.shape
        products = [o for o in block.layer.operations if isinstance(o, MatmulSpec) and is_expert(o.parameter)]
        if not products or layout.ep == 1:
            return 0.0, 0.0, 0.0
        first = products[0]
        tokens = shape.part_of_sequence(first.sequence_ranks).count("token") * first.uses_per_token
        size = tokens * first.in_features * DTYPE_BYTES[self._step.recipe.compute]
        seconds = 2 * self._groups.seconds("all-to-all", size, "ep") * (1 - self._step.stack.expert_parallel_hidden)
        return seconds, seconds, seconds if self._step.recompute == "full" else 0.0

    def _context(self, block: BlockSpec, kernels: BlockTimes) -> tuple[float, float, float]:
        """The exchange of keys and values, or of a part of the heads for a part of the sequence."""
        layout, step = self._step.layout, self._step
        attention = [o for o in block.layer.operations if isinstance(o, AttentionSpec)]
        if layout.cp == 1 or not attention:
            return 0.0, 0.0, 0.0
        operation, width = attention[0], DTYPE_BYTES[step.recipe.compute]
        heads = operation.kv_heads or operation.heads
        tokens = step.shape.count("token")
        size = layout.cp * tokens * heads * (operation.key_dim + operation.value_dim) * width
        if layout.cp_kind == "all-to-all":
            size = tokens * 2 * operation.heads * (operation.key_dim + operation.value_dim) * width
            seconds = self._groups.seconds("all-to-all", size, "cp")
        else:
            seconds = self._groups.seconds("all-gather", size, "cp")
        hidden = step.stack.context_parallel_hidden
        exposed = max(seconds * (1 - hidden), seconds - hidden * kernels.forward_s)
        return exposed, 2 * exposed, exposed if step.recompute == "full" else 0.0
