"""Synchronisation of the ranks of one host: counters in shared memory, and the detection of processes that end."""

import os
import select
import time
from dataclasses import dataclass

from motet.collectives.program import CollectiveError, PeerLostError
from motet.collectives.shm_backend.transport import shared_memory as shm

LIVENESS_CHECK_S = 0.02  # Interval at which a waiting rank checks that its peers are alive
SPINS = 400
YIELDS = 30
DESCRIPTION_INDEX_BITS = 8
STATE_LEFT = 2
STATE_FAILED = 1


@dataclass(frozen=True)
class LocalPeerProcess:
    """The process of another rank of this host."""

    rank: int  # Rank in the group
    pidfd: int  # Readable when the process has ended


LocalPeers = dict[int, LocalPeerProcess]


class LocalPeerSync:
    """One rank's view of its host. All ranks here are local indices, except `rank` and those in messages."""

    def __init__(
        self, memory: shm.SharedMemorySegment, local_rank: int, peers: LocalPeers, *, rank: int, timeout_s: float
    ) -> None:
        self.shared_memory, self.words, self.local_rank, self.peers = memory, memory.words, local_rank, peers
        self.rank, self.timeout_s = rank, timeout_s
        self._own_words = memory.word_index(local_rank, 0)
        self.published_index, self.consumed_index, self.sleep_flags, self.signatures = (
            [memory.word_index(r, counter) for r in range(memory.layout.ranks)]
            for counter in (shm.PUBLISHED_ROUND, shm.CONSUMED_ROUND, shm.COLLECTIVE_SLEEP_FLAG, shm.SIGNATURES_OFFSET)
        )
        self.collective_id = self.signature = 0
        self.spins = SPINS
        self._poll = select.poll()
        self._by_descriptor = {peer.pidfd: local for local, peer in peers.items()}
        for peer in peers.values():
            self._poll.register(peer.pidfd, select.POLLIN)

    def begin(self, signature: int) -> None:
        """Publish the start and the signature of a collective."""
        self.collective_id += 1
        self.signature = signature
        self.words[self.signatures[self.local_rank] + self.collective_id % shm.SIGNATURE_SLOTS] = signature
        self.words[self._own_words + shm.STARTED_COLLECTIVE] = self.collective_id

    def finish(self) -> None:
        """Publish the end of the collective."""
        self.words[self._own_words + shm.FINISHED_COLLECTIVE] = self.collective_id

    def _counter(self, local: int, counter: int) -> int:
        return self.words[self.shared_memory.word_index(local, counter)]

    def _check_signature(self, local: int) -> None:
        signature = self.words[self.signatures[local] + self.collective_id % shm.SIGNATURE_SLOTS]
        if signature >> DESCRIPTION_INDEX_BITS != self.signature >> DESCRIPTION_INDEX_BITS:
            raise CollectiveError(
                f"collective number {self.collective_id} of the group differs: rank {self.rank} called "
                f"{self.description(self.local_rank, self.signature)}, rank {self.peers[local].rank} called "
                f"{self.description(local, signature)}; every rank must call the same with equal shapes and dtypes"
            )

    def publish(self, index: int, value: int, readers: tuple[int, ...]) -> None:
        """Set a counter of this rank, and wake the readers that sleep."""
        self.words[index] = value
        for reader in readers:
            self.shared_memory.wake(self.sleep_flags[reader])

    def wait_published(self, other: int, value: int) -> None:
        """Wait until another rank has published a round of this collective."""
        index = self.published_index[other]
        if self.words[index] < value:
            self.wait_counter(index, value, other)
        self._check_signature(other)

    def wait_counter(self, index: int, value: int, other: int) -> None:
        """Wait until a counter of another rank has at least this value."""
        words = self.words
        for _ in range(self.spins):
            if words[index] >= value:
                return
        for _ in range(YIELDS):
            shm.yield_core()
            if words[index] >= value:
                return
        flag = self.sleep_flags[self.local_rank]
        start = last_check = time.monotonic()
        while words[index] < value:
            words[flag] = 1
            if words[index] < value:
                self.shared_memory.sleep(flag)
            words[flag] = 0
            now = time.monotonic()
            if now - last_check > LIVENESS_CHECK_S:
                last_check = now
                ended = {self._by_descriptor[descriptor] for descriptor, _ in self._poll.poll(0)}
                if words[index] < value:
                    self._check_liveness(other, ended, now - start)

    def _check_liveness(self, other: int, ended: set[int], waited_s: float) -> None:
        if self._counter(other, shm.STARTED_COLLECTIVE) >= self.collective_id:
            self._check_signature(other)
        absent = [local for local in self.peers if self._counter(local, shm.FINISHED_COLLECTIVE) < self.collective_id]
        states = {local: self._counter(local, shm.EXIT_STATE) for local in absent}
        this_rank = f"rank {self.rank} in {self.description(self.local_rank, self.signature)}"
        # A killed rank (state 0) is named before the ranks that failed because of it.
        for local in sorted(absent, key=lambda local: states[local]):
            who, state = f"rank {self.peers[local].rank}", states[local]
            if state == STATE_FAILED:
                reason = self.shared_memory.read_description(local, shm.DESCRIPTION_SLOTS - 1)
                raise PeerLostError(f"{this_rank}: {who} has given up: {reason}")
            if state == STATE_LEFT or local in ended:
                departure = f"{who} has left the group" if state == STATE_LEFT else f"the process of {who} has ended"
                raise PeerLostError(f"{this_rank}: {departure} without taking part")
        if waited_s > self.timeout_s:
            raise PeerLostError(
                f"{this_rank}: rank {self.peers[other].rank} did not take part within the timeout of "
                f"{self.timeout_s:g} s; {self._describe_progress(other)}"
            )

    def description(self, local: int, signature: int) -> str:
        return self.shared_memory.read_description(local, signature & ((1 << DESCRIPTION_INDEX_BITS) - 1))

    def _describe_progress(self, other: int) -> str:
        started = self._counter(other, shm.STARTED_COLLECTIVE)
        if started == 0:
            return "it has not called any collective of this group"
        last = self.description(other, self.words[self.signatures[other] + started % shm.SIGNATURE_SLOTS])
        doing = "is in" if self._counter(other, shm.FINISHED_COLLECTIVE) < started else "has finished"
        return f"it {doing} its collective number {started}, {last}, this is number {self.collective_id}"

    def lost_reason(self, local: int) -> str:
        """The reason why nothing more will come from a rank; empty if something may."""
        if self._counter(local, shm.EXIT_STATE) in (STATE_FAILED, STATE_LEFT):
            return "that rank has given up or left the group"
        poll = select.poll()
        poll.register(self.peers[local].pidfd, select.POLLIN)
        return "its process has ended" if poll.poll(0) else ""

    def mark_failed(self, reason: str) -> None:
        """Tell the peers that this rank takes part in nothing more."""
        self.shared_memory.write_description(self.local_rank, shm.DESCRIPTION_SLOTS - 1, reason)
        self._publish_exit_state(STATE_FAILED)

    def leave(self) -> None:
        if not self.words[self._own_words + shm.EXIT_STATE]:
            self._publish_exit_state(STATE_LEFT)
        for peer in self.peers.values():
            os.close(peer.pidfd)

    def _publish_exit_state(self, state: int) -> None:
        self.publish(self._own_words + shm.EXIT_STATE, state, tuple(self.peers))
