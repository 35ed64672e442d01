"""Every interleaving of a small parameter server: messages in any order, some of them twice, and processes that end.

A state is what every process knows, and the messages underway. Of a state that was seen 64 bits are kept: with ten
million of them, two are taken for one with a chance of 3 in a million.

What makes no difference is left out:

- States that differ in the names of workers alone count once, and messages that will be ignored are not underway.
- A process ends when the desk hears of it. Before, one that has ended is as good as one that is slow.
- What is lost of what a process had sent is lost when it ends. To lose it later is to have it underway for longer.

And unless `all_of_it` is asked for:

- A second arrival that would be ignored uses up no chance of one.
- What the desk decided is forgotten when nobody can ask for it, and a version is as good as any other within the bound.
- Where a message is certain to arrive, and what comes of it is the same now and after anything else that may happen, it
  arrives first, and nothing else is tried in its place (`Explorer.urgent`).
"""

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations, product

from motet.parallel.parameter_server.protocol.coordinator_state_machine import CoordinatorStateMachine
from motet.parallel.parameter_server.protocol.messages import (
    COORDINATOR,
    BackupPushAck,
    DecidedWorkItems,
    GradientPushAck,
    GradientsReady,
    Message,
    ParameterPlacement,
    ParameterPull,
    ParameterPullReply,
    ProcessLost,
    ServerTakeoverOffer,
    UpdateDecision,
    WorkAssignment,
)
from motet.parallel.parameter_server.protocol.server_state_machine import ServerStateMachine
from motet.parallel.parameter_server.protocol.worker_state_machine import WorkerStateMachine
from server.crew import Crew
from server.system import (
    CRASHES,
    CUTS,
    DOUBLES,
    NONE,
    STOPS,
    Left,
    Machine,
    Machines,
    Reading,
    State,
    System,
    Underway,
    demand,
)


class Explorer:
    def __init__(self, system: System, all_of_it: bool = False) -> None:
        self.system = system
        self.all_of_it = all_of_it
        self.crew = Crew(system, all_of_it)

    def states(self) -> Iterator[State]:
        """All, but for those that are the same with other names of workers."""
        stack = [self.crew.start()]
        seen = {hash(stack[0])}
        while stack:
            state = stack.pop()
            yield state
            for following in map(self.crew.canonical, self.after(state)):
                if (mark := hash(following)) not in seen:
                    seen.add(mark)
                    stack.append(following)

    def after(self, state: State) -> Iterator[State]:
        """Everything that may happen next."""
        if self.all_of_it:
            yield from self._after(state)
            return
        urgent = self.urgent(state)
        for following in self._after(state) if urgent is None else self._arrive(state, urgent):
            now = following
            while not now[2][DOUBLES] and (only := self.urgent(now)) is not None:
                (now,) = self._arrive(now, only)
            yield now

    def _after(self, state: State) -> Iterator[State]:
        machines, underway, left = state
        for index, number in enumerate(underway):
            if not index or underway[index - 1] != number:
                yield from self._arrive(state, index)
        alive = [place for place, machine in enumerate(machines) if machine]
        for place in alive if left[CRASHES] else ():
            if self._may_end(machines, place):
                yield from self._crash(state, place)
        for one, other in combinations(alive, 2) if left[CUTS] else ():
            yield from self._cut(state, one, other)
        yield from self._owner(state)

    def is_end(self, state: State) -> bool:
        return not state[1] and not any(self._owner(state))

    # --- messages ----------------------------------------------------------------------------------

    def urgent(self, state: State) -> int | None:
        """The place of a message that can neither be lost nor make a difference by when it arrives. What is lost with
        its receiver makes none; a connection that is cut does."""
        machines, underway, left = state
        if left[CUTS] or (self.system.returns and self.system.copies == 1):  # then a ticket may come before its time
            return None
        for index, number in enumerate(underway):
            to, sender, message = self.crew.messages[number]
            if isinstance(message, WorkAssignment):
                return index
            if isinstance(message, ParameterPullReply):
                is_urgent = not (left[CRASHES] and self._may_end(machines, self.crew.places[sender]))
            else:
                is_urgent = self._is_urgent(state, machines[self.crew.places[to]], message)
            if is_urgent:
                return index
        return None

    def _is_urgent(self, state: State, receiver: int, message: Message | Reading) -> bool:
        if not isinstance(message, GradientPushAck | ParameterPull | UpdateDecision | BackupPushAck):
            return False
        machine = self.crew.machines[receiver]
        match message:
            case ParameterPull(slice_id=piece):
                return isinstance(machine, ServerStateMachine) and piece in machine.slice_states
            case GradientPushAck():
                return self._knows_all_views(state, machine)
            case UpdateDecision():
                is_early = not self._is_needed(message) and not self.system.is_late
                return is_early and not self.system.returns and not self.system.told
        return not (self.system.returns or self.system.told) and self._knows_all_views(state, machine)

    def _is_needed(self, decision: UpdateDecision) -> bool:
        """Some share will be computed with what was decided, at least until then."""
        rule = self.system.rule
        return rule.max_staleness is not None and decision.decided_floor // rule.work_items_per_step > rule.step_of(
            decision.work_items[0]
        )

    def _knows_all_views(self, state: State, machine: Machine | None) -> bool:
        _, underway, left = state
        if not self._may_lose_servers:
            return True
        desk = self.crew.machines[state[0][0]]
        assert isinstance(machine, WorkerStateMachine | ServerStateMachine) and isinstance(
            desk, CoordinatorStateMachine
        )
        messages = (self.crew.messages[number][2] for number in underway)
        is_calm = not left[CRASHES] and not any(
            isinstance(message, ProcessLost | ServerTakeoverOffer) for message in messages
        )
        return is_calm and machine.placement.epoch == desk.placement.epoch

    def _arrive(self, state: State, index: int) -> Iterator[State]:
        machines, underway, left = state
        number = underway[index]
        rest = underway[:index] + underway[index + 1 :]
        message = self.crew.messages[number][2]
        if isinstance(message, Reading):
            yield self.crew.state(machines, (*rest, self._read(machines, number)), left)
            return
        now, sent = self.crew.take(machines, number)
        once = self.crew.state(now, rest + sent, left)
        yield once
        if left[DOUBLES] and not isinstance(message, GradientsReady | ProcessLost):
            twice = self.crew.state(now, underway + sent, _less(left, DOUBLES))
            if self.all_of_it or twice[1] != once[1]:
                yield twice

    def _read(self, machines: Machines, number: int) -> int:
        """One part more of a value."""
        to, sender, reading = self.crew.messages[number]
        assert isinstance(reading, Reading)
        value, first = reading
        keeper, version = self.crew.machines[machines[self.crew.places[sender]]], value.version
        if self.system.in_place and isinstance(keeper, ServerStateMachine):
            version = keeper.slice_states[value.slice_id].version
        if first is None:
            return self.crew.number(to, sender, Reading(value, version))
        demand(first == version, f"{value} is torn: its first part is of version {first}, the other of {version}")
        return self.crew.number(to, sender, value)

    # --- what goes wrong, and what the owner of the desk does ---------------------------------------

    def _cut(self, state: State, one: int, other: int) -> Iterator[State]:
        """A connection is lost, and made again."""
        crew, (machines, underway, left) = self.crew, state
        ends = {crew.names[one], crew.names[other]}
        kept = tuple(m for m in underway if {*crew.messages[m][:2]} != ends)
        if len(kept) == len(underway):
            return
        now = list(machines)
        sent: Underway = ()
        for here, there in ((one, other), (other, one)):
            if here:  # the desk waits to be told where others are
                now[here], said = crew.resume(machines[here], here, there)
                sent += said
        desk, keeper = crew.machines[machines[one]], crew.machines[machines[other]]
        left = _less(left, CUTS)
        if not (isinstance(desk, CoordinatorStateMachine) and isinstance(keeper, ServerStateMachine)):
            yield crew.state(tuple(now), kept + sent, left)
            return
        for version, settled in self._known(desk):
            yield crew.state(tuple(now), kept + sent + crew.stands(keeper, version, settled), left)

    def _known(self, desk: CoordinatorStateMachine) -> Iterator[tuple[int, DecidedWorkItems]]:
        """What the desk's owner may have of the parameters: those of the beginning, or of a rest."""
        yield desk.first_logged_update, DecidedWorkItems(self.system.first * self.system.rule.work_items_per_step)
        if self.system.owned and desk.is_quiescent:
            yield desk.update_count, desk.decided

    @property
    def _may_lose_servers(self) -> bool:
        return bool(self.system.crashes) and (self.system.copies > 1 or self.system.returns)

    def _may_end(self, machines: Machines, place: int) -> bool:
        """Somebody must be left to go on, and to keep each piece."""
        if not 0 < place < len(machines) - 1:
            return False
        if place > self.system.servers:
            return sum(map(bool, machines[1 + self.system.servers : -1])) > 1
        return self._may_lose_servers

    def _crash(self, state: State, place: int) -> Iterator[State]:
        crew, (machines, underway, left) = self.crew, state
        name, machine = crew.names[place], crew.machines[machines[place]]
        left = _less(left, CRASHES)
        gone = (*machines[:place], NONE, *machines[place + 1 :])
        lost = crew.number(COORDINATOR, name, ProcessLost(name))
        others = tuple(m for m in underway if crew.messages[m][1] != name)
        own = Counter(m for m in underway if crew.messages[m][1] == name)
        for counts in product(*(range(count + 1) for count in own.values())):
            kept = others + tuple(m for m, count in zip(own, counts, strict=True) for _ in range(count))
            if not (isinstance(machine, ServerStateMachine) and self.system.returns):
                now, sent = crew.take(gone, lost)
                yield crew.state(now, kept + sent, left)
                continue
            for new, offer in self._offers(machine):
                for heard, unheard in ((lost, offer), (offer, lost)):
                    now, sent = crew.take((*gone[:-1], new), heard)
                    yield crew.state(now, (*kept, *sent, unheard), left)

    def _offers(self, lost: ServerStateMachine) -> Iterator[tuple[int, int]]:
        """(a server that comes instead, what it says)"""
        for older in (0, 1) if self.system.copies == 1 else (0,):
            snapshot = (
                tuple((p, k.version - older) for p, k in lost.slice_states.items()) if self.system.copies == 1 else ()
            )
            new = self.crew.machines.number(self.system.keeper("new", ParameterPlacement(-1, self.crew.owners)))
            yield new, self.crew.number(COORDINATOR, "new", ServerTakeoverOffer("new", lost.name, snapshot))

    def _owner(self, state: State) -> Iterator[State]:
        machines, _, left = state
        desk = self.crew.machines[machines[0]]
        assert isinstance(desk, CoordinatorStateMachine)
        if not self.system.owned or desk.ends_at_step_limit:
            return
        rule, step = self.system.rule, self.system.rule.step_of(desk.decided.floor)
        if left[STOPS] and step < rule.steps:
            begun = -(-desk.next_work_item // rule.work_items_per_step)
            yield self._go_on(state, min(rule.steps, max(step + 1, begun)), False, _less(left, STOPS))
        if desk.is_quiescent and left[STOPS] == self.system.stops and step < rule.steps:
            yield self._go_on(state, step + 1, False, left)
        elif desk.is_quiescent:
            yield self._go_on(state, step, True, left)

    def _go_on(self, state: State, until: int, closes: bool, left: Left) -> State:
        now, sent = self.crew.go_on(state[0], until, closes)
        return self.crew.state(now, state[1] + sent, left)


@dataclass
class Found:
    states: int = 0
    steps: int = 0
    """From one state to another."""
    ends: int = 0


@dataclass
class Ways:
    """From where each state was come to, by what `hash` makes of them."""

    sources: "array[int]" = field(default_factory=lambda: array("q"))
    targets: "array[int]" = field(default_factory=lambda: array("q"))
    ends: set[int] = field(default_factory=set)

    def lead_to_an_end(self) -> set[int]:
        """The states from which one can be reached."""
        before: dict[int, list[int]] = {}
        for source, target in zip(self.sources, self.targets, strict=True):
            before.setdefault(target, []).append(source)
        found, stack = set(self.ends), list(self.ends)
        while stack:
            new = set(before.get(stack.pop(), ())) - found
            found |= new
            stack += new
        return found


def explore(
    system: System, most: int = 10**9, all_of_it: bool = False, found: Found | None = None, ways: Ways | None = None
) -> Found:
    """Where a promise is broken, `found` has what came before."""
    explorer = Explorer(system, all_of_it)
    start = explorer.crew.start()
    seen = {hash(start)}
    found = Found() if found is None else found
    stack = [start]
    while stack and len(seen) < most:
        state = stack.pop()
        found.states = len(seen)
        for following in explorer.after(state):
            found.steps += 1
            same = explorer.crew.canonical(following)
            if (mark := hash(same)) not in seen:
                seen.add(mark)
                stack.append(same)
            if ways is not None:
                ways.sources.append(hash(state))
                ways.targets.append(mark)
        if explorer.is_end(state):
            found.ends += 1
            explorer.crew.promises.of_end(state[0])
            if ways is not None:
                ways.ends.add(hash(state))
    found.states = len(seen)
    return found


def _less(left: Left, which: int) -> Left:
    return tuple(count - (number == which) for number, count in enumerate(left))
