"""A collective as a value: who sends which chunk to whom in which step, where chunks start and where they must end.

From this one value come the execution (`execute.py`), the proof (`prove.py`), the cost (`cost.py`) and the picture
(`draw.py`) of a collective. It is written as JSON by `record.py`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal, NamedTuple

TransferOp = Literal["copy", "reduce"]


class ChunkTransfer(NamedTuple):
    """The chunks `first` to `last`, both included, go from one rank to another and replace or add to what is there."""

    src: int
    dst: int
    first: int
    last: int
    op: TransferOp

    @property
    def chunks(self) -> range:
        return range(self.first, self.last + 1)

    def __str__(self) -> str:
        chunk_range = f"{self.first}" if self.first == self.last else f"{self.first}-{self.last}"
        return f"{self.src} -> {self.dst}: {self.op} chunk {chunk_range}"


# Transfers that happen together: each reads what was there before the step, and what arrives in one chunk is applied in
# the order of the list.
Step = tuple[ChunkTransfer, ...]

Contributors = tuple[int, ...]  # The ranks, in order, whose contributions a chunk is made of


@dataclass(frozen=True)
class Program:
    """A collective. A chunk keeps its index on every rank; for all-to-all chunk `i * ranks + j` is what i has for j."""

    collective: str
    algorithm: str
    ranks: int
    sizes: tuple[int, ...]  # The relative size of each chunk
    initial: tuple[tuple[int, ...], ...]  # The chunks that each rank holds at the start
    # The chunks that each rank must hold at the end, and the ranks that contribute to each.
    final: tuple[Mapping[int, Contributors], ...]
    steps: tuple[Step, ...]
    ports: int = 1  # How many messages a rank may send, and receive, in one step

    @property
    def chunks(self) -> int:
        return len(self.sizes)

    @cached_property
    def message_size_units(self) -> int:
        """What the sizes of chunks are relative to: the most that any rank holds at the start or must hold at the end.

        It stands for "the size of the message", S, the way nccl-tests counts it: the larger of the two buffers.
        """
        return max(sum(map(self.sizes.__getitem__, chunks)) for place in (self.initial, self.final) for chunks in place)

    def message_fraction(self, chunks: Iterable[int]) -> Fraction:
        """The part of S that these chunks are."""
        return Fraction(sum(self.sizes[chunk] for chunk in chunks), self.message_size_units)

    def relative_size(self, transfer: ChunkTransfer) -> int:
        """The relative size of what a transfer moves."""
        return self._size_prefix_sums[transfer.last + 1] - self._size_prefix_sums[transfer.first]

    @cached_property
    def _size_prefix_sums(self) -> tuple[int, ...]:
        """The relative size of all chunks before each one."""
        sums = [0]
        for size in self.sizes:
            sums.append(sums[-1] + size)
        return tuple(sums)

    @cached_property
    def message_count(self) -> int:
        """How many messages are sent in all."""
        return sum(len({(src, dst) for src, dst, _, _, _ in step}) for step in self.steps)

    def send_fraction(self, rank: int) -> Fraction:
        """What a rank sends in all, as a part of S."""
        return Fraction(self._sent_sizes[rank], self.message_size_units)

    @cached_property
    def _sent_sizes(self) -> tuple[int, ...]:
        """The relative size of what each rank sends, counted in one go: there may be millions of transfers."""
        sums = [0] * self.ranks
        prefix_sums = self._size_prefix_sums
        for step in self.steps:
            for src, _, first, last, _ in step:
                sums[src] += prefix_sums[last + 1] - prefix_sums[first]
        return tuple(sums)

    def to_json(self) -> str:
        """The Program as text that other tools can read: docs/reference/program.md."""
        from motet.collectives.program_json import to_json

        return to_json(self)

    @staticmethod
    def from_json(record: str | bytes | Mapping[str, Any]) -> "Program":
        """The Program that was written so; a sentence if it makes no sense."""
        from motet.collectives.program_json import from_json

        return from_json(record)

    def __str__(self) -> str:
        return f"{self.collective}/{self.algorithm} of {self.ranks} rank{'' if self.ranks == 1 else 's'}"


def group_by_pair(step: Step) -> dict[tuple[int, int], list[ChunkTransfer]]:
    """What travels together: all that goes from one rank to another in a step is one message."""
    by_pair: dict[tuple[int, int], list[ChunkTransfer]] = {}
    for transfer in step:
        by_pair.setdefault((transfer.src, transfer.dst), []).append(transfer)
    return by_pair


def contiguous_ranges(chunks: Iterable[int]) -> list[tuple[int, int]]:
    """Chunk numbers as ranges of neighbours, both ends included: 1 2 3 7 -> (1, 3) (7, 7)."""
    ranges: list[tuple[int, int]] = []
    for chunk in sorted(chunks):
        if ranges and ranges[-1][1] == chunk - 1:
            ranges[-1] = (ranges[-1][0], chunk)
        else:
            ranges.append((chunk, chunk))
    return ranges


def transfers_for(src: int, dst: int, chunks: Iterable[int], op: TransferOp = "copy") -> list[ChunkTransfer]:
    """The transfers that move these chunks."""
    return [ChunkTransfer(src, dst, first, last, op) for first, last in contiguous_ranges(chunks)]
