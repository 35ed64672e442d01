"""The memory that the ranks of one host share: counters, descriptions, buffers and message rings of each rank.

It is a file without a name (memfd), so that nobody can put another in its place. Other ranks open it through /proc,
which admits processes of the same user. The kernel frees it when the last rank ends, however that happens. A waiting
rank spins, then yields its core, then sleeps on a word of this memory (a futex). A wake may be missed when both sides
look in the same moment (on x86 a load may pass a store), so every sleep is short.
"""

import ctypes
import fcntl
import mmap
import os
import platform
import resource
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from motet.collectives.shm_backend.transport.host_connections import printable
from motet.core.errors import check_input, convert_os_errors
from motet.core.units import format_bytes

_WORD_BYTES = 8
CACHE_LINE_WORDS = 8  # Words between two counters, so that two writers never share a cache line

# The counters of a rank.
PUBLISHED_ROUND, CONSUMED_ROUND, STARTED_COLLECTIVE, FINISHED_COLLECTIVE = (CACHE_LINE_WORDS * i for i in range(4))
EXIT_STATE, COLLECTIVE_SLEEP_FLAG, MESSAGE_SLEEP_FLAG, SIGNATURES_OFFSET = (CACHE_LINE_WORDS * i for i in range(4, 8))
PROGRESS_SLEEP_FLAG = MESSAGE_SLEEP_FLAG + 1  # Flag of the thread that moves messages in the background

SIGNATURE_SLOTS = 64
_PAIR_COUNTERS_OFFSET = SIGNATURES_OFFSET + SIGNATURE_SLOTS
_DESCRIPTION_BYTES = 256
# Descriptions of collectives that a rank keeps; the last slot says why the rank has failed.
DESCRIPTION_SLOTS = 128

BUFFERS_PER_RANK = 4  # Used in turn, so that one is written while others are read
BUFFER_BYTES = 2 << 20  # The most that a rank can publish in one round
MESSAGE_RING_BYTES = 512 << 10  # One ring for each ordered pair of ranks
_PAGE_BYTES = 4096
# Nobody can shorten the memory under a rank that has mapped it, which would end that rank with SIGBUS.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_SYS_FUTEX = 202
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_ALL_WAITERS = 1 << 30
MAX_SLEEP_S = 0.002
_library = ctypes.CDLL(None, use_errno=False)
_syscall, yield_core = _library.syscall, _library.sched_yield  # yield_core lets other processes and threads run
_syscall.restype = ctypes.c_long


def is_supported() -> bool:
    """Whether stores become visible to other processors in their order, and the system has these calls."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


class SharedMemoryLayout:
    """The offsets in the memory of a number of ranks."""

    def __init__(self, ranks: int) -> None:
        words = _PAIR_COUNTERS_OFFSET + 2 * CACHE_LINE_WORDS * ranks
        self.ranks = ranks
        self.header_words = -(-words * _WORD_BYTES // _PAGE_BYTES) * _PAGE_BYTES // _WORD_BYTES
        self.descriptions_offset = ranks * self.header_words * _WORD_BYTES
        self.buffers_offset = self.descriptions_offset + ranks * DESCRIPTION_SLOTS * _DESCRIPTION_BYTES
        self.message_rings_offset = self.buffers_offset + ranks * BUFFERS_PER_RANK * BUFFER_BYTES
        self.total_bytes = self.message_rings_offset + ranks * ranks * MESSAGE_RING_BYTES


class SharedMemorySegment:
    """The mapped memory. All ranks here are local indices."""

    def __init__(self, ranks: int, descriptor: int) -> None:
        self.layout = SharedMemoryLayout(ranks)
        with _convert_memory_errors("map", ranks):
            self._mapped = mmap.mmap(descriptor, self.layout.total_bytes)
        self._bytes = memoryview(self._mapped)
        self.words = self._bytes[: self.layout.descriptions_offset].cast("Q")
        self.memory: Tensor = torch.frombuffer(self._mapped, dtype=torch.uint8)

    def word_index(self, rank: int, counter: int) -> int:
        """The index of a counter of a rank in `words`."""
        return rank * self.layout.header_words + counter

    def sent_bytes_index(self, src: int, dst: int) -> int:
        """The index of the bytes of messages that `src` has written to its ring for `dst`."""
        return self.word_index(src, _PAIR_COUNTERS_OFFSET + CACHE_LINE_WORDS * dst)

    def received_bytes_index(self, src: int, dst: int) -> int:
        return self.word_index(dst, _PAIR_COUNTERS_OFFSET + CACHE_LINE_WORDS * (self.layout.ranks + src))

    def sleep(self, flag: int, max_s: float = MAX_SLEEP_S) -> None:
        """Sleep until a peer clears the flag at this index, or for a moment of less than a second."""
        timespec = struct.pack("ll", 0, int(max_s * 1e9))  # Seconds and nanoseconds
        _syscall(_SYS_FUTEX, self._word_address(flag), _FUTEX_WAIT, 1, timespec, None, 0)

    def wake(self, flag: int) -> None:
        """Clear the flag at this index, and wake the rank that has set it."""
        if self.words[flag]:
            self.words[flag] = 0
            _syscall(_SYS_FUTEX, self._word_address(flag), _FUTEX_WAKE, _ALL_WAITERS, None, None, 0)

    def _word_address(self, index: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.memory.data_ptr() + index * _WORD_BYTES)

    def _description_range(self, rank: int, index: int) -> slice:
        start = self.layout.descriptions_offset + (rank * DESCRIPTION_SLOTS + index) * _DESCRIPTION_BYTES
        return slice(start, start + _DESCRIPTION_BYTES)

    def write_description(self, rank: int, index: int, text: str) -> None:
        padded = text.encode()[:_DESCRIPTION_BYTES].ljust(_DESCRIPTION_BYTES, b"\0")
        self._bytes[self._description_range(rank, index)] = padded

    def read_description(self, rank: int, index: int) -> str:
        return printable(bytes(self._bytes[self._description_range(rank, index)]))

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
    with _convert_memory_errors("make", ranks):
        descriptor = os.memfd_create("motet", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(descriptor, 0o600)
            os.ftruncate(descriptor, SharedMemoryLayout(ranks).total_bytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except OSError:
            os.close(descriptor)
            raise
    return descriptor


def open_shared_memory(ranks: int, pid: int, descriptor: int) -> int:
    """Open the memory that another process of this user has made, and refuse every other file."""
    path = f"/proc/{pid}/fd/{descriptor}"
    with _convert_memory_errors("open", ranks):
        # Opening a device could change it.
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC) if Path(path).is_file() else -1
    problem = _unlike_shared_memory(opened, SharedMemoryLayout(ranks).total_bytes)
    if problem and opened >= 0:
        os.close(opened)
    remedy = "let only ranks of this group reach its store"
    check_input(
        not problem, f"{path}, which the store names as the memory of the ranks of this host, {problem}; {remedy}"
    )
    return opened


def _unlike_shared_memory(descriptor: int, total_bytes: int) -> str:
    """The difference of a file from the memory of a group; empty if there is none."""
    if descriptor < 0:
        return "is not a file"
    status = os.fstat(descriptor)
    if status.st_uid != os.getuid():
        return f"belongs to user {status.st_uid}, not to user {os.getuid()}"
    if status.st_size != total_bytes:
        return f"has {status.st_size} bytes instead of {total_bytes}"
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:  # The file is on a disk
        seals = 0
    return "" if seals & _SEALS == _SEALS else "can be shortened by others"


@contextmanager
def _convert_memory_errors(verb: str, ranks: int) -> Iterator[None]:
    """Turn an `OSError` into a sentence with the size of the memory and the limits of this process."""
    file_bytes, files = (resource.getrlimit(limit)[0] for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE))
    limit = "any size" if file_bytes == resource.RLIM_INFINITY else format_bytes(file_bytes)
    size = format_bytes(SharedMemoryLayout(ranks).total_bytes)
    action = f"{verb} the {size} of memory that the {ranks} ranks of this host share"
    limits = f"files of this process may have {limit}, and {files} of them may be open"
    with convert_os_errors(
        f"{action} ({limits})", "start all ranks of a host as the same user, or use the backend gloo"
    ):
        yield
