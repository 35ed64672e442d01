"""The events of a simulated step: the computations and communications of each rank of a pipeline, with their times.

The simulation adds up waits that are not events of one block, such as the reductions that backward does not hide. Here
each has its place: buckets are reduced as soon as their gradients are complete, but never later than in the simulation.
Where the simulation hides more than that, a reduction starts before its bucket is complete.
"""

from collections import defaultdict
from collections.abc import Iterator
from functools import cache, partial
from typing import Any, Literal, NamedTuple

from motet.parallel.data_parallel.zero import fill_buckets
from motet.parallel.pipeline.pipeline_schedule import PipelineAction, message_of_compute
from motet.parallel.pipeline.schedule_timeline import event_times
from motet.parallel.pipeline.schedules import order_of_computations
from motet.plan.planned_step import is_expert
from motet.plan.time.host_update import HostUpdate
from motet.plan.time.stage_times import PlannedBlock, simulate_backward, simulate_forward
from motet.plan.time.step_simulation import GATHERED_ONCE, REDUCED, StepSimulation

StepStream = Literal["compute", "network", "host link", "host cores", "disk"]
StepEventKind = Literal[
    "forward", "recomputation", "backward", "weights", "exchange", "message", "gather", "reduce", "norm", "update",
    "host", "data", "send", "read", "write", "receive",
]  # fmt: skip
_STREAM_OF_KIND: dict[StepEventKind, StepStream] = {
    **dict.fromkeys(("exchange", "message", "gather", "reduce", "norm"), "network"),
    **dict.fromkeys(("send", "receive"), "host link"),
    **dict.fromkeys(("read", "write"), "disk"),
}  # Others compute
_UPDATE_KINDS: tuple[StepEventKind, ...] = ("read", "update", "write", "receive", "gather")  # As in PartSpans
_EXCHANGES = ("tensor parallelism", "expert parallelism", "context parallelism")


class StepEvent(NamedTuple):
    """A computation or a communication of a rank."""

    rank: int
    stream: StepStream
    kind: StepEventKind
    name: str  # The operation, and its block or bucket
    start_s: float
    stop_s: float
    block: str = ""
    stage: int | None = None
    microbatch: int | None = None


class _Span(NamedTuple):
    """A part of a pass of a stage; times are from the start of the pass."""

    kind: StepEventKind
    operation: str
    block: str
    start: float
    stop: float


class _Bucket(NamedTuple):
    """Parameters that are communicated together."""

    name: str
    blocks: frozenset[str]
    share: float  # Share of all parameters of the rank


def events_of_step(simulation: StepSimulation) -> list[StepEvent]:
    """The events of the first rank of each pipeline rank, in order of time; hidden gathers end in the next forward."""
    return sorted(_EventBuilder(simulation).build(), key=lambda event: (event.rank, event.start_s, event.stop_s))


class _EventBuilder:
    def __init__(self, simulation: StepSimulation) -> None:
        self._simulation, self._step, layout = simulation, simulation.step, simulation.step.layout
        self._schedule = order_of_computations(
            layout.schedule, layout.pp, chunks=layout.chunks, microbatches=layout.microbatches
        )
        self._events, self._rank_stride = list[StepEvent](), layout.ranks // layout.pp
        # Times at which the gradients of each block, and of all blocks, are complete, by rank and micro-batch
        self._ready: dict[tuple[int, int | None], dict[str, float]] = defaultdict(dict)
        self._spans = cache(self._make_spans)

    def build(self) -> list[StepEvent]:
        """All events of all ranks."""
        simulation, layout = self._simulation, self._step.layout
        exposed, others = simulation.exposed_collectives, layout.microbatches - 1
        times = event_times(self._schedule.actions, simulation.durations.by_kind)
        # Ranks that share cores take longer, and the simulation repeats the steady part of many micro-batches
        stretch = simulation.makespan_s / max(stop for _, stop in times.values())
        for rank, order in enumerate(self._schedule.actions):
            delay, stages = 0.0, len(self._schedule.stages_of_rank(rank))
            for action in order:
                start, stop = (delay + stretch * time for time in times[action])
                slowdown = 0.0
                if action.kind in "BI" and action.microbatch < others:
                    delay += exposed.microbatch_s / stages
                elif action.kind in "BI":
                    slowdown = simulation.slowdown_s / stages
                    delay += slowdown + simulation.seconds_of_stages[action.stage].last_reduction
                self._add_pass(action, start, stop + slowdown, rank=rank)
        computed = simulation.makespan_s + others * exposed.microbatch_s + simulation.slowdown_s
        for rank in range(self._schedule.ranks):
            self._add_after_backward(rank, computed)
        return self._events

    def _add(self, kind: StepEventKind, name: str, span: tuple[float, float], *, rank: int, **details: Any) -> None:
        if span[1] > span[0] or kind == "norm":
            stream = details.pop("stream", _STREAM_OF_KIND.get(kind, "compute"))
            self._events.append(StepEvent(rank * self._rank_stride, stream, kind, name, *span, **details))

    def _add_pass(self, action: PipelineAction, start: float, stop: float, *, rank: int) -> None:
        """Add the blocks of a stage, and the message to its neighbour."""
        kind, stage, microbatch = action
        durations, layout = self._simulation.durations, self._step.layout
        add = partial(self._add, rank=rank, stage=stage, microbatch=microbatch)
        part = f" of micro-batch {microbatch + 1}" * (layout.microbatches > 1)
        wait = durations.blocks_s if kind != "W" else 0.0
        is_last = microbatch == layout.microbatches - 1
        spans, seconds = self._spans(stage, kind, reduces=is_last or not self._simulation.reduces_once)
        scale = (stop - start - wait) / seconds if seconds else 0.0
        for span in spans:
            first, last = start + scale * span.start, start + scale * span.stop
            add(span.kind, f"{span.operation} {span.block}{part}", (first, last), block=span.block)
            if span.kind in ("backward", "weights"):
                self._ready[rank, microbatch][span.block] = last
        message = message_of_compute(action, self._schedule.stage_ranks)
        if message is not None:
            tensor = "activation" if kind == "F" else "gradient"
            arrival = stop if wait else stop + durations.message_s
            add("message", f"{tensor} to stage {message.other_end.stage}{part}", (stop - wait, arrival))

    def _make_spans(self, stage: int, kind: str, *, reduces: bool) -> tuple[list[_Span], float]:
        """The spans of a pass of a stage, and how long it takes before it is scaled."""
        simulation, durations = self._simulation, self._simulation.durations
        blocks = list(self._blocks(stage))
        if kind == "W" or not simulation.is_sharded:
            at, spans = 0.0, list[_Span]()
            for name, costs in blocks if kind == "F" else reversed(blocks):
                stop = at + _pass_s(costs, kind)
                spans += _block_spans(name, costs, kind, span=(at, stop))
                at = stop
            return spans, at
        contention = self._step.stack.contention
        sharded = simulation.sharded_blocks(simulation.stages[stage])
        if kind == "F":
            moment, placed, seconds = "forward", simulate_forward(sharded, contention), durations.forward_s[stage]
        else:
            moment, seconds = "backward", durations.backward_s[stage]
            placed = simulate_backward(sharded, contention, reduces=reduces)
        reduced_s = simulation.seconds_by_collective(simulation.parameters_of_rank(0), REDUCED)
        reductions = " and ".join(collective for collective, value in reduced_s.items() if value)
        spans = []
        for (name, costs), each in zip(blocks if kind == "F" else reversed(blocks), placed, strict=True):
            spans.append(_Span("gather", f"all-gather for {moment}", name, *each[0:2]))
            spans += _block_spans(name, costs, kind, span=each[2:4])
            if kind != "F":
                spans.append(_Span("reduce", reductions, name, *each[4:6]))
        return spans, seconds

    def _blocks(self, stage: int) -> Iterator[tuple[str, PlannedBlock]]:
        """The name and the costs of each block of a stage."""
        specs = self._step.stage_specs[stage].blocks
        for spec, (_, costs) in zip(specs, self._simulation.stages[stage], strict=True):
            for index in range(spec.first_index, spec.first_index + spec.repeat):
                yield f"{spec.name} {index}" if "{i}" in spec.prefix else spec.name, costs

    def _add_after_backward(self, rank: int, computed: float) -> None:
        """Add the events after the last backward of a rank, in the order of its row of ZERO_STAGES."""
        simulation, add = self._simulation, partial(self._add, rank=rank)
        exposed = simulation.exposed_collectives
        at = computed + exposed.reduction_s
        if not simulation.is_sharded:
            self._add_reductions(rank, at)
        update = simulation.host_update_of_rank(rank)
        if update is not None:
            self._add_host_update(rank, at, update)
            return
        gathers = list[float]()
        for action, _ in simulation.actions:
            if action.kind == "norm":
                add("norm", "agree on the norm", (at, at))
            elif action.kind == "update":
                add("update", "update", (at, at + simulation.optimizer_s))
                at += simulation.optimizer_s
            elif action.moment == "step":
                gathers.append(at)
                at += exposed.gather_s
        if not gathers:  # Stage 3 gathers for the next forward
            gathers.append(at)
            at += exposed.gather_s
        self._add_gathers(rank, gathers[0], self._add_waits(rank, at))

    def _add_waits(self, rank: int, at: float) -> float:
        """Add the work of the host and the wait for data; the end of the step."""
        end = at + self._step.stack.step_overhead_s
        self._add("host", "host", (at, end), rank=rank)
        self._add("data", "waits for data", (end, self._simulation.read_s), rank=rank)
        return max(end, self._simulation.read_s)

    def _add_host_update(self, rank: int, at: float, update: HostUpdate) -> None:
        """Add the events after the last reduction, where states lie on the host or on disk."""
        simulation, add = self._simulation, partial(self._add, rank=rank)
        slowest = simulation.host_update
        assert slowest is not None
        for number, (start, stop) in enumerate(update.sends, 1):
            span = at - update.reduced_s + start, at - update.reduced_s + stop
            add("send", f"sums of part {number} to the host", span)
        add("norm", "agree on the norm", (at, at + simulation.optimizer_s))
        at += simulation.optimizer_s
        first = at + update.exposed_send_s
        is_hidden = self._step.delays_update and self._step.stack.hides_data_parallel
        for number, spans in enumerate(update.spans, 1):
            for kind, (start, stop) in zip(_UPDATE_KINDS, spans, strict=True):
                stream: StepStream = "host cores" if kind == "update" else _STREAM_OF_KIND[kind]
                offset = 0.0 if is_hidden else first  # The gradients of the step before, from the start of this one
                offset += update.exposed_send_s * (is_hidden and kind in ("receive", "gather"))
                add(kind, f"{kind} part {number}", (offset + start, offset + stop), stream=stream)
        end = self._add_waits(rank, at + slowest.exposed_s)
        if not is_hidden:
            self._add_next_forward(rank, end, first + update.spans[-1].gather.stop)

    def _add_reductions(self, rank: int, limit: float) -> None:
        """Add the reductions of buckets, in order."""
        simulation, count = self._simulation, self._step.layout.microbatches
        seconds = simulation.seconds_by_collective(simulation.parameters_of_rank(rank), REDUCED)
        chain, free = list[tuple[float, float, str]](), 0.0
        for microbatch in range(count - 1 if simulation.reduces_once else 0, count):
            ready = self._ready[rank, microbatch]
            part = f" of micro-batch {microbatch + 1}" * (count > 1 and not simulation.reduces_once)
            for bucket in self._buckets(rank):
                blocks = bucket.blocks if simulation.hides_data_parallel else ready
                free = max(free, *(ready[block] for block in blocks))
                for kind, value in seconds.items():
                    chain.append((free, free + value * bucket.share, f"{kind} {bucket.name}{part}"))
                    free = chain[-1][1]
        for start, stop, name in reversed(chain):
            late = max(0.0, stop - limit)
            self._add("reduce", name, (start - late, stop - late), rank=rank)
            limit = start - late

    def _add_gathers(self, rank: int, start: float, end: float) -> None:
        """Add gathers in the order in which the next forward uses buckets, and the part of it that they may reach."""
        simulation = self._simulation
        if simulation.is_sharded:
            return
        free, seconds = start, simulation.seconds_by_collective(simulation.parameters_of_rank(rank), GATHERED_ONCE)
        for bucket in reversed(self._buckets(rank)):
            for kind, value in seconds.items():
                self._add("gather", f"{kind} {bucket.name}", (free, free + value * bucket.share), rank=rank)
                free += value * bucket.share
        if seconds:
            self._add_next_forward(rank, end, free)

    def _add_next_forward(self, rank: int, end: float, last: float) -> None:
        """Add the forward of the next step if something that belongs to this one goes on until `last` meanwhile."""
        if last > end:
            self._events += [
                e._replace(name=f"{e.name} of the next step", start_s=end + e.start_s, stop_s=end + e.stop_s)
                for e in self._events
                if (e.rank, e.microbatch) == (rank * self._rank_stride, 0)
                if e.kind == "forward" or (e.kind == "exchange" and " of forward " in e.name)
            ]

    def _buckets(self, rank: int) -> list[_Bucket]:
        """The buckets of a rank in the order of backward."""
        step, sizes, block_of = self._step, dict[str, tuple[int, int]](), dict[str, str]()
        for stage in self._schedule.stages_of_rank(rank):
            names = (name for name, _ in self._blocks(stage))
            for spec in step.stage_specs[stage].blocks:
                for parameters in spec.parameters_by_repetition():
                    block = next(names)
                    sizes |= {each.name: (0, each.numel) for each in parameters if each.is_trained}
                    block_of |= {each.name: block for each in parameters}
        kinds = {name: is_expert(name) for name in sizes}
        buckets = fill_buckets(sizes, step.shards, step.recipe, settings=step.communication, kinds=kinds)
        total = sum(bucket.length for bucket in buckets)
        return [
            _Bucket(f"bucket {number}", frozenset(block_of[m.name] for m in bucket.members), bucket.length / total)
            for number, bucket in enumerate(buckets)
        ]


def _pass_s(costs: PlannedBlock, kind: str) -> float:
    weight_s = costs.kernels.weight_s
    return {"F": costs.forward_s, "B": costs.backward_s, "I": costs.backward_s - weight_s, "W": weight_s}[kind]


def _block_spans(block: str, costs: PlannedBlock, kind: str, *, span: tuple[float, float]) -> Iterator[_Span]:
    """The computations of a block, and the collectives on activations behind each that nothing hides."""
    start, stop = span
    if kind == "W":
        yield _Span("weights", "weight gradients", block, start, stop)
        return
    exposed = tuple(zip(costs.tensor_s, costs.expert_s, costs.context_s, strict=True))  # Forward, backward, again
    parts: list[tuple[StepEventKind, float, tuple[float, ...]]] = [("forward", stop, exposed[0])]
    if kind != "F":
        parts = [("recomputation", start + costs.recomputed_s, exposed[2]), ("backward", stop, exposed[1])]
    for part, end, seconds in parts:
        at = max(start, end - sum(seconds))
        yield _Span(part, part, block, start, at)
        for name, value in zip(_EXCHANGES, seconds, strict=True):
            yield _Span("exchange", f"{name} of {part}", block, at, at := at + value)
        start = end
