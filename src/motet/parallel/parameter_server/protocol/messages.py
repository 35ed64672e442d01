"""The messages of the parameter server's protocol, without tensors and sockets.

The work of a step is cut into work items, numbered on over the steps. A worker asks the coordinator for one, pulls the
parameter slices from their servers, and pushes its gradient of each. A server keeps a push until the coordinator
decides which work items make an update, and in which order updates come. So all servers apply the same updates, and a
second server with the same pushes and decisions has the same bits. Messages are idempotent: slice and work item
identify a push, so a duplicate changes nothing.

    worker                              coordinator                      servers
      WorkerJoined, WorkItemCompleted  ---->
      WorkAssignment  <---------------------
      ParameterPull  ------------------------------------------------------>
      ParameterPullReply  <-------------------------------------------------  once the version is recent enough
      GradientPush  ------------------------------------------------------->  BackupPush, BackupPushAck with 2 copies
      GradientPushAck  <----------------------------------------------------
                                            GradientNormRequest  ---------->  (the work items of the update)
                                            GradientNormReply  <------------
                                            UpdateDecision  --------------->
"""

from functools import lru_cache
from typing import NamedTuple

COORDINATOR = "coordinator"
NO_MORE_WORK = -1  # The work item of the last assignment


class ConsistencyPolicy(NamedTuple):
    """Which work items make an update, and how old the parameters of a work item may be."""

    work_items_per_step: int
    steps: int
    quorum: int  # Work items that complete a step; later ones are dropped. Ignored with per-item updates.
    max_staleness: int | None  # The parameters of step t have all steps before t - max_staleness; None: no bound
    has_per_item_updates: bool = False

    @property
    def drops_late_items(self) -> bool:
        return not self.has_per_item_updates and self.quorum < self.work_items_per_step

    @property
    def updates_per_step(self) -> int:
        return self.work_items_per_step if self.has_per_item_updates else 1

    def step_of(self, work_item: int) -> int:
        return work_item // self.work_items_per_step

    def required_work_items(self, work_item: int) -> int:
        """How many work items of the run the parameters of this one must have, counted from the first."""
        if self.max_staleness is None:
            return 0
        return max(0, self.step_of(work_item) - self.max_staleness) * self.work_items_per_step


class WorkItemReport(NamedTuple):  # Sums over the rows of a work item
    loss_sum: float = 0.0
    targets: float = 0.0
    tokens: float = 0.0
    squared_norm: float = 0.0  # Of its gradient, if the work item makes an update; else 0
    oldest_version: float = 0.0  # Of its parameters


class UpdateScalars(NamedTuple):
    """How servers apply an update; one that is not finite is skipped."""

    learning_rate: float = 0.0
    gradient_factor: float = 0.0
    is_applied: bool = False


class SlicePrimaryAndBackups(NamedTuple):
    """The servers of a slice. The first one, the primary, answers pulls, accepts pushes and forwards them."""

    servers: tuple[str, ...]
    incarnation: int = 0  # Grows when all servers of the slice were lost, with their pushes


class ParameterPlacement(NamedTuple):
    """The servers of every slice. A later epoch replaces an earlier one."""

    epoch: int
    replicas: tuple[SlicePrimaryAndBackups, ...]


class WorkerJoined(NamedTuple):
    worker: str


class WorkAssignment(NamedTuple):
    assignment_id: int
    work_item: int
    min_version: int  # Updates that its parameters must have


NO_ASSIGNMENT = WorkAssignment(0, NO_MORE_WORK, 0)


class EvictionNotice(NamedTuple):
    name: str  # Others have taken over the work of this process


class WorkItemCompleted(NamedTuple):
    worker: str
    work_item: int
    epoch: int  # Of the placement in which all pushes were acknowledged
    report: WorkItemReport = WorkItemReport()


class ParameterPull(NamedTuple):
    worker: str
    assignment_id: int
    slice_id: int
    min_version: int
    priority: int = 0  # The lowest is sent first


class ParameterPullReply(NamedTuple):
    assignment_id: int
    slice_id: int
    version: int
    priority: int = 0


class GradientPush(NamedTuple):
    worker: str
    assignment_id: int
    slice_id: int
    work_item: int


class GradientPushAck(NamedTuple):
    server: str
    assignment_id: int
    slice_id: int


class BackupPush(NamedTuple):
    server: str
    slice_id: int
    work_item: int


class BackupPushAck(NamedTuple):
    server: str
    slice_id: int
    work_item: int


class DecidedWorkItems(NamedTuple):
    """Work items that an update has, or that were dropped: all below the floor, and some above."""

    floor: int = 0
    above_floor: frozenset[int] = frozenset()

    def has(self, work_item: int) -> bool:
        return work_item < self.floor or work_item in self.above_floor

    @lru_cache(maxsize=64)  # noqa: B019  # keyed by value: all slices of a server share the result
    def with_decided(self, work_items: tuple[int, ...], floor: int) -> "DecidedWorkItems":
        return DecidedWorkItems(floor, frozenset(item for item in {*self.above_floor, *work_items} if item >= floor))


class ParameterStateTransfer(NamedTuple):  # To the new second server of a slice
    slice_id: int
    version: int
    decided: DecidedWorkItems
    pending_work_items: frozenset[int]


class ServerTakeoverOffer(NamedTuple):
    """A new server offers to replace a lost one, with its snapshot."""

    server: str
    replaced_server: str
    snapshot_versions: tuple[tuple[int, int], ...] = ()  # (slice_id, version)


class DecisionReplayRequest(NamedTuple):
    server: str
    from_update: int  # The first whose decision the server may have missed


class SliceStartVersion(NamedTuple):
    """The version at which a server starts a slice: of a checkpoint, or a snapshot whose last updates are lost."""

    slice_id: int
    version: int
    decided: DecidedWorkItems


class GradientNormRequest(NamedTuple):
    attempt: int  # Grows also when the same update is tried again
    update: int
    work_items: tuple[int, ...]


class GradientNormReply(NamedTuple):
    attempt: int
    slice_id: int
    squared_norm: float = 0.0


class UpdateDecision(NamedTuple):
    update: int
    work_items: tuple[int, ...]
    decided_floor: int  # All work items below are decided
    scalars: UpdateScalars = UpdateScalars()


class ServerShutdown(NamedTuple):
    update_count: int


class ParameterStateRequest(NamedTuple):
    slice_id: int


class ParameterStateReply(NamedTuple):
    slice_id: int
    version: int


class ServerTrafficReport(NamedTuple):
    sent_bytes: int
    received_bytes: int
    queued_bytes: int


class ServerAddress(NamedTuple):
    server: str
    host: str
    port: int
    is_initialized: bool  # Whether it has the state of all its slices


class ServerAddressBook(NamedTuple):
    entries: tuple[tuple[str, str, int], ...]  # (name, host, port)


class ConnectionRejected(NamedTuple):
    reason: str  # The other side of the connection has another job, or other data


class ProcessLost(NamedTuple):
    name: str


class ParametersReady(NamedTuple):
    assignment: WorkAssignment  # Whose parameters have all arrived


class GradientsReady(NamedTuple):
    """Tells a worker that gradients are ready; they stay unchanged until its next assignment."""

    assignment_id: int
    slice_ids: tuple[int, ...]
    report: WorkItemReport = WorkItemReport()


class ApplyUpdate(NamedTuple):
    """Tells a server to update one slice with the gradients of these work items, in their order."""

    slice_id: int
    decision: UpdateDecision


SentMessage = (
    WorkerJoined | WorkAssignment | EvictionNotice | WorkItemCompleted | ParameterPull | ParameterPullReply
    | GradientPush | GradientPushAck | BackupPush | BackupPushAck | ParameterStateTransfer | ServerTakeoverOffer
    | DecisionReplayRequest | SliceStartVersion | GradientNormRequest | GradientNormReply | UpdateDecision
    | ParameterPlacement | ServerShutdown | ParameterStateRequest | ParameterStateReply | ServerTrafficReport
    | ServerAddress | ServerAddressBook
)  # fmt: skip
LocalMessage = ConnectionRejected | ProcessLost | ParametersReady | GradientsReady | ApplyUpdate  # Inside one process
Message = SentMessage | LocalMessage
OutgoingMessages = list[tuple[str, Message]]  # (recipient, message), in order
