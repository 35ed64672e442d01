"""Aligned files with and without direct IO: their bytes, short transfers, refusals and counts."""

import ctypes
import errno
import mmap
import os
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from direct_io_refusal import refuse_direct_io
from motet.core.direct_io import (
    ALIGNMENT,
    DirectFile,
    IoThreads,
    IoTraffic,
    aligned_buffer,
    check_free_space,
    padded_bytes,
)
from motet.core.errors import InputError

PAGES = 6


def pattern(byte_count: int, seed: int = 0) -> memoryview:
    """Bytes that differ from page to page, in aligned memory."""
    view = aligned_buffer(byte_count)
    view[:] = bytes((seed + index // 5 + index // ALIGNMENT * 7) % 251 for index in range(byte_count))
    return view


@contextmanager
def new_file(folder: Path, byte_count: int = PAGES * ALIGNMENT) -> Iterator[DirectFile]:
    with closing(DirectFile(folder / "file.bin", create=True)) as file:
        file.allocate(byte_count, "make room")
        yield file


@pytest.mark.parametrize(("count", "padded"), [(0, 0), (1, 4096), (4096, 4096), (4097, 8192)])
def test_bytes_are_padded_to_the_alignment(count: int, padded: int) -> None:
    assert padded_bytes(count) == padded


@pytest.mark.parametrize("count", [0, 1, 3 * ALIGNMENT, 2**21 - 1, 2**21, 2**22 + 1])
def test_buffers_begin_at_a_page_and_large_ones_at_a_huge_page(count: int) -> None:
    buffer = aligned_buffer(count)
    assert len(buffer) == max(padded_bytes(count), ALIGNMENT) and not any(buffer)
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    huge = hasattr(mmap, "MADV_HUGEPAGE") and count >= 2**21
    assert address % (2**21 if huge else ALIGNMENT) == 0
    buffer[-1] = 1
    assert buffer[-1] == 1


@pytest.mark.parametrize("direct", [True, False])
def test_bytes_that_are_written_are_read_again(
    direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if not direct:
        refuse_direct_io(monkeypatch)
    with new_file(tmp_path) as file:
        if direct and not file.is_direct:
            pytest.skip("the filesystem of temporary files has no direct IO")
        assert file.is_direct == direct
        assert os.stat(file.path).st_blocks * 512 >= PAGES * ALIGNMENT == file.path.stat().st_size  # noqa: PTH116
        written, read = pattern(2 * ALIGNMENT), aligned_buffer(PAGES * ALIGNMENT)
        assert file.write(written, 3 * ALIGNMENT) == 2 * ALIGNMENT
        assert file.read(read, 0) == PAGES * ALIGNMENT
        assert read == bytes(3 * ALIGNMENT) + bytes(written) + bytes(ALIGNMENT)
        file.sync()
    with closing(DirectFile(file.path)) as again:
        read[:] = bytes(len(read))
        again.read(read[: 2 * ALIGNMENT], 3 * ALIGNMENT)
        assert read[: 2 * ALIGNMENT] == written and again.is_direct == direct
    with pytest.raises(FileExistsError):
        DirectFile(file.path, create=True)
    warnings = [record.message for record in caplog.records if str(tmp_path) in record.message]
    assert len(warnings) == (not direct)


def test_a_file_that_opens_for_direct_io_and_cannot_be_read_so_is_buffered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "other").mkdir()
    with new_file(tmp_path / "other") as file:
        if not file.is_direct:
            pytest.skip("the filesystem of temporary files has no direct IO")
    real_read, refused = os.preadv, list[int]()

    def read(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if not refused:
            refused.append(descriptor)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_read(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", read)
    with new_file(tmp_path) as file:
        assert refused and not file.is_direct
        file.write(pattern(ALIGNMENT), 0)
        buffer = aligned_buffer(ALIGNMENT)
        file.read(buffer, 0)
        assert buffer == pattern(ALIGNMENT)
    assert [str(tmp_path) in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize("most", [8192, 5000])
def test_short_transfers_go_on_at_a_multiple_of_the_alignment(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may stop early, also in the middle of a page."""

    def shortened(
        call: Callable[[int, list[memoryview], int], int],
    ) -> Callable[[int, list[memoryview], int], int]:
        def transfer(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            starts.append(offset)
            return min(call(descriptor, [buffers[0][: padded_bytes(most)]], offset), most)

        return transfer

    starts = list[int]()
    with new_file(tmp_path) as file:
        monkeypatch.setattr(os, "preadv", shortened(os.preadv))
        monkeypatch.setattr(os, "pwritev", shortened(os.pwritev))
        written, read = pattern(PAGES * ALIGNMENT), aligned_buffer(PAGES * ALIGNMENT)
        travelled = file.write(written, 0), file.read(read, 0)
    assert read == written
    step = most // ALIGNMENT * ALIGNMENT
    assert starts == [*range(0, PAGES * ALIGNMENT, step)] * 2
    again = 0 if most % ALIGNMENT == 0 else (PAGES - 1) * (most - ALIGNMENT)  # Bytes that travel a second time
    assert travelled == (PAGES * ALIGNMENT + again,) * 2


def test_a_file_that_ends_early_is_an_error_of_the_device(tmp_path: Path) -> None:
    with new_file(tmp_path) as file:
        os.truncate(file.path, 2 * ALIGNMENT + 100)
        with pytest.raises(OSError, match=f"ends at byte {2 * ALIGNMENT + 100}") as raised:
            file.read(aligned_buffer(PAGES * ALIGNMENT), 0)
    assert (raised.value.errno, raised.value.filename) == (errno.EIO, str(file.path))


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = SimpleNamespace(free=5 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: free)
    check_free_space(tmp_path, 5 * 2**20, "make room")
    with closing(DirectFile(tmp_path / "file.bin", create=True)) as file:
        with pytest.raises(InputError) as refused:
            file.allocate(5 * 2**20 + 1, "make room")
        assert file.path.stat().st_size == 0
    assert str(refused.value) == f"{tmp_path} has 5 MiB free and the files need 5 MiB; make room"


def test_a_file_has_the_padded_bytes_of_its_last_allocation(tmp_path: Path) -> None:
    with new_file(tmp_path) as file:
        file.allocate(ALIGNMENT + 1, "make room")
        assert file.path.stat().st_size == 2 * ALIGNMENT
        file.allocate(0, "make room")
        assert file.path.stat().st_size == 0


def test_space_that_cannot_be_reserved_is_refused(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * ALIGNMENT, hard))
    try:
        with (
            pytest.raises(InputError, match=r"the files need 24 KiB \(File too large\); make room"),
            new_file(tmp_path),
        ):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_threads_read_and_write_and_count_the_bytes(tmp_path: Path) -> None:
    with new_file(tmp_path) as file, closing(IoThreads(2)) as threads:
        pieces = [pattern(ALIGNMENT, seed) for seed in range(PAGES)]
        written = [threads.write(file, piece, index * ALIGNMENT) for index, piece in enumerate(pieces)]
        for future in written:
            future.result()
        before = threads.traffic
        assert (before.bytes_read, before.bytes_written) == (0, PAGES * ALIGNMENT) and before.busy_s > 0
        buffers = [aligned_buffer(ALIGNMENT) for _ in pieces]
        for future in [threads.read(file, buffer, index * ALIGNMENT) for index, buffer in enumerate(buffers)]:
            future.result()
        assert buffers == pieces
        traffic = threads.traffic - before
        assert (traffic.bytes_read, traffic.bytes_written) == (PAGES * ALIGNMENT, 0)
        assert traffic.bytes_per_s == pytest.approx(PAGES * ALIGNMENT / traffic.busy_s)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("motet-io")]
    assert IoTraffic().bytes_per_s == 0


def test_transfers_that_overlap_count_their_time_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two transfers that wait for one another are under way together."""
    both, clock = threading.Barrier(2, timeout=30), iter([10.0, 14.0])
    with new_file(tmp_path) as file, closing(IoThreads(2)) as threads:
        monkeypatch.setattr(file, "read", lambda buffer, offset: both.wait() * 0 + len(buffer))
        monkeypatch.setattr("motet.core.direct_io.time", SimpleNamespace(monotonic=lambda: next(clock)))
        done = [threads.read(file, pattern(ALIGNMENT), 0) for _ in range(2)]
        for future in done:
            future.result()
        monkeypatch.undo()
        assert threads.traffic == IoTraffic(2 * ALIGNMENT, 0, 4.0)
