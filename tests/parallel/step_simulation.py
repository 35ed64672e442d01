"""Simulation of a plan: its actions one after another, on integers, and the parameters of each rank after the step.

Gradients are random numbers of 64 bits for each element, row of the batch and rank with a partial sum of it. Two plans
that leave the same numbers train the same.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from motet.parallel.data_parallel.buckets import BucketParameter
from motet.parallel.data_parallel.comm_units import CommUnit, ShardedSpan, SyncGroupPlan
from motet.parallel.data_parallel.zero import CommUnitAction
from motet.parallel.model_sharding import ModelSharding
from motet.parallel.shard_spec import ShardSpec
from motet.parallel.step_plan.plan import StepPlan
from motet.parallel.sync_groups import METRIC_REPORTERS, reports

Numbers = NDArray[np.int64]


class StepFailsError(Exception):
    """A rank is to use what it does not hold, or ranks communicate different numbers of elements."""


def require(is_right: object) -> None:
    if not is_right:
        raise StepFailsError


@cache
def random_tensor(shape: tuple[int, ...], *key: object) -> Numbers:
    return np.random.default_rng(crc32(repr(key).encode())).integers(-(2**62), 2**62, shape)


def local(whole: Numbers, spec: ShardSpec) -> Numbers:
    """The shard of a tensor, flat, with zeros in the place of padding."""
    indices = [np.concatenate([np.arange(*span) for span in spans]) for spans in spec.spans]
    held = whole[np.ix_(*indices)] if whole.shape else whole
    return np.pad(held, [(0, zeros) for zeros in spec.padding]).ravel() if spec.padding else held.ravel()


@dataclass
class Held:
    """Elements of a span, and which of them each rank holds."""

    values: Numbers
    mask: NDArray[np.bool_]

    def copy(self) -> "Held":
        return Held(self.values.copy(), self.mask.copy())

    def sent(self, rank: int, first: int, stop: int) -> Numbers:
        """These elements, as a rank sends them: they themselves, or the shard that it holds instead."""
        if not self.mask[rank, first:stop].all():
            values = self.values[rank, self.mask[rank]]
            require(not self.mask[rank].all() and len(values) == stop - first)
            return values
        return self.values[rank, first:stop]


@dataclass
class SpanSimulation:
    """The ranks of one sum group at work on one span of a unit."""

    span: ShardedSpan
    is_bucket: bool
    full: Held  # Parameters that ranks compute with
    at_rest: Held
    rates: Numbers
    current: Held | None = None  # Gradients of a micro-batch
    total: Held | None = None  # Sums of gradients
    gathered: Held | None = None  # Parameters of a forward
    secondary: Held | None = None
    updated: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))
    norm: dict[int, NDArray[Any]] = field(default_factory=dict)  # What each rank adds, by element
    kept_gradients: Numbers = field(default_factory=lambda: np.zeros(0, np.int64))  # In how many micro-batches
    knows_norm: bool = True

    def gradients(self) -> Held:
        held = self.current if self.current is not None else self.total
        if held is None:
            raise StepFailsError
        return held

    def bounds(self, shard: int) -> tuple[int, int]:
        require(shard < len(self.span.shard_ranges))
        first, stop = self.span.shard_ranges[shard]
        require(0 <= first <= stop <= self.span.length)
        return first, stop

    def scatter(self, action: CommUnitAction) -> None:
        held = self.parameters() if action.tensor == "parameters" else self.gradients()
        new = held.copy()
        for ranks in action.rank_groups:
            require(held.mask[list(ranks)].all())
            total = held.values[list(ranks)].sum(0)
            for shard, rank in enumerate(ranks):
                new.mask[rank], new.values[rank] = False, 0
                first, stop = self.bounds(shard)
                new.mask[rank, first:stop], new.values[rank, first:stop] = True, total[first:stop]
        held.values, held.mask = new.values, new.mask

    def two_level_scatter(self, action: CommUnitAction) -> None:
        held = self.gradients()
        require(held.mask.all())
        between, new = held.copy(), Held(np.zeros_like(held.values), np.zeros_like(held.mask))
        for ranks in action.intra_groups:
            between.values[list(ranks)] = held.values[list(ranks)].sum(0)
        intra = {rank: (i, len(ranks)) for ranks in action.intra_groups for i, rank in enumerate(ranks)}
        for ranks in action.inter_groups:
            require(len({intra.get(rank) for rank in ranks}) == 1 and ranks[0] in intra)
            for position, rank in enumerate(ranks):
                index, size = intra[rank]
                first, stop = self.bounds(position * size + index)
                new.mask[rank, first:stop] = True
                new.values[rank, first:stop] = between.values[list(ranks), first:stop].sum(0)
        for ranks in action.rank_groups:
            for shard, rank in enumerate(ranks):
                first, stop = self.bounds(shard)
                require(new.mask[rank].sum() == stop - first and new.mask[rank, first:stop].all())
        held.values, held.mask = new.values, new.mask

    def all_reduce(self, action: CommUnitAction) -> None:
        held = self.parameters() if action.tensor == "parameters" else self.gradients()
        values = held.values.copy()
        for ranks in action.rank_groups:
            require((held.mask[list(ranks)] == held.mask[ranks[0]]).all())
            values[list(ranks)] = held.values[list(ranks)].sum(0)
        held.values = values

    def parameters(self) -> Held:
        return self.full if self.is_bucket else self.at_rest

    def count(self, action: CommUnitAction) -> None:
        held = self.gradients()
        for rank in (rank for ranks in action.rank_groups for rank in ranks):
            squares = held.values[rank].astype(object) ** 2 * held.mask[rank]
            self.norm[rank] = self.norm.get(rank, 0) + squares

    def update(self, action: CommUnitAction) -> None:
        self.knows_norm &= bool(self.norm)
        held, parameters = self.gradients(), self.parameters()
        for rank in (rank for ranks in action.rank_groups for rank in ranks):
            mask = held.mask[rank]
            require(parameters.mask[rank, mask].all())
            changed = 5 * parameters.values[rank] + self.rates * held.values[rank]
            parameters.values[rank, mask] = changed[mask]
            self.updated[rank] |= mask

    def require_planned_updates(self, unit: CommUnit) -> None:
        """Require that each rank has updated what the plan itself says."""
        for rank, updated in enumerate(self.updated):
            shard, planned = unit.updated_shard(rank), np.zeros(self.span.length, bool)
            planned[slice(*self.bounds(shard)) if shard is not None else slice(None)] = True
            require((updated == planned).all())

    def gather(self, action: CommUnitAction) -> None:
        source, length = self.at_rest, self.span.length
        if action.tensor == "gradients":
            source = target = self.gradients()
        elif self.is_bucket:
            source = target = self.full
        else:
            target = self.full
        new = target.copy()
        for ranks in action.rank_groups:
            bounds = [self.bounds(shard) for shard in range(len(ranks))] if action.over != "near" else []
            if action.over == "near":
                require(self.secondary is not None)
                source = self.secondary or source
                bounds = [(i * length // len(ranks), (i + 1) * length // len(ranks)) for i in range(len(ranks))]
            for rank in ranks:
                new.mask[rank] = False
                for other, (first, stop) in zip(ranks, bounds, strict=True):
                    new.values[rank, first:stop] = source.sent(other, first, stop)
                    new.mask[rank, first:stop] = True
        target.values, target.mask = new.values, new.mask

    def keep(self, action: CommUnitAction) -> None:
        length = self.span.length
        if self.gathered is None:
            raise StepFailsError
        self.secondary = Held(self.gathered.values, np.zeros_like(self.full.mask))
        for ranks in action.rank_groups:
            for i, rank in enumerate(ranks):
                self.secondary.mask[rank, i * length // len(ranks) : (i + 1) * length // len(ranks)] = True
        require(self.gathered.mask[self.secondary.mask].all())

    def run(self, unit: CommUnit, microbatches: list[Held], *, groups: dict[object, object]) -> None:
        """The actions of one step, and those before the next forward."""
        do: dict[str, Callable[[CommUnitAction], None]] = {
            **dict.fromkeys(("reduce_scatter", "reduce"), self.scatter),
            "two_level_reduce_scatter": self.two_level_scatter,
            "all_reduce": self.all_reduce,
            **dict.fromkeys(("all_gather", "broadcast"), self.gather),
            "norm": self.count,
            "update": self.update,
            "keep_secondary": self.keep,
        }

        def act(moment: str) -> None:
            for action in unit.schedule:
                if action.moment == moment:
                    # The engine communicates over the groups of the layout that the action names.
                    key = len(self.updated), action.over
                    require(action.over is None or groups.get(key) == action.rank_groups)
                    require((action.kind in ("reduce", "broadcast")) == (unit.owner is not None and bool(action.over)))
                    do[action.kind](action)

        def compute() -> None:
            act("forward")
            require(self.full.mask.all())
            self.gathered = self.full
            if any(action.moment == "backward" for action in unit.schedule):
                self.full = Held(np.zeros_like(self.full.values), np.zeros_like(self.full.mask))
                act("backward")
                require(self.full.mask.all())

        for gradient in microbatches:
            compute()
            self.current = gradient.copy()
            act("microbatch")
            if self.total is None:
                self.total = self.current
            else:
                require((self.total.mask == self.current.mask).all())
                self.total.values += self.current.values
            self.kept_gradients += self.total.mask
            if not self.is_bucket:
                self.full = Held(np.zeros_like(self.full.values), np.zeros_like(self.full.mask))
        self.current = None
        act("last_microbatch")
        act("step")
        compute()


@dataclass(frozen=True)
class StepSimulator:
    """Simulates plans of one layout; `model` says of which tensors ranks have partial sums."""

    model: ModelSharding
    # The groups of ranks that the engine makes, by the number of ranks that add, and the names that actions use.
    groups: dict[object, object]
    known: dict[object, tuple[tuple[int, dict[object, object]], object]] = field(default_factory=dict)

    def outcome(self, plan: StepPlan) -> object:
        """The norm and, by rank, parameters and the number of elements updated and of gradients kept; None: it fails.

        Of each element also the number of ranks that update it, and that keep its gradient after a micro-batch.
        """
        outcome: dict[object, object] = {}
        norm = 0
        try:
            groups = [each.group for each in plan.groups]
            added = [(each.unit_kind, each.stages, ranks) for each in groups for ranks in each.sum_groups]
            require(len(added) == len(set(added)))  # The same ranks start collectives in one order
            for group in plan.groups:
                for ranks in group.group.sum_groups:
                    for unit in group.units:
                        for span, members in spans_of(unit):
                            key = id(unit), id(span), id(group.group), id(plan.rows_by_rank), ranks
                            if key not in self.known:
                                result = self.simulate(plan, group, ranks, unit=unit, span=span, members=members)
                                self.known[key] = result, (plan, unit)  # Which stay alive, so that ids are unique
                            span_norm, facts = self.known[key][0]
                            norm += span_norm
                            require(not outcome.keys() & facts.keys())
                            outcome |= facts
        except (StepFailsError, StopIteration, LookupError, ValueError):  # Also a rank or shard that does not exist
            return None
        return norm, outcome

    def simulate(
        self,
        plan: StepPlan,
        group: SyncGroupPlan,
        ranks: tuple[int, ...],
        *,
        unit: CommUnit,
        span: ShardedSpan,
        members: list[BucketParameter],
    ) -> tuple[int, dict[object, object]]:
        size = len(ranks), span.length
        rates = np.ones(span.length, np.int64)
        initial = np.zeros(size, np.int64)
        microbatches = [
            Held(np.zeros(size, np.int64), np.ones(size, bool)) for _ in range(max(map(len, plan.rows_by_rank)))
        ]
        for member in members:
            place = slice(member.start - span.start, member.stop - span.start)
            rates[place] = 1 + member.optimizer_group
            for position, rank in enumerate(ranks):
                values, gradients = self.tensors(plan, member.name, rank)
                require(place.start >= 0 and place.stop <= span.length and values.size == member.numel)
                initial[position, place] += values
                for held, gradient in zip(microbatches, gradients, strict=False):
                    held.values[position, place] += gradient
        at_rest = Held(initial.copy(), np.ones(size, bool))
        is_bucket = unit.kind == "bucket"
        state = SpanSimulation(span, is_bucket, Held(initial, np.ones(size, bool)), at_rest, rates)
        state.updated, state.kept_gradients = np.zeros(size, bool), np.zeros(size, np.int64)
        if not is_bucket:
            state.full = Held(np.zeros_like(initial), np.zeros(size, bool))
            at_rest.mask[:] = False
            for shards in group.group.sharding.shard_groups:
                for shard, position in enumerate(shards):
                    require(position < len(ranks))
                    at_rest.mask[position, slice(*state.bounds(shard))] = True
        state.run(unit, microbatches, groups=self.groups)
        require(state.knows_norm)
        state.require_planned_updates(unit)
        facts: dict[object, object] = {}
        for member in members:
            place = slice(member.start - span.start, member.stop - span.start)
            for position, rank in enumerate(ranks):
                require((member.name, rank) not in facts)
                times = [held[:, place].sum(0).tobytes() for held in (state.updated, state.kept_gradients)]
                facts[member.name, rank] = state.full.values[position, place].tobytes(), *times
        for position, rank in enumerate(ranks):
            memory = [int(held[position].sum()) for held in (state.updated, state.kept_gradients)]
            facts["memory", frozenset(member.name for member in members), rank] = memory
        return sum(self.counted(group, span, member, (ranks, state.norm)) for member in members), facts

    @staticmethod
    def counted(group: SyncGroupPlan, span: ShardedSpan, member: BucketParameter, norm: tuple[Any, Any]) -> int:
        """The share of a tensor in the norm, which the first rank of each group of copies adds."""
        (ranks, squares), place = norm, slice(member.start - span.start, member.stop - span.start)
        firsts = {copies[0] for copies in group.group.copy_groups[member.name]}
        return sum(each[place].sum() for position, each in squares.items() if ranks[position] in firsts)

    def tensors(self, plan: StepPlan, name: str, rank: int) -> tuple[Numbers, list[Numbers]]:
        """The parameter of a rank, and its gradient of each micro-batch."""
        tensor = next(tensor for tensor in plan.inventory.tensors if tensor.name == name)
        require(rank in plan.specs[name])
        spec, coordinates = plan.specs[name][rank], plan.dims.coordinates(rank)
        partial_over = [over for over in self.model.partial_over(tensor) if over != "dp"]
        make = partial(random_tensor, tensor.shape, name)
        indices = tuple(coordinates.get(over, 0) for over in partial_over)
        zero = np.zeros(tensor.shape, np.int64)
        gradients = [sum((make(row, indices) for row in rows), zero) for rows in plan.rows_by_rank[rank]]
        return local(make(), spec), [local(gradient, spec) for gradient in gradients]


def spans_of(unit: CommUnit) -> Iterator[tuple[ShardedSpan, list[BucketParameter]]]:
    if unit.kind == "bucket":
        yield unit.spans[0], list(unit.members)
    else:
        require(len(unit.spans) == len(unit.members))
        yield from ((span, [member]) for span, member in zip(unit.spans, unit.members, strict=True))


def declared_facts(plan: StepPlan) -> dict[str, object]:
    """Facts of a plan that its actions do not show, equal where only the order of groups or names differs."""
    sums: Counter[object] = Counter()
    for each in plan.groups:
        group = each.group
        for name in group.names:
            copies = group.copy_groups.get(name, ())
            ranks = (frozenset(Counter(groups).items()) for groups in (group.sum_groups, copies))
            sums[name, each.shapes.get(name), *ranks, group.sharding, group.stages, group.unit_kind] += 1
    places = {rank: plan.dims.coordinates(rank) for rank in range(plan.dims.ranks)}
    return {
        "sums": sums,
        "reporters": {m: [r for r in places if reports(m, places[r], plan.dims)] for m in METRIC_REPORTERS},
        "outer steps": Counter(ranks for ranks in plan.outer_groups if len(ranks) > 1),
        "states": plan.states,
    }


def split_facts(plan: StepPlan) -> object:
    """Facts about the split of the model.

    `partial_over` makes no difference along a dimension of size 1, and for shards that no two ranks share.
    """
    sharding, partial_sums = plan.model_sharding, {}
    for tensor in plan.inventory.trained:
        for over, size in plan.dims.sizes:
            held = [[plan.specs[tensor.name].get(rank) for rank in ranks] for ranks in plan.dims.groups(over)]
            if any(None not in specs and len(set(specs)) < size for specs in held):
                partial_sums[tensor.name, over] = over in sharding.rule(tensor.name).partial_over
    comms = [comm for comm in sharding.boundary_comms if plan.dims.size(comm.over) > 1]
    lies = [comm.dim if comm.operation in ("gather", "scatter", "split", "exchange") else None for comm in comms]
    shards = {name: dict(specs) for name, specs in plan.specs.items()}
    return shards, partial_sums, sharding.stages, comms, lies, sharding.activations
