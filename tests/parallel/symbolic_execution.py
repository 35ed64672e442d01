"""A definition of what the actions on a unit must do, apart from the code that makes them: they are executed on
multisets of contributors. Each rank holds a shard or all, and sums of some ranks, so that a gradient that is missing
is noticed as well as one that counts twice.

A mistake is a `UnitScheduleError`, which does not know yet which elements the unit has. Ranks are positions in a sum
group; messages have the numbers of the ranks of the first one.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from motet.collectives.cost.alpha_beta import RankGroups
from motet.parallel.data_parallel.comm_units import CommUnit, SyncGroupPlan
from motet.parallel.data_parallel.communication.communication_settings import GroupName
from motet.parallel.data_parallel.data_sharding import DataParallelSharding
from motet.parallel.data_parallel.zero import MOMENTS, ActionKind, CommUnitAction, UnitKind, UnitSchedule
from motet.parallel.step_plan.check import STEP_PLAN_RULES, InvalidStepPlanError, format_ranks
from motet.parallel.step_plan.plan import StepPlan


@dataclass(frozen=True)
class UnitWork:
    """The actions on a unit, and whatever decides if they are right."""

    schedule: UnitSchedule
    shards: int
    kind: UnitKind
    sharding: DataParallelSharding
    has_owner: bool = False


class UnitScheduleError(Exception):
    """A mistake in a schedule, whatever the unit; `{}` in the text stands for the elements of the shard."""

    def __init__(self, shard: int | None, text: str) -> None:
        self.shard = shard
        super().__init__(text)


def _require(is_right: bool, shard: int | None, text: str) -> None:
    if not is_right:
        raise UnitScheduleError(shard, text)


@dataclass
class SymbolicRankStates:
    """The states of all ranks."""

    ranks: Sequence[int]  # Their numbers, in the order of their positions
    shards: int
    shard_of_rank: list[int | None]
    sum_of_rank: list[int]  # Index into `contributors`; those below the number of ranks are local gradients
    contributors: list[Counter[int]]
    sum_ids: dict[tuple[int, ...], int] = field(default_factory=dict)
    is_updated: bool = False
    is_norm_counted: bool = False
    primary_groups: RankGroups = ()  # Of the gather for the forward, where parameters are sharded

    def combine_sums(self, ranks: Iterable[int]) -> int:
        """Index of the sum of what these ranks hold."""
        key = tuple(sorted(self.sum_of_rank[rank] for rank in ranks))
        if key not in self.sum_ids:
            total: Counter[int] = Counter()
            for index in key:
                total.update(self.contributors[index])
            self.sum_ids[key] = len(self.contributors)
            self.contributors.append(total)
        return self.sum_ids[key]

    def name(self, *positions: int) -> str:
        """`rank 3`, `ranks 0 to 7`, or a list that is cut after eight ranks."""
        return format_ranks([self.ranks[position] for position in positions])

    def require_all_shards(self, ranks: Sequence[int], noun: str) -> None:
        """Require that these ranks hold each shard once, or that it is one rank, which holds everything."""
        held, name = Counter(self.shard_of_rank[rank] for rank in ranks), self.name(*ranks)
        for shard in held if None in held else range(self.shards):
            _require(held[shard] == 1, shard, f"the {noun} of {name} has {{}} {held[shard]} times, not once")

    def require_each_rank_once(self, groups: RankGroups, predicate: str) -> None:
        times = Counter(rank for ranks in groups for rank in ranks)
        for rank, shard in enumerate(self.shard_of_rank):
            _require(times[rank] == 1, shard, f"{self.name(rank)} {predicate} {times[rank]} times, not once")

    def require_complete_sums(self, ranks: Iterable[int]) -> None:
        """Require that what these ranks hold is the sum over all ranks, each once."""
        first_ranks = {self.sum_of_rank[rank]: rank for rank in sorted(ranks, reverse=True)}
        for rank, index in sorted((rank, index) for index, rank in first_ranks.items()):
            self.require_complete_sum(self.contributors[index], range(len(self.ranks)), rank=rank)

    def require_complete_sum(self, contributors: Counter[int], everyone: Sequence[int], *, rank: int) -> None:
        """Require that this is the sum over these ranks, each once."""
        missing = [other for other in everyone if not contributors[other]]
        excess = [other for other, times in sorted(contributors.items()) if times > (other in everyone)]
        problem = f"misses {self.name(*missing)}" if missing else f"counts {self.name(*excess)} more than once"
        text = f"the sum of {{}} on {self.name(rank)} {problem}"
        _require(not missing and not excess, self.shard_of_rank[rank], text)


def _reduce_scatter(states: SymbolicRankStates, action: CommUnitAction) -> None:
    _require_gradients(states, action)
    is_first = max(states.sum_of_rank) < len(states.sum_of_rank)
    _require(is_first, None, f"{action.kind} of {{}} by {format_ranks(states.ranks)} must come before every other sum")
    states.require_each_rank_once(action.rank_groups, "sums {}")
    for ranks, total in [(ranks, states.combine_sums(ranks)) for ranks in action.rank_groups]:
        text = f"{states.name(*ranks)} scatter the sum of {{}}, which has {states.shards} shards"
        _require(len(ranks) == states.shards, None, text)
        for shard, rank in enumerate(ranks):
            states.shard_of_rank[rank], states.sum_of_rank[rank] = shard if states.shards > 1 else None, total


def _all_reduce(states: SymbolicRankStates, action: CommUnitAction) -> None:
    _require_gradients(states, action)
    states.require_each_rank_once(action.rank_groups, "sums {}")
    for ranks, total in [(ranks, states.combine_sums(ranks)) for ranks in action.rank_groups]:
        shard = states.shard_of_rank[ranks[0]]
        for rank in ranks:
            text = f"{states.name(ranks[0])} adds {{}} to another shard, which {states.name(rank)} holds"
            _require(states.shard_of_rank[rank] == shard, shard, text)
            states.sum_of_rank[rank] = total


def _require_gradients(states: SymbolicRankStates, action: CommUnitAction) -> None:
    wanted = "parameters" if states.is_updated else "gradients"
    text = f"{action.kind} communicates {action.tensor} of {{}} where {format_ranks(states.ranks)} hold {wanted}"
    _require(action.tensor == wanted, None, text)


def _count_in_norm(states: SymbolicRankStates, action: CommUnitAction) -> None:
    ranks = [rank for ranks in action.rank_groups for rank in ranks]
    _require(not states.is_norm_counted, None, f"{states.name(*ranks)} count {{}} twice in the norm")
    states.require_complete_sums(ranks)
    states.require_all_shards(ranks, "norm")
    states.is_norm_counted = True


def _update(states: SymbolicRankStates, action: CommUnitAction) -> None:
    everyone = format_ranks(states.ranks)
    _require(not states.is_updated, None, f"{everyone} update {{}} twice")
    _require(states.is_norm_counted, None, f"{everyone} update {{}} before their norm is known")
    states.require_each_rank_once(action.rank_groups, "updates {}")
    states.require_complete_sums(range(len(states.ranks)))
    for ranks in action.rank_groups:
        states.require_all_shards(ranks, "update")
    states.is_updated = True


def _all_gather(states: SymbolicRankStates, action: CommUnitAction) -> None:
    groups = action.rank_groups
    _require_gradients(states, action)
    states.require_each_rank_once(groups, "gathers {}")
    if not states.is_updated:
        states.require_complete_sums(range(len(states.ranks)))
    for ranks in groups:
        for position, rank in enumerate(ranks):
            shard = states.shard_of_rank[rank]
            text = f"{states.name(ranks[0])} gathers shard {shard} of {states.name(rank)} in the place of {{}}"
            _require(shard == position, None if position >= states.shards else position, text)
    states.primary_groups = states.primary_groups or groups
    states.shard_of_rank = [None] * len(states.ranks)


def _positions(groups: RankGroups) -> dict[int, tuple[tuple[int, ...], int]]:
    """Rank -> (its group, its position there)."""
    return {rank: (ranks, position) for ranks in groups for position, rank in enumerate(ranks)}


def _keep_secondary(states: SymbolicRankStates, action: CommUnitAction) -> None:
    _require(None not in states.shard_of_rank, None, f"{format_ranks(states.ranks)} hold all of {{}} already")
    states.require_each_rank_once(action.rank_groups, "keeps a secondary shard of {}")
    gathered, shards = _positions(states.primary_groups), list(states.shard_of_rank)
    for ranks in action.rank_groups:
        for position, rank in enumerate(ranks):
            text = f"{states.name(ranks[0], rank)} share a secondary copy of {{}}, but not a primary one"
            _require(rank in gathered and gathered[rank][0] == gathered[ranks[0]][0], None, text)
            shards[rank] = position
    states.shard_of_rank = shards


def _two_level_reduce_scatter(states: SymbolicRankStates, action: CommUnitAction) -> None:
    """Sums over the intra groups, then over the inter groups; each rank gets the total of its shard."""
    intra, primary = _positions(action.intra_groups), _positions(action.rank_groups)
    for groups in (action.intra_groups, action.inter_groups):
        states.require_each_rank_once(groups, "sums {} in two levels")
    _reduce_scatter(states, action)
    for ranks in action.inter_groups:
        contributors = Counter(other for rank in ranks for other in intra[rank][0])
        states.require_complete_sum(contributors, primary[ranks[0]][0], rank=ranks[0])
        for position, rank in enumerate(ranks):
            (others, intra_position), (_, shard) = intra[rank], primary[rank]
            is_same = position * len(others) + intra_position == shard
            _require(is_same, shard, f"{states.name(rank)} gets another shard than {{}} of a two-level sum")


class SymbolicAction(NamedTuple):
    """An action on the states, when it may happen and over which groups."""

    execute: Callable[[SymbolicRankStates, CommUnitAction], None]
    # To buckets of stages 0 and 1, to those of stages 2 and 3, to FSDP units, and to buckets that have an owner.
    moments: tuple[tuple[str, ...], ...]
    over: tuple[GroupName | None, ...] = ("shards",)


_EACH, _LAST, _STEP, _PASSES = ("microbatch",), ("last_microbatch",), ("step",), ("forward", "backward")
SYMBOLIC_ACTIONS: dict[ActionKind, SymbolicAction] = {
    "reduce_scatter": SymbolicAction(_reduce_scatter, (_LAST, _EACH, _EACH, ())),
    "two_level_reduce_scatter": SymbolicAction(_two_level_reduce_scatter, ((), (), _EACH, ())),
    "tree_reduce_scatter": SymbolicAction(_reduce_scatter, (_EACH, _EACH, _EACH, ())),
    "reduce": SymbolicAction(_reduce_scatter, ((), (), (), _LAST)),
    "all_reduce": SymbolicAction(_all_reduce, (_LAST, _LAST, _LAST, ()), ("replicas",)),
    "tree_all_reduce": SymbolicAction(_all_reduce, (_LAST, _LAST, _LAST, ()), ("replicas",)),
    "norm": SymbolicAction(_count_in_norm, (_STEP, _STEP, _STEP, _STEP), (None,)),
    "update": SymbolicAction(_update, (_STEP, _STEP, _STEP, _STEP), (None,)),
    "all_gather": SymbolicAction(_all_gather, (_STEP, _STEP, _PASSES, ()), ("shards", "near")),
    "broadcast": SymbolicAction(_all_gather, ((), (), (), _STEP)),
    "keep_secondary": SymbolicAction(_keep_secondary, ((), (), ("backward",), ()), ("near",)),
}


def execute_on_ranks(work: UnitWork, ranks: Sequence[int]) -> None:
    """Execute the actions on a unit with all ranks of a sum group; raise at the first mistake."""
    schedule, sharding, positions = work.schedule, work.sharding, range(len(ranks))
    states = SymbolicRankStates(
        ranks, work.shards, [None for _ in ranks], [*positions], [Counter([p]) for p in positions]
    )
    column = 3 if work.has_owner else int(sharding.zero >= 2) if work.kind == "bucket" else 2
    everyone = format_ranks(ranks)
    for action in schedule:
        text = f"{action.kind} of {{}} by {everyone} cannot happen in {action.moment!r}"
        allowed = SYMBOLIC_ACTIONS[action.kind].moments[column]
        allowed = (
            _LAST if allowed == _EACH and sharding.reduces_once and not action.kind.startswith("tree") else allowed
        )
        _require(action.moment in allowed, None, text)
    moments = [MOMENTS.index(action.moment) for action in schedule]
    _require(moments == sorted(moments), None, f"actions of {everyone} on {{}} are not in the order of a step")
    is_summed = sharding.reproducible_batch_size is None or any(a.kind == "tree_reduce_scatter" for a in schedule)
    _require(is_summed, None, f"{everyone} do not sum their rows of {{}} in the order of a tree")
    shards_at_rest = states.shard_of_rank
    for moment in ("microbatch", "last_microbatch", "step", "forward", "backward"):
        actions = [action for action in schedule if action.moment == moment]
        if moment == "forward":
            _require(states.is_updated, None, f"none of {everyone} updates {{}}")
            shards_at_rest = states.shard_of_rank
        elif moment == "backward" and (actions or (work.kind == "block" and sharding.reshard_after_forward)):
            states.shard_of_rank = shards_at_rest
        for action in actions:
            SYMBOLIC_ACTIONS[action.kind].execute(states, action)
        for rank, shard in enumerate(states.shard_of_rank) if moment in _PASSES else ():
            text = f"{states.name(rank)} does not get the updated {{}} for {moment}, but has only its shard {shard}"
            _require(shard is None, None, text)
    for action in schedule:
        is_tree = action.kind.startswith("tree")
        text = f"{action.kind} of {{}} by {everyone} needs a tree over the rows, and there is none"
        _require(not is_tree or sharding.reproducible_batch_size is not None, None, text)
        # The engine communicates over the groups of the sharding. Without shards, ranks shard sums only to gather them.
        shards_sums = sharding.shards == 1 and not is_tree
        groups = {
            None: action.rank_groups,
            "shards": sharding.replica_groups if shards_sums else sharding.shard_groups,
            "replicas": sharding.replica_groups,
            "near": sharding.secondary_shard_groups,
        }
        is_gathered_sum = action.is_gather and action.tensor == "gradients"
        text = f"{everyone} gather sums of {{}} of which they keep shards"
        _require(sharding.shards == 1 or not is_gathered_sum, None, text)
        is_right = action.over in SYMBOLIC_ACTIONS[action.kind].over and action.rank_groups == groups[action.over]
        if action.kind == "two_level_reduce_scatter":
            levels = sharding.secondary_shard_groups, sharding.secondary_replica_groups
            is_right = is_right and (action.intra_groups, action.inter_groups) == levels
        _require(is_right, None, f"{action.kind} of {{}} by {everyone} is not over the groups {action.over!r}")


def actions_train_everything(plan: StepPlan) -> Iterator[str]:
    """The actions on each unit sum the gradients of all ranks, count and update each element once, and gather it."""
    for group in plan.groups:
        executed: set[object] = set()
        for unit in (unit for unit in group.units if unit.members):
            if (key := (id(unit.schedule), unit.kind, unit.shards, unit.owner is None)) in executed:
                continue
            executed.add(key)
            sharding, has_owner = group.group.sharding, unit.owner is not None
            work = UnitWork(unit.schedule, unit.shards, unit.kind, sharding, has_owner=has_owner)
            try:
                execute_on_ranks(work, group.group.sum_groups[0])
            except UnitScheduleError as error:
                yield str(error).format(_elements(group, unit, error.shard))


def _elements(group: SyncGroupPlan, unit: CommUnit, shard: int | None) -> str:
    """Elements of a shard, of the first unit with this schedule in which it is not empty."""
    for other in (each for each in (unit, *group.units) if each.schedule is unit.schedule):
        for name, first, stop in other.member_ranges(shard):
            return f"element {first} of {name}" if stop - first < 2 else f"elements {first} to {stop - 1} of {name}"
    return unit.members[0].name


# The rules that a run checks, and the one about actions, which speaks before the rules that compare units.
RULES_AND_ACTIONS: Mapping[str, Callable[[StepPlan], Iterator[str]]] = {
    name: rule
    for before, rule_of_run in STEP_PLAN_RULES.items()
    for name, rule in (
        *([("actions_train_everything", actions_train_everything)] if before == "units_reduce_alike" else []),
        (before, rule_of_run),
    )
}


def prove_plan_and_actions(plan: StepPlan) -> None:
    """Raise at the first mistake of a plan, whether a run would look for it or not."""
    for rule in RULES_AND_ACTIONS.values():
        for mistake in rule(plan):
            raise InvalidStepPlanError(mistake)
