"""The actions on one bucket or FSDP unit in a step: a row of ZERO_STAGES, with the ranks and settings of a layout."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from motet.collectives.compression.codec_base import BlockwiseCodec, Codec
from motet.collectives.cost.alpha_beta import RankGroups
from motet.parallel.data_parallel.communication.communication_settings import (
    CommunicationCodecs,
    CommunicationGroups,
    CommunicationSettings,
    GroupName,
    resolve_codecs,
    resolve_communication_groups,
)
from motet.parallel.data_parallel.data_sharding import DataParallelSharding
from motet.parallel.data_parallel.zero import ActionKind, CommunicatedTensor, Moment, stage_actions

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
    | all_reduce | ranks sum what they hold, and all of them get the sum |
    | norm | ranks add the sums that they hold to the squared norm |
    | update | the group is one copy of the model; its ranks update what they hold |
    | all_gather | each rank gets the unsharded unit, from shards in the order of the group |
    | broadcast | each rank gets the unit from its owner |
    | keep_secondary | ranks keep secondary shards of what was gathered |
    """

    kind: ActionKind
    moment: Moment
    rank_groups: RankGroups
    over: GroupName | None = None
    tensor: CommunicatedTensor = "gradients"
    overlaps: bool = False  # While the ranks compute; a gather of the step then arrives in the next forward
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
        """How often it happens in a step."""
        return 1 if self.moment in ("last_microbatch", "step") else microbatches


UnitSchedule = tuple[CommUnitAction, ...]


def make_unit_schedule(
    settings: CommunicationSettings, sharding: DataParallelSharding, unit: UnitKind = "bucket", *, trained: bool = True
) -> UnitSchedule:
    """The actions on a unit, which has something to be `trained` or is only gathered."""
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
    if unit == "bucket" and sharding.zero == 3 and sharding.shards > 1:  # What is not cut into rows is small
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
    actions: list[CommUnitAction] = []
    for kind, moment, over, tensor in row:
        ranks = rank_groups[over] if over else norm_groups if kind == "norm" else sharding.shard_groups
        action = CommUnitAction(kind, moment, ranks, over, tensor, overlaps=bool(over) and overlaps[moment])
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
