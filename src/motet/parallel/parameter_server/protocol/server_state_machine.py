"""The state of a server: which pushes each slice has, which updates were applied, and which pulls wait for one."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from motet.parallel.parameter_server.protocol import messages
from motet.parallel.parameter_server.protocol.messages import COORDINATOR, GradientPush, Message, OutgoingMessages


@dataclass
class ServerSliceState:
    version: int = 0  # Updates that were applied
    decided: messages.DecidedWorkItems = field(default_factory=messages.DecidedWorkItems)
    pending_work_items: set[int] = field(default_factory=set)  # Pushed, and in no update yet
    # By work item: pushes to acknowledge once the second server has the gradient.
    pushes_awaiting_backup: dict[int, frozenset[GradientPush]] = field(default_factory=dict)
    waiting_pulls: list[messages.ParameterPull] = field(default_factory=list)
    is_initialized: bool = True  # False until the coordinator or the primary sends its state

    def drop_decided(self) -> None:
        self.pending_work_items = {item for item in self.pending_work_items if not self.decided.has(item)}


@dataclass
class ServerStateMachine:
    """The state of one server; each message changes it and yields the messages to send."""

    name: str
    placement: messages.ParameterPlacement
    slice_states: dict[int, ServerSliceState] = field(default_factory=dict)
    norm_request: messages.GradientNormRequest | None = None
    decisions: dict[int, messages.UpdateDecision] = field(default_factory=dict)  # By update that a slice still needs

    def handle(self, message: Message) -> OutgoingMessages:
        """The messages to send and the updates to apply, in this order."""
        match message:
            case GradientPush():
                return self._handle_push(message)
            case messages.BackupPush(server, slice_id, work_item):
                if self._is_primary(slice_id):  # from a server that is lost, and has acknowledged nothing
                    return []
                state = self.slice_state(slice_id)
                if not state.decided.has(work_item):
                    state.pending_work_items.add(work_item)
                return [(server, messages.BackupPushAck(self.name, slice_id, work_item))]
            case messages.BackupPushAck(server, slice_id, work_item):
                is_current = server == self._other_replica(slice_id)
                waiting = self.slice_state(slice_id).pushes_awaiting_backup if is_current else {}
                return self._push_acks(waiting.pop(work_item, frozenset()))
            case messages.ParameterPull():
                return self._handle_pull(message)
            case messages.ParameterStateTransfer() | messages.SliceStartVersion():
                return self._start_slice(message)
            case _:
                return self._handle_from_coordinator(message)

    def _handle_from_coordinator(self, message: Message) -> OutgoingMessages:
        match message:
            case messages.GradientNormRequest(attempt):
                if self.norm_request is None or attempt > self.norm_request.attempt:
                    self.norm_request = message
                return self._norm_replies()
            case messages.UpdateDecision(update):
                self.decisions[update] = message
                return self._apply_decisions()
            case messages.ParameterPlacement(epoch):
                return self._change_placement(message) if epoch > self.placement.epoch else []
            case _:
                raise AssertionError(message)

    def messages_on_connect(self, peer: str) -> OutgoingMessages:
        """Messages that the peer may have missed while the connection was lost."""
        if peer == COORDINATOR:
            request = messages.DecisionReplayRequest(self.name, self._oldest_version())
            return [(COORDINATOR, request), *self._norm_replies()]
        outgoing: OutgoingMessages = []
        for slice_id, state in self.slice_states.items():
            if self._other_replica(slice_id) == peer:
                if self._is_primary(slice_id) and state.is_initialized:
                    outgoing.append((peer, self._state_transfer(slice_id)))
                outgoing += [(peer, messages.BackupPush(self.name, slice_id, i)) for i in state.pushes_awaiting_backup]
        return outgoing

    def _oldest_version(self) -> int:
        """No slice needs an earlier decision; a slice without a state may need any."""
        if not any(self.name in replicas.servers for replicas in self.placement.replicas):
            return 0
        return min((s.version if s.is_initialized else 0 for s in self.slice_states.values()), default=0)

    def _state_transfer(self, slice_id: int) -> messages.ParameterStateTransfer:
        s = self.slice_states[slice_id]
        return messages.ParameterStateTransfer(slice_id, s.version, s.decided, frozenset(s.pending_work_items))

    def slice_state(self, slice_id: int) -> ServerSliceState:
        return self.slice_states.setdefault(slice_id, ServerSliceState(is_initialized=False))

    def _handle_push(self, push: GradientPush) -> OutgoingMessages:
        _, _, slice_id, work_item = push
        state = self.slice_state(slice_id)
        if work_item in state.pushes_awaiting_backup:
            state.pushes_awaiting_backup[work_item] |= {push}
            return []
        if state.decided.has(work_item) or work_item in state.pending_work_items:
            return self._push_acks([push])
        state.pending_work_items.add(work_item)
        return self._replicate_push(slice_id, work_item, frozenset({push}))

    def _replicate_push(self, slice_id: int, work_item: int, pushes: frozenset[GradientPush]) -> OutgoingMessages:
        if (backup := self._other_replica(slice_id)) is None:
            return self._push_acks(pushes)
        self.slice_state(slice_id).pushes_awaiting_backup[work_item] = pushes
        return [(backup, messages.BackupPush(self.name, slice_id, work_item))]

    def _handle_pull(self, pull: messages.ParameterPull) -> OutgoingMessages:
        state = self.slice_state(pull.slice_id)
        if pull not in state.waiting_pulls:
            state.waiting_pulls.append(pull)
        return self._pull_replies(state)

    def _pull_replies(self, state: ServerSliceState) -> OutgoingMessages:
        if not state.is_initialized:
            return []
        pulls, version, reply = state.waiting_pulls, state.version, messages.ParameterPullReply
        state.waiting_pulls = [pull for pull in pulls if pull.min_version > version]
        ready = [pull for pull in pulls if pull.min_version <= version]
        return [(p.worker, reply(p.assignment_id, p.slice_id, version, p.priority)) for p in ready]

    def _norm_replies(self) -> OutgoingMessages:
        if self.norm_request is None:
            return []
        attempt, update, work_items = self.norm_request
        return [
            (COORDINATOR, messages.GradientNormReply(attempt, slice_id))
            for slice_id, s in self.slice_states.items()
            if s.is_initialized and s.version == update and self._is_primary(slice_id)
            if s.pending_work_items >= set(work_items)
        ]

    def _apply_decisions(self) -> OutgoingMessages:
        outgoing: OutgoingMessages = []
        for slice_id, state in self.slice_states.items():
            while state.is_initialized and (decision := self.decisions.get(state.version)) is not None:
                assert state.pending_work_items >= set(decision.work_items), (self.name, slice_id, decision)
                outgoing.append((self.name, messages.ApplyUpdate(slice_id, decision)))
                state.version += 1
                state.decided = state.decided.with_decided(decision.work_items, decision.decided_floor)
                state.drop_decided()
                outgoing += self._pull_replies(state)
        oldest = self._oldest_version()
        self.decisions = {update: decision for update, decision in self.decisions.items() if update >= oldest}
        return outgoing + self._norm_replies()

    def _change_placement(self, placement: messages.ParameterPlacement) -> OutgoingMessages:
        previous, self.placement = self.placement, placement
        outgoing: OutgoingMessages = []
        for slice_id, replicas in enumerate(placement.replicas):
            if self.name not in replicas.servers:
                continue
            state, other = self.slice_state(slice_id), self._other_replica(slice_id)
            if other is not None and other not in previous.replicas[slice_id].servers and self._is_primary(slice_id):
                outgoing.append((other, self._state_transfer(slice_id)))
            awaiting_backup, state.pushes_awaiting_backup = state.pushes_awaiting_backup, {}
            for work_item, pushes in awaiting_backup.items():
                outgoing += self._replicate_push(slice_id, work_item, pushes)
        return outgoing + self._norm_replies()

    def _start_slice(self, start: messages.ParameterStateTransfer | messages.SliceStartVersion) -> OutgoingMessages:
        state = self.slice_state(start.slice_id)
        if state.is_initialized:
            return []
        state.is_initialized, state.version, state.decided = True, start.version, start.decided
        if isinstance(start, messages.ParameterStateTransfer):
            state.pending_work_items |= start.pending_work_items
        state.drop_decided()
        return self._pull_replies(state) + self._apply_decisions()

    def _is_primary(self, slice_id: int) -> bool:
        return self.placement.replicas[slice_id].servers[:1] == (self.name,)

    def _other_replica(self, slice_id: int) -> str | None:
        return next((server for server in self.placement.replicas[slice_id].servers if server != self.name), None)

    def _push_acks(self, pushes: Iterable[GradientPush]) -> OutgoingMessages:
        return [(p.worker, messages.GradientPushAck(self.name, p.assignment_id, p.slice_id)) for p in sorted(pushes)]
