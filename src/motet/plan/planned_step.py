"""One training step as the planner reads it: a model, a global batch, a layout, a precision and a framework.

`SameObject` is a cache key for objects that are costly to compare: it equals only a key of the same object.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from operator import attrgetter
from typing import Generic, Literal, NamedTuple, TypeVar

from motet.core.errors import InputError, check_input
from motet.memory.policy_choice import Place
from motet.models.arch.logit_slices import padded_targets
from motet.models.settings import TransformerSettings
from motet.models.spec.layer_specs import BlockPolicy, BlockSpec, LayerSpec, MatmulSpec, MicroBatchShape, ParameterSpec
from motet.models.spec.model_spec import ModelSpec, shape_on_gpu, spec_from_settings
from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.parallel.data_parallel.zero import (
    StageAction,
    sharded_states,
    stage_actions,
    with_shards,
    with_transfers,
)
from motet.parallel.layout import Layout
from motet.parallel.techniques import conflict_with
from motet.plan.frameworks import EXPERT_IMBALANCE, STACKS, SoftwareStack
from motet.precision.recipe import RECIPES, AttentionKernelName, PrecisionRecipe

T = TypeVar("T")


class SameObject(Generic[T]):
    """Keeps its object alive, so that no other can take over the identity."""

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        """The object is compared by identity."""
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameObject) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


_EXPERTS = ".experts."

# Policies of recomputation. `selective` keeps the results of products with weights. The last ones are those of
# vendors: `attention` is the core attention alone, `activations` norms and activation functions, `up-projections` the
# products of latent attention that widen its short vectors.
Recompute = Literal[
    "none", "selective", "full", "attention", "activations", "up-projections", "activations and up-projections"
]
POLICY_OF_BLOCKS: dict[Recompute, BlockPolicy] = {"none": "none", "selective": "selective", "full": "full"}

# The settings of a known model, or the spec of a traced one
PlannedModel = TransformerSettings | ModelSpec


@dataclass(frozen=True)
class PlannedStep:
    """A step of training. `sequence` is the length of a row, `global_batch` the rows of all ranks, `source` the tokens
    of a row that an encoder reads besides."""

    model: PlannedModel
    sequence: int
    global_batch: int
    layout: Layout
    recipe: PrecisionRecipe = RECIPES["bf16"]
    matmul: str = "bfloat16"  # The dtype of the inputs of products with weights, such as float8
    stack: SoftwareStack = field(default_factory=lambda: STACKS["motet"])
    moments: int = 2  # Moments that the optimizer keeps for each parameter
    extra_outputs: int = 0  # Tokens after the next that multi-token prediction predicts; time does not count them
    expert_imbalance: float = EXPERT_IMBALANCE  # Tokens of the fullest rank of experts over the mean, for memory
    shards_gradient_sums: bool = False  # Memory has shards of sums, though time counts one reduction in a step
    has_dropout: bool = False  # A framework keeps masks of dropout; motet's own are those of `model`
    source: int = 0  # Tokens of a row that an encoder reads
    masked_fraction: float | None = None  # Fraction of the tokens that an encoder predicts
    packed: bool = False  # Rows hold several documents, which do not see each other
    recompute: Recompute = "none"
    states: Place = "device"  # Where masters and moments lie and are updated
    delays_update: bool = False  # The host updates them while the next step computes
    # Predicted times ignore compression.
    communication: CommunicationSettings = field(default_factory=CommunicationSettings)
    attention: AttentionKernelName = "auto"

    def __post_init__(self) -> None:
        layout = self.layout
        experts = layout.dp * layout.cp * layout.tp // layout.expert_tp
        if experts % layout.ep:  # Thousands of steps are made: only a mistake makes a text
            message = f"ep = {layout.ep} does not divide the {experts} ranks of data, context and tensor parallelism"
            raise InputError(f"{message}; choose a divisor of {experts}")
        if self.global_batch % (count := layout.dp * layout.microbatches):
            raise InputError(
                f"a global batch of {self.global_batch} rows cannot be cut evenly over dp = {layout.dp} x "
                f"{layout.microbatches} micro-batches = {count}; choose a multiple of {count}"
            )

    @property
    def sums_gradients(self) -> bool:
        """Whether memory has unsharded sums of the gradients of several micro-batches."""
        return self.layout.sharding.sums_gradients and not self.shards_gradient_sums

    @property
    def block_stack(self) -> SoftwareStack:
        """The stack whose kernels compute the blocks: eager ones where the step rules out compiled ones."""
        name = self.stack.as_written
        return STACKS[name] if name and _rules_out_compiling(_step_values(self)) else self.stack

    @property
    def layout_text(self) -> str:
        """The layout with its recomputation and the place of its states, as `layout_from_words` reads it."""
        parts = {"recompute": (self.recompute, "none"), "optimizer": (self.states, "device")}
        words = (f" {name}={value}" for name, (value, default) in parts.items() if value != default)
        return f"{self.layout}{''.join(words)}"

    @property
    def rows(self) -> int:
        """Rows of a micro-batch."""
        return self.global_batch // (self.layout.dp * self.layout.microbatches)

    @cached_property
    def shape(self) -> MicroBatchShape:
        """A micro-batch as one rank computes it, with its part of each sequence."""
        fraction = self.masked_fraction
        targets = None if fraction is None else padded_targets(round(self.rows * self.sequence * fraction))
        shape = MicroBatchShape(self.rows, self.sequence, self.source, packed=self.packed, targets=targets)
        if self.stack.computes_on_gpus and self.stack.memory == "motet":
            shape = shape_on_gpu(shape, self.spec.attention, dtype=self.recipe.compute, kernel=self.attention)
        return shape.part_of_sequence(self.layout.cp)

    @cached_property
    def spec(self) -> ModelSpec:
        """The model on one device."""
        return spec_of(self.model)

    @cached_property
    def rank_spec(self) -> ModelSpec:
        """The model that one rank of tensor and expert parallelism computes, with all layers."""
        layout = self.layout
        return _rank_spec(self.model, (layout.tp, layout.sp, layout.ep, layout.expert_tp))

    @cached_property
    def stage_ranges(self) -> tuple[range, ...]:
        """The blocks of each stage, in the order of the model."""
        layout = self.layout
        if layout.stages:
            count = layout.pp * layout.chunks
            check_input(
                len(layout.stages) == count,
                f"stages of layout {str(layout)!r} are {len(layout.stages)}, but pp = {layout.pp} x chunks = "
                f"{layout.chunks} are {count}; give {count}",
            )
            return layout.stages
        return even_stages(self.spec.policy_count, layout.pp * layout.chunks)

    @cached_property
    def stage_specs(self) -> tuple[ModelSpec, ...]:
        """The part of a rank's model that each stage computes."""
        layout = self.layout
        return _stage_specs(self.model, (layout.tp, layout.sp, layout.ep, layout.expert_tp), self.stage_ranges)

    @property
    def stage_kinds(self) -> tuple[int, ...]:
        """The first stage with the same blocks, for each stage."""
        return _kinds_of_stages(SameObject(self.stage_specs))

    @property
    def has_experts(self) -> bool:
        """Whether the model has experts."""
        return any(is_expert(p.name) for block in self.spec.blocks for p in block.layer.parameters)

    @property
    def actions(self) -> tuple[tuple[StageAction, bool], ...]:
        """The actions on gradients and parameters, and whether each sums or applies shards of gradients."""
        layout = self.layout
        sharding = layout.sharding
        return _actions(
            layout.zero,
            self.communication.overlap,
            sharding.sums_gradients,
            sharding.reshard_after_forward,
            self.states != "device",
        )

    @property
    def shards(self) -> int:
        """Ranks of data and context parallelism over which gradients are scattered."""
        layout = self.layout
        if not any(action.kind == "reduce_scatter" for action, _ in self.actions):
            return 1
        return layout.shards if sharded_states(layout.zero).optimizer_states else layout.dp * layout.cp

    @property
    def tokens(self) -> int:
        """Tokens of the global batch."""
        return self.global_batch * (self.sequence + self.source)

    def model_flops(self) -> float:
        """FLOPs of forward and backward over the global batch, causal attention counted half, without recomputation."""
        return float(self.spec.training_flops(MicroBatchShape(self.global_batch, self.sequence, self.source)))


# Setting of a job -> the attribute of a step that takes its place. The planner tries several values of them.
STEP_SETTINGS = {
    **{f"layout.{name}": f"layout.{name}" for name in ("zero", "tp", "sp", "cp", "pp", "ep")},
    "memory.recompute": "recompute",
    "memory.optimizer": "states",
    "communication.overlap": "communication.overlap",
}
_step_values = attrgetter(*STEP_SETTINGS.values())


@lru_cache(maxsize=1 << 14)
def _rules_out_compiling(values: tuple[object, ...]) -> bool:
    settings = dict[str, dict[str, object]]()
    for key, value in zip(STEP_SETTINGS, values, strict=True):
        section, _, name = key.partition(".")
        settings.setdefault(section, {})[name] = value
    return conflict_with("compiled blocks", settings) is not None


_RankDegrees = tuple[int, bool, int, int]  # tp, sp, ep, expert_tp


@lru_cache(maxsize=256)
def _actions(zero: int, overlap: str, *others: bool) -> tuple[tuple[StageAction, bool], ...]:
    reduces_once, gathers_again, is_off_device = others
    actions = stage_actions(zero, overlap=overlap, reduces_once=reduces_once, gathers_again=gathers_again)
    return tuple(with_shards(with_transfers(actions) if is_off_device else actions))


@lru_cache(maxsize=256)
def spec_of(model: PlannedModel) -> ModelSpec:
    """The spec of a model on one device."""
    return model if isinstance(model, ModelSpec) else spec_from_settings(model)


@lru_cache(maxsize=1024)
def _rank_spec(model: PlannedModel, degrees: _RankDegrees) -> ModelSpec:
    tp, sp, ep, expert_tp = degrees
    spec = spec_of(model)
    spec = spec.on_rank(tp, sequence=sp) if tp > 1 else spec
    if ep == 1 and expert_tp == 1:
        return spec
    return replace(spec, blocks=tuple(_with_local_experts(block, ep, expert_tp) for block in spec.blocks))


@lru_cache(maxsize=4096)
def _stage_specs(model: PlannedModel, degrees: _RankDegrees, ranges: tuple[range, ...]) -> tuple[ModelSpec, ...]:
    spec = _rank_spec(model, degrees)
    if len(ranges) == 1:
        return (spec,)
    if ranges[0] and ranges[-1]:
        return tuple(map(spec.on_stage, ranges))
    # The first stage is the embedding, or the last one the output head, without any block.
    indices = [index for index, block in enumerate(spec.blocks) if "{i}" in block.prefix]
    ends = spec.blocks[: indices[0]], spec.blocks[indices[-1] + 1 :]
    inner = replace(spec, blocks=spec.blocks[indices[0] :] if not ranges[0] else spec.blocks)
    inner = replace(inner, blocks=inner.blocks[: -len(ends[1])] if not ranges[-1] else inner.blocks)
    parts = [inner.on_stage(blocks) for blocks in ranges if blocks]
    first = [] if ranges[0] else [replace(spec, blocks=ends[0])]
    return (*first, *parts, *([] if ranges[-1] else [replace(spec, blocks=ends[1])]))


@lru_cache(maxsize=4096)
def _kinds_of_stages(stages: SameObject[tuple[ModelSpec, ...]]) -> tuple[int, ...]:
    first = dict[tuple[tuple[str, int, int], ...], int]()  # Name, repetitions and number of parameters of each block
    return tuple(
        first.setdefault(tuple((b.name, b.repeat, len(b.layer.parameters)) for b in stage.blocks), index)
        for index, stage in enumerate(stages.value)
    )


@lru_cache(maxsize=4096)
def even_stages(blocks: int, stages: int) -> tuple[range, ...]:
    """Equally many blocks for each stage. If they cannot be equal, the last stage and the first, which also have the
    output head and the embedding, get one less, and may have none; then their neighbours get one less."""
    if not blocks and stages > 1:
        raise InputError(f"{stages} stages cannot share a model without a list of blocks; use 1 stage")
    limit = f"{stages} stages cannot share {blocks} blocks; use {blocks} stages at most"
    most = -(-blocks // stages)
    order = [index for pair in zip(reversed(range(stages)), range(stages), strict=True) for index in pair]
    with_one_less = set(list(dict.fromkeys(order))[: most * stages - blocks])
    check_input(most > 1 or with_one_less <= {0, stages - 1}, limit)
    bounds = [0]
    for index in range(stages):
        bounds.append(bounds[-1] + most - (index in with_one_less))
    return tuple(range(first, stop) for first, stop in pairwise(bounds))


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to experts that expert parallelism distributes."""
    return _EXPERTS in f".{name}"


class ParameterCounts(NamedTuple):
    """Parameters that a rank holds, if none are in shards: trained and frozen ones."""

    dense: float
    experts: float
    frozen_dense: float = 0.0
    frozen_experts: float = 0.0

    @property
    def trained(self) -> float:
        return self.dense + self.experts

    def with_frozen(self) -> "ParameterCounts":
        """The counts as if all of them were trained, for gathers."""
        return ParameterCounts(self.dense + self.frozen_dense, self.experts + self.frozen_experts)


def count_parameters(blocks: Iterable[tuple[BlockSpec, float]]) -> ParameterCounts:
    """The parameters of blocks, each with its number."""
    counts = [(number, _parameters_of_block(SameObject(block.layer))) for block, number in blocks]
    return ParameterCounts(*(sum(n * each[index] for n, each in counts) for index in range(4)))


@lru_cache(maxsize=1 << 14)
def _parameters_of_block(same: SameObject[LayerSpec]) -> ParameterCounts:
    counts = [0, 0, 0, 0]
    for parameter in same.value.parameters:
        counts[is_expert(parameter.name) + 2 * (not parameter.is_trained)] += parameter.numel
    return ParameterCounts(*counts)


def expert_products(block: BlockSpec) -> Iterator[MatmulSpec]:
    """The products of experts."""
    for operation in block.layer.operations:
        if isinstance(operation, MatmulSpec) and is_expert(operation.parameter):
            yield operation


def _with_local_experts(block: BlockSpec, ep: int, expert_tp: int) -> BlockSpec:
    """A block of which each rank holds its part of the experts. Routing is assumed to be even, so that a rank computes
    as many products as without expert parallelism."""
    layer = block.layer
    if not any(is_expert(parameter.name) for parameter in layer.parameters):
        return block
    parameters = tuple(_local_expert(parameter, ep, expert_tp) for parameter in layer.parameters)
    return replace(block, layer=replace(layer, parameters=parameters))


def _local_expert(parameter: ParameterSpec, ep: int, expert_tp: int) -> ParameterSpec:
    if not is_expert(parameter.name):
        return parameter
    experts, *rest = parameter.shape
    check_input(experts % ep == 0, f"ep = {ep} does not divide {experts} experts; choose a divisor")
    if expert_tp > 1:
        rest[0 if parameter.name.endswith("up") else 1] //= expert_tp
    return replace(parameter, shape=(experts // ep, *rest))
