"""The predicted time of a training step on several hosts: computing as measured, the actions of its plan as costed.

An action is one or more messages. A message is a collective that groups of ranks carry out at the same time, each group
for itself; on a cluster they share the links.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from motet.cluster.cluster import Cluster
from motet.collectives.algorithms import build
from motet.collectives.compression.codecs import SCALE_BYTES, BlockwiseCodec, Codec, PowerSGDCodec
from motet.collectives.cost.alpha_beta import RankGroups, estimate_cost
from motet.collectives.execute.rank_plan import elements_sent
from motet.collectives.program import Program
from motet.core.units import DTYPE_BYTES
from motet.models.spec.layer_specs import MicroBatchShape
from motet.models.spec.model_spec import ModelSpec
from motet.parallel.data_parallel.comm_units import CommUnit
from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.parallel.data_parallel.communication.powersgd_matrices import MatrixView, ReductionBufferSpec
from motet.parallel.data_parallel.zero import CommUnitAction, Moment
from motet.parallel.step_plan.plan import StepPlan

DTYPE = "float32"
WIDTH = DTYPE_BYTES[DTYPE]


@dataclass(frozen=True)
class Message:
    """A collective in each of these groups of ranks, at the same time."""

    collective: str
    algorithm: str
    groups: RankGroups
    numel: int  # Elements of S, the size of the message
    width: int = WIDTH  # Bytes of an element

    def seconds(self, cluster: Cluster) -> float:
        return float(estimate_cost(self._program, cluster, self.groups).seconds(self.numel * self.width))

    def sent_bytes(self, rank: int) -> int:
        position, program = next(group.index(rank) for group in self.groups if rank in group), self._program
        return self.width * elements_sent(
            program, position, self.numel * sum(program.sizes) // program.message_size_units
        )

    def crossing_bytes(self, host: Sequence[int]) -> float:
        """The bytes that leave a host."""
        program = self._program
        sent = [(t, g[t.src], g[t.dst]) for g in self.groups for step in program.steps for t in step]
        leaving = sum(program.relative_size(t) for t, src, dst in sent if src in host and dst not in host)
        return self.numel * self.width * leaving / program.message_size_units

    @property
    def _program(self) -> Program:
        return build(self.collective, self.algorithm, len(self.groups[0]))


def messages_of_action(unit: CommUnit, action: CommUnitAction, settings: CommunicationSettings) -> Iterator[Message]:
    """The messages of an action, in float32."""
    codec, groups = action.codec, action.rank_groups
    match action.kind:
        case "reduce_scatter" if codec is None:
            yield Message("reduce-scatter", settings.reduce_scatter, groups, unit.reduction_spec(None).numel)
        case "two_level_reduce_scatter":
            assert isinstance(codec, BlockwiseCodec)
            intra, inter = len(action.intra_groups[0]), len(action.inter_groups[0])
            shard = unit.reduction_spec(None).numel // unit.shards
            intra_bytes, inter_bytes = codec.wire_bytes([inter * shard], DTYPE), codec.wire_bytes([shard], DTYPE)
            yield Message("all-to-all", "pairwise", action.intra_groups, intra * intra_bytes, 1)
            yield Message("all-to-all", "pairwise", action.inter_groups, inter * inter_bytes, 1)
        case "all_reduce":
            for numel, width in _summed_buffers(unit.reduction_spec(0), codec):
                yield Message("all-reduce", settings.all_reduce, groups, numel, width)
        case "all_gather" if codec is not None:
            message = codec.wire_bytes([unit.gathered_numel // unit.shards], DTYPE)
            yield Message("all-gather", settings.all_gather, groups, unit.shards * message, 1)
        case "all_gather":
            yield Message("all-gather", settings.all_gather, groups, unit.gathered_numel)
        case "norm" | "update" | "keep_secondary":
            pass
        case _:
            raise NotImplementedError(action.kind)


def _summed_buffers(buffer: ReductionBufferSpec, codec: Codec | None) -> Iterator[tuple[int, int]]:
    """(elements, bytes of one) of each all-reduce. PowerSGD: tensors that are not matrices, all P, all Q."""
    matrices: list[MatrixView] = []
    if codec is not None:
        assert isinstance(codec, PowerSGDCodec)
        matrices = [part for part in buffer.split_for_powersgd(codec, DTYPE) if isinstance(part, MatrixView)]
        for side in (1, 2):
            yield sum(m[side] * min(codec.rank, m.rows, m.columns) for m in matrices), SCALE_BYTES
    dense = buffer.numel - sum(m.rows * m.columns for m in matrices)
    if dense:
        yield dense, WIDTH


def messages_of_step(plan: StepPlan, settings: CommunicationSettings) -> list[Message]:
    """All messages of a step, except agreements on a few numbers."""
    actions = ((unit, action) for unit in plan.comm_units for action in unit.schedule)
    times = ((unit, action) for unit, action in actions for _ in range(action.times(plan.microbatches)))
    return [message for unit, action in times for message in messages_of_action(unit, action, settings)]


@dataclass(frozen=True)
class ModelSegment:
    """A block of a model."""

    flops: float  # FLOPs of the forward of a micro-batch
    parameters: frozenset[str]


def model_segments(spec: ModelSpec, shape: MicroBatchShape) -> tuple[ModelSegment, ...]:
    """Each block of a model, in the order of the forward."""
    return tuple(
        ModelSegment(block.forward_flops(shape), frozenset(parameter.name for parameter in parameters))
        for block in spec.blocks
        for parameters in block.parameters_by_repetition()
    )


@dataclass(frozen=True)
class Alone:
    """A measured step whose collectives end immediately: all ranks compute, and nothing is sent."""

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
    segments: Sequence[ModelSegment]
    agree_s: float  # Time of all agreements of a step on a few numbers

    def one_after_another(self, sent: Sequence[Message], alone: Alone, every: int = 1) -> float:
        """The mean of steps of which one in `every` sends messages: stage 3 on CPU ranks, which wait, or DiLoCo."""
        return alone.step_s + (sum(message.seconds(self.cluster) for message in sent) + self.agree_s) / every

    def overlapped(self, plan: StepPlan, settings: CommunicationSettings, alone: Alone, *, coding_s: float) -> float:
        """Time until the next forward may begin, at stages 0 to 2. `coding_s` runs during backward, as messages do."""
        numel = sum(unit.gathered_numel for unit in plan.comm_units)

        def seconds(unit: CommUnit, action: CommUnitAction) -> float:
            messages = messages_of_action(unit, action, settings)
            coding = coding_s * unit.gathered_numel / numel if action.keeps_error else 0.0
            return sum(message.seconds(self.cluster) for message in messages) + coding

        def transfers(*moments: Moment) -> Iterator[tuple[CommUnit, CommUnitAction]]:
            actions = ((unit, action) for unit in plan.comm_units for action in unit.schedule)
            return ((unit, action) for unit, action in actions if action.over and action.moment in moments)

        clock = network = 0.0
        for microbatch in range(plan.microbatches):
            clock += alone.forward_s
            end = clock + alone.backward_s
            moments: tuple[Moment, ...] = ("microbatch",)
            if microbatch == plan.microbatches - 1:
                moments = ("microbatch", "last_microbatch")
            for unit, action in transfers(*moments):
                ready = end - self._left(unit) * (end - clock) if action.overlaps else end
                network = max(network, ready) + seconds(unit, action)
            clock = end
        gathers = sorted(transfers("step"), key=lambda pair: pair[1].overlaps * (1 + self._first_user(pair[0])))
        gathers_sums = any(action.tensor == "gradients" for _, action in gathers)
        clock = max(clock, network) + self.agree_s + (0.0 if gathers_sums else alone.rest_s)
        network = clock
        for unit, action in gathers:
            network += seconds(unit, action)
            if not action.overlaps or self._first_user(unit) == 0:  # The next forward waits for it
                clock = max(clock, network) + (alone.rest_s if gathers_sums else 0.0)
        return clock

    def _first_user(self, unit: CommUnit) -> int:
        """The first segment that has parameters of a bucket."""
        names = {member.name for member in unit.members}
        return next(i for i, segment in enumerate(self.segments) if names & segment.parameters)

    def _left(self, unit: CommUnit) -> float:
        """The part of a backward that is left when it has all gradients of a bucket."""
        flops = [segment.flops for segment in self.segments]
        return sum(flops[: self._first_user(unit)]) / sum(flops)


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
