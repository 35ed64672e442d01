"""State of the optimizer in files, which is read, updated and written piece by piece.

While one piece is updated, the next ones are read and the last ones written, by a few threads with direct IO. The
order of the pieces and the numbers do not depend on the threads: the update of a piece runs in the calling thread.
"""

import errno
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from motet.core.direct_io import (
    PIECE_BYTES,
    THREADS,
    DirectFile,
    IoThreads,
    IoTraffic,
    aligned_buffer,
    check_free_space,
)
from motet.core.errors import StateFileError, convert_os_errors
from motet.memory.tiers.file_layout import BUFFERED_PIECES, FileLayout, Piece

PieceFunction = Callable[[slice, Mapping[str, Tensor]], None]

_ROOM = "make room, or set memory.folder to another disk or memory.optimizer to host"
_REMEDIES = {
    errno.ENOSPC: "make room in memory.folder",
    errno.EDQUOT: "ask for a larger quota, or set memory.folder to another disk",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
}
_OTHER_REMEDY = "check the disk, or set memory.folder to another one"


@contextmanager
def state_file_errors(action: str) -> Iterator[None]:
    """Raise an error of the system, which names the file, as one for the user."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, _OTHER_REMEDY)
        raise StateFileError(
            f"could not {action} {error.filename} ({error.strerror}): the last checkpoint is complete; {remedy}, then "
            "--resume"
        ) from error


class _PieceBuffers:
    """Aligned memory for one piece of each kind, and the transfers that are under way to or from it."""

    def __init__(self, layout: FileLayout, dtypes: Mapping[str, torch.dtype]) -> None:
        self.piece: Piece | None = None
        self._layout, self._dtypes = layout, dtypes
        self._memory = {kind: aligned_buffer(layout.buffer_bytes(kind)) for kind in dtypes}
        self._futures: list[Future[None]] = []
        self._action = ""

    def read(self, piece: Piece, files: Mapping[str, DirectFile], threads: IoThreads) -> None:
        self.piece, self._action = piece, "read"
        self._futures = [threads.read(files[kind], *self._span(kind)) for kind in self._dtypes]

    def write(self, files: Mapping[str, DirectFile], threads: IoThreads) -> None:
        self._action = "write"
        self._futures = [threads.write(files[kind], *self._span(kind)) for kind in self._dtypes]

    def _span(self, kind: str) -> tuple[memoryview, int]:
        assert self.piece is not None
        length = self._layout.transfer_bytes(kind, self.piece)
        return self._memory[kind][:length], self._layout.offset(kind, self.piece)

    def tensors(self) -> dict[str, Tensor]:
        """The elements of the piece, by kind, without padding."""
        assert self.piece is not None
        count = self.piece.stop - self.piece.start
        return {
            kind: torch.frombuffer(self._memory[kind], dtype=dtype, count=count) for kind, dtype in self._dtypes.items()
        }

    def is_done(self) -> bool:
        return all(future.done() for future in self._futures)

    def finish(self) -> None:
        """Wait for the transfers; raise the first error of one."""
        futures, self._futures = self._futures, []
        wait(futures)
        for future in futures:
            with state_file_errors(self._action):
                future.result()

    def abandon(self) -> None:
        """Wait for the transfers, whether they fail or not."""
        wait(self._futures)
        self._futures = []


class FileTensors:
    """Tensors in files: of each kind of state one tensor for each slice of an optimizer.

    The files are made in `folder`, filled with zeros, and belong to the object until `close`; the folder is removed by
    its owner, `run_subfolder`.
    """

    def __init__(
        self,
        folder: Path,
        kinds: Mapping[str, torch.dtype],
        lengths: Sequence[int],
        *,
        threads: int = THREADS,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        """Reserve the files; a folder without enough space is refused before anything is written."""
        widths = {kind: dtype.itemsize for kind, dtype in kinds.items()}
        self.layout = FileLayout(widths, tuple(lengths), piece_bytes)
        self._dtypes = dict(kinds)
        self._files: dict[str, DirectFile] = {}
        with ExitStack() as stack, convert_os_errors(f"make the files of the optimizer in {folder}", _OTHER_REMEDY):
            check_free_space(folder, self.layout.update_bytes, _ROOM)
            for kind in kinds:
                self._files[kind] = file = DirectFile(folder / f"{kind}.bin", create=True)
                stack.callback(file.close)
                file.allocate(self.layout.file_bytes(kind), _ROOM)
            self._threads = IoThreads(threads)
            stack.callback(self._threads.close)
            self._stack = stack.pop_all()
        self._buffers = [_PieceBuffers(self.layout, kinds) for _ in range(BUFFERED_PIECES)]
        self._free = list(self._buffers)
        self._reading = deque[_PieceBuffers]()
        self._writing = deque[_PieceBuffers]()
        self._upcoming: Iterator[Piece] = iter(())
        self._next: Piece | None = None  # The first piece of `_upcoming`, which is not being read yet
        self._are_views_out = False

    @property
    def kinds(self) -> list[str]:
        """The kinds of state."""
        return [*self._dtypes]

    @property
    def is_direct(self) -> bool:
        """Whether all files pass the page cache."""
        return all(file.is_direct for file in self._files.values())

    @property
    def traffic(self) -> IoTraffic:
        """The bytes that travelled, padding included, and the time that they took; exact after `flush`."""
        return self._threads.traffic

    @property
    def bytes_read(self) -> int:
        """The bytes that `update` and `read` have read, padding included."""
        return self.traffic.bytes_read

    @property
    def bytes_written(self) -> int:
        """The bytes that `update` and `fill` have written, padding included."""
        return self.traffic.bytes_written

    def tensors(self, kind: str) -> list[Tensor]:
        """Views of the file of a kind, one for each slice: a change of a view changes the file. They are valid until
        the next `update`, `fill` or `read`. Large states are filled and read faster with those."""
        self.flush()
        self._are_views_out = True
        dtype, byte_count = self._dtypes[kind], self.layout.file_bytes(kind)
        if not byte_count:
            return [torch.empty(0, dtype=dtype) for _ in self.layout.lengths]
        count = byte_count // dtype.itemsize
        flat = torch.from_file(str(self._files[kind].path), shared=True, size=count, dtype=dtype)
        first = [self.layout.first_element(kind, index) for index in range(len(self.layout.lengths))]
        return [flat[start : start + length] for start, length in zip(first, self.layout.lengths, strict=True)]

    def update(self, index: int, function: PieceFunction, *, following: Sequence[int] = ()) -> None:
        """Read a slice, let `function(elements, tensors)` change each of its pieces in place, in order, and write it.

        The first pieces of the slices in `following`, which the caller updates next, are read meanwhile. Writes may be
        under way when the call returns; `flush` waits for them.
        """
        self._process(index, function, read=(index, *following), writes=True)

    def fill(self, index: int, function: PieceFunction) -> None:
        """Write a slice: `function(elements, tensors)` sets all elements of each of its pieces, in order."""
        self._process(index, function, read=(), writes=True)

    def read(self, index: int, function: PieceFunction, *, following: Sequence[int] = ()) -> None:
        """Read a slice: `function(elements, tensors)` gets each of its pieces, in order, until it returns."""
        self._process(index, function, read=(index, *following), writes=False)

    def start_read(self, kind: str, index: int, memory: memoryview) -> list[Future[None]]:
        """Begin to read a slice of one kind into aligned memory of the caller, padding included. The futures raise
        `OSError`; the slice must not be updated before they are done."""
        self.flush()
        self._write_views_back()
        start, end = self.layout.slice_span(kind, index)
        positions = range(0, end - start, PIECE_BYTES)
        parts = ((memory[at : min(at + PIECE_BYTES, end - start)], start + at) for at in positions)
        return [self._threads.read(self._files[kind], part, offset) for part, offset in parts]

    def flush(self) -> None:
        """Wait until everything is written, and forget what was read ahead."""
        try:
            while self._writing:
                self._finish_oldest_write()
            self._expect(())
        except BaseException:
            self._abandon()
            raise

    def close(self) -> None:
        """Wait for the transfers, end the threads and close the files. Errors of the last writes are not raised."""
        self._stack.close()

    def __enter__(self) -> "FileTensors":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _process(self, index: int, function: PieceFunction, *, read: Sequence[int], writes: bool) -> None:
        try:
            self._write_views_back()
            self._expect(read)
            for piece in self.layout.pieces(index):
                buffers = self._take_read(piece) if read else self._take_free()
                buffers.piece = piece
                self._read_ahead(piece)
                function(piece.elements, buffers.tensors())
                if writes:
                    buffers.write(self._files, self._threads)
                    self._writing.append(buffers)
                else:
                    self._free.append(buffers)
        except BaseException:
            self._abandon()
            raise

    def _write_views_back(self) -> None:
        """Let the disk have the changes of mapped views before direct IO passes by them (open(2) asks for it)."""
        if self._are_views_out:
            for file in self._files.values():
                if file.is_direct:
                    with state_file_errors("write"):
                        file.sync()
            self._are_views_out = False

    def _expect(self, indices: Sequence[int]) -> None:
        """Keep of the pieces that are being read those with which the slices begin; the others follow them."""
        upcoming = chain.from_iterable(map(self.layout.pieces, indices))
        kept, expected = 0, next(upcoming, None)
        while kept < len(self._reading) and self._reading[kept].piece == expected:
            kept, expected = kept + 1, next(upcoming, None)
        while len(self._reading) > kept:
            buffers = self._reading.pop()
            buffers.abandon()
            self._free.append(buffers)
        self._upcoming, self._next = upcoming, expected

    def _take_read(self, piece: Piece) -> _PieceBuffers:
        """The buffers with a piece, which is the next one."""
        if not self._reading:
            while any(buffers.piece == piece for buffers in self._writing):
                self._finish_oldest_write()
            self._start_reading(self._take_free())
        buffers = self._reading.popleft()
        assert buffers.piece == piece, (buffers.piece, piece)
        buffers.finish()
        return buffers

    def _take_free(self) -> _PieceBuffers:
        if not self._free:
            self._finish_oldest_write()
        return self._free.pop()

    def _read_ahead(self, current: Piece) -> None:
        """Read pieces into all buffers that are free, up to one whose elements may still change."""
        while self._writing and self._writing[0].is_done():
            self._finish_oldest_write()
        changing = {current, *(buffers.piece for buffers in chain(self._reading, self._writing))}
        while self._free and self._next is not None and self._next not in changing:
            changing.add(self._next)
            self._start_reading(self._free.pop())

    def _start_reading(self, buffers: _PieceBuffers) -> None:
        assert self._next is not None
        buffers.read(self._next, self._files, self._threads)
        self._reading.append(buffers)
        self._next = next(self._upcoming, None)

    def _finish_oldest_write(self) -> None:
        buffers = self._writing.popleft()
        buffers.finish()
        self._free.append(buffers)

    def _abandon(self) -> None:
        """Wait for all transfers without their errors, and free all buffers."""
        for buffers in self._buffers:
            buffers.abandon()
        self._free = list(self._buffers)
        self._reading.clear()
        self._writing.clear()
        self._upcoming, self._next = iter(()), None
