"""The ranks of one host as one of them sees them: it publishes its counters, waits for theirs, notices their end."""

import os
import select
import time
from collections.abc import Callable
from dataclasses import dataclass

from motet.collectives.backend.arena import BELL, DONE, FAILED, FINISHED, LINE, OPENED, READY, TEXTS, WORD, Arena
from motet.collectives.backend.bell import offer_core, ring, sleep
from motet.collectives.backend.errors import CollectiveError, PeerLostError

NAP_S = 0.002
LOOK_S = 0.02
"""How often a rank that waits looks whether the others are still there."""
SPINS = 400
YIELDS = 30
INDEX_BITS = 8
LEFT = 2
GAVE_UP = 1


@dataclass(frozen=True)
class Neighbour:
    """A rank of this host."""

    rank: int
    """In the group."""
    pidfd: int
    """Readable when the process has ended."""


class Neighbours:
    """Ranks are counted within the host in everything here, except in sentences."""

    def __init__(self, arena: Arena, me: int, others: dict[int, Neighbour], rank: int, timeout_s: float) -> None:
        self.arena, self.me, self.others, self.rank, self.timeout_s = arena, me, others, rank, timeout_s
        self.words = arena.words
        self.ready = [arena.word(r, READY) for r in range(arena.shape.ranks)]
        self.done = [arena.word(r, DONE) for r in range(arena.shape.ranks)]
        self.bells = [arena.word(r, BELL) for r in range(arena.shape.ranks)]
        self.signatures = [arena.signature(r, 0) for r in range(arena.shape.ranks)]
        self.number = 0
        self.signature = 0
        self.spins = SPINS
        self._poll = select.poll()
        self._by_descriptor = {n.pidfd: local for local, n in others.items()}
        for neighbour in others.values():
            self._poll.register(neighbour.pidfd, select.POLLIN)

    def begin(self, signature: int) -> None:
        """A collective starts: say which one it is."""
        self.number += 1
        self.signature = signature
        self.words[self.signatures[self.me] + self.number % 64] = signature
        self.words[self.ready[self.me] + OPENED - READY] = self.number

    def finish(self) -> None:
        self.words[self.ready[self.me] + FINISHED - READY] = self.number

    def publish(self, index: int, value: int, readers: tuple[int, ...]) -> None:
        """Set a counter of this rank, and wake those who sleep until it is set."""
        words = self.words
        words[index] = value
        for reader in readers:
            bell = self.bells[reader]
            if words[bell]:
                words[bell] = 0
                ring(self.arena.address + bell * WORD)

    def wait_ready(self, other: int, value: int) -> None:
        """Until another rank has published this step of the collective."""
        words, index = self.words, self.ready[other]
        if words[index] < value:
            self.wait(index, value, other)
        if words[self.signatures[other] + self.number % 64] >> INDEX_BITS != self.signature >> INDEX_BITS:
            self._mismatch(other)

    def wait(self, index: int, value: int, other: int) -> None:
        """Until a counter of another rank is at least this."""
        words = self.words
        for _ in range(self.spins):
            if words[index] >= value:
                return
        for _ in range(YIELDS):
            offer_core()
            if words[index] >= value:
                return
        self._sleep(lambda: words[index] >= value, other)

    def _sleep(self, reached: Callable[[], bool], other: int) -> None:
        bell = self.bells[self.me]
        address = self.arena.address + bell * WORD
        start = look = time.monotonic()
        while not reached():
            self.words[bell] = 1
            if not reached():
                sleep(address, NAP_S)
            self.words[bell] = 0
            now = time.monotonic()
            if now - look > LOOK_S:
                look = now
                self._look(reached, other, now - start)

    def _look(self, reached: Callable[[], bool], other: int, waited_s: float) -> None:
        """Raise when waiting on makes no sense."""
        words, shape = self.words, self.arena
        if words[shape.word(other, OPENED)] >= self.number:
            found = words[self.signatures[other] + self.number % 64]
            if found >> INDEX_BITS != self.signature >> INDEX_BITS:
                self._mismatch(other)
        ended = {self._by_descriptor[descriptor] for descriptor, _ in self._poll.poll(0)}
        if reached():
            return
        absent = [local for local in self.others if words[shape.word(local, FINISHED)] < self.number]
        states = {local: words[shape.word(local, FAILED)] for local in absent}
        # Who was killed comes before those who gave up because of that.
        for local in sorted(absent, key=lambda local: states[local]):
            who = f"rank {self.others[local].rank}"
            if states[local] == GAVE_UP:
                raise PeerLostError(f"{self._i()}: {who} has given up: {shape.read_text(local, TEXTS - 1)}")
            if states[local] == LEFT:
                raise PeerLostError(f"{self._i()}: {who} has left the group without taking part")
            if local in ended:
                raise PeerLostError(f"{self._i()}: the process of {who} has ended without taking part")
        if waited_s > self.timeout_s:
            raise PeerLostError(
                f"{self._i()}: rank {self.others[other].rank} did not take part within the timeout of "
                f"{self.timeout_s:g} s; {self._where(other)}"
            )

    def _i(self) -> str:
        return f"rank {self.rank} in {self.text(self.me, self.signature)}"

    def text(self, local: int, signature: int) -> str:
        return self.arena.read_text(local, signature & ((1 << INDEX_BITS) - 1))

    def _where(self, other: int) -> str:
        number = self.words[self.arena.word(other, OPENED)]
        if number == 0:
            return "it has not called any collective of this group"
        last = self.text(other, self.words[self.signatures[other] + number % 64])
        doing = "is in" if self.words[self.arena.word(other, FINISHED)] < number else "has finished"
        return f"it {doing} its collective number {number}, {last}, this is number {self.number}"

    def _mismatch(self, other: int) -> None:
        theirs = self.text(other, self.words[self.signatures[other] + self.number % 64])
        ours = self.text(self.me, self.signature)
        raise CollectiveError(
            f"collective number {self.number} of the group differs: rank {self.rank} called {ours}, "
            f"rank {self.others[other].rank} called {theirs}; "
            "every rank must call the same with equal shapes and dtypes"
        )

    def give_up(self, reason: str) -> None:
        """Tell the others that this rank will not go on."""
        self.arena.write_text(self.me, TEXTS - 1, reason)
        self._end(GAVE_UP)

    def leave(self) -> None:
        if not self.words[self.arena.word(self.me, FAILED)]:
            self._end(LEFT)
        for neighbour in self.others.values():
            os.close(neighbour.pidfd)

    def _end(self, state: int) -> None:
        self.publish(self.arena.word(self.me, FAILED), state, tuple(self.others))


assert LINE * WORD == 64
