"""The processes of a small parameter server and the messages between them, as numbers.

What a process does with a message is computed once, and remembered for all states in which it comes to that.
"""

from copy import deepcopy
from itertools import permutations

from motet.parallel.parameter_server.protocol import messages
from motet.parallel.parameter_server.protocol.messages import (
    COORDINATOR,
    GradientPush,
    Message,
    ParameterPull,
    ParameterPullReply,
)
from motet.parallel.parameter_server.protocol.state_machines import (
    CoordinatorStateMachine,
    ServerSliceState,
    ServerStateMachine,
    WorkerStateMachine,
)
from parallel.parameter_server.interning import InternTable
from parallel.parameter_server.invariants import Invariants, items_of
from parallel.parameter_server.scenario import (
    NONE,
    FaultsLeft,
    InFlight,
    Machine,
    Machines,
    PartialRead,
    Scenario,
    State,
)

# (what a machine is then, what it sends but for values, the values that it sends, what it says by that).
Outcome = tuple[int, InFlight, InFlight, tuple[Message, ...]]
CHECKED_MESSAGES = (
    *(messages.GradientPushAck, messages.WorkAssignment, messages.GradientNormRequest, messages.UpdateDecision),
    *(ParameterPullReply, messages.ApplyUpdate),
)
FORGOTTEN = messages.UpdateDecision(0, (), 0)


class SimulatedCluster:
    def __init__(self, scenario: Scenario, without_reduction: bool) -> None:
        s = self.scenario = scenario
        self.without_reduction = without_reduction
        self.machines: InternTable[Machine | None] = InternTable(None)
        self.messages: InternTable[tuple[str, str, Message | PartialRead]] = InternTable()  # (to, from, what)
        self.servers = [f"s{i}" for i in range(s.servers)]
        self.workers = [f"w{i}" for i in range(s.workers)]
        self.names = [COORDINATOR, *self.servers, *self.workers, "new"]
        self.places = {name: place for place, name in enumerate(self.names)}
        names = self.servers * 2
        owners = (tuple(names[slice_id : slice_id + s.copies]) for slice_id in range(s.servers))
        self.owners = tuple(map(messages.SlicePrimaryAndBackups, owners))
        self.invariants = Invariants(scenario, self.machines, self.places)
        first_items = messages.DecidedWorkItems(s.first * s.policy.work_items_per_step)
        self.first_version = s.first * self.invariants.updates_per_step, first_items
        self._known: dict[tuple[int, int], Outcome] = {}
        self._stale: dict[tuple[int, int, int], bool] = {}
        self._tidy: dict[Machines, Machines] = {}
        self._within: dict[tuple[int, int], int] = {}
        self._routes: list[tuple[int, int]] = []  # Of each message: (to, the worker whose pull or push it is or 0)
        names = [dict(zip(self.workers, order, strict=True)) for order in permutations(self.workers)][1:]
        self._swaps = [([self.places[swap.get(name, name)] for name in self.names], swap) for swap in names]
        self._forgets = not (without_reduction or s.replacements or s.disconnects or s.starts_empty)

    def start(self) -> State:
        s = self.scenario
        view = messages.ParameterPlacement(0, self.owners)
        coordinator = s.coordinator(s.policy, view, list(self.servers), s.copies).resume_after(s.first)
        if s.is_paced:
            coordinator.step_limit, coordinator.ends_at_step_limit = s.first, False
        machines: list[Machine] = [coordinator]
        for name in self.servers:
            own = [slice_id for slice_id, (servers, _) in enumerate(self.owners) if name in servers]
            state = ServerSliceState(is_initialized=False) if s.starts_empty else ServerSliceState(*self.first_version)
            machines.append(s.server(name, view, {slice_id: deepcopy(state) for slice_id in own}))
        machines += [s.worker(name, view) for name in self.workers]
        in_flight = [self.number(COORDINATOR, name, messages.WorkerJoined(name)) for name in self.workers]
        for server in [machine for machine in machines if isinstance(machine, ServerStateMachine)]:
            in_flight += self.stands(server, *self.first_version)
        left = s.duplicates, s.crashes, s.disconnects, s.stops
        return self.state((*map(self.machines.number, machines), NONE), tuple(in_flight), left)

    def stands(self, server: ServerStateMachine, version: int, settled: messages.DecidedWorkItems) -> InFlight:
        """The messages of the coordinator's owner to a server that is connected, and has not begun."""
        if all(state.is_initialized for state in server.slice_states.values()):
            return ()
        stands = [messages.SliceStartVersion(slice_id, version, settled) for slice_id in server.slice_states]
        return tuple(self.number(server.name, COORDINATOR, stand) for stand in stands)

    def number(self, to: str, sender: str, message: Message | PartialRead) -> int:
        number = self.messages.number((to, sender, message))
        self._find_routes()
        return number

    def _find_routes(self) -> None:
        for number in range(len(self._routes), len(self.messages)):
            to, _, message = self.messages[number]
            asks = isinstance(message, ParameterPull | GradientPush) and not self.without_reduction
            self._routes.append((self.places[to], self.places[message.worker] if asks else 0))

    # --- what a process does -----------------------------------------------------------------------

    def take(self, machines: Machines, number: int) -> tuple[Machines, InFlight]:
        """(the machines then, what is sent)"""
        name, _, message = self.messages[number]
        to = self.places[name]
        key = machines[to], number
        if key not in self._known:
            now = deepcopy(self.machines[machines[to]])
            if isinstance(message, messages.GradientsReady):
                is_current = now.assignment.assignment_id == message.assignment_id
                assert is_current, f"{message} is taken for one of {now.assignment}"
            before = deepcopy(now)
            sent = now.handle(message)
            self.invariants.check_updates(before, now, sent, message)
            self._known[key] = self._told(now, to, sent)
        then, sent, values, said = self._known[key]
        following = (*machines[:to], then, *machines[to + 1 :])
        self.invariants.check_step(following, to, said)
        return following, sent + tuple(self._as_good(following, number) for number in values)

    def resume(self, machine: int, here: int, there: int) -> tuple[int, InFlight]:
        now = deepcopy(self.machines[machine])
        outgoing = now.messages_on_connect(self.names[there])
        self.invariants.check_updates(self.machines[machine], now, outgoing)
        then, sent, values, _ = self._told(now, here, outgoing)
        return then, sent + values

    def go_on(self, machines: Machines, until: int, closes: bool) -> tuple[Machines, InFlight]:
        coordinator = deepcopy(self.machines[machines[0]])
        outgoing = coordinator.extend_to_step(until, closes)
        assert (coordinator.step_limit, coordinator.ends_at_step_limit) == (until, closes), f"not until {until}"
        self.invariants.check_updates(self.machines[machines[0]], coordinator, outgoing)
        number, sent, _, said = self._told(coordinator, 0, outgoing)
        following = (number, *machines[1:])
        self.invariants.check_step(following, 0, said)
        return following, sent

    def _told(self, now: Machine, here: int, sent: messages.OutgoingMessages) -> Outcome:
        name, slice_ids = self.names[here], tuple(range(self.scenario.servers))
        for _, computed in [m for m in sent if isinstance(m[1], messages.ParametersReady)]:
            number = computed.assignment.assignment_id
            if self.scenario.gradients_by_slice:
                sent += [(name, messages.GradientsReady(number, (slice_id,))) for slice_id in slice_ids]
            else:
                sent += now.handle(messages.GradientsReady(number, slice_ids))
        said = tuple(m for _, m in sent if isinstance(m, CHECKED_MESSAGES))
        out = [(to, m) for to, m in sent if not isinstance(m, messages.ApplyUpdate | messages.ParametersReady)]
        others = tuple(self.number(to, name, m) for to, m in out if not isinstance(m, ParameterPullReply))
        pulled = [(to, m) for to, m in out if isinstance(m, ParameterPullReply)]
        values = tuple(self.number(to, name, PartialRead(m) if self.scenario.partial_reads else m) for to, m in pulled)
        return self.machines.number(self._without_history(now)), others, values, said

    def _without_history(self, machine: Machine) -> Machine:
        if isinstance(machine, CoordinatorStateMachine) and self._forgets:
            machine.decision_log = [FORGOTTEN] * len(machine.decision_log)
            if self.scenario.policy.quorum == self.scenario.policy.work_items_per_step:
                machine.completed_reports = dict(sorted(machine.completed_reports.items()))
        return machine

    def _as_good(self, machines: Machines, number: int) -> int:
        """A value whose version is within the bound is as good as the oldest that is."""
        to, sender, message = self.messages[number]
        worker = machines[self.places[to]]
        if self.without_reduction or not isinstance(message, ParameterPullReply) or worker == NONE:
            return number
        key = worker, number
        if key not in self._within:
            receiver, self._within[key] = self.machines[worker], number
            if receiver.assignment.assignment_id == message.assignment_id:
                self.invariants.check_value(receiver, message)
                oldest = message._replace(version=receiver.assignment.min_version)
                self._within[key] = self.number(to, sender, oldest)
        return self._within[key]

    # --- states that are the same ------------------------------------------------------------------

    def state(self, machines: Machines, in_flight: InFlight, left: FaultsLeft) -> State:
        if not self.without_reduction:
            machines = self._without_pulls(machines)
        state = []
        for number in in_flight:
            to, worker = self._routes[number]
            key = machines[to], number, machines[worker] if worker else NONE
            if key not in self._stale:
                self._stale[key] = key[0] == NONE or self._comes_to_nothing(*key)
            if not self._stale[key]:
                state.append(number)
        return machines, tuple(sorted(state)), left

    def _comes_to_nothing(self, receiver: int, number: int, worker: int) -> bool:
        """Now or later."""
        machine, message = self.machines[receiver], self.messages[number][2]
        is_lasting = self.scenario.copies > 1 or not self.scenario.replacements
        if not self._routes[number][1]:
            result = is_ignored(machine, message, is_lasting)
        elif isinstance(message, ParameterPull):
            return is_answered(machine, self.machines[worker], message)
        else:
            result = is_known(machine, self.machines[worker], message, is_lasting)
        if result:
            self.invariants.check_ignored(machine, message.value if isinstance(message, PartialRead) else message)
        return result

    def _without_pulls(self, machines: Machines) -> Machines:
        """A server does not keep pulls whose answers would be ignored."""
        first, key = 1 + self.scenario.servers, machines[1:]
        if key not in self._tidy:
            workers = machines[first:-1]
            *servers, new = (self._without_answered(server, *workers) for server in (*machines[1:first], machines[-1]))
            self._tidy[key] = *servers, *workers, new
        return machines[0], *self._tidy[key]

    def _without_answered(self, number: int, *workers: int) -> int:
        server = self.machines[number]
        if not isinstance(server, ServerStateMachine) or not any(s.waiting_pulls for s in server.slice_states.values()):
            return number
        by_name = {name: self.machines[worker] for name, worker in zip(self.workers, workers, strict=True)}
        server = deepcopy(server)
        for state in server.slice_states.values():
            waiting = state.waiting_pulls
            state.waiting_pulls = [pull for pull in waiting if not is_answered(server, by_name[pull.worker], pull)]
        return self.machines.number(server)

    def canonical(self, state: State) -> State:
        """The least of the states that are this one with other names of workers."""
        machines, in_flight, left = state
        best = machines, in_flight
        for number, (places, names) in enumerate(self._swaps):
            mapped = [0] * len(machines)
            for place, machine in enumerate(machines):
                mapped[places[place]] = self.machines.renamed(machine, number, names) if machine else NONE
            other = tuple(mapped)
            if other <= best[0]:
                best = min(best, (other, tuple(sorted(self.messages.renamed(m, number, names) for m in in_flight))))
        self._find_routes()
        return *best, left


def is_ignored(machine: Machine, message: Message | PartialRead, is_lasting: bool) -> bool:
    """Whether its receiver ignores the message. `is_lasting`: acknowledged pushes are never lost."""
    message = message.value if isinstance(message, PartialRead) else message
    if isinstance(machine, WorkerStateMachine):
        return _ignored_by_worker(machine, message, is_lasting)
    is_server = isinstance(machine, ServerStateMachine)
    return _ignored_by_server(machine, message) if is_server else _ignored_by_coordinator(machine, message)


def _ignored_by_worker(worker: WorkerStateMachine, message: Message, is_lasting: bool) -> bool:
    current = worker.assignment.assignment_id
    match message:
        case messages.WorkAssignment(number):
            return number <= current
        case ParameterPullReply(number, slice_id):
            return number < current or (number == current and slice_id in worker.pulled_versions)
        case messages.GradientPushAck(_, number, slice_id):
            again = number == current and slice_id in worker.acknowledged_slices
            return number < current or (again and is_lasting)
        case messages.ParameterPlacement(epoch):
            return epoch <= worker.placement.epoch
    return False


def _ignored_by_server(server: ServerStateMachine, message: Message) -> bool:
    match message:
        case messages.ParameterPlacement(epoch):
            return epoch <= server.placement.epoch
        case messages.GradientNormRequest(turn):
            return server.norm_request is not None and turn <= server.norm_request.attempt
        case messages.UpdateDecision(number):
            is_told = any(server.name in servers for servers, _ in server.placement.replicas)
            return is_told and all(k.is_initialized and number < k.version for k in server.slice_states.values())
        case messages.BackupPushAck(_, slice_id, work_item):
            return _is_replicated(server, slice_id, work_item)
        case messages.SliceStartVersion(slice_id) | messages.ParameterStateTransfer(slice_id):
            return slice_id in server.slice_states and server.slice_states[slice_id].is_initialized
    return False


def _ignored_by_coordinator(coordinator: CoordinatorStateMachine, message: Message) -> bool:
    match message:
        case messages.GradientNormReply(turn, slice_id):
            is_over = turn < coordinator.norm_attempt or coordinator.next_update_items is None
            return is_over or slice_id in coordinator.squared_norms
        case messages.WorkerJoined(worker):
            return worker in coordinator.lost_processes
    return False


def _is_replicated(server: ServerStateMachine, slice_id: int, work_item: int) -> bool:
    state = server.slice_states.get(slice_id)
    if state is None or work_item in state.pushes_awaiting_backup:
        return False
    return work_item in state.pending_work_items or work_item in items_of(state.decided)


def is_answered(server: ServerStateMachine, worker: WorkerStateMachine | None, pull: ParameterPull) -> bool:
    """Whether the worker has ended (None) or gone on, or has the answer: the server's would be ignored."""
    if pull.slice_id not in server.slice_states:
        return False
    if worker is None or pull.assignment_id < worker.assignment.assignment_id:
        return True
    return pull.assignment_id == worker.assignment.assignment_id and pull.slice_id in worker.pulled_versions


def is_known(server: ServerStateMachine, worker: WorkerStateMachine | None, push: GradientPush, lasting: bool) -> bool:
    """The server has it, and who pushed need not be told."""
    if not _is_replicated(server, push.slice_id, push.work_item):
        return False
    if worker is None or push.assignment_id < worker.assignment.assignment_id:
        return True
    is_current = push.assignment_id == worker.assignment.assignment_id
    return is_current and push.slice_id in worker.acknowledged_slices and lasting
