"""The memory that the ranks of one host share: a header of counters per rank, and room for what a rank sends.

It is a file without a name: whoever makes it hands its descriptor on through /proc, and the kernel takes it back when
the last rank ends, however it ends.
"""

import mmap
import os
from dataclasses import dataclass

import torch
from torch import Tensor

WORD_BYTES = 8
CACHE_LINE_WORDS = 8  # Words between two counters, so that two writers never share a cache line

# Counters of a rank: the beat it has put out and the one it has taken in, the collective it has begun and the last it
# has finished, whether it has given up, and whether it sleeps (in a collective, or for a message).
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
# Descriptions of collectives that a rank keeps; the last of them says why the rank has given up.
DESCRIPTION_SLOTS = 128

BUFFERS_PER_RANK = 4
# What a rank can put out in one beat; the buffers are used in turn, so that one is written while others are read.
BUFFER_BYTES = 2 << 20
MESSAGE_RING_BYTES = 512 << 10  # Messages from one rank to another pass through a ring of so many bytes
PAGE_BYTES = 4096


@dataclass(frozen=True)
class SharedMemoryLayout:
    """Where things lie in the memory of so many ranks."""

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
    """The mapping. Ranks are counted within the host here."""

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
        """How many bytes of messages `src` has put into its ring for `dst`."""
        return self.word_index(src, _PAIR_COUNTERS_OFFSET + CACHE_LINE_WORDS * dst)

    def received_bytes_index(self, src: int, dst: int) -> int:
        return self.word_index(dst, _PAIR_COUNTERS_OFFSET + CACHE_LINE_WORDS * (self.layout.ranks + src))

    def write_description(self, rank: int, index: int, text: str) -> None:
        start = self.layout.descriptions_offset + (rank * DESCRIPTION_SLOTS + index) * DESCRIPTION_BYTES
        self._bytes[start : start + DESCRIPTION_BYTES] = text.encode()[:DESCRIPTION_BYTES].ljust(
            DESCRIPTION_BYTES, b"\0"
        )

    def read_description(self, rank: int, index: int) -> str:
        start = self.layout.descriptions_offset + (rank * DESCRIPTION_SLOTS + index) * DESCRIPTION_BYTES
        return bytes(self._bytes[start : start + DESCRIPTION_BYTES]).rstrip(b"\0").decode(errors="replace")

    def buffer(self, rank: int, buffer_id: int) -> Tensor:
        """Bytes of one of the buffers that a rank writes to."""
        start = self.layout.buffers_offset + (BUFFERS_PER_RANK * rank + buffer_id) * BUFFER_BYTES
        return self.memory[start : start + BUFFER_BYTES]

    def message_ring(self, src: int, dst: int) -> Tensor:
        """The ring of bytes from one rank to another."""
        start = self.layout.message_rings_offset + (src * self.layout.ranks + dst) * MESSAGE_RING_BYTES
        return self.memory[start : start + MESSAGE_RING_BYTES]


def create_shared_memory(ranks: int) -> int:
    """The descriptor of fresh memory for so many ranks; it holds nothing until it is touched."""
    descriptor = os.memfd_create("motet", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, SharedMemoryLayout(ranks).total_bytes)
    return descriptor


def open_shared_memory(pid: int, descriptor: int) -> int:
    """The memory that another process has made."""
    return os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
