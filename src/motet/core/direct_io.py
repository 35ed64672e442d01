"""Files that threads read and write in aligned pieces, past the page cache where the filesystem allows it.

Buffers, offsets and lengths are multiples of `ALIGNMENT`. A file of another length ends in padding. Measured on two
cores and a virtual disk (docs/benchmarks/disk.md): a few threads with pieces of 4 MiB on huge pages read and write at
least as fast as fio with io_uring, and buffered writes with `fdatasync` reach a tenth of that. So there is no binding
to an IO library here.
"""

import ctypes
import errno
import logging
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from threading import Lock

from motet.core.errors import InputError
from motet.core.units import format_bytes

ALIGNMENT = 4096  # Bytes: a page, and the largest logical block of common disks
PIECE_BYTES = 4 * 2**20
THREADS = 3
_HUGE_PAGE_BYTES = 2 * 2**20

_NO_DIRECT_IO = (errno.EINVAL, errno.EOPNOTSUPP)
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def padded_bytes(byte_count: int) -> int:
    """The smallest multiple of `ALIGNMENT` that is not smaller."""
    return -(-byte_count // ALIGNMENT) * ALIGNMENT


def aligned_buffer(byte_count: int) -> memoryview:
    """Zeros that begin at a page, as many as asked for and padding; a view keeps the memory alive.

    Large buffers are on huge pages where Linux has them: direct IO looks up each page of its memory, and with pages
    of 4 KiB reads had half of the bandwidth on the machine of docs/benchmarks/disk.md.
    """
    length = max(padded_bytes(byte_count), ALIGNMENT)
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # Linux has it
        return memoryview(mmap.mmap(-1, length))
    memory = mmap.mmap(-1, length + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _HUGE_PAGE_BYTES
    # A fork during a direct read into private memory can lose what was read (open(2)), so children do not get it.
    memory.madvise(mmap.MADV_DONTFORK)
    if on_huge_pages := length // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES:
        with suppress(OSError):  # A kernel that was built without them
            memory.madvise(mmap.MADV_HUGEPAGE, start, on_huge_pages)
    return memoryview(memory)[start : start + length]


def check_free_space(folder: Path, needed_bytes: int, remedy: str) -> None:
    """Refuse a folder whose filesystem has fewer free bytes than are needed."""
    if shutil.disk_usage(folder).free < needed_bytes:
        raise _no_space(folder, needed_bytes, remedy)


def _no_space(folder: Path, needed_bytes: int, remedy: str, *, reason: str = "") -> InputError:
    free = format_bytes(shutil.disk_usage(folder).free)
    return InputError(f"{folder} has {free} free and the files need {format_bytes(needed_bytes)}{reason}; {remedy}")


@cache
def _warn_of_buffered_io(folder: Path) -> None:
    """Warn once for each folder of this process."""
    text = f"the filesystem of {folder} has no direct IO: files there pass through the page cache, which is slower"
    logging.getLogger("motet").warning(text)


class DirectFile:
    """An open file that is read and written in aligned pieces, by several threads if they like.

    It is opened with O_DIRECT where the filesystem supports that; otherwise its IO is buffered, and a warning names
    the folder unless the caller wants none. An `OSError` of a transfer names the file.
    """

    def __init__(
        self, path: Path, *, create: bool = False, mode: int = 0o600, warn_of_buffered_io: bool = True
    ) -> None:
        """Open a file for reading and writing; `create` makes it and refuses one that exists."""
        self.path, self._warn_of_buffered_io = path, warn_of_buffered_io
        self._flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        direct = getattr(os, "O_DIRECT", 0)  # Linux has it
        make = os.O_CREAT | os.O_EXCL if create else 0
        try:
            self._descriptor = os.open(path, self._flags | make | direct, mode)
        except OSError as error:
            if not direct or error.errno not in _NO_DIRECT_IO:
                raise
            direct = 0
            # Linux makes the file before it finds out that the filesystem has no direct IO.
            self._descriptor = os.open(path, self._flags | (os.O_CREAT if create else 0), mode)
        self.is_direct = bool(direct)
        self._warn_if_buffered()

    def _warn_if_buffered(self) -> None:
        if self._warn_of_buffered_io and not self.is_direct:
            _warn_of_buffered_io(self.path.parent)

    def allocate(self, byte_count: int, remedy: str) -> None:
        """Reserve the padded bytes, so that a write does not find the disk full; refuse if they are not free."""
        byte_count = padded_bytes(byte_count)
        check_free_space(self.path.parent, byte_count, remedy)
        try:
            if byte_count and hasattr(os, "posix_fallocate"):  # macOS has none
                os.posix_fallocate(self._descriptor, 0, byte_count)
            os.ftruncate(self._descriptor, byte_count)
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise
            raise _no_space(self.path.parent, byte_count, remedy, reason=f" ({error.strerror})") from error
        if byte_count:
            self.probe_direct_io()

    def set_length(self, byte_count: int) -> None:
        """Cut the file, or let it end in zeros that take no space on disk before they are written."""
        try:
            os.ftruncate(self._descriptor, byte_count)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def probe_direct_io(self) -> None:
        """Fall back to buffered IO if the filesystem opens a file for direct IO and then refuses to read it so.

        The file has a page or more.
        """
        if not self.is_direct:
            return
        try:
            os.preadv(self._descriptor, [aligned_buffer(ALIGNMENT)], 0)
        except OSError as error:
            if error.errno not in _NO_DIRECT_IO:
                raise
            os.close(self._descriptor)
            self._descriptor = os.open(self.path, self._flags)
            self.is_direct = False
            self._warn_if_buffered()

    def read(self, buffer: memoryview, offset: int) -> int:
        """Fill the buffer; the bytes that travelled."""
        return self._transfer(os.preadv, buffer, offset)

    def write(self, buffer: memoryview, offset: int) -> int:
        """Write the buffer; the bytes that travelled."""
        return self._transfer(os.pwritev, buffer, offset)

    def _transfer(self, call: Callable[[int, Sequence[memoryview], int], int], buffer: memoryview, offset: int) -> int:
        assert offset % ALIGNMENT == len(buffer) % ALIGNMENT == 0, (offset, len(buffer))
        done, travelled, has_stalled = 0, 0, False
        while done < len(buffer):
            try:
                count = call(self._descriptor, [buffer[done:]], offset + done)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self.path)) from error
            # A short transfer goes on at a multiple of the alignment, as direct IO needs.
            aligned = count // ALIGNMENT * ALIGNMENT
            if not aligned and has_stalled:
                raise OSError(errno.EIO, f"the file ends at byte {offset + done + count}", str(self.path))
            has_stalled = not aligned
            done, travelled = done + aligned, travelled + count
        return travelled

    def sync(self) -> None:
        """Wait until the disk has everything that was written, also through a mapping, and drop it from the cache."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file, once."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


@dataclass(frozen=True)
class IoTraffic:
    """The bytes that travelled, and the seconds in which at least one transfer was under way."""

    bytes_read: int = 0
    bytes_written: int = 0
    busy_s: float = 0.0

    def __add__(self, other: "IoTraffic") -> "IoTraffic":
        return IoTraffic(
            self.bytes_read + other.bytes_read, self.bytes_written + other.bytes_written, self.busy_s + other.busy_s
        )

    def __sub__(self, earlier: "IoTraffic") -> "IoTraffic":
        return IoTraffic(
            self.bytes_read - earlier.bytes_read,
            self.bytes_written - earlier.bytes_written,
            self.busy_s - earlier.busy_s,
        )

    @property
    def bytes_per_s(self) -> float:
        """Bytes in both directions for each second with a transfer; 0 before the first one."""
        return (self.bytes_read + self.bytes_written) / self.busy_s if self.busy_s else 0.0


class IoThreads:
    """Threads that read and write pieces, and count what travels. `close` waits for them."""

    def __init__(self, count: int = THREADS) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="motet-io")
        self._lock = Lock()
        self._traffic, self._under_way, self._busy_since_s = IoTraffic(), 0, 0.0

    @property
    def traffic(self) -> IoTraffic:
        """The bytes of transfers that have ended, and the busy time until now."""
        with self._lock:
            under_way_s = time.monotonic() - self._busy_since_s if self._under_way else 0.0
            return replace(self._traffic, busy_s=self._traffic.busy_s + under_way_s)

    def read(self, file: DirectFile, buffer: memoryview, offset: int) -> "Future[None]":
        """Fill the buffer in another thread."""
        return self._pool.submit(self._read, file, buffer, offset)

    def write(self, file: DirectFile, buffer: memoryview, offset: int) -> "Future[None]":
        """Write the buffer in another thread."""
        return self._pool.submit(self._write, file, buffer, offset)

    def close(self) -> None:
        """Wait for all transfers and end the threads."""
        self._pool.shutdown()

    def _read(self, file: DirectFile, buffer: memoryview, offset: int) -> None:
        with self._busy():
            count = file.read(buffer, offset)
        with self._lock:
            self._traffic = replace(self._traffic, bytes_read=self._traffic.bytes_read + count)

    def _write(self, file: DirectFile, buffer: memoryview, offset: int) -> None:
        with self._busy():
            count = file.write(buffer, offset)
        with self._lock:
            self._traffic = replace(self._traffic, bytes_written=self._traffic.bytes_written + count)

    @contextmanager
    def _busy(self) -> Iterator[None]:
        with self._lock:
            if not self._under_way:
                self._busy_since_s = time.monotonic()
            self._under_way += 1
        try:
            yield
        finally:
            with self._lock:
                self._under_way -= 1
                if not self._under_way:
                    busy_s = self._traffic.busy_s + time.monotonic() - self._busy_since_s
                    self._traffic = replace(self._traffic, busy_s=busy_s)
