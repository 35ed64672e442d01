"""The memory of a planned step: one rank of each stage of the pipeline, by category.

State follows from the recipe and what the layout shards, saved activations from the sizes of the model and from the
micro-batches that the schedule has in flight; both are the values that training reads. `allocated` is what tensors take
at the peak, `reserved` what the allocator holds for them, `outside` what other tools see of the process.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

from motet.core.dtypes import DTYPE_BYTES
from motet.core.units import format_bytes
from motet.models.settings import TransformerSettings
from motet.models.spec.layer_specs import (
    BlockPolicy,
    BlockSpec,
    MatmulSpec,
    SavedActivation,
    SavedAttentionMatrix,
)
from motet.models.spec.model_spec import ModelSpec
from motet.parallel.pipeline.schedules import order_of_computations
from motet.plan.memory.memory_constants import MEMORY_CONSTANTS, MemoryConstants
from motet.plan.planned_layout import POLICY_OF_BLOCKS
from motet.plan.planned_step import PlannedStep, is_expert
from motet.precision.state_bytes import parameter_state_bytes

_T = TypeVar("_T")

_STATES = ("parameters", "master parameters", "gradients", "moments")
_SCHEDULE_ROUNDS = 3  # More micro-batches than this many times the stages do not add to what is in flight
_EXPLICIT_ATTENTION_DROPOUT = 0.1  # Makes a spec that keeps probabilities and masks


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank at its peak, by category."""

    pipeline_rank: int
    bytes: Mapping[str, float]
    constants: MemoryConstants

    @property
    def allocated(self) -> float:
        """Tensors at the peak."""
        return sum(self.bytes.values())

    @property
    def reserved(self) -> float:
        """The memory that the allocator holds: it rounds blocks, and cannot use all gaps."""
        state = sum(self.bytes.get(name, 0.0) for name in _STATES)
        return self.allocated + self.constants.fragmentation * (self.allocated - state)

    @property
    def outside(self) -> float:
        """Reserved memory, the context of the device, and buffers of the collective library."""
        return self.reserved + self.constants.context_bytes

    @property
    def state(self) -> float:
        """Bytes that are kept from step to step."""
        return sum(self.bytes.get(name, 0.0) for name in _STATES)


@dataclass(frozen=True)
class PlannedMemory:
    """The memory of one rank of each stage of a pipeline."""

    ranks: tuple[RankMemory, ...]

    @property
    def worst(self) -> RankMemory:
        """The rank with the most."""
        return max(self.ranks, key=lambda rank: rank.allocated)


def estimate_memory(step: PlannedStep) -> PlannedMemory:
    """The memory of a step."""
    constants = MEMORY_CONSTANTS[step.stack.memory]
    estimate = _Estimate(step, constants)
    return PlannedMemory(tuple(RankMemory(rank, estimate.rank(rank), constants) for rank in range(step.layout.pp)))


def fits(memory: PlannedMemory, usable_bytes: float) -> str | None:
    """Why a step needs more than a device has, or None."""
    worst = memory.worst
    if worst.outside <= usable_bytes:
        return None
    activations = worst.bytes.get("saved activations", 0.0)
    other = worst.outside - activations - worst.state
    parts = f"activations {format_bytes(activations)} + states {format_bytes(worst.state)}"
    parts += f" + buffers {format_bytes(other)}"
    return f"stage {worst.pipeline_rank}: {parts} > {format_bytes(usable_bytes)}"


class _Estimate:
    def __init__(self, step: PlannedStep, constants: MemoryConstants) -> None:
        self.step, self.constants = step, constants
        self.saved_stages = _saved_stages(step)
        # Later stages have an embedding without parameters, of which they keep what all blocks read.
        self._kinds = [
            tuple((block.name, block.repeat, len(block.layer.parameters)) for block in stage.blocks)
            for stage in step.stage_specs
        ]
        self._values = dict[tuple[str, tuple[tuple[str, int, int], ...]], Any]()
        layout = step.layout
        self.in_flight, self.stages_of_rank = _in_flight(
            (layout.schedule, layout.pp, layout.chunks, layout.microbatches)
        )

    def rank(self, rank: int) -> dict[str, float]:
        """Bytes by category of one rank of the pipeline."""
        stages = self.stages_of_rank[rank]
        parameters = [self._once(stage, "parameters", self._parameters) for stage in stages]
        dense, experts = (sum(column) for column in zip(*parameters, strict=True))
        result = self._state(dense, experts)
        saved = [self._once(stage, "saved", self._saved) for stage in stages]
        count = min(self.in_flight[rank], len(stages) * self.step.layout.microbatches)
        activations = count * sum(saved) / len(stages)
        result["saved activations"] = 0.0 if self._saves_on_host else activations
        result["recomputed activations"] = max(self._once(stage, "recomputed", self._recomputed) for stage in stages)
        result["logits"] = max(self._once(stage, "logits", self._logits) for stage in stages)
        result["gathered parameters"] = self._gathered(stages)
        result["workspace"] = self.constants.workspace_bytes
        if self.step.layout.pp > 1:
            width = DTYPE_BYTES[self.step.recipe.compute]
            result["communication buffers"] = 4.0 * self.step.shape.count("token") * self.step.model.hidden * width
            if self.step.layout.sp:
                result["communication buffers"] /= self.step.layout.tp
        return {name: size for name, size in result.items() if size}

    @property
    def _saves_on_host(self) -> bool:
        return self.constants.saved_on_host and self.step.layout.recompute == "full"

    def _once(self, stage: int, what: str, compute: Callable[[int], _T]) -> _T:
        """A value of a stage, which is computed once for all stages with the same blocks."""
        key = what, self._kinds[stage]
        if key not in self._values:
            self._values[key] = compute(stage)
        value: _T = self._values[key]
        return value

    def _parameters(self, stage: int) -> tuple[float, float]:
        dense = experts = 0.0
        for block in self.step.stage_specs[stage].blocks:
            of_experts = sum(p.numel for p in block.layer.parameters if is_expert(p.name))
            experts += block.repeat * of_experts
            dense += block.repeat * (block.parameter_count - of_experts)
        return dense, experts

    def _state(self, dense: float, experts: float) -> dict[str, float]:
        step, layout = self.step, self.step.layout
        shards = layout.shards
        expert_shards = max(1, shards * layout.tp // (layout.ep * layout.expert_tp))
        sharded = dense / shards + experts / expert_shards
        total = dense + experts
        each = parameter_state_bytes(step.recipe, step.moments, storage="rows" if layout.zero == 3 else "buckets")
        if layout.zero == 3:
            rows = each.gradients * sharded, each.masters * sharded, each.moments * sharded
            return {"gradients": rows[0], "master parameters": rows[1], "moments": rows[2]}
        updated = sharded if layout.zero else total
        twice = self.constants.gradients_twice and step.recipe.reduce != step.recipe.compute
        unreduced = DTYPE_BYTES[step.recipe.compute] * total if twice else 0.0
        return {
            "parameters": each.parameters * total,
            "gradients": each.gradients * (sharded if layout.zero == 2 else total) + unreduced,
            "master parameters": each.masters * updated,
            "moments": each.moments * updated,
        }

    def _saved(self, stage: int) -> float:
        step, kept = self.step, 0.0
        for tensor, count in self._saved_tensors(stage):
            is_product = step.layout.recompute == "selective" and tensor.name.endswith(".output")
            part = self.constants.saved_products if is_product else 1.0
            kept += count * part * self._width_share(tensor.name) * tensor.bytes(step.shape, step.recipe.compute)
        return kept

    def _width_share(self, name: str) -> float:
        """The share of a saved tensor that a framework keeps of it."""
        narrow = {"float8": 0.5, "mxfloat8": 0.5, "float4": 0.5}.get(
            self.step.matmul, 1.0
        )  # float4 keeps a transposed copy as well
        narrow = narrow if self.constants.keeps_inputs_in_matmul_dtype else 1.0
        is_input = name.endswith((".input", "ffn.experts.inner", "ffn.experts.tokens")) and "norm" not in name
        return narrow if is_input else 1.0

    def _saved_tensors(self, stage: int) -> Iterator[tuple[SavedActivation | SavedAttentionMatrix, int]]:
        """All tensors that one micro-batch leaves for the backward of a stage, and in how many blocks."""
        recompute = self.step.layout.recompute
        policy: BlockPolicy = POLICY_OF_BLOCKS.get(recompute, "none")
        spec = self.saved_stages[stage]
        for block in spec.blocks:
            if policy != "none" and block.input is not None:
                yield from ((tensor, 1) for tensor in block.arguments)
            for count, is_first in ((1, True), (block.repeat - 1, False)):
                kept = block.saved(policy, is_first=is_first) if block.input else block.layer.saved
                yield from ((tensor, count) for tensor in kept if count and not self._is_left_out(tensor, block))

    def _is_left_out(self, tensor: SavedActivation | SavedAttentionMatrix, block: BlockSpec) -> bool:
        recompute, name = self.step.layout.recompute, tensor.name
        if block.input is None and name.startswith("head."):
            return self.step.stack.keeps_logits
        if recompute == "attention":
            return isinstance(tensor, SavedAttentionMatrix)
        of_activations = name.endswith(("_norm.input", "ffn.down.input", "ffn.experts.inner"))
        of_projections = name.endswith(("queries_keys", "key_value_up"))
        return (of_activations and "activations" in recompute) or (of_projections and "up-projections" in recompute)

    def _recomputed(self, stage: int) -> float:
        """The activations of one block that backward computes again."""
        recompute = self.step.layout.recompute
        if recompute not in ("full", "selective"):
            return 0.0
        step = self.step
        blocks = (block for block in self.saved_stages[stage].blocks if block.input)
        sizes = (
            sum(tensor.bytes(step.shape, step.recipe.compute) for tensor in block.saved("none")) for block in blocks
        )
        return max(sizes, default=0.0)

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
        return logits * self.constants.bytes_per_logit

    def _gathered(self, stages: tuple[int, ...]) -> float:
        """Parameters in the compute dtype that stage 3 gathers, the next block's included, and their gradients."""
        layout = self.step.layout
        if layout.zero != 3:
            return 0.0
        compute, reduce = DTYPE_BYTES[self.step.recipe.compute], DTYPE_BYTES[self.step.recipe.reduce]
        blocks = [block for stage in stages for block in self.step.stage_specs[stage].blocks]
        largest = max((block.parameter_count for block in blocks if block.input), default=0)
        root = sum(block.parameter_count for block in blocks if not block.input)
        kept = sum(block.parameter_count * block.repeat for block in blocks if block.input)
        if layout.pp > 1 and self.constants.gathers_stage_once:
            return (compute + reduce) * float(kept + root)
        gathered = largest * 2 if layout.reshard_after_forward else kept
        return compute * (gathered + root) + reduce * max(largest, root)


@lru_cache(maxsize=4096)
def _in_flight(size: tuple[str, int, int, int]) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Two values for each rank: the most activations of a stage and a micro-batch that it keeps, and its stages."""
    schedule, ranks, chunks, microbatches = size
    if ranks == 1:
        return (chunks,), (tuple(range(chunks)),)
    is_bounded = schedule not in ("gpipe", "breadth-first")  # Otherwise all micro-batches are in flight
    count = min(microbatches, _SCHEDULE_ROUNDS * ranks) if is_bounded else microbatches
    made = order_of_computations(schedule, ranks, chunks=chunks, microbatches=count)
    bounds = tuple(min(bound, chunks * microbatches) for bound in made.max_in_flight)
    return bounds, tuple(made.stages_of_rank(rank) for rank in range(ranks))


@lru_cache(maxsize=64)
def _explicit_attention(model: TransformerSettings) -> TransformerSettings:
    return model.model_copy(update={"dropout": model.dropout or _EXPLICIT_ATTENTION_DROPOUT})


def _saved_stages(step: PlannedStep) -> tuple[ModelSpec, ...]:
    """The stages whose saved activations count: with explicit probabilities where the framework keeps them."""
    if step.stack.attention != "unfused":
        return step.stage_specs
    return replace(step, model=_explicit_attention(step.model)).stage_specs
