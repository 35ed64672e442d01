"""Invariants of the protocol, checked after every message and at the end."""

from dataclasses import dataclass, field

from motet.parallel.parameter_server.protocol import messages
from motet.parallel.parameter_server.protocol.coordinator_state_machine import CoordinatorStateMachine
from motet.parallel.parameter_server.protocol.messages import NO_MORE_WORK, Message, ParameterPullReply, UpdateDecision
from motet.parallel.parameter_server.protocol.server_state_machine import ServerStateMachine
from motet.parallel.parameter_server.protocol.worker_state_machine import WorkerStateMachine
from parallel.parameter_server.interning import InternTable
from parallel.parameter_server.scenario import Machine, Machines, Scenario


@dataclass
class Invariants:
    scenario: Scenario
    machines: InternTable[Machine | None]
    places: dict[str, int]
    within: set[int] = field(default_factory=set)  # Workers, as numbers, whose parameters are recent enough

    @property
    def _is_lasting(self) -> bool:
        """Whether acknowledged pushes are never lost. Where they are, a worker that repeats a work item may hear that
        it need not: its earlier push is there."""
        return self.scenario.copies > 1 or not self.scenario.replacements

    def of_step(self, machines: Machines, at: int, said: tuple[Message, ...]) -> None:
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
                assert min(versions.values()) >= assignment.min_version, f"{assignment} is computed with {versions}"
            self.within.add(machines[at])

    def _coordinator(self, machines: Machines) -> CoordinatorStateMachine:
        return self.machines[machines[0]]

    def _have_all(self, machines: Machines, slice_id: int, work_items: tuple[int, ...]) -> None:
        """The servers of the slice have these pushes, or are about to hear of its state."""
        for name in self._coordinator(machines).placement.replicas[slice_id].servers:
            server = self.machines[machines[self.places[name]]]
            if isinstance(server, ServerStateMachine) and server.is_slice_initialized(slice_id):
                state = server.slice_states[slice_id]
                has_all = all(item in state.pending_work_items or state.decided.has(item) for item in work_items)
                assert has_all, f"{name} has not all of {work_items} of slice {slice_id}"

    def _is_kept(self, machines: Machines, ack: messages.GradientPushAck) -> None:
        """An acknowledged push is with all servers of its slice, for an update may have it from now on."""
        worker = self._client(machines, ack.assignment_id)
        if worker is not None and not self._coordinator(machines).decided.has(worker.assignment.work_item):
            self._have_all(machines, ack.slice_id, (worker.assignment.work_item,))

    def of_updates(self, before: Machine, now: Machine, sent: messages.OutgoingMessages) -> None:
        """A server does one update after another, and an update is in the floor of the coordinator once."""
        if isinstance(now, ServerStateMachine) and isinstance(before, ServerStateMachine):
            for slice_id, state in now.slice_states.items():
                applied = [m for _, m in sent if isinstance(m, messages.ApplyUpdate) and m.slice_id == slice_id]
                done, known = [m.decision.update for m in applied], before.slice_states.get(slice_id)
                first = known.version if known and known.is_initialized else state.version - len(done)
                assert done == list(range(first, state.version)), (
                    f"{now.name} does {done} of slice {slice_id} from {first} on"
                )
        if isinstance(now, CoordinatorStateMachine) and self.scenario.policy.has_per_item_updates:
            count = now.decided.floor + len(now.decided.above_floor)
            assert count == now.update_count, f"{count} work items are decided, in {now.update_count} updates"

    def _client(self, machines: Machines, assignment_id: int) -> WorkerStateMachine | None:
        workers = [m for number in machines if isinstance(m := self.machines[number], WorkerStateMachine)]
        return next((worker for worker in workers if worker.assignment.assignment_id == assignment_id), None)

    def _is_free(self, machines: Machines, assignment: messages.WorkAssignment) -> None:
        """A worker gets an assignment only if it has nothing to do."""
        current = self._coordinator(machines).current_assignments
        name = next((worker for worker in current if current[worker] == assignment), None)
        worker = self.machines[machines[self.places[name]]] if name is not None else None
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
        needs = self.scenario.policy.required_work_items(worker.assignment.work_item)
        later = [item for decision in applied if decision.update >= value.version for item in decision.work_items]
        is_recent = server.slice_states[value.slice_id].decided.floor >= needs <= min(later, default=needs)
        assert is_recent, f"{worker.assignment} is answered with {value}"

    def of_value(self, worker: WorkerStateMachine, value: ParameterPullReply) -> None:
        policy, least = self.scenario.policy, worker.assignment.min_version
        if not policy.has_per_item_updates:  # steps are updates
            needs = policy.required_work_items(worker.assignment.work_item)
            assert least * policy.work_items_per_step >= needs, f"{worker.assignment} does not keep the bound"
        assert value.version >= least, f"{worker.assignment} is answered with {value}"

    def of_end(self, machines: Machines) -> None:
        """Check that all are done, for nothing is underway any more, and nothing will be."""
        coordinator, policy = self._coordinator(machines), self.scenario.policy
        others = [self.machines[number] for number in machines[1:]]
        steps = policy.steps if coordinator.step_limit is None else coordinator.step_limit
        is_over = coordinator.ends_at_step_limit and coordinator.decided.floor == policy.work_items_per_step * steps
        assert is_over, f"nobody goes on: {[coordinator, *others]}"
        for machine in others:
            if isinstance(machine, WorkerStateMachine):
                assert machine.assignment[1:] == (NO_MORE_WORK, 0) and machine.assignment.assignment_id, (
                    f"{machine.name} waits for ever"
                )
            for slice_id, state in machine.slice_states.items() if isinstance(machine, ServerStateMachine) else ():
                if machine.name in coordinator.placement.replicas[slice_id].servers:
                    assert state.version == coordinator.update_count, (
                        f"{machine.name} has {state.version} updates of slice {slice_id}"
                    )
