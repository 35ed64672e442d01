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

DESK = "desk"
END = -1
"""The share of a ticket that says that there is nothing more to do."""
Numbers = tuple[float, ...]
"""What the protocol only carries."""


class Rule(NamedTuple):
    """What a mode asks for."""

    shares: int
    """That a step is cut into."""
    steps: int
    closes: int
    """So many shares close a step; what comes later is dropped. With `alone` each is an update of its own."""
    ahead: int | None
    """A share of step t is computed with all of the steps before t - ahead; None: with whatever is there."""
    alone: bool = False

    def step(self, share: int) -> int:
        return share // self.shares

    def needs(self, share: int) -> int:
        """So many shares, the first of the run, must be in the parameters that this one is computed with."""
        return 0 if self.ahead is None else max(0, self.step(share) - self.ahead) * self.shares


class Owners(NamedTuple):
    """Who keeps a piece. The first answers pulls and takes pushes, and copies these to the second."""

    servers: tuple[str, ...]
    life: int = 0
    """Grows when all that kept it were lost, and what they had been pushed."""


class View(NamedTuple):
    """Who keeps what, by piece. The later epoch holds."""

    epoch: int
    owners: tuple[Owners, ...]


# --- between the desk and workers ------------------------------------------------------------------


class Joined(NamedTuple):
    worker: str


class Ticket(NamedTuple):
    number: int
    share: int
    least: int
    """The updates that its parameters must have."""


NO_TICKET = Ticket(0, END, 0)


class Gone(NamedTuple):
    """To a process that was given up, and is there after all: others do what it had to do."""

    name: str


class Done(NamedTuple):
    worker: str
    share: int
    epoch: int
    """Of the view by which all pushes were acknowledged."""
    report: Numbers = ()


# --- between workers and servers -------------------------------------------------------------------


class Pull(NamedTuple):
    worker: str
    ticket: int
    piece: int
    least: int
    """The updates that it must have."""
    urgency: int = 0
    """What has less is sent sooner."""


class Value(NamedTuple):
    ticket: int
    piece: int
    version: int
    urgency: int = 0


class Push(NamedTuple):
    worker: str
    ticket: int
    piece: int
    share: int


class Ack(NamedTuple):
    server: str
    ticket: int
    piece: int


# --- between servers -------------------------------------------------------------------------------


class Copy(NamedTuple):
    server: str
    piece: int
    share: int


class Copied(NamedTuple):
    server: str
    piece: int
    share: int


class Settled(NamedTuple):
    """The shares that have been decided upon: all below the floor, and these."""

    floor: int = 0
    more: frozenset[int] = frozenset()

    def has(self, share: int) -> bool:
        return share < self.floor or share in self.more

    @lru_cache(maxsize=64)  # noqa: B019  # of values, not of objects: all pieces of a server come to the same
    def with_(self, shares: tuple[int, ...], floor: int) -> "Settled":
        return Settled(floor, frozenset(share for share in {*self.more, *shares} if share >= floor))


NOTHING = Settled()


class State(NamedTuple):
    """All that is known of a piece, for a server that is to be its second."""

    piece: int
    version: int
    settled: Settled
    held: frozenset[int]


# --- between the desk and servers ------------------------------------------------------------------


class Offered(NamedTuple):
    """A server that is there now, with what it has from a snapshot."""

    server: str
    instead: str
    """Of this one, which does not answer any more."""
    pieces: tuple[tuple[int, int], ...] = ()
    """(piece, version)"""


class Standing(NamedTuple):
    """To the desk: what a server that is connected, or connected again, has not heard."""

    server: str
    version: int
    """It has all decisions before."""


class Stand(NamedTuple):
    """Where a piece stands whose updates until then are lost, but for what a snapshot had."""

    piece: int
    version: int
    settled: Settled


class Close(NamedTuple):
    turn: int
    """Grows, also when the same update is tried again."""
    number: int
    shares: tuple[int, ...]


class Norm(NamedTuple):
    turn: int
    piece: int
    squares: float = 0.0


class Decide(NamedTuple):
    number: int
    shares: tuple[int, ...]
    floor: int
    """All shares below have been decided upon."""
    how: Numbers = ()


class Bye(NamedTuple):
    """To a server: the run has ended."""

    updates: int


class Fetch(NamedTuple):
    """To a server: what it has of a piece is asked for."""

    piece: int


class Stored(NamedTuple):
    """What a server has of a piece."""

    piece: int
    version: int


class Load(NamedTuple):
    """To the desk: what a server has sent and received so far, and what has not left yet."""

    sent_bytes: int
    received_bytes: int
    waiting_bytes: int


# --- addresses -------------------------------------------------------------------------------------


class Here(NamedTuple):
    """To the desk: where a server can be reached."""

    server: str
    host: str
    port: int
    begun: bool
    """It knows what its pieces are."""


class Book(NamedTuple):
    """From the desk: where servers can be reached."""

    entries: tuple[tuple[str, str, int], ...]


# --- of one process --------------------------------------------------------------------------------


class Refused(NamedTuple):
    """Of a connection: the other side has another job, or other data."""

    sentence: str


class Lost(NamedTuple):
    """To the desk: a process does not answer."""

    name: str


class Compute(NamedTuple):
    """To a worker by itself: the parameters are there."""

    ticket: Ticket


class Ready(NamedTuple):
    """To a worker by itself: the gradients of these pieces are there, and stay until it has another ticket."""

    ticket: int
    pieces: tuple[int, ...]
    report: Numbers = ()


class Apply(NamedTuple):
    """To a server by itself: one update of one piece, in the order of its shares."""

    piece: int
    decision: Decide


Message = (
    Joined | Ticket | Gone | Done | Pull | Value | Push | Ack | Copy | Copied | State | Offered | Standing | Stand
    | Close | Norm | Decide | View | Bye | Fetch | Stored | Load | Here | Book | Refused | Lost | Compute | Ready
    | Apply
)  # fmt: skip
Sent = list[tuple[str, Message]]
"""(to whom, what), in order."""
