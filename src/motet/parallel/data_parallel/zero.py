"""The stages of ZeRO as a table of actions, and how each stage cuts parameters.

Stages 0 to 2 communicate flat buckets. Stage 3 communicates units, whose parameters are cut into rows; a parameter
without rows is in a bucket there too.

The actions on one bucket or FSDP unit in a step: a row of ZERO_STAGES, with the ranks and settings of a layout.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, prod
from typing import Literal, NamedTuple, get_args

from motet.collectives.compression.codecs import BlockwiseCodec, Codec
from motet.collectives.cost.alpha_beta import RankGroups
from motet.core.units import DTYPE_BYTES
from motet.parallel.data_parallel.buckets import (
    ALIGN_ELEMENTS,
    Bucket,
    BucketParameter,
    assign_owners,
    build_buckets,
)
from motet.parallel.data_parallel.communication.communication_settings import (
    CommunicationCodecs,
    CommunicationGroups,
    CommunicationSettings,
    GroupName,
    resolve_codecs,
    resolve_communication_groups,
)
from motet.parallel.data_parallel.communication.powersgd_matrices import Shape
from motet.parallel.data_parallel.data_sharding import DataParallelSharding
from motet.precision.recipe import PrecisionRecipe

MIB = 2**20


ActionKind = Literal[
    "all_gather", "keep_secondary", "reduce_scatter", "all_reduce", "tree_reduce_scatter", "tree_all_reduce",
    "two_level_reduce_scatter", "reduce", "broadcast", "norm", "update", "to_host", "to_device",
]  # fmt: skip
# Times of actions: before each forward and backward of a unit; when a backward has its gradients, in each micro-batch
# or the last; and once, after all ranks have agreed on the norm.
Moment = Literal["forward", "backward", "microbatch", "last_microbatch", "step"]
MOMENTS = get_args(Moment)
CommunicatedTensor = Literal["gradients", "parameters"]


class StageAction(NamedTuple):
    """An action of a row of ZERO_STAGES."""

    kind: ActionKind
    moment: Moment
    over: GroupName | None = None
    tensor: CommunicatedTensor = "gradients"


_NORM, _UPDATE = StageAction("norm", "step"), StageAction("update", "step")
_SCATTER_ONCE = StageAction("reduce_scatter", "last_microbatch", "shards")
_SCATTER_EACH = StageAction("reduce_scatter", "microbatch", "shards")
_ALL_REDUCE = StageAction("all_reduce", "last_microbatch", "replicas")
_GATHER_SUMS = StageAction("all_gather", "step", "shards")
_GATHER = StageAction("all_gather", "step", "shards", "parameters")
_GATHER_FORWARD = StageAction("all_gather", "forward", "shards", "parameters")
_GATHER_BACKWARD = StageAction("all_gather", "backward", "shards", "parameters")

FORWARD_OVERLAP = '0 with overlap = "forward"'

# The actions on each bucket or FSDP unit in a step. A collective over groups of one rank is left out of a plan.
ZERO_STAGES: Mapping[int | str, tuple[StageAction, ...]] = {
    0: (_ALL_REDUCE, _NORM, _UPDATE),
    FORWARD_OVERLAP: (_SCATTER_ONCE, _ALL_REDUCE, _NORM, _GATHER_SUMS, _UPDATE),
    1: (_SCATTER_ONCE, _ALL_REDUCE, _NORM, _UPDATE, _GATHER),
    2: (_SCATTER_EACH, _ALL_REDUCE, _NORM, _UPDATE, _GATHER),
    3: (_GATHER_FORWARD, _GATHER_BACKWARD, _SCATTER_EACH, _ALL_REDUCE, _NORM, _UPDATE),
}


def stage_actions(
    zero: int, *, overlap: str = "backward", reduces_once: bool = False, gathers_again: bool = True
) -> Iterator[StageAction]:
    """The row of a stage with `communication.overlap`. With `reduces_once` the gradients of all micro-batches are
    reduced together; a unit that does not gather again keeps its parameters from forward to backward."""
    for action in ZERO_STAGES.get(f'{zero} with overlap = "{overlap}"', ZERO_STAGES[zero]):
        if action.moment == "microbatch" and reduces_once:
            yield action._replace(moment="last_microbatch")
        elif action.moment != "backward" or gathers_again:
            yield action


def with_transfers(actions: Iterable[StageAction], *, fetches_rows: bool = False) -> Iterator[StageAction]:
    """The actions where the host updates masters: sums travel to it when they are reduced, and values back.

    With `fetches_rows`, rows of stage 3 lie on the host: they travel before each gather, and sums after each reduction.
    """
    reduced: Moment = "last_microbatch"
    for action in actions:
        if fetches_rows and action.kind == "reduce_scatter":
            reduced = action.moment
        if action.kind == "norm":
            yield StageAction("to_host", reduced)
        if fetches_rows and action.kind == "all_gather":
            yield StageAction("to_device", action.moment, tensor="parameters")
        yield action
        if action.kind == "update" and not fetches_rows:
            yield StageAction("to_device", "step", tensor="parameters")


def with_shards(actions: Iterable[StageAction]) -> Iterator[tuple[StageAction, bool]]:
    """Each action, and whether the gradients that it sums or applies are shards."""
    is_scattered = False
    for action in actions:
        yield action, is_scattered and action.kind != "all_gather"
        if action.tensor == "gradients" and action.kind in ("reduce_scatter", "all_gather"):
            is_scattered = action.kind == "reduce_scatter"


class ShardedStates(NamedTuple):
    """Whether a rank keeps only its shard of each state between steps; unsharded states are replicated."""

    parameters: bool
    gradients: bool
    optimizer_states: bool


def sharded_states(zero: int, *, reduces_once: bool = False) -> ShardedStates:
    """The states that a stage shards. Where it reduces gradients once a step, unsharded sums are kept until then;
    stage 3 has them only while a step runs."""
    actions = {(action.kind, action.moment) for action in ZERO_STAGES[zero]}
    gathers = ("all_gather", "forward") in actions
    scatters_each = ("reduce_scatter", "microbatch") in actions and (gathers or not reduces_once)
    return ShardedStates(gathers, scatters_each, any(kind == "reduce_scatter" for kind, _ in actions))


@dataclass(frozen=True)
class FSDPUnit:
    """Shapes of the parameters that stage 3 gathers together: a block, or all parameters outside of blocks."""

    trainable: tuple[Shape, ...]
    frozen: tuple[Shape, ...] = ()
    used_after_blocks: tuple[Shape, ...] = ()  # Trainable, outside of blocks; their gradients come first
    members: tuple[BucketParameter, ...] = ()  # The trainable parameters, as if all units were one flat tensor

    def gathered_numel(self, shards: int) -> int:
        """Elements of the unit when it is gathered, with padding."""
        return shards * padded_shard_numel(self.trainable + self.frozen, shards)


def padded_shard_numel(shapes: Iterable[Shape], shards: int) -> int:
    """Elements of a shard with padding: as many rows of each parameter as the first shard has."""
    return sum(ceil(shape[0] / shards) * prod(shape[1:]) for shape in shapes)


def peak_of_fetch(copies: Iterable[tuple[int, int]], compute: int) -> int:
    """The bytes of a unit while a single rank fetches its parameters from the host, one after the other: what has
    arrived, the parameter before, which FSDP2 frees late, and the next one, in its dtype and cast."""
    peak = arrived = before = 0
    for size, width in copies:
        peak = max(peak, arrived + before + size * width // compute + size)
        arrived, before = arrived + size, size
    return peak


def shard_rows(rows: int, shards: int, shard: int) -> tuple[int, int]:
    """(first, stop) of the rows of a parameter that a shard holds, without padding."""
    rows_per_shard = -(-rows // shards)
    return min(rows_per_shard * shard, rows), min(rows_per_shard * (shard + 1), rows)


def is_cut_into_rows(shape: Shape, dtype: str, sharding: DataParallelSharding) -> bool:
    """Whether stage 3 shards a parameter; buckets keep tensors without rows or elements, integers, and small ones."""
    has_rows = sharding.zero == 3 and (sharding.shards > 1 or sharding.parameters != "device")
    is_large = prod(shape) >= max(1, sharding.min_shard_numel)
    return has_rows and is_large and len(shape) > 0 and "float" in dtype


def make_buckets(
    sizes: Mapping[str, tuple[int, int]],
    sharding: DataParallelSharding,
    recipe: PrecisionRecipe,
    *,
    settings: CommunicationSettings,
    copies: Mapping[str, RankGroups],
) -> tuple[Bucket, ...]:
    """Buckets of the parameters `sizes`, name -> (optimizer group, elements), in the order of use; by their copies."""
    shards = len(resolve_communication_groups(settings, sharding).shard_groups[0])
    if owners := sharding.bucket_owners:
        settings = settings.model_copy(update={"bucket_mib": owners.bucket_mib, "first_bucket_mib": owners.bucket_mib})
        return assign_owners(fill_buckets(sizes, shards, recipe, settings=settings), owners.count)
    return fill_buckets(sizes, shards, recipe, settings=settings, kinds=copies)


def fill_buckets(
    sizes: Mapping[str, tuple[int, int]],
    shards: int,
    recipe: PrecisionRecipe,
    *,
    settings: CommunicationSettings,
    kinds: Mapping[str, object] | None = None,
) -> tuple[Bucket, ...]:
    """Buckets of the sizes that settings ask for; each has parameters of one kind."""
    mib = settings.bucket_mib, settings.first_bucket_mib
    max_numel, first_max_numel = (int(size * MIB / DTYPE_BYTES[recipe.reduce]) for size in mib)
    align = max(ALIGN_ELEMENTS, recipe.block_alignment)
    return build_buckets(sizes, shards, max_numel, first_max_numel=first_max_numel, kinds=kinds, align=align)


UnitKind = Literal["bucket", "block", "root"]  # The root of stage 3 has the parameters outside of blocks


@dataclass(frozen=True)
class CommUnitAction:
    """One action, by all groups of ranks in parallel; the engine interprets it.

    | kind | in each group |
    |---|---|
    | reduce_scatter | ranks sum the unsharded unit; each gets the shard of its position in the group |
    | two_level_reduce_scatter | the same, by a sum over `intra_groups` and then one over `inter_groups` |
    | tree_reduce_scatter, tree_all_reduce | the same as without `tree_`, in the order of one tree over the rows |
    | reduce | ranks sum the unit; its owner gets the sum |
    | all_reduce | ranks sum their tensors, and all of them get the sum |
    | norm | ranks add the sums that they hold to the squared norm |
    | update | the group is one copy of the model; its ranks update the masters that they hold |
    | all_gather | each rank gets the unsharded unit, from shards in the order of the group |
    | broadcast | each rank gets the unit from its owner |
    | to_host | each rank sends the sums whose masters it updates to its host, which adds or has them |
    | to_device | each rank gets its rows, or the values of the masters that it updates, from its host |
    | keep_secondary | ranks keep secondary shards of the gathered parameters |
    """

    kind: ActionKind
    moment: Moment
    rank_groups: RankGroups
    over: GroupName | None = None
    tensor: CommunicatedTensor = "gradients"
    overlaps: bool = False  # Runs while the ranks compute; a gather of the step then arrives in the next forward
    codec: Codec | None = None
    keeps_error: bool = False  # Error feedback
    intra_groups: RankGroups = ()
    inter_groups: RankGroups = ()

    @property
    def is_gather(self) -> bool:
        return self.kind in ("all_gather", "broadcast")

    @property
    def is_scatter(self) -> bool:
        """Whether a rank has only its shard of the sum afterwards."""
        return self.kind == "reduce" or self.kind.endswith("reduce_scatter")

    @cached_property
    def position_of_rank(self) -> Mapping[int, int]:
        """Rank -> its position in its group."""
        return {rank: i for ranks in reversed(self.rank_groups) for i, rank in reversed([*enumerate(ranks)])}

    @property
    def group_size(self) -> int:
        return len(self.rank_groups[0])

    def times(self, microbatches: int) -> int:
        """The number of times that the action happens in a step."""
        return 1 if self.moment in ("last_microbatch", "step") else microbatches


UnitSchedule = tuple[CommUnitAction, ...]


def make_unit_schedule(
    settings: CommunicationSettings,
    sharding: DataParallelSharding,
    unit: UnitKind = "bucket",
    *,
    trained: bool = True,
    on_device: bool = True,
) -> UnitSchedule:
    """The actions on a unit, which has `trained` parameters or is only gathered. Masters that are not on the device are
    updated by the host."""
    groups, codecs = resolve_communication_groups(settings, sharding), resolve_codecs(settings, sharding)
    stage = 3 if unit != "bucket" else min(sharding.zero, 2)
    if sharding.reproducible_batch_size:
        stage = max(stage, 2)  # partial sums over some rows are never complete gradients
    row = stage_actions(
        stage,
        overlap="forward" if groups.gathers_gradients and not sharding.reproducible_batch_size else "backward",
        reduces_once=sharding.reduces_once and not sharding.reproducible_batch_size,
        gathers_again=unit == "block" and sharding.reshard_after_forward,
    )
    fetches_rows = unit != "bucket" and sharding.parameters != "device"
    row = row if on_device else with_transfers(row, fetches_rows=fetches_rows)
    if unit == "bucket" and sharding.zero == 3 and sharding.shards > 1:  # Parameters without rows are small
        codecs = CommunicationCodecs()
    rank_groups = {"shards": groups.shard_groups, "replicas": groups.replica_groups}
    norm_groups = (tuple(ranks[0] for ranks in groups.replica_groups),)
    overlaps = {
        "forward": True,
        "backward": True,
        "microbatch": unit != "bucket" or settings.overlap != "none",
        "last_microbatch": unit != "bucket" or settings.overlap != "none",
        "step": settings.overlap == "forward",
    }
    # A tree adds up micro-batches until backward has ended, and so long FSDP2 has the rows that stay on the device.
    ends_with_backward = bool(sharding.reproducible_batch_size) or (
        unit != "bucket" and sharding.parameters == "device"
    )
    actions: list[CommUnitAction] = []
    for kind, moment, over, tensor in row:
        ranks = rank_groups[over] if over else norm_groups if kind == "norm" else sharding.shard_groups
        hidden = bool(over) and overlaps[moment]
        if not on_device and kind in ("to_host", "update", "to_device"):
            hidden = overlaps[moment] and not (kind == "to_host" and ends_with_backward)
        action = CommUnitAction(kind, moment, ranks, over, tensor, overlaps=hidden)
        actions += _with_settings(action, groups, codecs, sharding=sharding)
    return tuple(
        action
        for action in actions
        if (trained or action.tensor == "parameters")
        and (action.over is None or action.group_size > 1 or action.kind == "tree_reduce_scatter")
    )


def _with_settings(
    action: CommUnitAction, groups: CommunicationGroups, codecs: CommunicationCodecs, *, sharding: DataParallelSharding
) -> Iterator[CommUnitAction]:
    """The action with its codec, in the form that the sharding asks for."""
    secondary = groups.secondary_shard_groups
    match action.kind:
        case "reduce_scatter" | "all_reduce" if sharding.reproducible_batch_size:
            yield replace(action, kind="tree_reduce_scatter" if action.is_scatter else "tree_all_reduce")
        case "reduce_scatter" if sharding.bucket_owners:
            yield replace(action, kind="reduce")
        case "reduce_scatter":
            codec = codecs.shard_gradients
            made = replace(action, codec=codec, keeps_error=codecs.has_shard_error_feedback)
            if secondary and isinstance(codec, BlockwiseCodec):
                inter = groups.secondary_replica_groups
                made = replace(made, kind="two_level_reduce_scatter", intra_groups=secondary, inter_groups=inter)
            yield made
        case "all_reduce":
            yield replace(action, codec=codecs.replica_gradients, keeps_error=codecs.has_replica_error_feedback)
        case "all_gather" if sharding.bucket_owners:
            yield replace(action, kind="broadcast")
        case "all_gather" if action.moment == "backward" and secondary:
            yield CommUnitAction("keep_secondary", "backward", secondary, "near", "parameters")
            yield replace(action, rank_groups=secondary, over="near")
        case "all_gather" if action.tensor == "parameters":
            yield replace(action, codec=codecs.parameters)
        case _:
            yield action
