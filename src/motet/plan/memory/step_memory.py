"""The memory of a planned step: one rank of each stage of the pipeline, by category.

State follows from the recipe and what the layout shards, saved activations from the sizes of the model and from the
micro-batches that the schedule has in flight; both are the values that training reads.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from motet.core.dtypes import DTYPE_BYTES
from motet.models.spec.layer_specs import BlockPolicy, BlockSpec, MatmulSpec
from motet.parallel.step_plan.stage_memory import (
    GradientStorage,
    StagePeaks,
    largest_moment,
)
from motet.plan.memory.memory_constants import MEMORY_CONSTANTS, MemoryConstants
from motet.plan.memory.rank_memory import PlannedMemory, RankMemory
from motet.plan.memory.saved_activations import SavedActivations
from motet.plan.memory.simulated_stages import (
    ScheduleSize,
    StageSettings,
    busy_moments_of_ranks,
    order_of_schedule,
    peaks_of_stage,
)
from motet.plan.planned_layout import POLICY_OF_BLOCKS
from motet.plan.planned_step import PlannedStep, expert_products, is_expert
from motet.plan.same_object import SameObject
from motet.precision.state_bytes import parameter_state_bytes

# Frameworks with other definitions of what is saved differ by less from the sizes of the model.
_SURELY_SAVED = 0.9
_CHANGES = {"F": 1, "B": -1, "W": -1}  # Of the micro-batches that a rank keeps of a stage


def estimate_memory(step: PlannedStep, *, only_fullest: bool = False) -> PlannedMemory:
    """The memory of a step: of all ranks, or of those alone that can have the most."""
    constants = MEMORY_CONSTANTS[step.stack.memory]
    estimate = _Estimate(step, constants)
    layout = step.layout
    splits = (layout.dp * layout.cp, layout.tp, layout.cp, layout.pp, layout.ep)
    communicators = 1 + sum(ranks > 1 for ranks in splits)  # One of all ranks, one of each dimension
    chosen = estimate.fullest_ranks() if only_fullest else range(layout.pp)
    return PlannedMemory(tuple(RankMemory(rank, estimate.rank(rank), constants, communicators) for rank in chosen))


def least_memory(step: PlannedStep) -> float:
    """Bytes that the first rank needs at least: its state, and nearly all that it saves. It takes far less time."""
    estimate = _Estimate(step, MEMORY_CONSTANTS[step.stack.memory])
    return estimate.state_and_saved(0, _SURELY_SAVED)


@dataclass(frozen=True)
class _StageMemory:
    """Elements of parameters of one stage; its other values are bytes, of one micro-batch."""

    dense: float
    experts: float
    saved: float
    recomputed: float
    gradients: float
    logits: float


class _Estimate:
    def __init__(self, step: PlannedStep, constants: MemoryConstants) -> None:
        self.step, self.constants = step, constants
        self.saved = SavedActivations(step, constants)
        # Later stages have an embedding without parameters, of which they keep what all blocks read.
        self._kinds = step.stage_kinds
        self._stages, self._known_peaks = dict[int, _StageMemory](), dict[int, StagePeaks]()
        layout = step.layout
        self.in_flight = _in_flight((layout.schedule, layout.pp, layout.chunks, layout.microbatches))
        self.compute, self.reduce = DTYPE_BYTES[step.recipe.compute], DTYPE_BYTES[step.recipe.reduce]

    def rank(self, rank: int) -> dict[str, float]:
        """Bytes by category of one rank of the pipeline, at the larger of two peaks: in the loss, with its logits, and
        in the backward of a block, with what is computed again."""
        in_flight, layout = self.in_flight[rank], self.step.layout
        stages = tuple(stage for stage, _ in in_flight)
        each = [self._stage(stage) for stage in stages]
        result = self._state(
            sum(stage.dense for stage in each) + self._tied_copy(stages), sum(stage.experts for stage in each)
        )
        if self.constants.simulates_kernels:
            result |= self._largest_moment(rank)
            return {name: size for name, size in result.items() if size}
        saved = sum(stage.saved * count for stage, (_, count) in zip(each, in_flight, strict=True))
        result["saved activations"] = 0.0 if self._saves_on_host else saved
        result["workspace"] = self._workspace
        if layout.pp > 1:
            kept = {
                "none": 0.0,
                "parts of outputs": sum(count for _, count in in_flight) / layout.tp,
                "outputs and gradients": 2.0 * len(stages) * layout.microbatches,
            }
            result["communication buffers"] = (4.0 + kept[self.constants.kept_messages]) * self._message_bytes
        root, blocks = self._gathered(stages)
        loss: dict[str, float] = {"logits": max(stage.logits for stage in each), "gathered parameters": root}
        backward: dict[str, float] = {
            "recomputed activations": max(stage.recomputed for stage in each),
            "activation gradients": max(stage.gradients for stage in each),
            "gathered parameters": blocks,
        }
        result |= loss if sum(loss.values()) > sum(backward.values()) else backward
        return {name: size for name, size in result.items() if size}

    def _largest_moment(self, rank: int) -> dict[str, float]:
        """Bytes besides state in the moment with the most, as `motet show memory` predicts them."""
        layout = self.step.layout
        stages = {stage: self._peaks(stage) for stage, _ in self.in_flight[rank]}
        moments = busy_moments_of_ranks((layout.schedule, layout.pp, layout.chunks, layout.microbatches))[rank]
        live = largest_moment(stages, moments)
        names = {"saved activations": live.saved, "recomputed activations": live.recomputed}
        names |= {"gathered parameters": live.gathered, "workspace": live.workspace}
        return {**names, "gradients": live.gradients} if layout.zero == 3 and layout.shards > 1 else {**names}

    def _peaks(self, stage: int) -> StagePeaks:
        """The peaks of a stage, which are computed once for all stages with the same blocks."""
        kind = self._kinds[stage]
        if kind not in self._known_peaks:
            step, layout = self.step, self.step.layout
            policy: BlockPolicy = POLICY_OF_BLOCKS.get(layout.recompute, "none")
            rest = StageSettings(step.shape, policy, self._storage, layout.tp > 1)
            self._known_peaks[kind] = peaks_of_stage(SameObject(step.stage_specs), stage, rest)
        return self._known_peaks[kind]

    @cached_property
    def _storage(self) -> GradientStorage:
        layout = self.step.layout
        zero = layout.zero if layout.zero == 3 or layout.reduce_gradients == "microbatch" else min(layout.zero, 1)
        if zero < 2:  # Nothing else matters to the peaks
            return GradientStorage("flat", self.step.recipe)
        return GradientStorage.of_stage(
            zero,
            self.step.recipe,
            shards=layout.shards,
            reshards=layout.reshard_after_forward,
            microbatches=min(layout.microbatches, 2),  # One, or several
            reduces_once=self._reduces_once,
        )

    def state_and_saved(self, rank: int, share: float) -> float:
        """Bytes of state, and a share of the saved activations, when a rank has all of them."""
        stages = [stage for stage, _ in self.in_flight[rank]]
        parameters = [self._parameters(stage) for stage in stages]
        state = self._state(sum(dense for dense, _ in parameters), sum(experts for _, experts in parameters))
        if self.constants.simulates_kernels and self.step.layout.zero == 3 and self.step.layout.microbatches == 1:
            state["gradients"] = 0.0  # Those of the only micro-batch come when saved activations go
        if self._saves_on_host:
            return sum(state.values())
        saved = sum(self.saved.of_stage(stage) * count for stage, count in self.in_flight[rank])
        return sum(state.values()) + share * saved

    def fullest_ranks(self) -> list[int]:
        """The rank that keeps the most activations, of all ranks whose stages have the same blocks."""
        fullest = dict[tuple[int, ...], tuple[float, int]]()
        saved_of = [self._stage(stage).saved for stage in range(len(self._kinds))]
        for rank, in_flight in enumerate(self.in_flight):
            kinds = tuple([self._kinds[stage] for stage, _ in in_flight])
            saved = sum([saved_of[stage] * count for stage, count in in_flight])
            if kinds not in fullest or saved > fullest[kinds][0]:
                fullest[kinds] = saved, rank
        return sorted(rank for _, rank in fullest.values())

    @property
    def _reduces_once(self) -> bool:
        """Whether whole sums of gradients are kept from one micro-batch to the next."""
        step, layout = self.step, self.step.layout
        return layout.reduce_gradients == "step" and layout.microbatches > 1 and not step.shards_gradient_sums

    @property
    def _saves_on_host(self) -> bool:
        return self.constants.saved_on_host and self.step.layout.recompute == "full"

    @cached_property
    def _largest_tensor(self) -> int:
        return max((p.numel for block in self.step.rank_spec.blocks for p in block.layer.parameters), default=0)

    @property
    def _workspace(self) -> float:
        """Workspaces of products; frameworks compute experts of which a token visits only one after each other."""
        products = (product for block in self.step.spec.blocks for product in expert_products(block))
        is_grouped = any(product.uses_per_token > 1 for product in products)
        return self.constants.workspace_bytes + (self.constants.expert_workspace_bytes if is_grouped else 0.0)

    @property
    def _message_bytes(self) -> float:
        """Activations of a micro-batch between two stages."""
        layout = self.step.layout
        ranks = layout.tp if layout.sp else 1
        return self.step.shape.count("token") * self.step.spec.hidden * self.compute / ranks

    def _stage(self, stage: int) -> "_StageMemory":
        """The memory of a stage, which is computed once for all stages with the same blocks."""
        kind = self._kinds[stage]
        if kind not in self._stages and self.constants.simulates_kernels:
            kept = self._peaks(stage).kept
            self._stages[kind] = _StageMemory(*self._parameters(stage), kept, 0.0, 0.0, 0.0)
        if kind not in self._stages:
            saved, parameters = self.saved, self._parameters(stage)
            self._stages[kind] = _StageMemory(
                *parameters,
                saved.of_stage(stage),
                saved.recomputed(stage),
                saved.gradients(stage),
                self._logits(stage),
            )
        return self._stages[kind]

    def _parameters(self, stage: int) -> tuple[float, float]:
        dense = experts = 0.0
        for block, count in self._with_extra_blocks(stage):
            of_experts = sum(p.numel for p in block.layer.parameters if is_expert(p.name))
            experts += count * of_experts
            dense += count * (block.parameter_count - of_experts)
        return dense, experts

    def _with_extra_blocks(self, stage: int) -> Iterator[tuple[BlockSpec, int]]:
        """The blocks of a stage, each with their number; multi-token prediction adds to the last ones."""
        blocks = self.step.stage_specs[stage].blocks
        is_last = stage == len(self.step.stage_specs) - 1
        yield from ((block, block.repeat) for block in blocks)
        if is_last and self.step.extra_outputs:
            yield [block for block in self.step.rank_spec.blocks if block.input][-1], self.step.extra_outputs

    def _tied_copy(self, stages: tuple[int, ...]) -> float:
        """Elements of the embedding that a stage with a tied output head keeps, if another rank has the embedding."""
        if self.step.layout.pp == 1 or len(self.step.stage_specs) - 1 not in stages:
            return 0.0
        blocks = [b for stage in stages for b in self.step.stage_specs[stage].blocks if not b.input]
        held = {parameter.name for block in blocks for parameter in block.layer.parameters}
        operations = (operation for block in blocks for operation in block.layer.operations)
        heads = (each for each in operations if isinstance(each, MatmulSpec) and each.parameter not in held)
        return float(sum(head.in_features * head.out_features for head in heads))

    def _state(self, dense: float, experts: float) -> dict[str, float]:
        step, layout = self.step, self.step.layout
        shards = layout.shards
        expert_shards = max(1, shards * layout.tp // (layout.ep * layout.expert_tp))
        sharded = dense / shards + experts / expert_shards
        total = dense + experts
        each = parameter_state_bytes(step.recipe, step.moments, storage="rows" if layout.zero == 3 else "buckets")
        twice = self.constants.gradients_twice and self.reduce != self.compute
        copies = {"flat copies": self._flat_copies(total, sharded if layout.zero else total, are_wide=twice)}
        if layout.zero == 3:
            rows = each.gradients * sharded, each.masters * sharded, each.moments * sharded
            return {"gradients": rows[0], "master parameters": rows[1], "moments": rows[2]} | copies
        updated = sharded if layout.zero else total
        unreduced = self.compute * total if twice else 0.0
        return {
            "parameters": each.parameters * total,
            "gradients": each.gradients * (sharded if layout.zero == 2 and not self._reduces_once else total)
            + unreduced,
            "master parameters": each.masters * updated,
            "moments": each.moments * updated,
        } | copies

    def _flat_copies(self, total: float, updated: float, *, are_wide: bool) -> float:
        """Copies of gradients for their reduction: a bucket, or all of them, narrowed from wide sums; a bucket of
        gathers; and gradients that are widened for the optimizer. The gaps that activations leave are too small for
        them."""
        size = self.constants.bucket_elements
        if not size:
            return 0.0
        reduced = self.compute * total if are_wide else self.reduce * size
        widened = self.constants.shard_copy_bytes * updated if self.reduce < DTYPE_BYTES["float32"] else 0.0
        return reduced + self.compute * size + widened

    def _logits(self, stage: int) -> float:
        """Logits of the loss and their gradient."""
        if not self.step.stack.keeps_logits:
            return 0.0
        heads = (
            operation
            for block in self.step.stage_specs[stage].blocks
            if block.input is None
            for operation in block.layer.operations
            if isinstance(operation, MatmulSpec)
        )
        logits = sum(self.step.shape.count(head.per) * head.out_features for head in heads)
        of_split = self.constants.bytes_per_split_logit if self.step.layout.tp > 1 else None
        extra = self.step.extra_outputs * self.constants.bytes_per_saved_logit
        return logits * ((of_split or self.constants.bytes_per_logit) + extra)

    def _gathered(self, stages: tuple[int, ...]) -> tuple[float, float]:
        """Parameters in the compute dtype that stage 3 gathers, and gradients that are not reduced yet: in the loss,
        and in the backward of a block, where the next block is gathered too."""
        layout = self.step.layout
        if layout.zero != 3:
            return 0.0, 0.0
        compute, reduce = self.compute, self.reduce
        blocks = [block for stage in stages for block in self.step.stage_specs[stage].blocks]
        largest = max((block.parameter_count for block in blocks if block.input), default=0)
        root = sum(block.parameter_count for block in blocks if not block.input)
        kept = sum(block.parameter_count * block.repeat for block in blocks if block.input)
        if limit := self.constants.live_parameters:  # Gathered one by one, and reduced through buckets
            live = compute * (min(limit, float(kept + root)) + self._largest_tensor)
            return live, live
        sums = reduce * float(kept + root) if self._reduces_once else 0.0
        in_loss = largest if layout.reshard_after_forward else kept
        in_backward = 2 * largest if layout.reshard_after_forward else kept
        in_backward_bytes = compute * float(in_backward + root) + (compute + reduce) * largest
        return sums + compute * float(in_loss + root), sums + in_backward_bytes


@lru_cache(maxsize=4096)
def _in_flight(size: ScheduleSize) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The stages of each rank, each with the micro-batches that it keeps of it when it keeps the most."""
    _, ranks, chunks, _ = size
    if ranks == 1:
        return (tuple((stage, 1) for stage in range(chunks)),)
    made, most = order_of_schedule(size), []
    for rank, actions in enumerate(made.actions):
        kept = dict.fromkeys(made.stages_of_rank(rank), 0)
        best, total, largest = tuple(kept.items()), 0, 0
        for action in actions:
            change = _CHANGES.get(action.kind, 0)
            kept[action.stage] += change
            total += change
            if total > largest:
                best, largest = tuple(kept.items()), total
        most.append(best)
    return tuple(most)
