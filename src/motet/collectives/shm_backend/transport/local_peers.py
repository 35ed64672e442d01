"""The ranks of one host as one of them sees them: it publishes its counters, waits for theirs, notices their end."""

import os
import select
import time
from collections.abc import Callable
from dataclasses import dataclass

from motet.collectives.shm_backend.errors import CollectiveError, PeerLostError
from motet.collectives.shm_backend.transport.futex import futex_wait, futex_wake, yield_core
from motet.collectives.shm_backend.transport.shared_memory import (
    CACHE_LINE_WORDS,
    COLLECTIVE_SLEEP_FLAG,
    CONSUMED_ROUND,
    DESCRIPTION_SLOTS,
    EXIT_STATE,
    FINISHED_COLLECTIVE,
    PUBLISHED_ROUND,
    STARTED_COLLECTIVE,
    WORD_BYTES,
    SharedMemorySegment,
)

FUTEX_TIMEOUT_S = 0.002
LIVENESS_CHECK_S = 0.02  # How often a rank that waits looks whether the others are still there
SPINS = 400
YIELDS = 30
DESCRIPTION_INDEX_BITS = 8
STATE_LEFT = 2
STATE_FAILED = 1


@dataclass(frozen=True)
class LocalPeerProcess:
    """A rank of this host."""

    rank: int  # In the group
    pidfd: int  # Readable when the process has ended


class LocalPeerSync:
    """Ranks are counted within the host in everything here, except in sentences."""

    def __init__(
        self,
        shared_memory: SharedMemorySegment,
        local_rank: int,
        peers: dict[int, LocalPeerProcess],
        rank: int,
        timeout_s: float,
    ) -> None:
        self.shared_memory, self.local_rank, self.peers, self.rank, self.timeout_s = (
            shared_memory,
            local_rank,
            peers,
            rank,
            timeout_s,
        )
        self.words = shared_memory.words
        self.published_index = [shared_memory.word_index(r, PUBLISHED_ROUND) for r in range(shared_memory.layout.ranks)]
        self.consumed_index = [shared_memory.word_index(r, CONSUMED_ROUND) for r in range(shared_memory.layout.ranks)]
        self.sleep_flags = [
            shared_memory.word_index(r, COLLECTIVE_SLEEP_FLAG) for r in range(shared_memory.layout.ranks)
        ]
        self.signatures = [shared_memory.signature_index(r, 0) for r in range(shared_memory.layout.ranks)]
        self.collective_id = 0
        self.signature = 0
        self.spins = SPINS
        self._poll = select.poll()
        self._by_descriptor = {n.pidfd: local for local, n in peers.items()}
        for peer in peers.values():
            self._poll.register(peer.pidfd, select.POLLIN)

    def begin(self, signature: int) -> None:
        """A collective starts: say which one it is."""
        self.collective_id += 1
        self.signature = signature
        self.words[self.signatures[self.local_rank] + self.collective_id % 64] = signature
        self.words[self.published_index[self.local_rank] + STARTED_COLLECTIVE - PUBLISHED_ROUND] = self.collective_id

    def finish(self) -> None:
        self.words[self.published_index[self.local_rank] + FINISHED_COLLECTIVE - PUBLISHED_ROUND] = self.collective_id

    def publish(self, index: int, value: int, readers: tuple[int, ...]) -> None:
        """Set a counter of this rank, and wake those who sleep until it is set."""
        words = self.words
        words[index] = value
        for reader in readers:
            flag = self.sleep_flags[reader]
            if words[flag]:
                words[flag] = 0
                futex_wake(self.shared_memory.address + flag * WORD_BYTES)

    def wait_published(self, other: int, value: int) -> None:
        """Until another rank has published this step of the collective."""
        words, index = self.words, self.published_index[other]
        if words[index] < value:
            self.wait_counter(index, value, other)
        if (
            words[self.signatures[other] + self.collective_id % 64] >> DESCRIPTION_INDEX_BITS
            != self.signature >> DESCRIPTION_INDEX_BITS
        ):
            self._raise_mismatch(other)

    def wait_counter(self, index: int, value: int, other: int) -> None:
        """Until a counter of another rank is at least this."""
        words = self.words
        for _ in range(self.spins):
            if words[index] >= value:
                return
        for _ in range(YIELDS):
            yield_core()
            if words[index] >= value:
                return
        self._sleep_until(lambda: words[index] >= value, other)

    def _sleep_until(self, reached: Callable[[], bool], other: int) -> None:
        flag = self.sleep_flags[self.local_rank]
        address = self.shared_memory.address + flag * WORD_BYTES
        start = last_check = time.monotonic()
        while not reached():
            self.words[flag] = 1
            if not reached():
                futex_wait(address, FUTEX_TIMEOUT_S)
            self.words[flag] = 0
            now = time.monotonic()
            if now - last_check > LIVENESS_CHECK_S:
                last_check = now
                self._check_liveness(reached, other, now - start)

    def _check_liveness(self, reached: Callable[[], bool], other: int, waited_s: float) -> None:
        """Raise when waiting on makes no sense."""
        words, memory = self.words, self.shared_memory
        if words[memory.word_index(other, STARTED_COLLECTIVE)] >= self.collective_id:
            peer_signature = words[self.signatures[other] + self.collective_id % 64]
            if peer_signature >> DESCRIPTION_INDEX_BITS != self.signature >> DESCRIPTION_INDEX_BITS:
                self._raise_mismatch(other)
        ended = {self._by_descriptor[descriptor] for descriptor, _ in self._poll.poll(0)}
        if reached():
            return
        absent = [
            local for local in self.peers if words[memory.word_index(local, FINISHED_COLLECTIVE)] < self.collective_id
        ]
        states = {local: words[memory.word_index(local, EXIT_STATE)] for local in absent}
        # Who was killed comes before those who gave up because of that.
        for local in sorted(absent, key=lambda local: states[local]):
            who = f"rank {self.peers[local].rank}"
            if states[local] == STATE_FAILED:
                raise PeerLostError(
                    f"{self._describe_self()}: {who} has given up: {memory.read_description(local, DESCRIPTION_SLOTS - 1)}"
                )
            if states[local] == STATE_LEFT:
                raise PeerLostError(f"{self._describe_self()}: {who} has left the group without taking part")
            if local in ended:
                raise PeerLostError(f"{self._describe_self()}: the process of {who} has ended without taking part")
        if waited_s > self.timeout_s:
            raise PeerLostError(
                f"{self._describe_self()}: rank {self.peers[other].rank} did not take part within the timeout of "
                f"{self.timeout_s:g} s; {self._describe_progress(other)}"
            )

    def _describe_self(self) -> str:
        return f"rank {self.rank} in {self.description(self.local_rank, self.signature)}"

    def description(self, local: int, signature: int) -> str:
        return self.shared_memory.read_description(local, signature & ((1 << DESCRIPTION_INDEX_BITS) - 1))

    def _describe_progress(self, other: int) -> str:
        peer_collective_id = self.words[self.shared_memory.word_index(other, STARTED_COLLECTIVE)]
        if peer_collective_id == 0:
            return "it has not called any collective of this group"
        last = self.description(other, self.words[self.signatures[other] + peer_collective_id % 64])
        doing = (
            "is in"
            if self.words[self.shared_memory.word_index(other, FINISHED_COLLECTIVE)] < peer_collective_id
            else "has finished"
        )
        return f"it {doing} its collective number {peer_collective_id}, {last}, this is number {self.collective_id}"

    def _raise_mismatch(self, other: int) -> None:
        theirs = self.description(other, self.words[self.signatures[other] + self.collective_id % 64])
        ours = self.description(self.local_rank, self.signature)
        raise CollectiveError(
            f"collective number {self.collective_id} of the group differs: rank {self.rank} called {ours}, "
            f"rank {self.peers[other].rank} called {theirs}; "
            "every rank must call the same with equal shapes and dtypes"
        )

    def mark_failed(self, reason: str) -> None:
        """Tell the others that this rank will not go on."""
        self.shared_memory.write_description(self.local_rank, DESCRIPTION_SLOTS - 1, reason)
        self._publish_exit_state(STATE_FAILED)

    def leave(self) -> None:
        if not self.words[self.shared_memory.word_index(self.local_rank, EXIT_STATE)]:
            self._publish_exit_state(STATE_LEFT)
        for peer in self.peers.values():
            os.close(peer.pidfd)

    def _publish_exit_state(self, state: int) -> None:
        self.publish(self.shared_memory.word_index(self.local_rank, EXIT_STATE), state, tuple(self.peers))


assert CACHE_LINE_WORDS * WORD_BYTES == 64
