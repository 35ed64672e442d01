"""The predicted time of a training step on several hosts: computing as measured, communication as cost.py says.

What a step sends is a list of hops. A hop is one collective that groups of ranks carry out at the same time, each group
for itself; on a cluster these are one Program, whose messages share the links.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from motet.cluster.cluster import Cluster
from motet.collectives.algorithms import build
from motet.collectives.compression.codec_base import SCALE_BYTES, BlockwiseCodec
from motet.collectives.compression.powersgd import PowerSGDCodec
from motet.collectives.cost.alpha_beta import estimate_cost
from motet.collectives.execute.rank_plan import elements_sent
from motet.collectives.program import Program
from motet.core.dtypes import DTYPE_BYTES
from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings, resolve_codecs
from motet.parallel.data_parallel.communication.powersgd_matrices import (
    MatrixView,
    ReductionBufferSpec,
    bucket_reduction_specs,
    row_shard_reduction_specs,
)
from motet.parallel.data_parallel.data_sharding import DataParallelSharding
from motet.parallel.data_parallel.zero import BucketsAndFSDPUnits, padded_shard_numel
from motet.parallel.step_plan.timeline import (
    CommUnitVolume,
    ModelSegment,
    TimelineNode,
    build_step_graph,
    compute_node_times,
)

DTYPE = "float32"
WIDTH = DTYPE_BYTES[DTYPE]
Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Hop:
    """A collective in each of these groups of ranks, at the same time."""

    collective: str
    algorithm: str
    groups: tuple[Ranks, ...]
    count: int
    """Elements of S, the size of the message."""
    width: int
    """Bytes of one."""

    def seconds(self, cluster: Cluster) -> float:
        return (
            float(estimate_cost(self.program, cluster).seconds(self.count * self.width)) if self.does_something else 0.0
        )

    def sent_bytes(self, rank: int) -> int:
        if not self.does_something:
            return 0
        place, single = next(group.index(rank) for group in self.groups if rank in group), self._single
        of_all_chunks = self.count * sum(single.sizes) // single.message_size_units
        return self.width * elements_sent(single, place, of_all_chunks)

    def crossing_bytes(self, host: Ranks) -> float:
        """The bytes that leave a host."""
        if not self.does_something:
            return 0.0
        whole = self.program
        leaving = [t for step in whole.steps for t in step if t.src in host and t.dst not in host]
        return self.count * self.width * sum(map(whole.relative_size, leaving)) / whole.message_size_units

    @property
    def does_something(self) -> bool:
        return self.count > 0 and len(self.groups[0]) > 1

    @cached_property
    def program(self) -> Program:
        return side_by_side(self._single, self.groups)

    @property
    def _single(self) -> Program:
        return build(self.collective, self.algorithm, len(self.groups[0]))


def side_by_side(single: Program, groups: Sequence[Ranks]) -> Program:
    """Run the same Program in every group at the same time, each with its own chunks."""
    places = {rank: (number, place) for number, group in enumerate(groups) for place, rank in enumerate(group)}
    shift = single.chunks
    initial = [tuple(c + places[r][0] * shift for c in single.initial[places[r][1]]) for r in sorted(places)]
    final = [
        {
            chunk + number * shift: tuple(groups[number][source] for source in sources)
            for chunk, sources in single.final[place].items()
        }
        for number, place in (places[rank] for rank in sorted(places))
    ]
    steps = tuple(
        tuple(
            t._replace(src=group[t.src], dst=group[t.dst], first=t.first + n * shift, last=t.last + n * shift)
            for n, group in enumerate(groups)
            for t in step
        )
        for step in single.steps
    )
    sizes = single.sizes * len(groups)
    return replace(single, ranks=len(places), sizes=sizes, initial=tuple(initial), final=tuple(final), steps=steps)


@dataclass(frozen=True)
class Travel:
    """The messages of one comm unit in a step."""

    name: str
    parameters: frozenset[str] = frozenset()
    reduced: tuple[Hop, ...] = ()
    gathered: tuple[Hop, ...] = ()
    elements: int = 0

    @property
    def hops(self) -> tuple[Hop, ...]:
        return self.reduced + self.gathered


@dataclass(frozen=True)
class Paths:
    """The hops of the sums and gathers of a layout, as `data_parallel.communication.communicator` makes them."""

    layout: DataParallelSharding
    settings: CommunicationSettings
    shards: tuple[Ranks, ...] = field(init=False)
    replicas: tuple[Ranks, ...] = field(init=False)

    def __post_init__(self) -> None:
        size, world = self.layout.shards, self.layout.ranks
        rows = tuple(tuple(range(first, first + size)) for first in range(0, world, size))
        object.__setattr__(self, "shards", rows)
        object.__setattr__(self, "replicas", tuple(tuple(range(first, world, size)) for first in range(size)))

    def scattered(self, whole: ReductionBufferSpec) -> list[Hop]:
        codec = resolve_codecs(self.settings, self.layout).shard_gradients
        if codec is None:
            return [Hop("reduce-scatter", self.settings.reduce_scatter, self.shards, whole.numel, WIDTH)]
        near = self.layout.secondary_shards
        assert isinstance(codec, BlockwiseCodec) and near is not None
        ranks, part = self.layout.shards, whole.numel // self.layout.shards
        far = ranks // near
        return [
            Hop("all-to-all", "pairwise", self._near, near * codec.wire_bytes([far * part], DTYPE), 1),
            Hop("all-to-all", "pairwise", self._far, far * codec.wire_bytes([part], DTYPE), 1),
        ]

    def summed(self, part: ReductionBufferSpec) -> list[Hop]:
        """Over the replicas. PowerSGD: what is no matrix, all P, all Q."""
        codec, name = resolve_codecs(self.settings, self.layout).replica_gradients, self.settings.all_reduce
        if codec is None:
            return [Hop("all-reduce", name, self.replicas, part.numel, WIDTH)]
        assert isinstance(codec, PowerSGDCodec)
        found = [m for m in part.split_for_powersgd(codec, DTYPE) if isinstance(m, MatrixView)]
        ranked = [(m.rows, m.columns, min(codec.rank, m.rows, m.columns)) for m in found]
        rest = part.numel - sum(rows * columns for rows, columns, _ in ranked)
        factors = [sum(size[side] * size[2] for size in ranked) for side in (0, 1)]
        counts = [(rest, WIDTH), *((count, SCALE_BYTES) for count in factors)]
        return [Hop("all-reduce", name, self.replicas, count, width) for count, width in counts]

    def gathered(self, numel: int, near: bool = False) -> Hop:
        name, codec, shards = (
            self.settings.all_gather,
            resolve_codecs(self.settings, self.layout).parameters,
            self.shards,
        )
        if near:
            return Hop("all-gather", name, self._near, numel, WIDTH)
        if codec is None:
            return Hop("all-gather", name, shards, numel, WIDTH)
        ranks = self.layout.shards
        return Hop("all-gather", name, shards, ranks * codec.wire_bytes([numel // ranks], DTYPE), 1)

    @property
    def _near(self) -> tuple[Ranks, ...]:
        near = self.layout.secondary_shards or 1
        return tuple(row[first : first + near] for row in self.shards for first in range(0, len(row), near))

    @property
    def _far(self) -> tuple[Ranks, ...]:
        near = self.layout.secondary_shards or 1
        return tuple(row[place::near] for row in self.shards for place in range(near))


def travels(
    portions: BucketsAndFSDPUnits, layout: DataParallelSharding, settings: CommunicationSettings
) -> list[Travel]:
    """All that a step sends but for agreements on a few numbers, in the order of backward; float32 throughout."""
    paths = Paths(layout, settings)
    return [*_buckets(portions, paths), *_units(portions, paths)]


def _buckets(portions: BucketsAndFSDPUnits, paths: Paths) -> Iterator[Travel]:
    gathers = paths.layout.zero > 0
    wholes = bucket_reduction_specs(portions.buckets, None, portions.shapes, dtype=DTYPE).buffers
    parts = bucket_reduction_specs(portions.buckets, 0, portions.shapes, dtype=DTYPE).buffers
    for number, (bucket, whole, part) in enumerate(zip(portions.buckets, wholes, parts, strict=True)):
        reduced = (*(paths.scattered(whole) if gathers else ()), *paths.summed(part))
        gathered = (paths.gathered(whole.numel),) if gathers else ()
        names = frozenset(member.name for member in bucket.members)
        yield Travel(f"bucket {number}", names, reduced, gathered, whole.numel)


def _units(portions: BucketsAndFSDPUnits, paths: Paths) -> Iterator[Travel]:
    shards = paths.layout.shards
    wholes, parts = (
        found.buffers for found in row_shard_reduction_specs([unit.trainable for unit in portions.units], shards, DTYPE)
    )
    for number, (unit, whole, part) in enumerate(zip(portions.units, wholes, parts, strict=True)):
        numel = shards * padded_shard_numel(unit.trainable + unit.frozen, shards)
        from_all, from_near = unit.gather_counts(paths.layout)
        gathered = (*[paths.gathered(numel)] * from_all, *[paths.gathered(numel, near=True)] * from_near)
        reduced = (*paths.scattered(whole), *paths.summed(part))
        yield Travel(f"unit {number}", frozenset(), reduced, gathered, numel)


@dataclass(frozen=True)
class Alone:
    """A step whose collectives are over at once, measured: all ranks compute, and nothing is sent."""

    step_s: float
    forward_s: float
    backward_s: float

    @property
    def rest_s(self) -> float:
        return self.step_s - self.forward_s - self.backward_s


@dataclass(frozen=True)
class Predicted:
    """The predicted parts of a step."""

    cluster: Cluster
    stretches: Sequence[ModelSegment]
    agree_s: float
    """To agree on a few numbers, all that a step does of it."""

    def one_after_another(self, sent: Sequence[Travel], alone: Alone) -> float:
        """Stage 3 on CPU ranks, which wait for every collective."""
        return alone.step_s + sum(self._seconds(travel.hops) for travel in sent) + self.agree_s

    def overlapped(
        self,
        sent: Sequence[Travel],
        layout: DataParallelSharding,
        settings: CommunicationSettings,
        alone: Alone,
        coding_s: float,
    ) -> float:
        """Stages 0 to 2: until the next forward may begin. `coding_s` runs during backward, as messages do."""
        messages = [CommUnitVolume(t.name, t.parameters, t.elements, t.elements) for t in sent]
        nodes = build_step_graph(self.stretches, messages, layout, settings=settings)
        flops = sum(stretch.flops for stretch in self.stretches)
        by_name = {travel.name: travel for travel in sent}
        coding = {t.name: coding_s * t.elements / sum(other.elements for other in sent) for t in sent}

        def seconds(node: TimelineNode) -> float:
            match node.kind:
                case "forward":
                    return alone.forward_s * node.work / flops
                case "backward":
                    return alone.backward_s * node.work / (2 * flops)
                case "reduce":
                    return self._seconds(by_name[node.label].reduced) + coding[node.label]
                case "gather":
                    return self._seconds(by_name[node.label].gathered)
                case "agree":
                    return self.agree_s
                case "update":
                    return alone.rest_s

        times = compute_node_times(nodes, seconds)
        return min(times[node.name][0] for node in nodes if node.label.endswith("of the next step"))

    def meeting(self, alone: Alone, sent: Sequence[Travel], every: int) -> float:
        """DiLoCo, the mean of a period: steps apart, and then what is sent once."""
        return alone.step_s + (sum(self._seconds(travel.hops) for travel in sent) + self.agree_s) / every

    def _seconds(self, hops: Sequence[Hop]) -> float:
        return sum(hop.seconds(self.cluster) for hop in hops)


def apart(predicted: Mapping[str, float], quartiles: Mapping[str, tuple[float, float]], least: float) -> dict[str, str]:
    """Classify every pair as `right`, `wrong`, or `equal`.

    Two are equal where predictions differ by less than `least` of the smaller one, or measured quartiles overlap.
    """
    found = {}
    names = list(predicted)
    for number, first in enumerate(names):
        for second in names[number + 1 :]:
            ahead = predicted[first] > predicted[second]
            slow, quick = (first, second) if ahead else (second, first)
            close = predicted[slow] < (1 + least) * predicted[quick]
            overlap = quartiles[first][0] <= quartiles[second][1] and quartiles[second][0] <= quartiles[first][1]
            if close or overlap:
                found[f"{first} / {second}"] = "equal"
            else:
                found[f"{first} / {second}"] = "right" if quartiles[slow][0] > quartiles[quick][1] else "wrong"
    return found
