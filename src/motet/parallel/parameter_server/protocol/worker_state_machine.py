"""The state of a worker: what it has pulled for its work item, and which of its pushes are acknowledged."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from motet.parallel.parameter_server.protocol import messages
from motet.parallel.parameter_server.protocol.messages import COORDINATOR, NO_MORE_WORK, Message, OutgoingMessages


@dataclass
class WorkerStateMachine:
    """The state of one worker. It pulls all slices, computes, and pushes each gradient when it is ready."""

    name: str
    placement: messages.ParameterPlacement
    assignment: messages.WorkAssignment = messages.NO_ASSIGNMENT
    pulled_versions: dict[int, int] = field(default_factory=dict)  # By slice
    ready_slices: set[int] = field(default_factory=set)  # Their gradient is computed
    acknowledged_slices: set[int] = field(default_factory=set)  # Their servers have the gradient
    report: messages.WorkItemReport = field(default_factory=messages.WorkItemReport)
    priorities: dict[int, int] = field(default_factory=dict)  # By slice: the lower, the sooner forward needs it

    def handle(self, message: Message) -> OutgoingMessages:
        match message:
            case messages.WorkAssignment(new_assignment_id):
                return self._start_assignment(message) if new_assignment_id > self.assignment.assignment_id else []
            case messages.ParameterPullReply(assignment_id, slice_id, version):
                if assignment_id != self.assignment.assignment_id or slice_id in self.pulled_versions:
                    return []
                self.pulled_versions[slice_id] = version
                has_all = len(self.pulled_versions) == len(self.placement.replicas)
                return [(self.name, messages.ParametersReady(self.assignment))] if has_all else []
            case messages.GradientsReady(_, slice_ids, report):
                self.report = report
                self.ready_slices.update(slice_ids)
                return self._push_messages(slice_ids)
            case messages.GradientPushAck(server, assignment_id, slice_id):
                is_current = assignment_id == self.assignment.assignment_id
                if not is_current or slice_id in self.acknowledged_slices or server not in self._servers_of(slice_id):
                    return []
                self.acknowledged_slices.add(slice_id)
                return self._report_if_complete()
            case messages.ParameterPlacement(epoch):
                return self._change_placement(message) if epoch > self.placement.epoch else []
            case _:
                raise AssertionError(message)

    def messages_on_connect(self, peer: str) -> OutgoingMessages:
        if peer == COORDINATOR:
            completed = self._report_if_complete() if self.assignment.assignment_id > 0 else []
            return [(COORDINATOR, messages.WorkerJoined(self.name)), *completed]
        return self._outstanding({i for i, r in enumerate(self.placement.replicas) if r.servers[:1] == (peer,)})

    def _servers_of(self, slice_id: int) -> tuple[str, ...]:
        return self.placement.replicas[slice_id].servers

    def _start_assignment(self, assignment: messages.WorkAssignment) -> OutgoingMessages:
        self.assignment, self.report = assignment, messages.WorkItemReport()
        self.pulled_versions, self.ready_slices, self.acknowledged_slices = {}, set(), set()
        return [] if assignment.work_item == NO_MORE_WORK else self._pull_messages(range(len(self.placement.replicas)))

    def _report_if_complete(self) -> OutgoingMessages:
        done = messages.WorkItemCompleted(self.name, self.assignment.work_item, self.placement.epoch, self.report)
        return [(COORDINATOR, done)] if len(self.acknowledged_slices) == len(self.placement.replicas) else []

    def _outstanding(self, slice_ids: set[int]) -> OutgoingMessages:
        if self.assignment.work_item == NO_MORE_WORK:
            return []
        pulls = self._pull_messages(sorted(slice_ids - self.pulled_versions.keys()))
        return pulls + self._push_messages(sorted(slice_ids & self.ready_slices - self.acknowledged_slices))

    def _pull_messages(self, slice_ids: Iterable[int]) -> OutgoingMessages:
        assignment_id, _, min_version = self.assignment
        return [
            (to, messages.ParameterPull(self.name, assignment_id, i, min_version, self.priorities.get(i, 0)))
            for i, to in self._primary_servers(slice_ids)
        ]

    def _push_messages(self, slice_ids: Iterable[int]) -> OutgoingMessages:
        assignment_id, work_item, _ = self.assignment
        primaries = self._primary_servers(slice_ids)
        return [(to, messages.GradientPush(self.name, assignment_id, i, work_item)) for i, to in primaries]

    def _primary_servers(self, slice_ids: Iterable[int]) -> list[tuple[int, str]]:
        """(slice, primary); a slice without servers waits for a later placement."""
        return [(i, servers[0]) for i in slice_ids if (servers := self._servers_of(i))]

    def _change_placement(self, placement: messages.ParameterPlacement) -> OutgoingMessages:
        previous, self.placement = self.placement, placement
        if self.assignment.work_item == NO_MORE_WORK:
            return []
        pairs = list(enumerate(zip(previous.replicas, placement.replicas, strict=True)))
        self.acknowledged_slices -= {slice_id for slice_id, (old, new) in pairs if old.incarnation != new.incarnation}
        moved_slices = {slice_id for slice_id, (old, new) in pairs if old.servers[:1] != new.servers[:1]}
        return self._outstanding(moved_slices) + self._report_if_complete()
