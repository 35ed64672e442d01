"""Every interleaving of a small parameter server: messages in any order, some of them twice, and processes that end.

A state is what every process knows, and the messages underway. Of a state that was seen 64 bits are kept: with ten
million of them, two are taken for one with a chance of 3 in a million.

What makes no difference is left out:

- States that differ in the names of workers alone count once, and messages that will be ignored are not underway.
- A process ends when the coordinator hears of it. Before, one that has ended is as good as one that is slow.
- What is lost of what a process had sent is lost when it ends. To lose it later is to have it underway for longer.

And unless `all_of_it` is asked for:

- A second arrival that would be ignored uses up no chance of one.
- What the coordinator decided is forgotten when nobody can ask for it; all versions within the bound are equal.
- Where a message is certain to arrive, and what comes of it is the same now and after anything else that may happen, it
  arrives first, and nothing else is tried in its place (`Explorer.urgent`).
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations, product

from motet.parallel.parameter_server.protocol import messages
from motet.parallel.parameter_server.protocol.messages import COORDINATOR, Message, ParameterPull, ParameterPullReply
from motet.parallel.parameter_server.protocol.state_machines import CoordinatorStateMachine, ServerStateMachine
from parallel.parameter_server.scenario import (
    CRASHES,
    DISCONNECTS,
    DUPLICATES,
    NONE,
    STOPS,
    FaultsLeft,
    InFlight,
    Machine,
    Machines,
    PartialRead,
    Scenario,
    State,
)
from parallel.parameter_server.simulated_cluster import SimulatedCluster


class Explorer:
    def __init__(self, scenario: Scenario, without_reduction: bool = False) -> None:
        self.scenario, self.without_reduction = scenario, without_reduction
        self.cluster = SimulatedCluster(scenario, without_reduction)

    def after(self, state: State) -> Iterator[State]:
        """Everything that may happen next."""
        if self.without_reduction:
            yield from self._after(state)
            return
        urgent = self.urgent(state)
        for now in self._after(state) if urgent is None else self._arrive(state, urgent):
            while not now[2][DUPLICATES] and (only := self.urgent(now)) is not None:
                (now,) = self._arrive(now, only)
            yield now

    def _after(self, state: State) -> Iterator[State]:
        machines, in_flight, left = state
        for index, number in enumerate(in_flight):
            if not index or in_flight[index - 1] != number:
                yield from self._arrive(state, index)
        alive = [place for place, machine in enumerate(machines) if machine]
        for place in alive if left[CRASHES] else ():
            if self._may_end(machines, place):
                yield from self._crash(state, place)
        for one, other in combinations(alive, 2) if left[DISCONNECTS] else ():
            yield from self._cut(state, one, other)
        yield from self._owner(state)

    def is_end(self, state: State) -> bool:
        return not state[1] and not any(self._owner(state))

    # --- messages ----------------------------------------------------------------------------------

    def urgent(self, state: State) -> int | None:
        """The place of a message that can neither be lost nor make a difference by when it arrives. What is lost with
        its receiver makes none; a connection that is cut does."""
        machines, in_flight, left = state
        # With a snapshot's server an assignment may come before its time.
        if left[DISCONNECTS] or (self.scenario.replacements and self.scenario.copies == 1):
            return None
        for index, number in enumerate(in_flight):
            to, sender, message = self.cluster.messages[number]
            if isinstance(message, ParameterPullReply):
                is_urgent = not (left[CRASHES] and self._may_end(machines, self.cluster.places[sender]))
            else:
                is_urgent = self._is_urgent(state, machines[self.cluster.places[to]], message)
            if is_urgent:
                return index
        return None

    def _is_urgent(self, state: State, receiver: int, message: Message | PartialRead) -> bool:
        machine = self.cluster.machines[receiver]
        starts_whole = not (self.scenario.replacements or self.scenario.starts_empty)
        match message:
            case messages.WorkAssignment():
                return True
            case ParameterPull(slice_id=slice_id):
                return isinstance(machine, ServerStateMachine) and slice_id in machine.slice_states
            case messages.GradientPushAck():
                return self._knows_all_views(state, machine)
            case messages.UpdateDecision():
                return starts_whole and not self._is_needed(message) and not self.scenario.has_late_decisions
            case messages.BackupPushAck():
                return starts_whole and self._knows_all_views(state, machine)
        return False

    def _is_needed(self, decision: messages.UpdateDecision) -> bool:
        """Some work item will be computed with what was decided, at least until then."""
        per_step, bound = self.scenario.policy.work_items_per_step, self.scenario.policy.max_staleness
        return bound is not None and decision.decided_floor // per_step > decision.work_items[0] // per_step

    def _knows_all_views(self, state: State, machine: Machine | None) -> bool:
        _, in_flight, left = state
        if not self._may_lose_servers:
            return True
        coordinator = self.cluster.machines[state[0][0]]
        membership = messages.ProcessLost | messages.ServerTakeoverOffer
        is_calm = not any(isinstance(self.cluster.messages[number][2], membership) for number in in_flight)
        return is_calm and not left[CRASHES] and machine.placement.epoch == coordinator.placement.epoch

    def _arrive(self, state: State, index: int) -> Iterator[State]:
        machines, in_flight, left = state
        number = in_flight[index]
        rest = in_flight[:index] + in_flight[index + 1 :]
        message = self.cluster.messages[number][2]
        if isinstance(message, PartialRead):
            yield self.cluster.state(machines, (*rest, self._read(machines, number)), left)
            return
        now, sent = self.cluster.take(machines, number)
        once = self.cluster.state(now, rest + sent, left)
        yield once
        if left[DUPLICATES] and not isinstance(message, messages.GradientsReady | messages.ProcessLost):
            twice = self.cluster.state(now, in_flight + sent, _less(left, DUPLICATES))
            if self.without_reduction or twice[1] != once[1]:
                yield twice

    def _read(self, machines: Machines, number: int) -> int:
        to, sender, (value, first) = self.cluster.messages[number]
        server, version = self.cluster.machines[machines[self.cluster.places[sender]]], value.version
        if self.scenario.updates_in_place and isinstance(server, ServerStateMachine):
            version = server.slice_states[value.slice_id].version
        if first is None:
            return self.cluster.number(to, sender, PartialRead(value, version))
        assert first == version, f"{value} is torn: its first part is of version {first}, the other of {version}"
        return self.cluster.number(to, sender, value)

    # --- what goes wrong, and what the owner of the coordinator does ---------------------------------------

    def _cut(self, state: State, one: int, other: int) -> Iterator[State]:
        """A connection is lost, and made again."""
        cluster, (machines, in_flight, left) = self.cluster, state
        ends = {cluster.names[one], cluster.names[other]}
        state = tuple(m for m in in_flight if {*cluster.messages[m][:2]} != ends)
        if len(state) == len(in_flight):
            return
        now = list(machines)
        sent: InFlight = ()
        for here, there in ((one, other), (other, one)):
            if here:  # the coordinator waits to be told where others are
                now[here], said = cluster.resume(machines[here], here, there)
                sent += said
        coordinator, server = cluster.machines[machines[one]], cluster.machines[machines[other]]
        left = _less(left, DISCONNECTS)
        if not (isinstance(coordinator, CoordinatorStateMachine) and isinstance(server, ServerStateMachine)):
            yield cluster.state(tuple(now), state + sent, left)
            return
        # The coordinator's owner has the parameters of the beginning, or of a rest.
        known = [cluster.first_version]
        if self.scenario.is_paced and cluster.invariants.is_resting(coordinator):
            known.append((cluster.first_version[0] + len(coordinator.decision_log), coordinator.decided))
        for version, settled in known:
            yield cluster.state(tuple(now), state + sent + cluster.stands(server, version, settled), left)

    @property
    def _may_lose_servers(self) -> bool:
        return bool(self.scenario.crashes) and (self.scenario.copies > 1 or self.scenario.replacements)

    def _may_end(self, machines: Machines, place: int) -> bool:
        """Somebody must be left to go on, and to keep each slice."""
        if not 0 < place < len(machines) - 1:
            return False
        if place > self.scenario.servers:
            return sum(map(bool, machines[1 + self.scenario.servers : -1])) > 1
        return self._may_lose_servers

    def _crash(self, state: State, place: int) -> Iterator[State]:
        cluster, (machines, in_flight, left) = self.cluster, state
        name, machine = cluster.names[place], cluster.machines[machines[place]]
        left = _less(left, CRASHES)
        gone = (*machines[:place], NONE, *machines[place + 1 :])
        lost = cluster.number(COORDINATOR, name, messages.ProcessLost(name))
        others = tuple(m for m in in_flight if cluster.messages[m][1] != name)
        own = Counter(m for m in in_flight if cluster.messages[m][1] == name)
        for counts in product(*(range(count + 1) for count in own.values())):
            state = others + tuple(m for m, count in zip(own, counts, strict=True) for _ in range(count))
            if not (isinstance(machine, ServerStateMachine) and self.scenario.replacements):
                now, sent = cluster.take(gone, lost)
                yield cluster.state(now, state + sent, left)
                continue
            for new, offer in self._offers(machine):
                for heard, unheard in ((lost, offer), (offer, lost)):
                    now, sent = cluster.take((*gone[:-1], new), heard)
                    yield cluster.state(now, (*state, *sent, unheard), left)

    def _offers(self, lost: ServerStateMachine) -> Iterator[tuple[int, int]]:
        """(a server that comes instead, what it says)"""
        for older in (0, 1) if self.scenario.copies == 1 else (0,):
            kept = lost.slice_states.items() if self.scenario.copies == 1 else ()
            snapshot = tuple((slice_id, state.version - older) for slice_id, state in kept)
            placement = messages.ParameterPlacement(-1, self.cluster.owners)
            new = self.cluster.machines.number(self.scenario.server("new", placement))
            yield new, self.cluster.number(COORDINATOR, "new", messages.ServerTakeoverOffer("new", lost.name, snapshot))

    def _owner(self, state: State) -> Iterator[State]:
        machines, in_flight, left = state
        coordinator, invariants = self.cluster.machines[machines[0]], self.cluster.invariants
        if not self.scenario.is_paced or coordinator.ends_at_step_limit:
            return
        policy = self.scenario.policy
        step, is_resting = coordinator.decided.floor // policy.work_items_per_step, invariants.is_resting(coordinator)
        if is_resting:
            invariants.check_rest(machines, [self.cluster.messages[number][2] for number in in_flight])
        if left[STOPS] and step < policy.steps:
            begun = -(-coordinator.next_work_item // policy.work_items_per_step)
            yield self._go_on(state, min(policy.steps, max(step + 1, begun)), False, _less(left, STOPS))
        if is_resting and left[STOPS] == self.scenario.stops and step < policy.steps:
            yield self._go_on(state, step + 1, False, left)
        elif is_resting:
            yield self._go_on(state, step, True, left)

    def _go_on(self, state: State, until: int, closes: bool, left: FaultsLeft) -> State:
        now, sent = self.cluster.go_on(state[0], until, closes)
        return self.cluster.state(now, state[1] + sent, left)


@dataclass
class Exploration:
    states: int = 0
    steps: int = 0  # From one state to another
    ends: list[State] = field(default_factory=list)
    before: dict[int, set[int]] | None = None  # The states before each state, as their hashes, if not None

    def lead_to_an_end(self) -> set[int]:
        """The states from which an end can be reached, as their hashes."""
        stack = list(map(hash, self.ends))
        result = set(stack)
        while stack:
            new = self.before.get(stack.pop(), set()) - result
            result |= new
            stack += new
        return result


def explore(explorer: Explorer, most: int = 10**9, result: Exploration | None = None) -> Exploration:
    """Explore all states. `result` has the counts until a promise is broken."""
    stack, result = [explorer.cluster.start()], result or Exploration()
    seen = set(map(hash, stack))
    while stack and len(seen) < most:
        state = stack.pop()
        result.states = len(seen)
        for following in explorer.after(state):
            result.steps += 1
            same = explorer.cluster.canonical(following)
            if (mark := hash(same)) not in seen:
                seen.add(mark)
                stack.append(same)
            if result.before is not None:
                result.before.setdefault(mark, set()).add(hash(state))
        if explorer.is_end(state):
            result.ends.append(state)
            explorer.cluster.invariants.check_end(state)
    result.states = len(seen)
    return result


def _less(left: FaultsLeft, which: int) -> FaultsLeft:
    return tuple(count - (number == which) for number, count in enumerate(left))
