"""Scenarios of the parameter server's protocol that are explored, and the explorer's names."""

from dataclasses import dataclass
from typing import NamedTuple

from motet.parallel.parameter_server.protocol.messages import ConsistencyPolicy, ParameterPullReply
from motet.parallel.parameter_server.protocol.state_machines import (
    CoordinatorStateMachine,
    ServerStateMachine,
    WorkerStateMachine,
)

Machine = CoordinatorStateMachine | ServerStateMachine | WorkerStateMachine


class PartialRead(NamedTuple):
    """A value underway, of which a part was read at a version."""

    value: ParameterPullReply
    first: int | None = None


@dataclass(frozen=True)
class Scenario:
    """A system to explore, with the faults that may happen."""

    policy: ConsistencyPolicy
    workers: int
    servers: int
    copies: int = 1  # Servers that keep a slice; slice i is first on server i
    duplicates: int = 0  # So many messages arrive twice
    crashes: int = 0  # So many processes end. What they had sent may arrive or not
    # Instead of a server that ended another one comes, with a snapshot of it or, where there are copies, nothing.
    replacements: bool = False
    disconnects: int = 0  # So many connections are lost, with all that is underway on them, and made again
    partial_reads: bool = False  # A value is read from the server's memory in two parts, one after the other
    updates_in_place: bool = False  # And that is what is there by then
    gradients_by_slice: bool = False  # The gradient of each slice is there at a time of its own
    # Decisions may be late also where it makes no difference, as long as servers wait for missing ones.
    has_late_decisions: bool = False
    starts_empty: bool = False  # Servers hear from the coordinator's owner what their slices are
    first: int = 0  # Steps that were done before
    is_paced: bool = False  # The coordinator goes on from step to step when its owner says so
    stops: int = 0  # And may be told to end with the steps that were begun
    coordinator: type[CoordinatorStateMachine] = CoordinatorStateMachine
    server: type[ServerStateMachine] = ServerStateMachine
    worker: type[WorkerStateMachine] = WorkerStateMachine


Machines = tuple[int, ...]  # Of the coordinator, the servers, the workers, a server that comes later; by number
InFlight = tuple[int, ...]  # Messages, by number
FaultsLeft = tuple[int, ...]  # How often each kind of fault may still happen
State = tuple[Machines, InFlight, FaultsLeft]
NONE = 0  # A process that has ended, or not begun
DUPLICATES, CRASHES, DISCONNECTS, STOPS = range(4)
