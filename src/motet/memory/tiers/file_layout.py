"""The layout of state in files, without files: where slices and pieces lie, and the bytes that an update moves.

Each kind of state has one file, which holds the slices of the optimizer one after the other. A slice begins at a
multiple of 4,096 bytes. An update takes a slice in pieces, which begin at the same element in all kinds and at a
multiple of 4,096 bytes in each file. Only the last piece of a slice has padding.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType

from motet.core.direct_io import ALIGNMENT, PIECE_BYTES, padded_bytes

BUFFERED_PIECES = 4  # One is updated, one read and one written; the fourth begins to be read while the third is written


@dataclass(frozen=True)
class Piece:
    """Elements of a slice that are read, updated and written together."""

    index: int  # The slice
    start: int
    stop: int

    @property
    def elements(self) -> slice:
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class FileLayout:
    """The files of some kinds of state for slices of some lengths."""

    widths: Mapping[str, int]  # Bytes of an element, by kind
    lengths: tuple[int, ...]  # Elements of each slice
    piece_bytes: int = PIECE_BYTES  # The most bytes of a piece in one file

    def __post_init__(self) -> None:
        object.__setattr__(self, "widths", MappingProxyType(dict(self.widths)))

    @cached_property
    def piece_elements(self) -> int:
        """The elements of a piece that is not the last one of its slice."""
        aligned = math.lcm(*(ALIGNMENT // math.gcd(ALIGNMENT, width) for width in self.widths.values()))
        return max(self.piece_bytes // max(self.widths.values()) // aligned, 1) * aligned

    @cached_property
    def _offsets(self) -> dict[str, list[int]]:
        """The first byte of each slice, and the end of the last one, by kind."""
        return {
            kind: [*accumulate((padded_bytes(length * width) for length in self.lengths), initial=0)]
            for kind, width in self.widths.items()
        }

    def pieces(self, index: int) -> Iterator[Piece]:
        """The pieces of a slice, in order; none if it is empty."""
        length = self.lengths[index]
        for start in range(0, length, self.piece_elements):
            yield Piece(index, start, min(start + self.piece_elements, length))

    def first_element(self, kind: str, index: int) -> int:
        """The elements before a slice in the file of a kind, padding included."""
        return self._offsets[kind][index] // self.widths[kind]

    def offset(self, kind: str, piece: Piece) -> int:
        """The first byte of a piece in the file of a kind."""
        return self._offsets[kind][piece.index] + piece.start * self.widths[kind]

    def transfer_bytes(self, kind: str, piece: Piece) -> int:
        """The bytes that are read or written for a piece of a kind, padding included."""
        return padded_bytes((piece.stop - piece.start) * self.widths[kind])

    def slice_span(self, kind: str, index: int) -> tuple[int, int]:
        """(First byte, end) of a slice in the file of a kind, padding included."""
        return self._offsets[kind][index], self._offsets[kind][index + 1]

    def file_bytes(self, kind: str) -> int:
        """The bytes of the file of a kind."""
        return self._offsets[kind][-1]

    def slice_bytes(self, index: int) -> int:
        """The bytes that an update of a slice reads, padding included; it writes as many."""
        return sum(offsets[index + 1] - offsets[index] for offsets in self._offsets.values())

    @cached_property
    def update_bytes(self) -> int:
        """The bytes of all files, padding included, which an update of all slices reads and writes."""
        return sum(map(self.file_bytes, self.widths))

    def buffer_bytes(self, kind: str) -> int:
        """The bytes of the largest piece of a kind, in memory."""
        return padded_bytes(min(max(self.lengths, default=0), self.piece_elements) * self.widths[kind])

    @property
    def memory_bytes(self) -> int:
        """The memory of all buffers of an update."""
        return BUFFERED_PIECES * sum(map(self.buffer_bytes, self.widths))
