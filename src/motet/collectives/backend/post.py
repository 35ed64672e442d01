"""Messages between two ranks: each send finds the receive with its tag, whatever the order of the calls.

All sends and receives under way go on whenever any thread waits for one of them; a thread of its own moves those for
which nobody waits, so that two ranks that both send first do not block each other.
"""

import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from motet.collectives.backend.errors import CollectiveError, PeerLostError
from motet.collectives.backend.lanes import ALIGNED, Lane, flat_bytes
from motet.collectives.backend.work import Task

_HEAD = struct.Struct("<qQ48s")
assert _HEAD.size == ALIGNED
_SPINS = 50
_LOOK_S = 0.02


class Rest(Protocol):
    """How to sleep until a peer has done something."""

    def arm(self) -> None:
        """From now on a peer that does something ends, or prevents, the next sleep."""

    def sleep(self) -> None: ...


@dataclass
class Send:
    task: Task
    parts: deque[Tensor]
    text: str


@dataclass
class Receive:
    task: Task
    tensor: Tensor
    tag: int
    text: str


@dataclass
class Message:
    """One that has begun to come in."""

    tag: int
    length: int
    text: str
    source: int
    data: Tensor | None = None
    """Where its bytes go; None until a receive is found for it, or it has to make room for others."""
    got: int = 0
    receive: Receive | None = None


@dataclass
class Peer:
    """Everything with one rank."""

    rank: int
    lane: Lane
    sends: deque[Send] = field(default_factory=deque)
    receives: deque[Receive] = field(default_factory=deque)
    current: Message | None = None
    head: Tensor = field(default_factory=lambda: torch.empty(ALIGNED, dtype=torch.uint8))
    head_got: int = 0
    early: list[Message] = field(default_factory=list)
    """Messages that came before their receive and stood in the way of others."""

    def open_receives(self) -> list[Receive]:
        begun = [message.receive for message in [self.current, *self.early] if message and message.receive]
        return [*self.receives, *begun]


class Post:
    """All messages of one rank in a group."""

    def __init__(
        self,
        rank: int,
        lanes: dict[int, Lane],
        timeout_s: float,
        rest: Rest,
        lost: Callable[[int], str],
    ) -> None:
        self.rank, self.timeout_s = rank, timeout_s
        self.peers = {other: Peer(other, lane) for other, lane in lanes.items()}
        self._rest = rest
        self._lost = lost
        """Why nothing will come from a rank any more, or nothing."""
        self._any: deque[Receive] = deque()
        self._lock = threading.RLock()
        self._waiting = 0
        self._pending = threading.Event()
        self._mover: threading.Thread | None = None
        self._closed = False
        self._looked = 0.0

    def send(self, tensor: Tensor, dst: int, tag: int) -> Task:
        text = _text(tensor)
        task = Task(self._help, [tensor])
        data = flat_bytes(tensor)
        head = torch.frombuffer(bytearray(_HEAD.pack(tag, len(data), text.encode()[:48])), dtype=torch.uint8)
        with self._lock:
            self._peer(dst).sends.append(Send(task, deque([head, data]), text))
            self._go_on()
        return self._started(task)

    def receive(self, tensor: Tensor, src: int | None, tag: int) -> Task:
        """`src` None: from whichever rank sends first."""
        task = Task(self._help, [tensor], source=-1 if src is None else src)
        receive = Receive(task, tensor, tag, _text(tensor))
        with self._lock:
            candidates = list(self.peers.values()) if src is None else [self._peer(src)]
            if not any(self._take_early(peer, receive) for peer in candidates):
                (self._any if src is None else candidates[0].receives).append(receive)
            self._go_on()
        return self._started(task)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._pending.set()
        if self._mover is not None:
            self._mover.join()

    def _peer(self, rank: int) -> Peer:
        if rank not in self.peers:
            raise CollectiveError(
                f"rank {self.rank}: a message to or from rank {rank}; it can be one of {[*self.peers]}"
            )
        return self.peers[rank]

    def _started(self, task: Task) -> Task:
        if not task.finished:
            if self._mover is None:
                self._mover = threading.Thread(target=self._move, name="motet-messages", daemon=True)
                self._mover.start()
            self._pending.set()
        return task

    def _help(self, task: Task, seconds: float | None) -> None:
        limit_s = self.timeout_s if seconds is None else seconds
        start = time.monotonic()
        idle = 0
        self._waiting += 1
        try:
            while not task.finished:
                if self._step():
                    idle = 0
                    continue
                idle += 1
                if idle > _SPINS:
                    self._doze()
                    self._give_up_on_the_lost()
                    if time.monotonic() - start > limit_s and not task.finished:
                        raise PeerLostError(f"rank {self.rank}: {self._what(task)} did not end within {limit_s:g} s")
        finally:
            self._waiting -= 1

    def _move(self) -> None:
        while True:
            self._pending.wait()
            if self._closed:
                return
            if self._waiting or not self._step():
                with self._lock:
                    if not self._busy() and not self._closed:
                        self._pending.clear()
                        continue
                self._doze()
                self._give_up_on_the_lost()

    def _doze(self) -> None:
        """Rest until something may have happened, or a moment."""
        self._rest.arm()
        if not self._step():
            self._rest.sleep()

    def _step(self) -> bool:
        with self._lock:
            return self._go_on()

    def _busy(self) -> bool:
        return bool(self._any) or any(peer.sends or peer.open_receives() for peer in self.peers.values())

    def _go_on(self) -> bool:
        moved = False
        for peer in self.peers.values():
            if peer.sends:
                moved |= self._push(peer)
            if peer.receives or self._any or (peer.current is not None and peer.current.data is not None):
                moved |= self._pull(peer)
        return moved

    def _push(self, peer: Peer) -> bool:
        moved = False
        while peer.sends:
            parts = peer.sends[0].parts
            while parts:
                if not len(parts[0]):
                    parts.popleft()
                    continue
                try:
                    count = peer.lane.write(parts[0])
                except PeerLostError as error:
                    self._fail(peer, str(error))
                    return True
                if not count:
                    return moved
                moved = True
                parts[0] = parts[0][count:]
            _settle(peer.sends.popleft().task)
        return moved

    def _pull(self, peer: Peer) -> bool:
        moved = False
        try:
            while peer.receives or self._any or peer.current is not None:
                if peer.current is None and not self._read_head(peer):
                    return moved
                message = peer.current
                assert message is not None
                if message.data is None and not self._find_place(peer, message):
                    return moved
                assert message.data is not None
                if message.got < message.length:
                    count = peer.lane.read(message.data[message.got :])
                    if not count:
                        return moved
                    message.got += count
                moved = True
                if message.got == message.length:
                    peer.current = None
                    self._deliver(peer, message)
        except PeerLostError as error:
            self._fail(peer, str(error))
            return True
        return moved

    def _read_head(self, peer: Peer) -> bool:
        peer.head_got += peer.lane.read(peer.head[peer.head_got :])
        if peer.head_got < ALIGNED:
            return False
        peer.head_got = 0
        tag, length, text = _HEAD.unpack(bytes(peer.head.tolist()))
        peer.current = Message(tag, length, text.rstrip(b"\0").decode(errors="replace"), peer.rank)
        return True

    def _find_place(self, peer: Peer, message: Message) -> bool:
        """A receive with this tag; or room of its own, when a receive with another tag waits behind it."""
        for waiting in (peer.receives, self._any):
            for receive in waiting:
                if receive.tag == message.tag:
                    waiting.remove(receive)
                    message.receive = receive
                    data = flat_bytes(receive.tensor)
                    # What does not fit is still read to its end, so that the next message can be.
                    message.data = data if len(data) == message.length else _room(message)
                    return True
        if not peer.receives and not self._any:
            return False
        message.data = _room(message)
        peer.early.append(message)
        return True

    def _take_early(self, peer: Peer, receive: Receive) -> bool:
        for message in peer.early:
            if message.tag == receive.tag and message.receive is None:
                message.receive = receive
                if message.got == message.length:
                    self._deliver(peer, message)
                return True
        return False

    def _deliver(self, peer: Peer, message: Message) -> None:
        receive = message.receive
        if receive is None:
            return
        if message in peer.early:
            peer.early.remove(message)
        data = flat_bytes(receive.tensor)
        receive.task.source = message.source
        if len(data) != message.length or _dtype(receive.text) != _dtype(message.text):
            _settle(
                receive.task,
                CollectiveError(
                    f"rank {self.rank} receives {receive.text} ({len(data)} bytes) from rank {message.source} with tag "
                    f"{message.tag}, which sent {message.text} ({message.length} bytes)"
                ),
            )
            return
        if message.data is not None and message.data.data_ptr() != data.data_ptr():
            data.copy_(message.data)
        _settle(receive.task)

    def _give_up_on_the_lost(self) -> None:
        if time.monotonic() - self._looked < _LOOK_S:
            return
        self._looked = time.monotonic()
        with self._lock:
            self._go_on()
            for peer in self.peers.values():
                if (peer.sends or peer.open_receives()) and (reason := self._lost(peer.rank)) and peer.lane.drained:
                    self._fail(peer, reason)
            if self._any and all(self._lost(rank) and peer.lane.drained for rank, peer in self.peers.items()):
                for receive in self._any:
                    _settle(receive.task, PeerLostError(f"rank {self.rank} receives from any rank, but all have ended"))
                self._any.clear()

    def _fail(self, peer: Peer, reason: str) -> None:
        for send in peer.sends:
            _settle(send.task, PeerLostError(f"rank {self.rank} sends {send.text} to rank {peer.rank}: {reason}"))
        for receive in peer.open_receives():
            _settle(
                receive.task, PeerLostError(f"rank {self.rank} receives {receive.text} from rank {peer.rank}: {reason}")
            )
        peer.sends.clear()
        peer.receives.clear()
        peer.current = None
        peer.early.clear()

    def _what(self, task: Task) -> str:
        for peer in self.peers.values():
            for send in peer.sends:
                if send.task is task:
                    return f"sending {send.text} to rank {peer.rank}"
            for receive in peer.open_receives():
                if receive.task is task:
                    return f"receiving {receive.text} from rank {peer.rank} with tag {receive.tag}"
        return "receiving from any rank"


def _room(message: Message) -> Tensor:
    return torch.empty(message.length, dtype=torch.uint8)


def _text(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _dtype(text: str) -> str:
    return text.partition(" ")[0]


def _settle(task: Task, error: CollectiveError | None = None) -> None:
    task.settle(error)
    task.tell()
