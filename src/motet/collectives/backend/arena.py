"""The memory that the ranks of one host share: a header of counters per rank, and room for what a rank sends.

It is a file without a name: whoever makes it hands its descriptor on through /proc, and the kernel takes it back when
the last rank ends, however it ends.
"""

import mmap
import os
from dataclasses import dataclass

import torch
from torch import Tensor

WORD = 8
LINE = 8
"""Words between two counters, so that two writers never share a cache line."""

READY, DONE, OPENED, FINISHED, FAILED, BELL, POST_BELL = (LINE * i for i in range(7))
"""Counters of a rank: the beat it has put out and the one it has taken in, the collective it has begun and the last it
has finished, whether it has given up, and whether it sleeps (in a collective, or for a message)."""

SIGNATURES = 64
_SIGNATURES_AT = LINE * 7
_PAIRS_AT = _SIGNATURES_AT + SIGNATURES
TEXT_BYTES = 256
TEXTS = 128
"""Descriptions of collectives that a rank keeps; the last of them says why the rank has given up."""

BUFFERS = 4
BUFFER_BYTES = 2 << 20
"""What a rank can put out in one beat; the buffers are used in turn, so that one is written while others are read."""
POST_BYTES = 512 << 10
"""Messages from one rank to another pass through a ring of so many bytes."""
PAGE = 4096


@dataclass(frozen=True)
class Shape:
    """Where things lie in the memory of so many ranks."""

    ranks: int

    @property
    def header_words(self) -> int:
        words = _PAIRS_AT + 2 * LINE * self.ranks
        return -(-words * WORD // PAGE) * PAGE // WORD

    @property
    def texts_at(self) -> int:
        return self.ranks * self.header_words * WORD

    @property
    def data_at(self) -> int:
        return self.texts_at + self.ranks * TEXTS * TEXT_BYTES

    @property
    def post_at(self) -> int:
        return self.data_at + self.ranks * BUFFERS * BUFFER_BYTES

    @property
    def total_bytes(self) -> int:
        return self.post_at + self.ranks * self.ranks * POST_BYTES


class Arena:
    """The mapping. Ranks are counted within the host here."""

    def __init__(self, ranks: int, descriptor: int) -> None:
        self.shape = Shape(ranks)
        self._mapped = mmap.mmap(descriptor, self.shape.total_bytes)
        self._bytes = memoryview(self._mapped)
        self.words = self._bytes[: self.shape.texts_at].cast("Q")
        self.memory: Tensor = torch.frombuffer(self._mapped, dtype=torch.uint8)
        self.address = self.memory.data_ptr()

    def word(self, rank: int, name: int) -> int:
        """The index of a counter of a rank in `words`."""
        return rank * self.shape.header_words + name

    def signature(self, rank: int, number: int) -> int:
        return self.word(rank, _SIGNATURES_AT + number % SIGNATURES)

    def sent(self, src: int, dst: int) -> int:
        """How many bytes of messages `src` has put into its ring for `dst`."""
        return self.word(src, _PAIRS_AT + LINE * dst)

    def taken(self, src: int, dst: int) -> int:
        return self.word(dst, _PAIRS_AT + LINE * (self.shape.ranks + src))

    def write_text(self, rank: int, index: int, text: str) -> None:
        start = self.shape.texts_at + (rank * TEXTS + index) * TEXT_BYTES
        self._bytes[start : start + TEXT_BYTES] = text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")

    def read_text(self, rank: int, index: int) -> str:
        start = self.shape.texts_at + (rank * TEXTS + index) * TEXT_BYTES
        return bytes(self._bytes[start : start + TEXT_BYTES]).rstrip(b"\0").decode(errors="replace")

    def buffer(self, rank: int, number: int) -> Tensor:
        """Bytes of one of the buffers that a rank writes to."""
        start = self.shape.data_at + (BUFFERS * rank + number) * BUFFER_BYTES
        return self.memory[start : start + BUFFER_BYTES]

    def post(self, src: int, dst: int) -> Tensor:
        """The ring of bytes from one rank to another."""
        start = self.shape.post_at + (src * self.shape.ranks + dst) * POST_BYTES
        return self.memory[start : start + POST_BYTES]


def make_memory(ranks: int) -> int:
    """The descriptor of fresh memory for so many ranks; it holds nothing until it is touched."""
    descriptor = os.memfd_create("motet", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, Shape(ranks).total_bytes)
    return descriptor


def open_memory(pid: int, descriptor: int) -> int:
    """The memory that another process has made."""
    return os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
