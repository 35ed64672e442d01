"""What a server knows of its pieces: who pushed what, which updates were done, and who waits for a later version."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from motet.parallel.parameter_server.protocol.messages import (
    COORDINATOR,
    NONE_DECIDED,
    ApplyUpdate,
    BackupPush,
    BackupPushAck,
    DecidedWorkItems,
    DecisionReplayRequest,
    GradientNormReply,
    GradientNormRequest,
    GradientPush,
    GradientPushAck,
    Message,
    OutgoingMessages,
    ParameterPlacement,
    ParameterPull,
    ParameterPullReply,
    ParameterStateAssignment,
    ParameterStateTransfer,
    UpdateDecision,
)


@dataclass
class ServerSliceState:
    """A piece, as a server has it."""

    version: int = 0  # Updates that are done
    decided: DecidedWorkItems = NONE_DECIDED  # The shares in them, and those that were dropped
    pending_work_items: set[int] = field(default_factory=set)  # Shares that were pushed, and are in no update yet
    # By share: what is to be acknowledged once the second server has it.
    pushes_awaiting_backup: dict[int, frozenset[GradientPush]] = field(default_factory=dict)
    waiting_pulls: list[ParameterPull] = field(default_factory=list)
    is_initialized: bool = True  # False until its first server has told what it is


@dataclass
class ServerStateMachine:
    """One server."""

    name: str
    placement: ParameterPlacement
    slice_states: dict[int, ServerSliceState] = field(default_factory=dict)
    norm_request: GradientNormRequest | None = None
    decisions: dict[int, UpdateDecision] = field(default_factory=dict)  # By number, that some piece has not come to

    def handle(self, message: Message) -> OutgoingMessages:
        """What is to be sent and done, in this order."""
        match message:
            case GradientPush():
                return self._handle_push(message)
            case BackupPush(server, slice_id, work_item):
                if self._is_primary(slice_id):  # from a server that is lost, and has acknowledged nothing
                    return []
                slice_state = self._slice_state(slice_id)
                if not slice_state.decided.has(work_item):
                    slice_state.pending_work_items.add(work_item)
                return [(server, BackupPushAck(self.name, slice_id, work_item))]
            case BackupPushAck(server, slice_id, work_item):
                if server != self._other_replica(slice_id):
                    return []
                return self._push_acks(self._slice_state(slice_id).pushes_awaiting_backup.pop(work_item, frozenset()))
            case ParameterPull():
                return self._handle_pull(message)
            case ParameterStateTransfer() | ParameterStateAssignment():
                return self._initialize_slice(message)
            case _:
                return self._handle_from_coordinator(message)

    def _handle_from_coordinator(self, message: Message) -> OutgoingMessages:
        """From the desk."""
        match message:
            case GradientNormRequest(attempt):
                if self.norm_request is None or attempt > self.norm_request.attempt:
                    self.norm_request = message
                return self._norm_replies(self.slice_states)
            case UpdateDecision(update):
                self.decisions[update] = message
                return self._apply_decisions()
            case ParameterPlacement(epoch):
                return self._change_placement(message) if epoch > self.placement.epoch else []
            case _:
                raise AssertionError(message)

    def messages_on_connect(self, peer: str) -> OutgoingMessages:
        """What is to be said, maybe again, to somebody with whom a connection was made."""
        if peer == COORDINATOR:
            return [
                (COORDINATOR, DecisionReplayRequest(self.name, self._oldest_version())),
                *self._norm_replies(self.slice_states),
            ]
        outgoing: OutgoingMessages = []
        for slice_id, slice_state in self.slice_states.items():
            if self._other_replica(slice_id) == peer:
                outgoing += (
                    [(peer, self._state_transfer(slice_id))]
                    if self._is_primary(slice_id) and slice_state.is_initialized
                    else []
                )
                outgoing += [
                    (peer, BackupPush(self.name, slice_id, work_item))
                    for work_item in slice_state.pushes_awaiting_backup
                ]
        return outgoing

    def _oldest_version(self) -> int:
        """No piece needs a decision before; one that it has not heard of may need any."""
        if not any(self.name in replicas.servers for replicas in self.placement.replicas):
            return 0
        return min(
            (slice_state.version if slice_state.is_initialized else 0 for slice_state in self.slice_states.values()),
            default=0,
        )

    def _state_transfer(self, slice_id: int) -> ParameterStateTransfer:
        slice_state = self.slice_states[slice_id]
        return ParameterStateTransfer(
            slice_id, slice_state.version, slice_state.decided, frozenset(slice_state.pending_work_items)
        )

    def is_slice_initialized(self, slice_id: int) -> bool:
        """Whether it knows what the piece is."""
        return slice_id in self.slice_states and self.slice_states[slice_id].is_initialized

    def _slice_state(self, slice_id: int) -> ServerSliceState:
        """What another server has of it is told later; until then it is empty."""
        return self.slice_states.setdefault(slice_id, ServerSliceState(is_initialized=False))

    def _handle_push(self, push: GradientPush) -> OutgoingMessages:
        _, _, slice_id, work_item = push
        slice_state = self._slice_state(slice_id)
        if work_item in slice_state.pushes_awaiting_backup:
            slice_state.pushes_awaiting_backup[work_item] |= {push}
            return []
        if slice_state.decided.has(work_item) or work_item in slice_state.pending_work_items:
            return self._push_acks([push])
        slice_state.pending_work_items.add(work_item)
        return self._replicate_push(slice_id, work_item, frozenset({push}))

    def _replicate_push(self, slice_id: int, work_item: int, pushes: frozenset[GradientPush]) -> OutgoingMessages:
        backup = self._other_replica(slice_id)
        if backup is None:
            return self._push_acks(pushes)
        self._slice_state(slice_id).pushes_awaiting_backup[work_item] = pushes
        return [(backup, BackupPush(self.name, slice_id, work_item))]

    def _handle_pull(self, pull: ParameterPull) -> OutgoingMessages:
        slice_state = self._slice_state(pull.slice_id)
        if pull not in slice_state.waiting_pulls:
            slice_state.waiting_pulls.append(pull)
        return self._pull_replies(slice_state)

    def _pull_replies(self, slice_state: ServerSliceState) -> OutgoingMessages:
        if not slice_state.is_initialized:
            return []
        ready_pulls = [pull for pull in slice_state.waiting_pulls if pull.min_version <= slice_state.version]
        slice_state.waiting_pulls = [
            pull for pull in slice_state.waiting_pulls if pull.min_version > slice_state.version
        ]
        return [
            (pull.worker, ParameterPullReply(pull.assignment_id, pull.slice_id, slice_state.version, pull.priority))
            for pull in ready_pulls
        ]

    def _norm_replies(self, slice_ids: Iterable[int]) -> OutgoingMessages:
        """Of the sum that is to be the next update, by the first server of a piece."""
        norm_request = self.norm_request
        return [
            (COORDINATOR, GradientNormReply(norm_request.attempt, slice_id))
            for slice_id in slice_ids
            if norm_request is not None
            and self._has_all_pushes(slice_id, norm_request.update, norm_request.work_items)
            and self._is_primary(slice_id)
        ]

    def _has_all_pushes(self, slice_id: int, update: int, work_items: tuple[int, ...]) -> bool:
        slice_state = self.slice_states[slice_id]
        return (
            slice_state.is_initialized
            and slice_state.version == update
            and slice_state.pending_work_items >= set(work_items)
        )

    def _apply_decisions(self) -> OutgoingMessages:
        """Decisions in their order, as far as they are known."""
        outgoing: OutgoingMessages = []
        for slice_id, slice_state in self.slice_states.items():
            while slice_state.is_initialized and (decision := self.decisions.get(slice_state.version)) is not None:
                assert slice_state.pending_work_items >= set(decision.work_items), (self.name, slice_id, decision)
                outgoing.append((self.name, ApplyUpdate(slice_id, decision)))
                slice_state.version += 1
                slice_state.decided = slice_state.decided.with_decided(decision.work_items, decision.decided_floor)
                slice_state.pending_work_items = {
                    work_item for work_item in slice_state.pending_work_items if not slice_state.decided.has(work_item)
                }
                outgoing += self._pull_replies(slice_state)
        oldest_version = self._oldest_version()
        self.decisions = {
            update: pending_decision for update, pending_decision in self.decisions.items() if update >= oldest_version
        }
        return outgoing + self._norm_replies(self.slice_states)

    def _change_placement(self, placement: ParameterPlacement) -> OutgoingMessages:
        """Others keep the pieces now."""
        previous, self.placement = self.placement, placement
        outgoing: OutgoingMessages = []
        for slice_id, replicas in enumerate(placement.replicas):
            if self.name not in replicas.servers:
                continue
            slice_state, other = self._slice_state(slice_id), self._other_replica(slice_id)
            if other is not None and other not in previous.replicas[slice_id].servers and self._is_primary(slice_id):
                outgoing.append((other, self._state_transfer(slice_id)))
            awaiting_backup, slice_state.pushes_awaiting_backup = slice_state.pushes_awaiting_backup, {}
            for work_item, pushes in awaiting_backup.items():
                outgoing += self._replicate_push(slice_id, work_item, pushes)
        return outgoing + self._norm_replies(self.slice_states)

    def _initialize_slice(self, assigned: ParameterStateTransfer | ParameterStateAssignment) -> OutgoingMessages:
        slice_state = self._slice_state(assigned.slice_id)
        if slice_state.is_initialized:
            return []
        slice_state.is_initialized, slice_state.version, slice_state.decided = True, assigned.version, assigned.decided
        slice_state.pending_work_items |= (
            assigned.pending_work_items if isinstance(assigned, ParameterStateTransfer) else set()
        )
        slice_state.pending_work_items = {
            work_item for work_item in slice_state.pending_work_items if not slice_state.decided.has(work_item)
        }
        return self._pull_replies(slice_state) + self._apply_decisions()

    def _is_primary(self, slice_id: int) -> bool:
        return self.placement.replicas[slice_id].servers[:1] == (self.name,)

    def _other_replica(self, slice_id: int) -> str | None:
        """The second server of the piece."""
        return next((server for server in self.placement.replicas[slice_id].servers if server != self.name), None)

    def _push_acks(self, pushes: Iterable[GradientPush]) -> OutgoingMessages:
        return [(push.worker, GradientPushAck(self.name, push.assignment_id, push.slice_id)) for push in sorted(pushes)]
