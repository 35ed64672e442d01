"""What is explored of the parameter server's protocol, and the names that the explorer has for it."""

from dataclasses import dataclass
from typing import NamedTuple

from motet.parallel.parameter_server.protocol.coordinator_state_machine import CoordinatorStateMachine
from motet.parallel.parameter_server.protocol.messages import ConsistencyPolicy, ParameterPullReply
from motet.parallel.parameter_server.protocol.server_state_machine import ServerStateMachine
from motet.parallel.parameter_server.protocol.worker_state_machine import WorkerStateMachine

Machine = CoordinatorStateMachine | ServerStateMachine | WorkerStateMachine


class Reading(NamedTuple):
    """A value underway, of which a part was read at a version."""

    value: ParameterPullReply
    first: int | None = None


@dataclass(frozen=True)
class System:
    """What is explored."""

    rule: ConsistencyPolicy
    workers: int
    servers: int
    copies: int = 1
    """Servers that keep a piece; piece i is first on server i."""
    doubles: int = 0
    """So many messages arrive twice."""
    crashes: int = 0
    """So many processes end. What they had sent may arrive or not."""
    returns: bool = False
    """Instead of a server that ended another one comes, with a snapshot of it or, where there are copies, nothing."""
    cuts: int = 0
    """So many connections are lost, with all that is underway on them, and made again."""
    in_parts: bool = False
    """A value is read from the server's memory in two parts, one after the other."""
    in_place: bool = False
    """And that is what is there by then."""
    by_piece: bool = False
    """The gradient of each piece is there at a time of its own."""
    is_late: bool = False
    """Decisions may be late also where it makes no difference, as long as servers wait for those that are missing."""
    told: bool = False
    """Servers begin with nothing, and hear from the desk's owner what their pieces are."""
    first: int = 0
    """Steps that were done before."""
    owned: bool = False
    """The desk goes on from step to step when its owner says so."""
    stops: int = 0
    """And may be told to end with the steps that were begun."""
    desk: type[CoordinatorStateMachine] = CoordinatorStateMachine
    keeper: type[ServerStateMachine] = ServerStateMachine
    client: type[WorkerStateMachine] = WorkerStateMachine


class BrokenPromiseError(AssertionError):
    """A promise that is not kept."""


def demand(kept: bool, sentence: str) -> None:
    if not kept:
        raise BrokenPromiseError(sentence)


Machines = tuple[int, ...]
"""What the desk, the servers, the workers and a server that comes later know; by number."""
Underway = tuple[int, ...]
"""Messages, by number."""
Left = tuple[int, ...]
"""How often a message may still arrive twice, a process end, a connection be lost, and the desk's owner stop."""
State = tuple[Machines, Underway, Left]
NONE = 0
"""A process that has ended, or not begun."""
DOUBLES, CRASHES, CUTS, STOPS = range(4)
