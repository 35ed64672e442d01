"""All that one rank of a group needs to talk to the others, and how it begins and ends."""

import atexit
import os
import select
from collections.abc import Callable

from torch import Tensor
from torch._C._distributed_c10d import Store

from motet.cluster.cpu_count import usable_cores
from motet.collectives.backend.arena import FAILED, POST_BELL, WORD
from motet.collectives.backend.bell import ring, sleep, supported
from motet.collectives.backend.chunks import Chunks
from motet.collectives.backend.lanes import Lane, LinkLane, RingLane
from motet.collectives.backend.links import Link, Links
from motet.collectives.backend.meet import Meeting, meet
from motet.collectives.backend.neighbours import GAVE_UP, LEFT, NAP_S, SPINS, Neighbours
from motet.collectives.backend.player import Plan, Player
from motet.collectives.backend.post import Post
from motet.collectives.backend.work import Task
from motet.core.errors import InputError

_CROWDED_SPINS = 20
_NETWORK_NAP_S = 0.0005


class Station:
    """A rank's end of everything."""

    def __init__(
        self, meeting: Meeting, neighbours: Neighbours, links: dict[int, tuple[Link, Link]], timeout_s: float
    ) -> None:
        self.hosts = _numbered([card.host for card in meeting.cards])
        self.local = meeting.local
        self.neighbours = neighbours
        self._links = Links(meeting.rank, {rank: pair[0] for rank, pair in links.items()}, timeout_s) if links else None
        self._player = Player(neighbours, self._links)
        crowded = len(self.local) > usable_cores()
        self._spins = neighbours.spins = _CROWDED_SPINS if crowded else SPINS
        lanes: dict[int, Lane] = {rank: LinkLane(pair[1]) for rank, pair in links.items()}
        wake = _waker(neighbours)
        for rank, other in self.local.items():
            if rank != meeting.rank:
                lanes[rank] = RingLane(neighbours.arena, neighbours.me, other, wake)
        streams = [pair[1] for pair in links.values()]
        rest = _Rest(neighbours, streams)
        self.post = Post(meeting.rank, lanes, timeout_s, rest, self._lost)
        self._post_links = streams
        self._closed = False
        self._pid = os.getpid()
        atexit.register(self.close)

    def play(self, plan: Plan, before: Chunks, place: Chunks) -> None:
        self._player.play(plan, before, place)

    def send(self, tensor: Tensor, dst: int, tag: int) -> Task:
        return self.post.send(tensor, dst, tag)

    def receive(self, tensor: Tensor, src: int | None, tag: int) -> Task:
        return self.post.receive(tensor, src, tag)

    def relax(self, relaxed: bool) -> None:
        """Spin less: another thread of this process wants to run."""
        self.neighbours.spins = 0 if relaxed else self._spins

    def describe(self, index: int, text: str) -> None:
        """Keep the description of a kind of collective where the neighbours can read it."""
        self.neighbours.arena.write_text(self.neighbours.me, index, text)

    def set_timeout(self, timeout_s: float) -> None:
        self.neighbours.timeout_s = self.post.timeout_s = timeout_s
        if self._links is not None:
            self._links.timeout_s = timeout_s

    def give_up(self, error: BaseException) -> None:
        """This rank will take part in nothing more; the others need not wait for it."""
        self.neighbours.give_up(str(error) or type(error).__name__)
        if self._links is not None:
            self._links.close()

    def close(self) -> None:
        # A process forked from a rank runs the same when it exits.
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        atexit.unregister(self.close)
        self.post.close()
        self.neighbours.leave()
        if self._links is not None:
            self._links.close()
        for link in self._post_links:
            link.stream.close()

    def _lost(self, rank: int) -> str:
        """Why nothing will come from a rank any more."""
        if rank not in self.local:
            return ""
        other = self.local[rank]
        words, arena = self.neighbours.words, self.neighbours.arena
        if words[arena.word(other, FAILED)] in (GAVE_UP, LEFT):
            return "that rank has given up or left the group"
        poll = select.poll()
        poll.register(self.neighbours.others[other].pidfd, select.POLLIN)
        return "its process has ended" if poll.poll(0) else ""


class _Rest:
    """Sleep until a neighbour has written or taken something; with ranks elsewhere, or something comes from them."""

    def __init__(self, neighbours: Neighbours, links: list[Link]) -> None:
        self._words = neighbours.words
        self._bell = neighbours.arena.word(neighbours.me, POST_BELL)
        self._address = neighbours.arena.address + self._bell * WORD
        self._links = links

    def arm(self) -> None:
        self._words[self._bell] = 1

    def sleep(self) -> None:
        if self._links:
            poll = select.poll()
            for link in self._links:
                poll.register(link.stream, select.POLLIN)
            poll.poll(_NETWORK_NAP_S * 1e3)
        else:
            sleep(self._address, NAP_S)
        self._words[self._bell] = 0


def _waker(neighbours: Neighbours) -> Callable[[int], None]:
    words, arena = neighbours.words, neighbours.arena
    bells = [arena.word(other, POST_BELL) for other in range(arena.shape.ranks)]

    def wake(other: int) -> None:
        bell = bells[other]
        if words[bell]:
            words[bell] = 0
            ring(arena.address + bell * WORD)

    return wake


def _numbered(hosts: list[str]) -> tuple[int, ...]:
    order = list(dict.fromkeys(hosts))
    return tuple(order.index(host) for host in hosts)


def open_station(store: Store, rank: int, ranks: int, timeout_s: float) -> Station:
    if not supported():
        raise InputError(
            "the backend motet needs Linux on an x86-64 processor, because it counts on the order of that processor's "
            "stores; use the backend gloo here"
        )
    meeting, links = meet(store, rank, ranks, timeout_s)
    neighbours = Neighbours(meeting.arena, meeting.local[rank], meeting.neighbours(), rank, timeout_s)
    return Station(meeting, neighbours, links, timeout_s)
