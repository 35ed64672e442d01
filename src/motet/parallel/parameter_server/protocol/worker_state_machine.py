"""What a worker knows of its share: what it has pulled, and which of its pushes are safe."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from motet.parallel.parameter_server.protocol.messages import (
    COORDINATOR,
    NO_ASSIGNMENT,
    NO_MORE_WORK,
    GradientPush,
    GradientPushAck,
    GradientsReady,
    Message,
    OpaqueScalars,
    OutgoingMessages,
    ParameterPlacement,
    ParameterPull,
    ParameterPullReply,
    ParametersReady,
    WorkAssignment,
    WorkerJoined,
    WorkItemCompleted,
)


@dataclass
class WorkerStateMachine:
    """One worker. With a ticket it pulls all pieces, computes, and pushes each as its gradient is there."""

    name: str
    placement: ParameterPlacement
    assignment: WorkAssignment = NO_ASSIGNMENT
    pulled_versions: dict[int, int] = field(default_factory=dict)  # Piece -> version
    ready_slices: set[int] = field(default_factory=set)  # Pieces whose gradient is there
    acknowledged_slices: set[int] = field(default_factory=set)  # Pieces whose gradient is known to be kept
    report: OpaqueScalars = ()
    # Of the values of pieces, once it is known which are needed first.
    priorities: dict[int, int] = field(default_factory=dict)

    def handle(self, message: Message) -> OutgoingMessages:
        match message:
            case WorkAssignment(new_assignment_id):
                return self._start_assignment(message) if new_assignment_id > self.assignment.assignment_id else []
            case ParameterPullReply(assignment_id, slice_id, version):
                if assignment_id != self.assignment.assignment_id or slice_id in self.pulled_versions:
                    return []
                self.pulled_versions[slice_id] = version
                return (
                    [(self.name, ParametersReady(self.assignment))]
                    if len(self.pulled_versions) == self._slice_count
                    else []
                )
            case GradientsReady(assignment_id, slice_ids, report):
                self.report = report
                self.ready_slices.update(slice_ids)
                return self._push_messages(slice_ids)
            case GradientPushAck(server, assignment_id, slice_id):
                if (
                    assignment_id != self.assignment.assignment_id
                    or slice_id in self.acknowledged_slices
                    or server not in self.placement.replicas[slice_id].servers
                ):
                    return []
                self.acknowledged_slices.add(slice_id)
                return self._report_if_complete()
            case ParameterPlacement(epoch):
                return self._change_placement(message) if epoch > self.placement.epoch else []
            case _:
                raise AssertionError(message)

    def messages_on_connect(self, peer: str) -> OutgoingMessages:
        """What is to be said, maybe again, to somebody with whom a connection was made."""
        if peer == COORDINATOR:
            return [(COORDINATOR, WorkerJoined(self.name))] + (
                self._report_if_complete() if self.assignment.assignment_id else []
            )
        if self.assignment.work_item == NO_MORE_WORK:
            return []
        primary_slices = [
            slice_id for slice_id, replicas in enumerate(self.placement.replicas) if replicas.servers[:1] == (peer,)
        ]
        return self._pull_messages(set(primary_slices) - self.pulled_versions.keys()) + self._push_messages(
            set(primary_slices) & self.ready_slices - self.acknowledged_slices
        )

    @property
    def has_ended(self) -> bool:
        return self.assignment.assignment_id > 0 and self.assignment.work_item == NO_MORE_WORK

    @property
    def _slice_count(self) -> int:
        return len(self.placement.replicas)

    def _start_assignment(self, assignment: WorkAssignment) -> OutgoingMessages:
        self.assignment, self.pulled_versions, self.ready_slices, self.acknowledged_slices, self.report = (
            assignment,
            {},
            set(),
            set(),
            (),
        )
        return [] if assignment.work_item == NO_MORE_WORK else self._pull_messages(range(self._slice_count))

    def _report_if_complete(self) -> OutgoingMessages:
        done = WorkItemCompleted(self.name, self.assignment.work_item, self.placement.epoch, self.report)
        return [(COORDINATOR, done)] if len(self.acknowledged_slices) == self._slice_count else []

    def _pull_messages(self, slice_ids: Iterable[int]) -> OutgoingMessages:
        assignment_id, _, min_version = self.assignment
        return [
            (to, ParameterPull(self.name, assignment_id, slice_id, min_version, self.priorities.get(slice_id, 0)))
            for slice_id, to in self._primary_servers(slice_ids)
        ]

    def _push_messages(self, slice_ids: Iterable[int]) -> OutgoingMessages:
        assignment_id, work_item, _ = self.assignment
        return [
            (to, GradientPush(self.name, assignment_id, slice_id, work_item))
            for slice_id, to in self._primary_servers(slice_ids)
        ]

    def _primary_servers(self, slice_ids: Iterable[int]) -> list[tuple[int, str]]:
        """Of those that somebody keeps; the rest waits for a later view."""
        return [
            (slice_id, replicas[0]) for slice_id in slice_ids if (replicas := self.placement.replicas[slice_id].servers)
        ]

    def _change_placement(self, placement: ParameterPlacement) -> OutgoingMessages:
        """What was asked of servers that are lost is asked again of those that have their place."""
        previous, self.placement = self.placement, placement
        if self.assignment.work_item == NO_MORE_WORK:
            return []
        pairs = list(enumerate(zip(previous.replicas, placement.replicas, strict=True)))
        self.acknowledged_slices -= {slice_id for slice_id, (old, new) in pairs if old.incarnation != new.incarnation}
        moved_slices = [piece for piece, (old, new) in pairs if old.servers[:1] != new.servers[:1]]
        pulls = self._pull_messages(piece for piece in moved_slices if piece not in self.pulled_versions)
        pushes = self._push_messages(
            piece for piece in moved_slices if piece in self.ready_slices - self.acknowledged_slices
        )
        return pulls + pushes + self._report_if_complete()
