"""A stage of a model as other frameworks compute it: the tensors that they keep from forward to backward, and the
largest temporary memory. The differences between frameworks are in their rows of constants."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from motet.core.units import DTYPE_BYTES
from motet.models.settings import TransformerSettings
from motet.models.spec.layer_specs import (
    BlockPolicy,
    BlockSpec,
    LayerSpec,
    MatmulSpec,
    MicroBatchShape,
    SavedActivation,
    SavedAttentionMatrix,
)
from motet.models.spec.model_spec import ModelSpec
from motet.parallel.data_parallel.zero import sharded_states
from motet.parallel.step_plan.stage_memory import MomentBytes, StagePeaks
from motet.plan.frameworks import MemoryConstants
from motet.plan.planned_step import POLICY_OF_BLOCKS, PlannedModel, PlannedStep, Recompute, SameObject, spec_of

SavedTensor = SavedActivation | SavedAttentionMatrix
_Kept = tuple[SavedTensor, float]  # A tensor, and the part of it that is kept

_INNER_OF_EXPERTS = "experts.inner", "experts.down.input"  # Before and after their activation function
_DROPOUT = 0.1  # Any probability makes a spec with masks and explicit probabilities


class _BlockBytes(NamedTuple):
    """Bytes that one micro-batch leaves or needs in one block."""

    first: float  # Bytes kept of the first block of a stack
    other: float
    arguments: float  # Kept once for all recomputed blocks
    everything: float
    gradients: float


class _Context(NamedTuple):
    """The values on which the bytes of a block depend besides the block."""

    model: SameObject[PlannedModel]
    shape: MicroBatchShape
    recompute: Recompute
    compute: str
    matmul: str
    expert_imbalance: float
    expert_tp: int
    keeps_logits: bool
    constants: MemoryConstants


@dataclass(frozen=True)
class FrameworkStage:
    """A stage as another framework computes it: its peak is in the loss, with its logits, or in the backward of a
    block, with recomputation."""

    step: PlannedStep
    constants: MemoryConstants
    stage: int

    @property
    def kept(self) -> float:
        """Bytes that one micro-batch leaves for its backward."""
        step = self.step
        if self.constants.saved_on_host and step.recompute == "full":
            return 0.0
        kept = sum(
            sizes.first + (block.repeat - 1) * sizes.other + sizes.arguments for block, sizes in self._saved_by_block
        )
        if self.stage < len(step.stage_specs) - 1 or not step.extra_outputs:
            return kept
        last = [block for each in _framework_stages(step) for block in each.blocks if block.input][-1]
        return kept + step.extra_outputs * _block_bytes(SameObject(last), self._context).other

    def peaks(self) -> StagePeaks:
        """The bytes of one micro-batch in both moments."""
        in_blocks = [sizes for block, sizes in self._saved_by_block if block.input]
        recomputes = self.step.recompute != "none"
        again = max((sizes.everything - sizes.other for sizes in in_blocks), default=0.0) * recomputes
        gradients = max((sizes.gradients for sizes in in_blocks), default=0.0)
        kept, (parameters, in_loss, in_backward, sums) = round(self.kept), self._gathered()
        loss = MomentBytes(kept, 0, in_loss, round(self._logits()), sums)
        backward = MomentBytes(kept, round(again), in_backward, round(gradients), sums)
        return StagePeaks(kept, loss, backward, parameters)

    @cached_property
    def _saved_by_block(self) -> list[tuple[BlockSpec, _BlockBytes]]:
        blocks = _framework_stages(self.step)[self.stage].blocks
        return [(block, _block_bytes(SameObject(block), self._context)) for block in blocks]

    def _logits(self) -> float:
        """Logits of the loss and their gradient."""
        if not self.step.stack.keeps_logits:
            return 0.0
        heads = (
            operation
            for block in self.step.stage_specs[self.stage].blocks
            if block.input is None
            for operation in block.layer.operations
            if isinstance(operation, MatmulSpec)
        )
        logits = sum(self.step.shape.count(head.per) * head.out_features for head in heads)
        split_bytes = self.constants.bytes_per_split_logit if self.step.layout.tp > 1 else None
        extra = self.step.extra_outputs * self.constants.bytes_per_saved_logit
        return logits * ((split_bytes or self.constants.bytes_per_logit) + extra)

    def _gathered(self) -> tuple[int, int, int, int]:
        """Parameters in the compute dtype that stage 3 keeps gathered; those in the loss, and in the backward of a
        block, where the next block is gathered too, with gradients that are not reduced; and unsharded sums."""
        step, layout = self.step, self.step.layout
        if not sharded_states(layout.zero).parameters:
            return 0, 0, 0, 0
        compute, reduce = DTYPE_BYTES[step.recipe.compute], DTYPE_BYTES[step.recipe.reduce]
        blocks = step.stage_specs[self.stage].blocks
        largest = max((block.parameter_count for block in blocks if block.input), default=0)
        root = sum(block.parameter_count for block in blocks if not block.input)
        all_blocks = sum(block.parameter_count * block.repeat for block in blocks if block.input)
        trained = sum(block.trained_count * block.repeat for block in blocks)
        if limit := round(self.constants.live_parameters):  # Gathered one by one, and reduced through buckets
            parameters = (p.numel for block in step.rank_spec.blocks for p in block.layer.parameters)
            live = compute * (min(limit, all_blocks + root) + max(parameters, default=0))
            return 0, live, live, 0
        reshards = layout.sharding.reshard_after_forward
        kept, in_backward = (0, 2 * largest) if reshards else (all_blocks, all_blocks)
        unreduced = (compute + reduce) * max((block.trained_count for block in blocks if block.input), default=0)
        return (
            compute * (kept + root),
            compute * ((kept or largest) + root),
            compute * (in_backward + root) + unreduced,
            reduce * trained * step.sums_gradients,
        )

    @cached_property
    def _context(self) -> _Context:
        step, layout = self.step, self.step.layout
        return _Context(
            SameObject(step.model),
            step.shape,
            step.recompute,
            step.recipe.compute,
            step.matmul,
            step.expert_imbalance if layout.ep > 1 else 1.0,
            layout.expert_tp,
            step.stack.keeps_logits,
            self.constants,
        )


@lru_cache(maxsize=1 << 14)
def _block_bytes(block: SameObject[BlockSpec], context: _Context) -> _BlockBytes:
    return _BlockActivations(context).sizes(block.value)


class _BlockActivations:
    """The tensors of one block."""

    def __init__(self, context: _Context) -> None:
        self.context, self.constants = context, context.constants

    def sizes(self, block: BlockSpec) -> _BlockBytes:
        """The bytes of a block."""
        first = self._sum(self._kept_of(block, is_first=not self.constants.splits_first_input))
        is_recomputed = self.context.recompute in ("full", "selective")
        arguments = ((tensor, 1.0) for tensor in block.arguments if is_recomputed and block.input)
        everything = gradients = 0.0
        if block.input:
            everything = self._sum(self._all(block))
            largest = max((self._bytes(tensor) for tensor, _ in self._all(block)), default=0.0)
            gradients = largest + 2 * self._bytes(block.input)
        return _BlockBytes(first, self._sum(self._kept_of(block)), self._sum(arguments), everything, gradients)

    def _all(self, block: BlockSpec) -> Iterator[_Kept]:
        return ((tensor, 1.0) for tensor in block.saved("none") if not tensor.name.endswith(self.constants.left_out))

    def _sum(self, tensors: Iterable[_Kept]) -> float:
        return sum(share * self._bytes(tensor) for tensor, share in tensors)

    def _bytes(self, tensor: SavedTensor) -> float:
        context = self.context
        size = self._width_share(tensor.name) * tensor.bytes(context.shape, context.compute)
        is_inner = tensor.name.endswith(_INNER_OF_EXPERTS)
        if tensor.name.startswith("ffn.experts."):
            size *= context.expert_imbalance
            if is_inner and self.constants.weights_inside_experts and not _is_gated(context.model.value):
                size *= 1.5  # Without a gate, a separate kernel weights, and keeps its input
            # A rank that splits experts has whole inputs, of the tokens of all ranks that split them.
            size *= 1 if tensor.name.endswith((*_INNER_OF_EXPERTS, "up.output")) else context.expert_tp
        return size

    @property
    def _is_traced(self) -> bool:
        """Whether a trace has seen the tensors, which have names of its module."""
        return isinstance(self.context.model.value, ModelSpec)

    def _width_share(self, name: str) -> float:
        """The share of a tensor in the compute dtype that a framework keeps of it."""
        # float4 keeps a transposed copy as well
        narrow = {"float8": 0.5, "mxfloat8": 0.5, "float4": 0.5}.get(self.context.matmul, 1.0)
        narrow = narrow if self.constants.keeps_inputs_in_matmul_dtype else 1.0
        is_input = name.endswith((".input", *_INNER_OF_EXPERTS)) and "norm" not in name
        return narrow if is_input else 1.0

    def _kept_of(self, block: BlockSpec, *, is_first: bool = False) -> Iterator[_Kept]:
        """The tensors that one block keeps, and the part of each."""
        policy: BlockPolicy = POLICY_OF_BLOCKS.get(self.context.recompute, "none")
        if block.input is None:
            kept = block.layer.saved
        elif policy == "selective" and self.constants.kept_products != "all" and not self._is_traced:
            yield from self._kept_by_operation(block)
            return
        else:
            kept = block.saved(policy, is_first=is_first)
        yield from ((tensor, 1.0) for tensor in kept if not self._is_left_out(tensor, block))

    def _kept_by_operation(self, block: BlockSpec) -> Iterator[_Kept]:
        """torchtitan keeps the results of attention and of every second product, in the order q, k, v, output, gate,
        up, down. Compiled, it does not keep the last one: backward needs no result of `down`."""
        assert block.input is not None
        yield block.input, 1.0
        model = self.context.model.value
        attention = spec_of(model).attention[0]
        heads, kv_heads = attention.heads, attention.kv_heads or attention.heads
        has_gate = any(p.name == "ffn.up.weight" for p in block.layer.parameters) and _is_gated(model)
        queries_values_share = (heads + kv_heads) / (heads + 2 * kv_heads)
        last = 1.0 if self.constants.kept_products == "every second" else 0.0
        shares = {"attention.qkv": queries_values_share, "attention.output": 0.0, "ffn.down": last}
        shares["ffn.up"] = 0.5 if has_gate else 1.0
        for product in block.products:
            yield product, shares.get(product.name.removesuffix(".output"), 0.5)
        for tensor in block.layer.saved:
            if tensor.name in ("attention.output.input", "attention.sums"):
                yield tensor, 1.0

    def _is_left_out(self, tensor: SavedTensor, block: BlockSpec) -> bool:
        recompute, name = self.context.recompute, tensor.name
        if name.endswith(self.constants.left_out):
            return True
        if block.input is None and name.startswith("head."):  # A loss with logits keeps the input of its product
            return self.context.keeps_logits and name != "head.input.gradient"
        if recompute == "attention":
            return isinstance(tensor, SavedAttentionMatrix)
        is_activation = name.endswith(("_norm.input", "ffn.down.input", *_INNER_OF_EXPERTS))
        is_projection = name.endswith(("queries_keys", "key_value_up"))
        return (is_activation and "activations" in recompute) or (is_projection and "up-projections" in recompute)


def _is_gated(model: PlannedModel) -> bool:
    return isinstance(model, ModelSpec) or model.gated


@lru_cache(maxsize=64)
def _with_dropout(model: TransformerSettings, dropout: float) -> TransformerSettings:
    return model.model_copy(update={"dropout": dropout})


def _framework_stages(step: PlannedStep) -> tuple[ModelSpec, ...]:
    """The stages whose tensors count. Other frameworks keep masks of dropout and use fused attention at the same time;
    attention that is not fused keeps probabilities, with dropout their mask and product."""
    model = step.model
    if isinstance(model, ModelSpec):
        return step.stage_specs
    has_dropout, is_unfused = step.has_dropout or model.dropout > 0, step.stack.attention == "unfused"
    explicit = replace(step, model=_with_dropout(model, _DROPOUT)).stage_specs
    fused = replace(step, model=_with_dropout(model, 0.0)).stage_specs
    if is_unfused:
        return explicit if has_dropout else tuple(map(_without_masks, explicit))
    return tuple(map(_with_masks, fused, explicit)) if has_dropout else fused


def _is_mask(tensor: SavedTensor) -> bool:
    return tensor.name.endswith(".mask")


def _without_masks(stage: ModelSpec) -> ModelSpec:
    def kept(tensor: SavedTensor) -> SavedTensor:
        if isinstance(tensor, SavedAttentionMatrix) and tensor.name.endswith(".probabilities"):
            return replace(tensor, heads=tensor.heads // 2)  # There is no product of mask and probabilities
        return tensor

    def layer(each: LayerSpec) -> LayerSpec:
        return replace(each, saved=tuple(kept(tensor) for tensor in each.saved if not _is_mask(tensor)))

    return replace(stage, blocks=tuple(replace(block, layer=layer(block.layer)) for block in stage.blocks))


def _with_masks(stage: ModelSpec, explicit: ModelSpec) -> ModelSpec:
    def joined(block: BlockSpec, source: BlockSpec) -> BlockSpec:
        masks = (t for t in source.layer.saved if _is_mask(t) and isinstance(t, SavedActivation))
        return replace(block, layer=replace(block.layer, saved=(*block.layer.saved, *masks)))

    return replace(stage, blocks=tuple(map(joined, stage.blocks, explicit.blocks)))
