"""Step times of a parameter server, simulated: its real protocol on links of a given rate.

Coordinator, servers and workers are the state machines that run in training; transfers and computing take simulated
time. Every process has a link to a switch, with the same rate both ways. A message travels in frames, as over TCP:
urgent ones go first on their connection, connections take turns on a link, and few frames of each are in flight.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from motet.parallel.parameter_server.protocol.messages import (
    COORDINATOR,
    MAX_FRAME_BYTES,
    NO_MORE_WORK,
    ApplyUpdate,
    BackupPush,
    ConsistencyPolicy,
    GradientPush,
    GradientsReady,
    Message,
    OutgoingMessages,
    ParameterPlacement,
    ParameterPullReply,
    ParametersReady,
    SlicePrimaryAndBackups,
    UpdateDecision,
    WorkAssignment,
    WorkerJoined,
)
from motet.parallel.parameter_server.protocol.state_machines import (
    CoordinatorStateMachine,
    ServerSliceState,
    ServerStateMachine,
    WorkerStateMachine,
)

IN_FLIGHT_FRAMES = 2  # Frames of one connection
MESSAGE_BYTES = 100  # A message without a payload


@dataclass(frozen=True)
class SimulatedParameterSlice:
    """The messages of a parameter slice: gradients to servers, parameters to workers."""

    push_bytes: float
    pull_bytes: float
    servers: tuple[str, ...]
    layer: int = 0  # Its forward needs the slice, and its backward yields the gradient


@dataclass(frozen=True)
class ServerSimulationCosts:
    """Rates and durations that the simulation assumes."""

    link_bytes_per_s: float  # Rate of each process's link, each way
    delay_s: float  # Latency and handling of any message
    forward_s: tuple[float, ...]  # Times of a work item, by layer
    backward_s: tuple[float, ...]
    update_s: float = 0.0  # Seconds per byte of gradients
    # (worker, work item) -> factor of the time of its computing.
    slowdown: Callable[[int, int], float] = lambda worker, work_item: 1.0


@dataclass
class _SimulatedLink:
    """The link of one process: a queue for each recipient, which take turns, and frames that arrive."""

    send_queues: dict[str, list[tuple[int, int, "_SimulatedMessage"]]] = field(default_factory=dict)
    send_turns: deque[str] = field(default_factory=deque)
    frames_in_flight: dict[str, int] = field(default_factory=dict)
    is_sending: bool = False
    arrivals: deque[tuple[float, str, "_SimulatedMessage | None"]] = field(default_factory=deque)
    is_receiving: bool = False


@dataclass
class _SimulatedMessage:
    message: Message
    remaining_bytes: float


@dataclass
class _SimulatedWorker:
    """A worker, and the layer whose forward comes next."""

    worker_index: int
    state_machine: WorkerStateMachine
    assignment: WorkAssignment | None = None
    layer: int = 0
    is_busy: bool = False


class ParameterServerSimulation:
    """A simulated run; after `run`, `update_times` has the time of each update."""

    def __init__(
        self,
        policy: ConsistencyPolicy,
        slices: Sequence[SimulatedParameterSlice],
        worker_count: int,
        costs: ServerSimulationCosts,
        uses_priorities: bool = True,
    ) -> None:
        self.update_times: list[float] = []
        self.bytes_in: dict[str, float] = {}
        self.bytes_out: dict[str, float] = {}
        self._now = 0.0
        self._slices, self._costs = slices, costs
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence_numbers = itertools.count()
        servers = sorted({server for load in slices for server in load.servers})
        placement = ParameterPlacement(0, tuple(SlicePrimaryAndBackups(load.servers) for load in slices))
        self._coordinator = CoordinatorStateMachine(policy, placement, list(servers))
        self._servers = {
            name: ServerStateMachine(
                name,
                placement,
                {index: ServerSliceState() for index, load in enumerate(slices) if name in load.servers},
            )
            for name in servers
        }
        self._workers = {
            f"w{worker_index}": _SimulatedWorker(worker_index, WorkerStateMachine(f"w{worker_index}", placement))
            for worker_index in range(worker_count)
        }
        for worker in self._workers.values() if uses_priorities else ():
            worker.state_machine.priorities = {slice_id: load.layer for slice_id, load in enumerate(slices)}
        self._links = {name: _SimulatedLink() for name in (COORDINATOR, *servers, *self._workers)}
        for name in self._workers:
            self._enqueue(name, [(COORDINATOR, WorkerJoined(name))])

    def run(self) -> "ParameterServerSimulation":
        while self._events:
            self._now, _, callback = heapq.heappop(self._events)
            callback()
        assert self._coordinator.is_quiescent
        return self

    def seconds_per_step(self, warmup_steps: int = 2) -> float:
        """The mean step time after the warm-up."""
        updates = len(self.update_times) // self._coordinator.policy.steps
        step_ends = self.update_times[updates - 1 :: updates]
        return (step_ends[-1] - step_ends[warmup_steps - 1]) / (len(step_ends) - warmup_steps)

    # --- links -------------------------------------------------------------------------------------

    def _enqueue(self, sender: str, outgoing: OutgoingMessages) -> None:
        for to, message in outgoing:
            if isinstance(message, ParametersReady):  # `_progress_worker` starts when the parameters are there
                continue
            link = self._links[sender]
            message_bytes = self._message_bytes(message)
            self.bytes_out[sender] = self.bytes_out.get(sender, 0.0) + message_bytes
            self.bytes_in[to] = self.bytes_in.get(to, 0.0) + message_bytes
            send_queue = link.send_queues.setdefault(to, [])
            heapq.heappush(
                send_queue,
                (
                    self._priority(sender, message),
                    next(self._sequence_numbers),
                    _SimulatedMessage(message, message_bytes),
                ),
            )
            if to not in link.send_turns:
                link.send_turns.append(to)
            self._send_next_frame(sender)

    def _message_bytes(self, message: Message) -> float:
        match message:
            case GradientPush(slice_id=slice_id) | BackupPush(slice_id=slice_id):
                return self._slices[slice_id].push_bytes + MESSAGE_BYTES
            case ParameterPullReply(slice_id=slice_id):
                return self._slices[slice_id].pull_bytes + MESSAGE_BYTES
        return MESSAGE_BYTES

    def _priority(self, sender: str, message: Message) -> int:
        if isinstance(message, GradientPush):
            return self._workers[sender].state_machine.priorities.get(message.slice_id, 0)
        return message.priority if isinstance(message, ParameterPullReply) else -1

    def _send_next_frame(self, sender: str) -> None:
        """Send a frame if the link is free and a connection may have one more in flight."""
        link = self._links[sender]
        if link.is_sending:
            return
        for _ in range(len(link.send_turns)):
            to = link.send_turns[0]
            link.send_turns.rotate(-1)
            if link.frames_in_flight.get(to, 0) < IN_FLIGHT_FRAMES:
                break
        else:
            return
        message = link.send_queues[to][0][2]
        frame_bytes = min(message.remaining_bytes, MAX_FRAME_BYTES)
        message.remaining_bytes -= frame_bytes
        complete_message = None
        if message.remaining_bytes <= 0:
            complete_message = heapq.heappop(link.send_queues[to])[2]
            if not link.send_queues[to]:
                link.send_turns.remove(to)
        link.frames_in_flight[to] = link.frames_in_flight.get(to, 0) + 1
        link.is_sending = True

        def on_frame_sent() -> None:
            link.is_sending = False
            self._links[to].arrivals.append((frame_bytes, sender, complete_message))
            self._receive_next_frame(to)
            self._send_next_frame(sender)

        self._schedule(frame_bytes / self._costs.link_bytes_per_s, on_frame_sent)

    def _receive_next_frame(self, to: str) -> None:
        link = self._links[to]
        if link.is_receiving or not link.arrivals:
            return
        frame_bytes, sender, complete_message = link.arrivals.popleft()
        link.is_receiving = True

        def on_frame_received() -> None:
            link.is_receiving = False
            self._links[sender].frames_in_flight[to] -= 1
            if complete_message is not None:
                self._schedule(self._costs.delay_s, lambda: self._deliver(to, complete_message.message))
            self._send_next_frame(sender)
            self._receive_next_frame(to)

        self._schedule(frame_bytes / self._costs.link_bytes_per_s, on_frame_received)

    def _schedule(self, seconds: float, callback: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._sequence_numbers), callback))

    # --- processes ---------------------------------------------------------------------------------

    def _deliver(self, name: str, message: Message) -> None:
        if name == COORDINATOR:
            outgoing = self._coordinator.handle(message)
            decided = {m.update for _, m in outgoing if isinstance(m, UpdateDecision)}
            self.update_times += [self._now] * len(decided)
            self._enqueue(name, outgoing)
        elif name in self._servers:
            self._run_server(name, self._servers[name].handle(message))
        else:
            self._enqueue(name, self._workers[name].state_machine.handle(message))
            self._progress_worker(name)

    def _run_server(self, name: str, outgoing: OutgoingMessages) -> None:
        """Apply updates, and send the replies afterwards."""
        seconds = sum(
            len(m.decision.work_items) * self._slices[m.slice_id].push_bytes * self._costs.update_s
            for _, m in outgoing
            if isinstance(m, ApplyUpdate)
        )
        replies: OutgoingMessages = [(to, message) for to, message in outgoing if not isinstance(message, ApplyUpdate)]
        if seconds:
            self._schedule(seconds, lambda: self._enqueue(name, replies))
        else:
            self._enqueue(name, replies)

    def _progress_worker(self, name: str) -> None:
        """Start the next layer if its parameters have arrived."""
        worker = self._workers[name]
        state_machine, costs = worker.state_machine, self._costs
        if worker.is_busy or state_machine.assignment.work_item == NO_MORE_WORK:
            return
        if worker.assignment != state_machine.assignment:
            worker.assignment, worker.layer = state_machine.assignment, 0
        layers = len(costs.forward_s)
        missing_layers = [
            load.layer for slice_id, load in enumerate(self._slices) if slice_id not in state_machine.pulled_versions
        ]
        if worker.layer > layers or (missing_layers and min(missing_layers) <= worker.layer):
            return
        slowdown = costs.slowdown(worker.worker_index, state_machine.assignment.work_item)
        if worker.layer < layers:
            self._start_forward(name, slowdown * costs.forward_s[worker.layer])
        else:
            self._start_backward(name, slowdown, layers - 1)

    def _start_forward(self, name: str, seconds: float) -> None:
        worker = self._workers[name]
        worker.is_busy = True

        def on_forward_done() -> None:
            worker.is_busy = False
            worker.layer += 1
            self._progress_worker(name)

        self._schedule(seconds, on_forward_done)

    def _start_backward(self, name: str, slowdown: float, layer: int) -> None:
        """Run backward layer by layer, from the last to the first."""
        worker = self._workers[name]
        worker.is_busy = True

        def on_backward_done() -> None:
            layer_slices = [slice_id for slice_id, load in enumerate(self._slices) if load.layer == layer]
            if layer:
                self._start_backward(name, slowdown, layer - 1)
            else:
                worker.is_busy, worker.layer = False, len(self._costs.forward_s) + 1
            self._enqueue(
                name,
                worker.state_machine.handle(
                    GradientsReady(worker.state_machine.assignment.assignment_id, tuple(layer_slices))
                ),
            )

        self._schedule(slowdown * self._costs.backward_s[layer], on_backward_done)
