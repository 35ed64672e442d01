"""Invariants of a parameter server."""

from dataclasses import dataclass, field

from motet.parallel.parameter_server.protocol.coordinator_state_machine import CoordinatorStateMachine
from motet.parallel.parameter_server.protocol.messages import (
    ApplyUpdate,
    GradientNormRequest,
    GradientPushAck,
    GradientsReady,
    Message,
    OutgoingMessages,
    ParameterPullReply,
    UpdateDecision,
    WorkAssignment,
)
from motet.parallel.parameter_server.protocol.server_state_machine import ServerStateMachine
from motet.parallel.parameter_server.protocol.worker_state_machine import WorkerStateMachine
from parallel.parameter_server.interning import InternTable
from parallel.parameter_server.scenario import Machine, Scenario, require


@dataclass
class Invariants:
    scenario: Scenario
    machines: InternTable[Machine | None]
    places: dict[str, int]
    within: set[int] = field(default_factory=set)
    """Workers, as numbers, that have what the bound asks for."""

    @property
    def _is_lasting(self) -> bool:
        """Whether an acknowledged push is never lost. Otherwise a worker that repeats a work item may hear that it need
        not: its earlier push is there."""
        return self.scenario.copies > 1 or not self.scenario.replacements

    def of_step(self, machines: tuple[int, ...], at: int, said: tuple[Message, ...]) -> None:
        """Check the state of a machine and the messages that it has sent."""
        for message in said:
            if isinstance(message, GradientPushAck):
                self._is_kept(machines, message)
            elif isinstance(message, WorkAssignment) and at == 0 and self._is_lasting:
                self._is_free(machines, message)
            elif isinstance(message, GradientNormRequest | UpdateDecision) and at == 0:
                self._are_kept(machines, message)
            elif isinstance(message, ParameterPullReply):
                later = [
                    apply.decision
                    for apply in said
                    if isinstance(apply, ApplyUpdate) and apply.slice_id == message.slice_id
                ]
                self._is_recent(machines, at, message, later)
        if machines[at] not in self.within:
            self._has_recent(self.machines[machines[at]])
            self.within.add(machines[at])

    def _is_kept(self, machines: tuple[int, ...], ack: GradientPushAck) -> None:
        """A push that is acknowledged is with all servers of its piece, for it may be decided upon from now on."""
        coordinator, worker_machine = self.machines[machines[0]], self._client(machines, ack.assignment_id)
        assert isinstance(coordinator, CoordinatorStateMachine)
        if worker_machine is None or coordinator.decided.has(worker_machine.assignment.work_item):
            return
        for server in coordinator.placement.replicas[ack.slice_id].servers:
            server_machine = self.machines[machines[self.places[server]]]
            if isinstance(server_machine, ServerStateMachine) and server_machine.is_slice_initialized(
                ack.slice_id
            ):  # others are about to be told
                state, work_item = server_machine.slice_states[ack.slice_id], worker_machine.assignment.work_item
                require(
                    work_item in state.pending_work_items or state.decided.has(work_item), f"{server} has not {ack}"
                )

    def _are_kept(self, machines: tuple[int, ...], chosen: GradientNormRequest | UpdateDecision) -> None:
        """All servers hold the pushes that make an update."""
        coordinator = self.machines[machines[0]]
        assert isinstance(coordinator, CoordinatorStateMachine)
        for slice_id, is_paced in enumerate(coordinator.placement.replicas):
            for server in is_paced.servers:
                server_machine = self.machines[machines[self.places[server]]]
                if isinstance(server_machine, ServerStateMachine) and server_machine.is_slice_initialized(slice_id):
                    state = server_machine.slice_states[slice_id]
                    all_held = all(
                        work_item in state.pending_work_items or state.decided.has(work_item)
                        for work_item in chosen.work_items
                    )
                    require(all_held, f"{server} has not all of {chosen} of slice {slice_id}")

    def of_updates(self, before: Machine, now: Machine, sent: OutgoingMessages) -> None:
        """A server does one update after another, and an update is in the floor of the coordinator once."""
        for slice_id, state in (
            now.slice_states.items()
            if isinstance(now, ServerStateMachine) and isinstance(before, ServerStateMachine)
            else ()
        ):
            done = [m.decision.update for _, m in sent if isinstance(m, ApplyUpdate) and m.slice_id == slice_id]
            known = before.slice_states.get(slice_id)
            first = known.version if known and known.is_initialized else state.version - len(done)
            require(
                done == list(range(first, state.version)), f"{now.name} does {done} of slice {slice_id} from {first} on"
            )
        if isinstance(now, CoordinatorStateMachine) and self.scenario.policy.has_per_item_updates:
            settled = now.decided.floor + len(now.decided.above_floor)
            require(settled == now.update_count, f"{settled} shares are decided upon, in {now.update_count} updates")

    def _client(self, machines: tuple[int, ...], assignment: int) -> WorkerStateMachine | None:
        """The worker that waits for the acknowledgement of its pushes, if there is one."""
        worker_machines = (self.machines[number] for number in machines)
        return next(
            (
                c
                for c in worker_machines
                if isinstance(c, WorkerStateMachine) and c.assignment.assignment_id == assignment
            ),
            None,
        )

    def _is_free(self, machines: tuple[int, ...], assignment: WorkAssignment) -> None:
        """A worker that is assigned an item is idle."""
        coordinator = self.machines[machines[0]]
        assert isinstance(coordinator, CoordinatorStateMachine)
        name = next(
            (worker for worker, current in coordinator.current_assignments.items() if current == assignment), None
        )
        worker_machine = self.machines[machines[self.places[name]]] if name is not None else None
        if isinstance(worker_machine, WorkerStateMachine) and worker_machine.assignment.assignment_id:
            all_safe = len(worker_machine.acknowledged_slices) == len(worker_machine.placement.replicas)
            require(
                all_safe or worker_machine.assignment == assignment,
                f"{name} is given {assignment} at its {worker_machine.assignment}",
            )

    def _is_recent(
        self, machines: tuple[int, ...], at: int, value: ParameterPullReply, applied: list[UpdateDecision]
    ) -> None:
        """A server sends a worker no value that lacks what its share needs. `applied`: in the same breath."""
        server_machine, worker_machine = self.machines[machines[at]], self._client(machines, value.assignment_id)
        if worker_machine is None:
            return
        assert isinstance(server_machine, ServerStateMachine)
        needs, settled = (
            self.scenario.policy.required_work_items(worker_machine.assignment.work_item),
            server_machine.slice_states[value.slice_id].decided,
        )
        later = [
            work_item for decision in applied if decision.update >= value.version for work_item in decision.work_items
        ]
        require(
            settled.floor >= needs <= min(later, default=needs), f"{worker_machine.assignment} is answered with {value}"
        )

    def _has_recent(self, machine: Machine | None) -> None:
        if isinstance(machine, WorkerStateMachine) and machine.ready_slices:
            bound = machine.assignment.min_version
            require(
                min(machine.pulled_versions.values()) >= bound,
                f"{machine.assignment} is computed with {machine.pulled_versions}",
            )

    def of_value(self, worker_machine: WorkerStateMachine, value: ParameterPullReply) -> None:
        """Whether or not it is the first of its piece that comes."""
        policy, least = self.scenario.policy, worker_machine.assignment.min_version
        if not policy.has_per_item_updates:  # steps are updates
            require(
                least * policy.work_items_per_step >= policy.required_work_items(worker_machine.assignment.work_item),
                f"{worker_machine.assignment} does not keep the bound",
            )
        require(value.version >= least, f"{worker_machine.assignment} is answered with {value}")

    @staticmethod
    def of_gradient(worker_machine: Machine, ready: GradientsReady) -> None:
        assert isinstance(worker_machine, WorkerStateMachine)
        require(
            worker_machine.assignment.assignment_id == ready.assignment_id,
            f"{ready} is taken for one of {worker_machine.assignment}",
        )

    def of_end(self, machines: tuple[int, ...]) -> None:
        """Nothing is underway any more, and nothing will be."""
        coordinator, *others = (self.machines[number] for number in machines)
        assert isinstance(coordinator, CoordinatorStateMachine)
        steps = self.scenario.policy.steps if coordinator.step_limit is None else coordinator.step_limit
        is_over = (
            coordinator.ends_at_step_limit
            and coordinator.decided.floor == self.scenario.policy.work_items_per_step * steps
        )
        require(is_over, f"nobody goes on: {[coordinator, *others]}")
        for machine in others:
            if isinstance(machine, WorkerStateMachine):
                require(machine.has_ended, f"{machine.name} waits for ever")
            for slice_id, state in machine.slice_states.items() if isinstance(machine, ServerStateMachine) else ():
                if machine.name in coordinator.placement.replicas[slice_id].servers:
                    require(
                        state.version == coordinator.update_count,
                        f"{machine.name} has {state.version} updates of slice {slice_id}",
                    )
