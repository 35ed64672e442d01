"""The memory that the ranks of one host share: counters, descriptions, buffers and message rings of each rank.

It is a file without a name, which other ranks open through /proc. The kernel frees it when the last rank ends, however
that happens.
"""

import mmap
import os
from dataclasses import dataclass

import torch
from torch import Tensor

WORD_BYTES = 8
CACHE_LINE_WORDS = 8  # Words between two counters, so that two writers never share a cache line

# The counters of a rank.
(
    PUBLISHED_ROUND,
    CONSUMED_ROUND,
    STARTED_COLLECTIVE,
    FINISHED_COLLECTIVE,
    EXIT_STATE,
    COLLECTIVE_SLEEP_FLAG,
    MESSAGE_SLEEP_FLAG,
) = (CACHE_LINE_WORDS * i for i in range(7))

SIGNATURE_SLOTS = 64
_SIGNATURES_OFFSET = CACHE_LINE_WORDS * 7
_PAIR_COUNTERS_OFFSET = _SIGNATURES_OFFSET + SIGNATURE_SLOTS
DESCRIPTION_BYTES = 256
# Descriptions of collectives that a rank keeps; the last slot says why the rank has failed.
DESCRIPTION_SLOTS = 128

BUFFERS_PER_RANK = 4  # Used in turn, so that one is written while others are read
BUFFER_BYTES = 2 << 20  # The most that a rank can publish in one round
MESSAGE_RING_BYTES = 512 << 10  # One ring for each ordered pair of ranks
PAGE_BYTES = 4096


@dataclass(frozen=True)
class SharedMemoryLayout:
    """The offsets in the memory of a number of ranks."""

    ranks: int

    @property
    def header_words(self) -> int:
        words = _PAIR_COUNTERS_OFFSET + 2 * CACHE_LINE_WORDS * self.ranks
        return -(-words * WORD_BYTES // PAGE_BYTES) * PAGE_BYTES // WORD_BYTES

    @property
    def descriptions_offset(self) -> int:
        return self.ranks * self.header_words * WORD_BYTES

    @property
    def buffers_offset(self) -> int:
        return self.descriptions_offset + self.ranks * DESCRIPTION_SLOTS * DESCRIPTION_BYTES

    @property
    def message_rings_offset(self) -> int:
        return self.buffers_offset + self.ranks * BUFFERS_PER_RANK * BUFFER_BYTES

    @property
    def total_bytes(self) -> int:
        return self.message_rings_offset + self.ranks * self.ranks * MESSAGE_RING_BYTES


class SharedMemorySegment:
    """The mapped memory. All ranks here are local indices."""

    def __init__(self, ranks: int, descriptor: int) -> None:
        self.layout = SharedMemoryLayout(ranks)
        self._mapped = mmap.mmap(descriptor, self.layout.total_bytes)
        self._bytes = memoryview(self._mapped)
        self.words = self._bytes[: self.layout.descriptions_offset].cast("Q")
        self.memory: Tensor = torch.frombuffer(self._mapped, dtype=torch.uint8)
        self.address = self.memory.data_ptr()

    def word_index(self, rank: int, counter: int) -> int:
        """The index of a counter of a rank in `words`."""
        return rank * self.layout.header_words + counter

    def signature_index(self, rank: int, collective_id: int) -> int:
        return self.word_index(rank, _SIGNATURES_OFFSET + collective_id % SIGNATURE_SLOTS)

    def sent_bytes_index(self, src: int, dst: int) -> int:
        """The index of the bytes of messages that `src` has written to its ring for `dst`."""
        return self.word_index(src, _PAIR_COUNTERS_OFFSET + CACHE_LINE_WORDS * dst)

    def received_bytes_index(self, src: int, dst: int) -> int:
        return self.word_index(dst, _PAIR_COUNTERS_OFFSET + CACHE_LINE_WORDS * (self.layout.ranks + src))

    def _description_range(self, rank: int, index: int) -> slice:
        start = self.layout.descriptions_offset + (rank * DESCRIPTION_SLOTS + index) * DESCRIPTION_BYTES
        return slice(start, start + DESCRIPTION_BYTES)

    def write_description(self, rank: int, index: int, text: str) -> None:
        padded = text.encode()[:DESCRIPTION_BYTES].ljust(DESCRIPTION_BYTES, b"\0")
        self._bytes[self._description_range(rank, index)] = padded

    def read_description(self, rank: int, index: int) -> str:
        padded = bytes(self._bytes[self._description_range(rank, index)])
        return padded.rstrip(b"\0").decode(errors="replace")

    def buffer(self, rank: int, buffer_id: int) -> Tensor:
        """One of the buffers that a rank publishes, as bytes."""
        start = self.layout.buffers_offset + (BUFFERS_PER_RANK * rank + buffer_id) * BUFFER_BYTES
        return self.memory[start : start + BUFFER_BYTES]

    def message_ring(self, src: int, dst: int) -> Tensor:
        """The ring of bytes from one rank to another."""
        start = self.layout.message_rings_offset + (src * self.layout.ranks + dst) * MESSAGE_RING_BYTES
        return self.memory[start : start + MESSAGE_RING_BYTES]


def create_shared_memory(ranks: int) -> int:
    """Make memory for a number of ranks, and return its descriptor. Pages are allocated on first use."""
    descriptor = os.memfd_create("motet", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, SharedMemoryLayout(ranks).total_bytes)
    return descriptor


def open_shared_memory(pid: int, descriptor: int) -> int:
    """Open the memory that another process has made."""
    return os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
