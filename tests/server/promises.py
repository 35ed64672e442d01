"""What must be true of a parameter server, whatever happens."""

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
from server.numbered import Numbered
from server.system import Machine, System, demand


@dataclass
class Promises:
    system: System
    machines: Numbered[Machine | None]
    places: dict[str, int]
    within: set[int] = field(default_factory=set)
    """Workers, as numbers, that have what the bound asks for."""

    @property
    def _is_lasting(self) -> bool:
        """What is acknowledged is not lost again. Where it is, a worker that does a share again may hear that it need
        not: what it has done before is there."""
        return self.system.copies > 1 or not self.system.returns

    def of_step(self, machines: tuple[int, ...], at: int, said: tuple[Message, ...]) -> None:
        """Of what a machine is now, and has said."""
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
        desk, client = self.machines[machines[0]], self._client(machines, ack.assignment_id)
        assert isinstance(desk, CoordinatorStateMachine)
        if client is None or desk.decided.has(client.assignment.work_item):
            return
        for server in desk.placement.replicas[ack.slice_id].servers:
            keeper = self.machines[machines[self.places[server]]]
            if isinstance(keeper, ServerStateMachine) and keeper.is_slice_initialized(
                ack.slice_id
            ):  # others are about to be told
                kept, share = keeper.slice_states[ack.slice_id], client.assignment.work_item
                demand(share in kept.pending_work_items or kept.decided.has(share), f"{server} has not {ack}")

    def _are_kept(self, machines: tuple[int, ...], chosen: GradientNormRequest | UpdateDecision) -> None:
        """What makes an update is with all servers."""
        desk = self.machines[machines[0]]
        assert isinstance(desk, CoordinatorStateMachine)
        for piece, owned in enumerate(desk.placement.replicas):
            for server in owned.servers:
                keeper = self.machines[machines[self.places[server]]]
                if isinstance(keeper, ServerStateMachine) and keeper.is_slice_initialized(piece):
                    kept = keeper.slice_states[piece]
                    all_held = all(
                        share in kept.pending_work_items or kept.decided.has(share) for share in chosen.work_items
                    )
                    demand(all_held, f"{server} has not all of {chosen} of piece {piece}")

    def of_updates(self, before: Machine, now: Machine, sent: OutgoingMessages) -> None:
        """A server does one update after another, and an update is in the floor of the desk once."""
        for piece, kept in (
            now.slice_states.items()
            if isinstance(now, ServerStateMachine) and isinstance(before, ServerStateMachine)
            else ()
        ):
            done = [m.decision.update for _, m in sent if isinstance(m, ApplyUpdate) and m.slice_id == piece]
            known = before.slice_states.get(piece)
            first = known.version if known and known.is_initialized else kept.version - len(done)
            demand(done == list(range(first, kept.version)), f"{now.name} does {done} of piece {piece} from {first} on")
        if isinstance(now, CoordinatorStateMachine) and self.system.rule.has_per_item_updates:
            settled = now.decided.floor + len(now.decided.above_floor)
            demand(settled == now.update_count, f"{settled} shares are decided upon, in {now.update_count} updates")

    def _client(self, machines: tuple[int, ...], ticket: int) -> WorkerStateMachine | None:
        """Who waits to hear that its pushes are safe."""
        clients = (self.machines[number] for number in machines)
        return next(
            (c for c in clients if isinstance(c, WorkerStateMachine) and c.assignment.assignment_id == ticket), None
        )

    def _is_free(self, machines: tuple[int, ...], ticket: WorkAssignment) -> None:
        """Who is given something to do has nothing to do."""
        desk = self.machines[machines[0]]
        assert isinstance(desk, CoordinatorStateMachine)
        name = next((worker for worker, current in desk.current_assignments.items() if current == ticket), None)
        client = self.machines[machines[self.places[name]]] if name is not None else None
        if isinstance(client, WorkerStateMachine) and client.assignment.assignment_id:
            all_safe = len(client.acknowledged_slices) == len(client.placement.replicas)
            demand(all_safe or client.assignment == ticket, f"{name} is given {ticket} at its {client.assignment}")

    def _is_recent(
        self, machines: tuple[int, ...], at: int, value: ParameterPullReply, applied: list[UpdateDecision]
    ) -> None:
        """A server sends a worker no value that lacks what its share needs. `applied`: in the same breath."""
        keeper, client = self.machines[machines[at]], self._client(machines, value.assignment_id)
        if client is None:
            return
        assert isinstance(keeper, ServerStateMachine)
        needs, settled = (
            self.system.rule.required_work_items(client.assignment.work_item),
            keeper.slice_states[value.slice_id].decided,
        )
        later = [share for decision in applied if decision.update >= value.version for share in decision.work_items]
        demand(settled.floor >= needs <= min(later, default=needs), f"{client.assignment} is answered with {value}")

    def _has_recent(self, machine: Machine | None) -> None:
        if isinstance(machine, WorkerStateMachine) and machine.ready_slices:
            bound = machine.assignment.min_version
            demand(
                min(machine.pulled_versions.values()) >= bound,
                f"{machine.assignment} is computed with {machine.pulled_versions}",
            )

    def of_value(self, client: WorkerStateMachine, value: ParameterPullReply) -> None:
        """Whether or not it is the first of its piece that comes."""
        rule, least = self.system.rule, client.assignment.min_version
        if not rule.has_per_item_updates:  # steps are updates
            demand(
                least * rule.work_items_per_step >= rule.required_work_items(client.assignment.work_item),
                f"{client.assignment} does not keep the bound",
            )
        demand(value.version >= least, f"{client.assignment} is answered with {value}")

    @staticmethod
    def of_gradient(client: Machine, ready: GradientsReady) -> None:
        assert isinstance(client, WorkerStateMachine)
        demand(
            client.assignment.assignment_id == ready.assignment_id, f"{ready} is taken for one of {client.assignment}"
        )

    def of_end(self, machines: tuple[int, ...]) -> None:
        """Nothing is underway any more, and nothing will be."""
        desk, *others = (self.machines[number] for number in machines)
        assert isinstance(desk, CoordinatorStateMachine)
        steps = self.system.rule.steps if desk.step_limit is None else desk.step_limit
        is_over = desk.ends_at_step_limit and desk.decided.floor == self.system.rule.work_items_per_step * steps
        demand(is_over, f"nobody goes on: {[desk, *others]}")
        for machine in others:
            if isinstance(machine, WorkerStateMachine):
                demand(machine.has_ended, f"{machine.name} waits for ever")
            for piece, kept in machine.slice_states.items() if isinstance(machine, ServerStateMachine) else ():
                if machine.name in desk.placement.replicas[piece].servers:
                    demand(
                        kept.version == desk.update_count, f"{machine.name} has {kept.version} updates of piece {piece}"
                    )
