"""How long the steps of a parameter server take: its own protocol, played on links of a given rate.

Desk, servers and workers are the machines that run; what is in between is counted instead of done. Every process has a
link of its own to a switch, the same both ways. A message travels in parts, as it does over TCP: what is more urgent
goes before what waits on the same connection, connections share a link part by part, and of each connection only so
much is underway at a time.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from motet.parallel.server.client import Client
from motet.parallel.server.desk import Desk
from motet.parallel.server.keeper import Keeper, Kept
from motet.parallel.server.protocol import (
    DESK,
    Apply,
    Compute,
    Copy,
    Decide,
    Joined,
    Message,
    Owners,
    Push,
    Ready,
    Rule,
    Sent,
    Ticket,
    Value,
    View,
)
from motet.parallel.server.wire import PART_BYTES

WINDOW = 2
"""Parts of a connection that are underway at a time."""
SMALL_BYTES = 100
"""A message without a payload."""


@dataclass(frozen=True)
class Load:
    """A piece, as it travels: gradients up, parameters down."""

    push_bytes: float
    pull_bytes: float
    servers: tuple[str, ...]
    layer: int = 0
    """The first that uses it: its forward needs the piece, and its gradient is there after this layer's backward."""


@dataclass(frozen=True)
class Setting:
    """Where it is played."""

    rate: float
    """Bytes per second, of each process's link, each way."""
    delay_s: float
    """From one process to another, of any message, what handles it included."""
    forward_s: tuple[float, ...]
    """Of a share, by layer."""
    backward_s: tuple[float, ...]
    update_s: float = 0.0
    """Of a byte of gradients, at its server."""
    slowness: Callable[[int, int], float] = lambda worker, share: 1.0
    """How many times as long a worker takes for a share."""


@dataclass
class _Link:
    """From one process: lines to others, which take turns; and into it."""

    lines: dict[str, list[tuple[int, int, "_Parcel"]]] = field(default_factory=dict)
    turns: deque[str] = field(default_factory=deque)
    underway: dict[str, int] = field(default_factory=dict)
    sending: bool = False
    arriving: deque[tuple[float, str, "_Parcel | None"]] = field(default_factory=deque)
    receiving: bool = False


@dataclass
class _Parcel:
    message: Message
    left: float


@dataclass
class _Worker:
    """At a share: which layer's forward is done, or is waited for."""

    number: int
    client: Client
    ticket: Ticket | None = None
    layer: int = 0
    busy: bool = False


class Play:
    """`step_ends`: when each update was decided upon."""

    def __init__(self, rule: Rule, loads: Sequence[Load], workers: int, setting: Setting, by_need: bool = True) -> None:
        self.step_ends: list[float] = []
        self.bytes_in: dict[str, float] = {}
        self.bytes_out: dict[str, float] = {}
        self._now = 0.0
        self._loads, self._setting = loads, setting
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        servers = sorted({server for load in loads for server in load.servers})
        view = View(0, tuple(Owners(load.servers) for load in loads))
        self._desk = Desk(rule, view, list(servers))
        self._keepers = {
            name: Keeper(name, view, {p: Kept() for p, load in enumerate(loads) if name in load.servers})
            for name in servers
        }
        self._workers = {f"w{number}": _Worker(number, Client(f"w{number}", view)) for number in range(workers)}
        for worker in self._workers.values() if by_need else ():
            worker.client.urgency = {piece: load.layer for piece, load in enumerate(loads)}
        self._links = {name: _Link() for name in (DESK, *servers, *self._workers)}
        for name in self._workers:
            self._say(name, [(DESK, Joined(name))])

    def run(self) -> "Play":
        while self._events:
            self._now, _, what = heapq.heappop(self._events)
            what()
        assert self._desk.is_finished
        return self

    def seconds_per_step(self, skip: int = 2) -> float:
        """After the first ones, on average."""
        updates = len(self.step_ends) // self._desk.rule.steps
        ends = self.step_ends[updates - 1 :: updates]
        return (ends[-1] - ends[skip - 1]) / (len(ends) - skip)

    # --- links -------------------------------------------------------------------------------------

    def _say(self, sender: str, sent: Sent) -> None:
        for to, message in sent:
            if isinstance(message, Compute):  # begun when its parameters are there
                continue
            link = self._links[sender]
            size = self._size(message)
            self.bytes_out[sender] = self.bytes_out.get(sender, 0.0) + size
            self.bytes_in[to] = self.bytes_in.get(to, 0.0) + size
            line = link.lines.setdefault(to, [])
            heapq.heappush(line, (self._urgency(sender, message), next(self._numbers), _Parcel(message, size)))
            if to not in link.turns:
                link.turns.append(to)
            self._send(sender)

    def _size(self, message: Message) -> float:
        match message:
            case Push(piece=piece) | Copy(piece=piece):
                return self._loads[piece].push_bytes + SMALL_BYTES
            case Value(piece=piece):
                return self._loads[piece].pull_bytes + SMALL_BYTES
        return SMALL_BYTES

    def _urgency(self, sender: str, message: Message) -> int:
        if isinstance(message, Push):
            return self._workers[sender].client.urgency.get(message.piece, 0)
        return message.urgency if isinstance(message, Value) else -1

    def _send(self, sender: str) -> None:
        """The next part, if the link is free and some connection takes one."""
        link = self._links[sender]
        if link.sending:
            return
        for _ in range(len(link.turns)):
            to = link.turns[0]
            link.turns.rotate(-1)
            if link.underway.get(to, 0) < WINDOW:
                break
        else:
            return
        parcel = link.lines[to][0][2]
        size = min(parcel.left, PART_BYTES)
        parcel.left -= size
        whole = None
        if parcel.left <= 0:
            whole = heapq.heappop(link.lines[to])[2]
            if not link.lines[to]:
                link.turns.remove(to)
        link.underway[to] = link.underway.get(to, 0) + 1
        link.sending = True

        def left() -> None:
            link.sending = False
            self._links[to].arriving.append((size, sender, whole))
            self._receive(to)
            self._send(sender)

        self._after(size / self._setting.rate, left)

    def _receive(self, to: str) -> None:
        link = self._links[to]
        if link.receiving or not link.arriving:
            return
        size, sender, whole = link.arriving.popleft()
        link.receiving = True

        def there() -> None:
            link.receiving = False
            self._links[sender].underway[to] -= 1
            if whole is not None:
                self._after(self._setting.delay_s, lambda: self._take(to, whole.message))
            self._send(sender)
            self._receive(to)

        self._after(size / self._setting.rate, there)

    def _after(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._numbers), what))

    # --- processes ---------------------------------------------------------------------------------

    def _take(self, name: str, message: Message) -> None:
        if name == DESK:
            sent = self._desk.take(message)
            decided = {m.number for _, m in sent if isinstance(m, Decide)}
            self.step_ends += [self._now] * len(decided)
            self._say(name, sent)
        elif name in self._keepers:
            self._serve(name, self._keepers[name].take(message))
        else:
            self._say(name, self._workers[name].client.take(message))
            self._go_on(name)

    def _serve(self, name: str, sent: Sent) -> None:
        """Updates take their time, and what comes after them waits."""
        seconds = sum(
            len(m.decision.shares) * self._loads[m.piece].push_bytes * self._setting.update_s
            for _, m in sent
            if isinstance(m, Apply)
        )
        out: Sent = [(to, message) for to, message in sent if not isinstance(message, Apply)]
        if seconds:
            self._after(seconds, lambda: self._say(name, out))
        else:
            self._say(name, out)

    def _go_on(self, name: str) -> None:
        """Begin what the worker has the parameters for."""
        worker = self._workers[name]
        client, setting = worker.client, self._setting
        if client.ended or worker.busy or not client.ticket.number:
            return
        if worker.ticket != client.ticket:
            worker.ticket, worker.layer = client.ticket, 0
        layers = len(setting.forward_s)
        lacking = [load.layer for piece, load in enumerate(self._loads) if piece not in client.pulled]
        if worker.layer > layers or (lacking and min(lacking) <= worker.layer):
            return
        times = setting.slowness(worker.number, client.ticket.share)
        if worker.layer < layers:
            self._forward(name, times * setting.forward_s[worker.layer])
        else:
            self._backward(name, times, layers - 1)

    def _forward(self, name: str, seconds: float) -> None:
        worker = self._workers[name]
        worker.busy = True

        def done() -> None:
            worker.busy = False
            worker.layer += 1
            self._go_on(name)

        self._after(seconds, done)

    def _backward(self, name: str, times: float, layer: int) -> None:
        """Layer after layer, the last first."""
        worker = self._workers[name]
        worker.busy = True

        def done() -> None:
            here = [piece for piece, load in enumerate(self._loads) if load.layer == layer]
            if layer:
                self._backward(name, times, layer - 1)
            else:
                worker.busy, worker.layer = False, len(self._setting.forward_s) + 1
            self._say(name, worker.client.take(Ready(worker.client.ticket.number, tuple(here), (1.0,))))

        self._after(times * self._setting.backward_s[layer], done)
