"""The processes of a small parameter server and the messages between them, as numbers.

What a process does with a message is computed once, and remembered for all states in which it comes to that.
"""

from copy import deepcopy
from itertools import permutations

from motet.parallel.parameter_server.protocol.coordinator_state_machine import CoordinatorStateMachine
from motet.parallel.parameter_server.protocol.messages import (
    COORDINATOR,
    ApplyUpdate,
    DecidedWorkItems,
    GradientNormRequest,
    GradientPush,
    GradientPushAck,
    GradientsReady,
    Message,
    OutgoingMessages,
    ParameterPlacement,
    ParameterPull,
    ParameterPullReply,
    ParameterReplicas,
    ParametersReady,
    ParameterStateAssignment,
    UpdateDecision,
    WorkAssignment,
    WorkerJoined,
)
from motet.parallel.parameter_server.protocol.server_state_machine import ServerSliceState, ServerStateMachine
from motet.parallel.parameter_server.protocol.worker_state_machine import WorkerStateMachine
from server.numbered import Numbered
from server.promises import Promises
from server.stale import is_answered, is_ignored, is_known
from server.system import NONE, Left, Machine, Machines, Reading, State, System, Underway

Taken = tuple[int, Underway, Underway, tuple[Message, ...]]
"""(what a machine is then, what it sends but for values, the values that it sends, what it says by that)"""
FORGOTTEN = UpdateDecision(0, (), 0)


class Crew:
    def __init__(self, system: System, all_of_it: bool) -> None:
        s = self.system = system
        self.all_of_it = all_of_it
        self.machines: Numbered[Machine | None] = Numbered(None)
        self.messages: Numbered[tuple[str, str, Message | Reading]] = Numbered()
        """(to, from, what)"""
        self.servers = [f"s{i}" for i in range(s.servers)]
        self.workers = [f"w{i}" for i in range(s.workers)]
        self.names = [COORDINATOR, *self.servers, *self.workers, "new"]
        self.places = {name: place for place, name in enumerate(self.names)}
        self.owners = tuple(
            ParameterReplicas(tuple(self.servers[(piece + copy) % s.servers] for copy in range(s.copies)))
            for piece in range(s.servers)
        )
        self.promises = Promises(system, self.machines, self.places)
        self._known: dict[tuple[int, int], Taken] = {}
        self._stale: dict[tuple[int, int, int], bool] = {}
        self._tidy: dict[Machines, Machines] = {}
        self._within: dict[tuple[int, int], int] = {}
        self._routes: list[tuple[int, int]] = []
        """Of each message: (to, the worker whose pull or push it is or 0)."""
        first = 1 + s.servers
        self._swaps = [
            (
                [*range(first), *(first + i for i in order), first + s.workers],
                dict(zip(self.workers, [self.workers[i] for i in order], strict=True)),
            )
            for order in permutations(range(s.workers))
        ][1:]
        self._forgets = not (all_of_it or s.returns or s.cuts or s.told)

    def start(self) -> State:
        s = self.system
        view = ParameterPlacement(0, self.owners)
        desk = s.desk(s.rule, view, list(self.servers), s.copies).resume_after(s.first)
        if s.owned:
            desk.step_limit, desk.ends_at_step_limit = s.first, False
        machines: list[Machine] = [desk]
        for name in self.servers:
            own = [piece for piece, owned in enumerate(self.owners) if name in owned.servers]
            kept = (
                ServerSliceState(is_initialized=False)
                if s.told
                else ServerSliceState(desk.first_logged_update, desk.decided)
            )
            machines.append(s.keeper(name, view, {piece: deepcopy(kept) for piece in own}))
        machines += [s.client(name, view) for name in self.workers]
        underway = [self.number(COORDINATOR, name, WorkerJoined(name)) for name in self.workers]
        known = desk.first_logged_update, desk.decided
        underway += [
            m for keeper in machines if isinstance(keeper, ServerStateMachine) for m in self.stands(keeper, *known)
        ]
        left = s.doubles, s.crashes, s.cuts, s.stops
        return self.state((*map(self.machines.number, machines), NONE), tuple(underway), left)

    def stands(self, keeper: ServerStateMachine, version: int, settled: DecidedWorkItems) -> Underway:
        """What the desk's owner tells a server that is connected, and has not begun."""
        if all(kept.is_initialized for kept in keeper.slice_states.values()):
            return ()
        stands = [ParameterStateAssignment(piece, version, settled) for piece in keeper.slice_states]
        return tuple(self.number(keeper.name, COORDINATOR, stand) for stand in stands)

    def number(self, to: str, sender: str, message: Message | Reading) -> int:
        number = self.messages.number((to, sender, message))
        self._find_routes()
        return number

    def _find_routes(self) -> None:
        for number in range(len(self._routes), len(self.messages)):
            to, _, message = self.messages[number]
            asks = isinstance(message, ParameterPull | GradientPush) and not self.all_of_it
            self._routes.append((self.places[to], self.places[message.worker] if asks else 0))

    # --- what a process does -----------------------------------------------------------------------

    def take(self, machines: Machines, number: int) -> tuple[Machines, Underway]:
        """(the machines then, what is sent)"""
        name, _, message = self.messages[number]
        to = self.places[name]
        key = machines[to], number
        if key not in self._known:
            now = deepcopy(self.machines[machines[to]])
            assert now is not None and not isinstance(message, Reading)
            if isinstance(message, GradientsReady):
                self.promises.of_gradient(now, message)
            before = deepcopy(now)
            sent = now.handle(message)
            self.promises.of_updates(before, now, sent)
            self._known[key] = self._told(now, to, sent)
        then, sent, values, said = self._known[key]
        following = (*machines[:to], then, *machines[to + 1 :])
        self.promises.of_step(following, to, said)
        return following, sent + tuple(self._as_good(following, number) for number in values)

    def resume(self, machine: int, here: int, there: int) -> tuple[int, Underway]:
        now = deepcopy(self.machines[machine])
        assert isinstance(now, ServerStateMachine | WorkerStateMachine)
        then, sent, values, _ = self._told(now, here, now.messages_on_connect(self.names[there]))
        return then, sent + values

    def go_on(self, machines: Machines, until: int, closes: bool) -> tuple[Machines, Underway]:
        desk = deepcopy(self.machines[machines[0]])
        assert isinstance(desk, CoordinatorStateMachine)
        number, sent, _, said = self._told(desk, 0, desk.extend_to_step(until, closes))
        following = (number, *machines[1:])
        self.promises.of_step(following, 0, said)
        return following, sent

    def _told(self, now: Machine, here: int, sent: OutgoingMessages) -> Taken:
        name, pieces = self.names[here], tuple(range(self.system.servers))
        for _, computed in [m for m in sent if isinstance(m[1], ParametersReady)]:
            assert isinstance(now, WorkerStateMachine) and isinstance(computed, ParametersReady)
            number = computed.assignment.assignment_id
            if self.system.by_piece:
                sent += [(name, GradientsReady(number, (piece,))) for piece in pieces]
            else:
                sent += now.handle(GradientsReady(number, pieces))
        said = tuple(
            m
            for _, m in sent
            if isinstance(
                m,
                GradientPushAck
                | WorkAssignment
                | GradientNormRequest
                | UpdateDecision
                | ParameterPullReply
                | ApplyUpdate,
            )
        )
        out = [(to, m) for to, m in sent if not isinstance(m, ApplyUpdate | ParametersReady)]
        others = tuple(self.number(to, name, m) for to, m in out if not isinstance(m, ParameterPullReply))
        values = tuple(self.number(to, name, self._underway(m)) for to, m in out if isinstance(m, ParameterPullReply))
        return self.machines.number(self._without_history(now)), others, values, said

    def _underway(self, value: ParameterPullReply) -> ParameterPullReply | Reading:
        return Reading(value) if self.system.in_parts else value

    def _without_history(self, machine: Machine) -> Machine:
        """What nothing will ask for is forgotten."""
        if isinstance(machine, CoordinatorStateMachine) and self._forgets:
            machine.decision_log = [FORGOTTEN] * len(machine.decision_log)
            if self.system.rule.quorum == self.system.rule.work_items_per_step:
                machine.completed_reports = dict(sorted(machine.completed_reports.items()))
        return machine

    def _as_good(self, machines: Machines, number: int) -> int:
        """A value whose version is within the bound is as good as the oldest that is."""
        to, sender, message = self.messages[number]
        worker = machines[self.places[to]]
        if self.all_of_it or not isinstance(message, ParameterPullReply) or worker == NONE:
            return number
        key = worker, number
        if key not in self._within:
            client = self.machines[worker]
            assert isinstance(client, WorkerStateMachine)
            self._within[key] = number
            if client.assignment.assignment_id == message.assignment_id:
                self.promises.of_value(client, message)
                self._within[key] = self.number(to, sender, message._replace(version=client.assignment.min_version))
        return self._within[key]

    # --- states that are the same ------------------------------------------------------------------

    def state(self, machines: Machines, underway: Underway, left: Left) -> State:
        if not self.all_of_it:
            machines = self._without_pulls(machines)
        kept = []
        for number in underway:
            to, worker = self._routes[number]
            key = machines[to], number, machines[worker] if worker else NONE
            is_stale = self._stale.get(key)
            if is_stale is None:
                is_stale = self._stale[key] = key[0] == NONE or self._comes_to_nothing(*key)
            if not is_stale:
                kept.append(number)
        return machines, tuple(sorted(kept)), left

    def _comes_to_nothing(self, receiver: int, number: int, worker: int) -> bool:
        """Now or later."""
        machine, message = self.machines[receiver], self.messages[number][2]
        assert machine is not None
        is_lasting = self.system.copies > 1 or not self.system.returns
        if self._routes[number][1]:
            client = self._client(worker)
            assert isinstance(machine, ServerStateMachine) and isinstance(message, ParameterPull | GradientPush)
            if isinstance(message, ParameterPull):
                return is_answered(machine, client, message)
            return is_known(machine, client, message, is_lasting)
        return is_ignored(machine, message, is_lasting)

    def _client(self, number: int) -> WorkerStateMachine | None:
        client = self.machines[number]
        assert client is None or isinstance(client, WorkerStateMachine)
        return client

    def _without_pulls(self, machines: Machines) -> Machines:
        """A server does not keep pulls whose answers would be ignored."""
        first, stop = 1 + self.system.servers, len(machines) - 1
        key = machines[1:]
        tidied = self._tidy.get(key)
        if tidied is None:
            clients = machines[first:stop]
            keepers = [self._without_answered(machines[place], *clients) for place in (*range(1, first), stop)]
            tidied = self._tidy[key] = *keepers[:-1], *clients, keepers[-1]
        return machines[0], *tidied

    def _without_answered(self, number: int, *clients: int) -> int:
        keeper = self.machines[number]
        if not isinstance(keeper, ServerStateMachine) or not any(
            kept.waiting_pulls for kept in keeper.slice_states.values()
        ):
            return number
        by_name = dict(zip(self.workers, map(self._client, clients), strict=True))
        keeper = deepcopy(keeper)
        for kept in keeper.slice_states.values():
            kept.waiting_pulls = [
                pull for pull in kept.waiting_pulls if not is_answered(keeper, by_name[pull.worker], pull)
            ]
        return self.machines.number(keeper)

    def canonical(self, state: State) -> State:
        """The least of the states that are this one with other names of workers."""
        machines, underway, left = state
        best = machines, underway
        for number, (places, names) in enumerate(self._swaps):
            mapped = [0] * len(machines)
            for place, machine in enumerate(machines):
                mapped[places[place]] = self.machines.renamed(machine, number, names) if machine else NONE
            other = tuple(mapped)
            if other <= best[0]:
                best = min(best, (other, tuple(sorted(self.messages.renamed(m, number, names) for m in underway))))
        self._find_routes()
        return *best, left
