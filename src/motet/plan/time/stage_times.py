"""The time of a forward and a backward of each stage for one micro-batch, with the collectives inside of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from motet.core.dtypes import DTYPE_BYTES
from motet.models.spec.layer_specs import AttentionSpec, BlockSpec, MatmulSpec
from motet.models.spec.model_spec import ModelSpec
from motet.plan.planned_step import PlannedStep, is_expert
from motet.plan.time.communication import GroupTimes
from motet.plan.time.kernel_times import BlockTimes, DeviceRates, KernelTimes


@dataclass(frozen=True)
class PlannedBlock:
    """Seconds of one block and one micro-batch on one rank."""

    kernels: BlockTimes
    tensor_s: tuple[float, float, float] = (0.0, 0.0, 0.0)  # Exposed, in forward, backward and what is computed again
    expert_s: tuple[float, float, float] = (0.0, 0.0, 0.0)
    context_s: tuple[float, float, float] = (0.0, 0.0, 0.0)
    launch_s: float = 0.0  # In which the host launches the kernels of a forward: a rank is not faster
    recomputes_all: bool = False  # The host launches the kernels of a forward again
    overhead_s: float = 0.0  # Of forward, and of backward

    def _sum(self, index: int) -> float:
        return self.tensor_s[index] + self.expert_s[index] + self.context_s[index]

    @property
    def forward_s(self) -> float:
        return max(self.kernels.forward_s + self._sum(0), self.launch_s) + self.overhead_s

    @property
    def backward_s(self) -> float:
        """A backward, with what is computed again."""
        backward = max(self.kernels.backward_s + self._sum(1), 2 * self.launch_s)
        return backward + self.recomputed_s + self.overhead_s

    @property
    def host_s(self) -> float:
        """The part of both for which the device waits for the host."""
        kernels = self.kernels.forward_s + self.kernels.backward_s + self.kernels.recomputed_s
        return self.forward_s + self.backward_s - kernels - sum(map(self._sum, range(3)))

    @property
    def recomputed_s(self) -> float:
        return max(self.kernels.recomputed_s + self._sum(2), self.launch_s if self.recomputes_all else 0.0)


class StageTimes:
    """The costs of the blocks of a step, each kind of block once."""

    def __init__(self, step: PlannedStep, rates: DeviceRates, groups: GroupTimes) -> None:
        self._step, self._groups = step, groups
        layout, kinds = step.layout, (step.recipe.compute, step.matmul)
        of_rank = rates.of_ranks(layout.ranks, layout.ranks // layout.pp)
        self._kernels = KernelTimes(of_rank, step.stack, *kinds, layout.cp)
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
        of_kind = {kind: tuple(self.blocks(specs[kind])) for kind in {*kinds}}
        return tuple(of_kind[kind] for kind in kinds)

    def _block(self, block: BlockSpec) -> PlannedBlock:
        step = self._step
        kernels = self._kernels.block(block, step.shape, step.recompute)
        parts = self._tensor(block, kernels), self._expert(block), self._context(block, kernels)
        launch_s = self._kernels.launch_s(block)
        overhead_s = step.stack.block_overhead_s if block.input is not None else 0.0
        if step.stack.waits_for_kernels:
            overhead_s += launch_s
        is_again = step.recompute == "full" and block.input is not None
        return PlannedBlock(kernels, *parts, launch_s, is_again, overhead_s)

    def _tensor(self, block: BlockSpec, kernels: BlockTimes) -> tuple[float, float, float]:
        """Collectives on activations: one sum of each product whose inputs are split, and one in its backward."""
        layout, shape = self._step.layout, self._step.shape
        if layout.tp == 1:
            return 0.0, 0.0, 0.0
        unsplit = self._unsplit[block.name].layer.operations
        sums = 0.0
        width = DTYPE_BYTES[self._step.recipe.compute]
        for before, after in zip(unsplit, block.layer.operations, strict=False):
            if isinstance(after, MatmulSpec) and isinstance(before, MatmulSpec):
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
