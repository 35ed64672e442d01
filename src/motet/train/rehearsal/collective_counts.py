"""The collectives of a step: started by a rank on its process groups, and planned."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from motet.core.dtypes import DTYPE_BYTES
from motet.models.spec.layer_specs import MicroBatchShape
from motet.parallel.data_parallel.comm_units import CommUnit, SyncGroupPlan
from motet.parallel.data_parallel.unit_schedule import CommUnitAction
from motet.parallel.layout import Layout
from motet.parallel.model_sharding import PIPELINE_DIMENSION, TENSOR_DIMENSION, ModelSharding
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.pipeline.border_bytes import border_traffic
from motet.parallel.pipeline.pipeline_schedule import PipelineAction
from motet.parallel.step_plan.activation_traffic import activation_collectives
from motet.parallel.step_plan.plan import StepPlan
from motet.parallel.torch_private import message_of_call
from motet.precision.recipe import PrecisionRecipe

_MOST_AGREED_BYTES = 4096  # In an agreement of all ranks, which are a few numbers for each
CollectiveKey = tuple[str, tuple[int, ...]]  # The collective, and the ranks of its group
MessageSizes = Counter[tuple[CollectiveKey, int]]  # (Key, bytes of one message) -> how often


@dataclass(frozen=True)
class CollectiveCount:
    """The collectives of one kind over one group of ranks in a step."""

    collective: str
    over: str  # The dimensions along which the ranks of the group differ
    ranks: int
    count: int
    bytes: int  # The larger buffer of each, added up
    planned_count: int | None  # None: agreements, which no plan has
    planned_bytes: int | None

    @property
    def is_as_planned(self) -> bool:
        return self.planned_bytes in (None, self.bytes)


@dataclass
class StartedCollectives:
    """Counts calls of torch.distributed by collective, group and size."""

    sizes: MessageSizes = field(default_factory=Counter)

    def on_message(self, operator: Any, args: Sequence[Any]) -> None:
        """Count a call."""
        collective, ranks, size = message_of_call(operator, args)
        self.sizes[(collective, ranks), size] += 1


def compare_with_plan(started: MessageSizes, planned: MessageSizes, dims: ParallelDims) -> list[CollectiveCount]:
    """The collectives of a step by kind and group, those of the plan first.

    A plan has one collective where the loss has one for each block of rows, so bytes are compared. What is started over
    a group beyond the plan, in a size that the plan does not have, is an agreement of a few numbers; where the loss has
    blocks, too, that is a small message of as many bytes as there are too many.
    """
    rows = list[CollectiveCount]()
    for key in dict.fromkeys(key for key, _ in (*started, *planned)):
        sizes, expected = _of_key(started, key), _of_key(planned, key)
        beyond = Counter({size: times for size, times in sizes.items() if size not in expected})
        is_more = _bytes(sizes) != _bytes(expected) and _bytes(sizes - beyond) >= _bytes(expected)
        if expected and not is_more:
            excess = _bytes(sizes) - _bytes(expected)
            beyond = Counter({n: times for n, times in beyond.items() if n * times == excess <= _MOST_AGREED_BYTES})
        place = key[0], _dimensions(key[1], dims), len(key[1])
        if expected:
            of_plan = expected.total(), _bytes(expected)
            rows.append(CollectiveCount(*place, (sizes - beyond).total(), _bytes(sizes - beyond), *of_plan))
        if beyond:
            rows.append(CollectiveCount(*place, beyond.total(), _bytes(beyond), None, None))
    return sorted(rows, key=lambda row: (row.planned_bytes is None, -row.bytes))


def _of_key(sizes: MessageSizes, key: CollectiveKey) -> Counter[int]:
    return Counter({size: times for (other, size), times in sizes.items() if other == key})


def _bytes(sizes: Counter[int]) -> int:
    return sum(size * times for size, times in sizes.items())


def _dimensions(ranks: Sequence[int], dims: ParallelDims) -> str:
    """The dimensions in which ranks differ."""
    indices = [dims.coordinates(rank % dims.ranks) for rank in ranks]
    return " ".join(name for name, _ in dims.sizes if len({each[name] for each in indices}) > 1)


def planned_collectives(
    plan: StepPlan, layout: Layout, recipe: PrecisionRecipe, *, shape: MicroBatchShape, rank: int, slices: int
) -> MessageSizes:
    """The collectives of a rank in a step; of an activation that `slices` ranks have, each sends one slice."""
    planned: MessageSizes = Counter()
    for group in plan.groups:
        ranks = next((ranks for ranks in group.group.sum_groups if rank in ranks), ())
        actions = ((unit, action) for unit in group.units for action in unit.schedule)
        for unit, action in actions if ranks else ():
            _add_action(planned, group, unit, action=action, ranks=ranks, rank=rank, recipe=recipe)
    for each in activation_collectives(plan, shape, recipe, rank=rank):
        members = next(ranks for ranks in plan.dims.groups(each.over) if rank in ranks)
        planned[(each.collective, members), DTYPE_BYTES[each.dtype] * each.numel] += plan.microbatches
    if plan.model_sharding.stages:
        _add_messages(planned, plan, layout=layout, recipe=recipe, shape=shape, rank=rank, slices=slices)
    return planned


def _add_action(
    planned: MessageSizes,
    group: SyncGroupPlan,
    unit: CommUnit,
    *,
    action: CommUnitAction,
    ranks: tuple[int, ...],
    rank: int,
    recipe: PrecisionRecipe,
) -> None:
    place = ranks.index(rank)
    members = next((each for each in action.rank_groups if place in each), ()) if action.over else ()
    dtype = recipe.reduce if action.tensor == "gradients" else recipe.compute
    numel = {
        "reduce_scatter": lambda: unit.reduction_spec(None).numel,
        "all_reduce": lambda: unit.reduction_spec(place % unit.shards if unit.shards > 1 else None).numel,
        "all_gather": lambda: unit.gathered_numel,
    }.get(action.kind)
    if numel is None or len(members) < 2 or not (size := DTYPE_BYTES[dtype] * numel()):
        return
    key = action.kind.replace("_", "-"), tuple(ranks[index] for index in members)
    planned[key, size] += action.times(group.group.sharding.microbatches)


def _add_messages(
    planned: MessageSizes,
    plan: StepPlan,
    *,
    layout: Layout,
    recipe: PrecisionRecipe,
    shape: MicroBatchShape,
    rank: int,
    slices: int,
) -> None:
    """Add the messages between stages; each tensor of a border is one."""
    members, tensor_ranks = (
        next(ranks for ranks in plan.dims.groups(dim) if rank in ranks)
        for dim in (PIPELINE_DIMENSION, TENSOR_DIMENSION)
    )
    sizes: Mapping[str, int] = {"rows": shape.rows, "tokens": shape.length, "source tokens": shape.source_length}
    steps = layout.pipeline_schedule(plan.microbatches).steps[members.index(rank)]
    for message in (message for step in steps if not isinstance(step, PipelineAction) for message in step):
        kind = "receive" if message.is_receive else "send"
        for wire in plan.model_sharding.wires[message.border]:
            traffic_of = partial(border_traffic, ModelSharding(wires=((wire,),)), sizes, compute=recipe.compute)
            (sent,), (complete,) = traffic_of(slices=slices), traffic_of()
            if message.is_gradient and not wire.needs_gradient:
                continue
            planned[(kind, members), sent.activation_bytes] += 1
            if message.is_receive and sent != complete:  # The slices are gathered
                planned[("all-gather", tensor_ranks), complete.activation_bytes] += 1
