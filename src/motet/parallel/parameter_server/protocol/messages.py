"""The protocol of the parameter server: what its three state machines say to each other. Neither tensors nor sockets.

The work of a step is cut into shares, numbered on over the steps. A worker asks the desk for one, pulls the pieces of
the parameters from their servers, and pushes what its gradient is of each. A server keeps a push until the desk decides
which shares make an update, and in what order updates come; so all servers do the same updates, and a second server
that has the same pushes and decisions has the same bits. Whatever arrives twice does nothing the second time: a push is
known by its piece and share.

    worker                   desk                      servers
      Joined, Done  ---------->
      Ticket  <----------------                           (a share)
      Pull  ------------------------------------------->
      Value  <------------------------------------------  once its version is recent enough
      Push  ------------------------------------------->  Copy, Copied where a piece has a second server
      Ack  <--------------------------------------------
                                 Close  ---------------->  (which shares a step has)
                                 Norm  <-----------------
                                 Decide  --------------->  (the update)
"""

from functools import lru_cache
from typing import NamedTuple

COORDINATOR = "desk"
NO_MORE_WORK = -1  # The share of a ticket that says that there is nothing more to do
OpaqueScalars = tuple[float, ...]  # What the protocol only carries


class ConsistencyPolicy(NamedTuple):
    """What a mode asks for."""

    work_items_per_step: int  # That a step is cut into
    steps: int
    quorum: int  # So many shares close a step; what comes later is dropped. With `alone` each is an update of its own.
    # A share of step t is computed with all of the steps before t - ahead; None: with whatever is there.
    max_staleness: int | None
    has_per_item_updates: bool = False

    def step_of(self, work_item: int) -> int:
        return work_item // self.work_items_per_step

    def required_work_items(self, work_item: int) -> int:
        """So many shares, the first of the run, must be in the parameters that this one is computed with."""
        return (
            0
            if self.max_staleness is None
            else max(0, self.step_of(work_item) - self.max_staleness) * self.work_items_per_step
        )


class ParameterReplicas(NamedTuple):
    """Who keeps a piece. The first answers pulls and takes pushes, and copies these to the second."""

    servers: tuple[str, ...]
    incarnation: int = 0  # Grows when all that kept it were lost, and what they had been pushed


class ParameterPlacement(NamedTuple):
    """Who keeps what, by piece. The later epoch holds."""

    epoch: int
    replicas: tuple[ParameterReplicas, ...]


# --- between the desk and workers ------------------------------------------------------------------


class WorkerJoined(NamedTuple):
    worker: str


class WorkAssignment(NamedTuple):
    assignment_id: int
    work_item: int
    min_version: int  # The updates that its parameters must have


NO_ASSIGNMENT = WorkAssignment(0, NO_MORE_WORK, 0)


class EvictionNotice(NamedTuple):
    """To a process that was given up, and is there after all: others do what it had to do."""

    name: str


class WorkItemCompleted(NamedTuple):
    worker: str
    work_item: int
    epoch: int  # Of the view by which all pushes were acknowledged
    report: OpaqueScalars = ()


# --- between workers and servers -------------------------------------------------------------------


class ParameterPull(NamedTuple):
    worker: str
    assignment_id: int
    slice_id: int
    min_version: int  # The updates that it must have
    priority: int = 0  # What has less is sent sooner


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


# --- between servers -------------------------------------------------------------------------------


class BackupPush(NamedTuple):
    server: str
    slice_id: int
    work_item: int


class BackupPushAck(NamedTuple):
    server: str
    slice_id: int
    work_item: int


class DecidedWorkItems(NamedTuple):
    """The shares that have been decided upon: all below the floor, and these."""

    floor: int = 0
    above_floor: frozenset[int] = frozenset()

    def has(self, work_item: int) -> bool:
        return work_item < self.floor or work_item in self.above_floor

    @lru_cache(maxsize=64)  # noqa: B019  # of values, not of objects: all pieces of a server come to the same
    def with_decided(self, work_items: tuple[int, ...], floor: int) -> "DecidedWorkItems":
        return DecidedWorkItems(
            floor, frozenset(work_item for work_item in {*self.above_floor, *work_items} if work_item >= floor)
        )


NONE_DECIDED = DecidedWorkItems()


class ParameterStateTransfer(NamedTuple):
    """All that is known of a piece, for a server that is to be its second."""

    slice_id: int
    version: int
    decided: DecidedWorkItems
    pending_work_items: frozenset[int]


# --- between the desk and servers ------------------------------------------------------------------


class ServerTakeoverOffer(NamedTuple):
    """A server that is there now, with what it has from a snapshot."""

    server: str
    replaced_server: str  # Of this one, which does not answer any more
    snapshot_versions: tuple[tuple[int, int], ...] = ()  # (piece, version)


class DecisionReplayRequest(NamedTuple):
    """To the desk: what a server that is connected, or connected again, has not heard."""

    server: str
    from_update: int  # It has all decisions before


class ParameterStateAssignment(NamedTuple):
    """Where a piece stands whose updates until then are lost, but for what a snapshot had."""

    slice_id: int
    version: int
    decided: DecidedWorkItems


class GradientNormRequest(NamedTuple):
    attempt: int  # Grows, also when the same update is tried again
    update: int
    work_items: tuple[int, ...]


class GradientNormReply(NamedTuple):
    attempt: int
    slice_id: int
    squared_norm: float = 0.0


class UpdateDecision(NamedTuple):
    update: int
    work_items: tuple[int, ...]
    decided_floor: int  # All shares below have been decided upon
    scalars: OpaqueScalars = ()


class ServerShutdown(NamedTuple):
    """To a server: the run has ended."""

    update_count: int


class ParameterStateRequest(NamedTuple):
    """To a server: what it has of a piece is asked for."""

    slice_id: int


class ParameterStateReply(NamedTuple):
    """What a server has of a piece."""

    slice_id: int
    version: int


class ServerTrafficReport(NamedTuple):
    """To the desk: what a server has sent and received so far, and what has not left yet."""

    sent_bytes: int
    received_bytes: int
    queued_bytes: int


# --- addresses -------------------------------------------------------------------------------------


class ServerAddress(NamedTuple):
    """To the desk: where a server can be reached."""

    server: str
    host: str
    port: int
    is_initialized: bool  # It knows what its pieces are


class ServerAddressBook(NamedTuple):
    """From the desk: where servers can be reached."""

    entries: tuple[tuple[str, str, int], ...]


# --- of one process --------------------------------------------------------------------------------


class ConnectionRejected(NamedTuple):
    """Of a connection: the other side has another job, or other data."""

    reason: str


class ProcessLost(NamedTuple):
    """To the desk: a process does not answer."""

    name: str


class ParametersReady(NamedTuple):
    """To a worker by itself: the parameters are there."""

    assignment: WorkAssignment


class GradientsReady(NamedTuple):
    """To a worker by itself: the gradients of these pieces are there, and stay until it has another ticket."""

    assignment_id: int
    slice_ids: tuple[int, ...]
    report: OpaqueScalars = ()


class ApplyUpdate(NamedTuple):
    """To a server by itself: one update of one piece, in the order of its shares."""

    slice_id: int
    decision: UpdateDecision


Message = (
    WorkerJoined | WorkAssignment | EvictionNotice | WorkItemCompleted | ParameterPull | ParameterPullReply | GradientPush | GradientPushAck | BackupPush | BackupPushAck | ParameterStateTransfer | ServerTakeoverOffer | DecisionReplayRequest | ParameterStateAssignment
    | GradientNormRequest | GradientNormReply | UpdateDecision | ParameterPlacement | ServerShutdown | ParameterStateRequest | ParameterStateReply | ServerTrafficReport | ServerAddress | ServerAddressBook | ConnectionRejected | ProcessLost | ParametersReady | GradientsReady
    | ApplyUpdate
)  # fmt: skip
OutgoingMessages = list[tuple[str, Message]]  # (to whom, what), in order
