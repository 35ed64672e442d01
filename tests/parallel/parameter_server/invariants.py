"""Invariants of the protocol, checked after every message and at the end.

Their definitions are their own. They take the scenario's numbers, the messages, and the fields of the machines, and
call no rule of the product, for a rule that is wrong would be wrong on both sides.
"""

from copy import deepcopy
from dataclasses import dataclass, field

from motet.parallel.parameter_server.protocol import messages
from motet.parallel.parameter_server.protocol.messages import NO_MORE_WORK, Message, ParameterPullReply, UpdateDecision
from motet.parallel.parameter_server.protocol.state_machines import (
    CoordinatorStateMachine,
    ServerStateMachine,
    WorkerStateMachine,
)
from parallel.parameter_server.interning import InternTable, key_of
from parallel.parameter_server.scenario import STOPS, Machine, Machines, Scenario, State

SliceStart = messages.ParameterStateTransfer | messages.SliceStartVersion
Push = messages.GradientPush | messages.BackupPush


def items_of(decided: messages.DecidedWorkItems) -> set[int]:
    return {*range(decided.floor), *decided.above_floor}


@dataclass
class Invariants:
    scenario: Scenario
    machines: InternTable[Machine | None]
    places: dict[str, int]
    within: set[int] = field(default_factory=set)  # Workers, as numbers, whose parameters are recent enough

    def __post_init__(self) -> None:
        """Take the numbers of the scenario that the definitions need."""
        self.items_per_step, self.steps, self.quorum, self.staleness, self.is_per_item = self.scenario.policy
        self.updates_per_step = self.items_per_step if self.is_per_item else 1

    def needed_steps(self, work_item: int) -> int:
        """The bound: how many steps the parameters of the work item must have completely."""
        return 0 if self.staleness is None else max(0, work_item // self.items_per_step - self.staleness)

    @property
    def _is_lasting(self) -> bool:
        """Whether acknowledged pushes are never lost. Where they are, a worker that repeats a work item may hear that
        it need not: its earlier push is there."""
        return self.scenario.copies > 1 or not self.scenario.replacements

    def check_step(self, machines: Machines, at: int, said: tuple[Message, ...]) -> None:
        for message in said:
            match message:
                case messages.GradientPushAck():
                    self._is_kept(machines, message)
                case messages.WorkAssignment() if at == 0 and self._is_lasting:
                    self._is_free(machines, message)
                case messages.GradientNormRequest() | UpdateDecision() if at == 0:
                    for slice_id in range(len(self._coordinator(machines).placement.replicas)):
                        self._have_all(machines, slice_id, message.work_items)
                case ParameterPullReply():
                    updates = [m for m in said if isinstance(m, messages.ApplyUpdate)]
                    applied = [m.decision for m in updates if m.slice_id == message.slice_id]
                    self._is_recent(machines, at, message, applied)
        if machines[at] not in self.within:
            machine = self.machines[machines[at]]
            if isinstance(machine, WorkerStateMachine) and machine.ready_slices:
                versions, assignment = machine.pulled_versions, machine.assignment
                least = max(assignment.min_version, self.needed_steps(assignment.work_item) * self.updates_per_step)
                has_all = sorted(versions) == list(range(self.scenario.servers)) and min(versions.values()) >= least
                assert has_all, f"{assignment} is computed with {versions}"
            self.within.add(machines[at])

    def _coordinator(self, machines: Machines) -> CoordinatorStateMachine:
        return self.machines[machines[0]]

    def _have_all(self, machines: Machines, slice_id: int, work_items: tuple[int, ...]) -> None:
        """The servers of the slice have these pushes, or are about to hear of its state."""
        for name in self._coordinator(machines).placement.replicas[slice_id].servers:
            server = self.machines[machines[self.places[name]]]
            state = server.slice_states.get(slice_id) if isinstance(server, ServerStateMachine) else None
            if state is not None and state.is_initialized:
                has_all = state.pending_work_items | items_of(state.decided) >= set(work_items)
                assert has_all, f"{name} has not all of {work_items} of slice {slice_id}"

    def _is_kept(self, machines: Machines, ack: messages.GradientPushAck) -> None:
        """An acknowledged push is with all servers of its slice, for an update may have it from now on."""
        worker = self._client(machines, ack.assignment_id)
        if worker and worker.assignment.work_item not in items_of(self._coordinator(machines).decided):
            self._have_all(machines, ack.slice_id, (worker.assignment.work_item,))

    def check_updates(
        self, before: Machine, now: Machine, sent: messages.OutgoingMessages, message: Message | None = None
    ) -> None:
        """Updates, and what a machine notes of them, by the decisions alone."""
        if isinstance(now, ServerStateMachine) and isinstance(before, ServerStateMachine):
            known = {*before.decisions.values(), message}
            applied = [m for _, m in sent if isinstance(m, messages.ApplyUpdate)]
            assert {*now.decisions.values(), *(m.decision for m in applied)} <= known, f"{now.name} alters a decision"
            for slice_id in now.slice_states:
                decisions = [m.decision for m in applied if m.slice_id == slice_id]
                start = message if isinstance(message, SliceStart | Push) and message.slice_id == slice_id else None
                self._check_slice(before, now, slice_id, decisions, start)
            for transfer in [m for _, m in sent if isinstance(m, messages.ParameterStateTransfer)]:
                state = now.slice_states[transfer.slice_id]
                assert transfer[1:] == (state.version, state.decided, state.pending_work_items), (
                    f"{transfer} of {state}"
                )
        if isinstance(now, CoordinatorStateMachine) and isinstance(before, CoordinatorStateMachine):
            self._check_decisions(before, now, [m for _, m in sent])
            is_resting = self.is_resting(now)
            assert now.is_quiescent == is_resting, f"that {now} rests is {is_resting}"
            self._has_no_idle_worker(now)

    def _decided_by(self, decision: UpdateDecision) -> set[int]:
        """Work items that the update has, or that are dropped with its step."""
        late = 0 if self.is_per_item else (decision.update + 1) * self.items_per_step
        return {*decision.work_items, *range(late)}

    def _counts(self, decided: messages.DecidedWorkItems, updates: int) -> bool:
        """So many updates have, or drop, just so many work items."""
        return len(items_of(decided)) * self.updates_per_step == updates * self.items_per_step

    def _check_slice(
        self,
        before: ServerStateMachine,
        now: ServerStateMachine,
        slice_id: int,
        applied: list[UpdateDecision],
        message: SliceStart | Push | None,
    ) -> None:
        """A server does one update after another, of work items that it has, and keeps the others."""
        state, known = now.slice_states[slice_id], before.slice_states.get(slice_id)
        kept, arrived = set(known.pending_work_items) if known else set(), set()
        if isinstance(message, Push):
            arrived = {message.work_item}
        elif isinstance(message, messages.ParameterStateTransfer):
            arrived = set(message.pending_work_items)
        after = items_of(state.decided)
        is_kept = kept - after <= state.pending_work_items <= (kept | arrived) - after
        assert is_kept, f"{now.name} keeps {state.pending_work_items} of {kept | arrived} of slice {slice_id}"
        start = known if known and known.is_initialized else message
        if not state.is_initialized or start is None:
            assert not applied and not state.is_initialized, f"{now.name} starts slice {slice_id} by itself"
            return
        done = [decision.update for decision in applied]
        assert done == list(range(start.version, state.version)), f"{now.name} does {done} from {start.version} on"
        assert after == items_of(start.decided).union(*map(self._decided_by, applied)), f"{state} after {applied}"
        assert self._counts(state.decided, state.version), f"{now.name} has {state}"
        assert kept | arrived >= {i for decision in applied for i in decision.work_items}, f"{applied} of {kept}"

    def _check_decisions(
        self, before: CoordinatorStateMachine, now: CoordinatorStateMachine, sent: list[Message]
    ) -> None:
        """An update has a work item that none had, or a quorum of its step; all servers hear the same."""
        decided, past = items_of(before.decided), len(before.decision_log)
        for update, decision in enumerate(now.decision_log[past:], now.first_logged_update + past):
            items, first = set(decision.work_items), update * self.items_per_step
            open_items = items - decided if self.is_per_item else items & {*range(first, first + self.items_per_step)}
            count = 1 if self.is_per_item else self.quorum
            is_whole = decision.update == update and len(open_items) == len(decision.work_items) == count
            assert is_whole, f"{decision} is update {update}, after {before.decided}"
            decided |= self._decided_by(decision)
        version = now.first_logged_update + len(now.decision_log)
        assert now.decision_log[:past] == before.decision_log, "a decision is changed"
        assert decided == items_of(now.decided) and self._counts(now.decided, version), f"{version}: {now.decided}"
        for message in sent:
            if isinstance(message, UpdateDecision):
                assert message == now.decision_log[message.update - now.first_logged_update], f"{message} is another"
            if isinstance(message, messages.SliceStartVersion):
                assert message[1:] == (version, now.decided), f"{message} at {version}, {now.decided}"

    def _limit(self, coordinator: CoordinatorStateMachine) -> int:
        """The work items up to which a coordinator goes."""
        steps = self.steps if coordinator.step_limit is None else coordinator.step_limit
        return steps * self.items_per_step

    def is_resting(self, coordinator: CoordinatorStateMachine) -> bool:
        """Whether a coordinator waits for its owner: all work items are decided, also those that workers have."""
        decided = items_of(coordinator.decided)
        assigned = {assignment.work_item for assignment in coordinator.current_assignments.values()}
        return decided >= {*range(self._limit(coordinator)), *assigned - {NO_MORE_WORK}}

    def check_rest(self, machines: Machines, in_flight: list[Message]) -> None:
        """While the coordinator rests, no worker has a work item that is not decided, nor will hear of one."""
        workers = [m for number in machines if isinstance(m := self.machines[number], WorkerStateMachine)]
        heard = [m for m in in_flight if isinstance(m, messages.WorkAssignment)]
        assigned = {a.work_item for a in (*heard, *(worker.assignment for worker in workers))}
        assert assigned - {NO_MORE_WORK} <= items_of(self._coordinator(machines).decided), f"{assigned} at rest"

    def _has_no_idle_worker(self, coordinator: CoordinatorStateMachine) -> None:
        """A worker waits only for the bound or the owner; in first-k, also where its work item would be dropped."""
        decided, limit = items_of(coordinator.decided), self._limit(coordinator)
        item = min(coordinator.orphaned_work_items, default=coordinator.next_work_item)
        waits = item >= limit or not decided >= {*range(self.needed_steps(item) * self.items_per_step)}
        is_over = coordinator.ends_at_step_limit and decided >= {*range(limit)}
        assigned = [assignment.work_item for assignment in coordinator.current_assignments.values()]
        step = {*range(first := item - item % self.items_per_step, first + self.items_per_step)}
        completed = step & coordinator.completed_reports.keys()
        is_enough = completed and len(completed | (step & {*assigned})) >= self.quorum < self.items_per_step
        for worker in coordinator.idle_workers:
            would_drop = is_enough and not self.is_per_item and worker in coordinator.workers_done_with_step
            assert (waits or would_drop) and not is_over, f"{worker} could compute {item}"

    def _client(self, machines: Machines, assignment_id: int) -> WorkerStateMachine | None:
        workers = [m for number in machines if isinstance(m := self.machines[number], WorkerStateMachine)]
        return next((worker for worker in workers if worker.assignment.assignment_id == assignment_id), None)

    def _is_free(self, machines: Machines, assignment: messages.WorkAssignment) -> None:
        """A worker gets an assignment only if it has nothing to do."""
        current = self._coordinator(machines).current_assignments
        name = next((worker for worker in current if current[worker] == assignment), None)
        worker = self.machines[machines[self.places[name]]] if name is not None else None
        assert worker is not None, f"{assignment} is nobody's"
        if isinstance(worker, WorkerStateMachine) and worker.assignment.assignment_id:
            all_safe = len(worker.acknowledged_slices) == len(worker.placement.replicas)
            assert all_safe or worker.assignment == assignment, (
                f"{name} is given {assignment} at its {worker.assignment}"
            )

    def _is_recent(self, machines: Machines, at: int, value: ParameterPullReply, applied: list[UpdateDecision]) -> None:
        """A server sends a worker no value that misses what its work item needs. `applied`: by the same message."""
        server, worker = self.machines[machines[at]], self._client(machines, value.assignment_id)
        if worker is None:
            return
        state, needed = server.slice_states[value.slice_id], self.needed_steps(worker.assignment.work_item)
        later = [decision for decision in applied if decision.update >= value.version]
        contents = items_of(state.decided) - {item for decision in later for item in decision.work_items}
        is_recent = contents >= {*range(needed * self.items_per_step)}
        is_recent &= state.version - len(later) == value.version >= needed * self.updates_per_step
        assert is_recent, f"{worker.assignment} is answered with {value}"

    def check_value(self, worker: WorkerStateMachine, value: ParameterPullReply) -> None:
        least, needed = worker.assignment.min_version, self.needed_steps(worker.assignment.work_item)
        assert least >= needed * self.updates_per_step, f"{worker.assignment} does not keep the bound"
        # Updates of steps that were begun may come before the last one that is needed.
        others = (self.staleness or 0) if self.is_per_item and needed > self.scenario.first else 0
        most = (max(needed, self.scenario.first) + others) * self.updates_per_step
        assert least <= most, f"{worker.assignment} waits for more than the bound asks for"
        assert value.version >= least, f"{worker.assignment} is answered with {value}"

    def check_ignored(self, machine: Machine, message: Message) -> None:
        """Check that a message that the explorer leaves out changes nothing, but for a note of an old decision."""
        now = deepcopy(machine)
        now.handle(message)
        if isinstance(now, ServerStateMachine) and isinstance(message, UpdateDecision):
            now.decisions = machine.decisions
        assert key_of(now) == key_of(machine), f"{machine} does not ignore {message}"

    def check_end(self, state: State) -> None:
        """Check that all are done, for nothing is underway any more, and nothing will be."""
        machines, _, left = state
        coordinator, decided = self._coordinator(machines), items_of(self._coordinator(machines).decided)
        others = [self.machines[number] for number in machines[1:]]
        steps = len(decided) // self.items_per_step
        is_over = coordinator.ends_at_step_limit and decided == {*range(self._limit(coordinator))}
        is_whole = steps == self.steps if left[STOPS] == self.scenario.stops else steps >= self.scenario.first
        assert is_over and is_whole, f"nobody goes on: {[coordinator, *others]}"
        for worker in [machine for machine in others if isinstance(machine, WorkerStateMachine)]:
            is_done = worker.assignment[1:] == (NO_MORE_WORK, 0) and worker.assignment.assignment_id
            assert is_done, f"{worker.name} waits for ever"
        for slice_id, (names, _) in enumerate(coordinator.placement.replicas):
            assert names, f"nobody has slice {slice_id}"
            for server in (self.machines[machines[self.places[name]]] for name in names):
                state = server.slice_states[slice_id]
                is_done = state.is_initialized and state.version == steps * self.updates_per_step
                assert is_done and not state.pending_work_items, f"{server.name} has {state} of slice {slice_id}"
