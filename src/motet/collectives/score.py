"""A collective as a value: who sends which chunk to whom in which step, where chunks start and where they must end.

From this one value come the execution (`execute.py`), the proof (`prove.py`), the cost (`cost.py`) and the picture
(`draw.py`) of a collective. It is written as JSON by `record.py`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal, NamedTuple

Operation = Literal["copy", "reduce"]


class Transfer(NamedTuple):
    """The chunks `first` to `last`, both included, go from one rank to another and replace or add to what is there."""

    src: int
    dst: int
    first: int
    last: int
    op: Operation

    @property
    def chunks(self) -> range:
        return range(self.first, self.last + 1)

    def __str__(self) -> str:
        what = f"{self.first}" if self.first == self.last else f"{self.first}-{self.last}"
        return f"{self.src} -> {self.dst}: {self.op} chunk {what}"


Step = tuple[Transfer, ...]
"""Transfers that happen together: each reads what was there before the step, and what arrives in one chunk is applied
in the order of the list."""

Contributors = tuple[int, ...]
"""The ranks, in order, whose contributions a chunk is made of."""


@dataclass(frozen=True)
class Program:
    """A collective. A chunk keeps its index on every rank; for all-to-all chunk `i * ranks + j` is what i has for j."""

    collective: str
    algorithm: str
    ranks: int
    sizes: tuple[int, ...]
    """The relative size of each chunk."""
    initial: tuple[tuple[int, ...], ...]
    """The chunks that each rank holds at the start."""
    final: tuple[Mapping[int, Contributors], ...]
    """The chunks that each rank must hold at the end, and the ranks that contribute to each."""
    steps: tuple[Step, ...]
    ports: int = 1
    """How many messages a rank may send, and receive, in one step."""

    @property
    def chunks(self) -> int:
        return len(self.sizes)

    @cached_property
    def whole(self) -> int:
        """What the sizes of chunks are relative to: the most that any rank holds at the start or must hold at the end.

        It stands for "the size of the message", S, the way nccl-tests counts it: the larger of the two buffers.
        """
        return max(sum(map(self.sizes.__getitem__, chunks)) for place in (self.initial, self.final) for chunks in place)

    def share(self, chunks: Iterable[int]) -> Fraction:
        """The part of S that these chunks are."""
        return Fraction(sum(self.sizes[chunk] for chunk in chunks), self.whole)

    def weight(self, transfer: Transfer) -> int:
        """The relative size of what a transfer moves."""
        return self._before[transfer.last + 1] - self._before[transfer.first]

    @cached_property
    def _before(self) -> tuple[int, ...]:
        """The relative size of all chunks before each one."""
        sums = [0]
        for size in self.sizes:
            sums.append(sums[-1] + size)
        return tuple(sums)

    @cached_property
    def messages(self) -> int:
        """How many messages are sent in all."""
        return sum(len({(src, dst) for src, dst, _, _, _ in step}) for step in self.steps)

    def sent(self, rank: int) -> Fraction:
        """What a rank sends in all, as a part of S."""
        return Fraction(self._sent[rank], self.whole)

    @cached_property
    def _sent(self) -> tuple[int, ...]:
        """The relative size of what each rank sends, counted in one go: there may be millions of transfers."""
        sums = [0] * self.ranks
        before = self._before
        for step in self.steps:
            for src, _, first, last, _ in step:
                sums[src] += before[last + 1] - before[first]
        return tuple(sums)

    def to_json(self) -> str:
        """The Program as text that other tools can read: docs/reference/program.md."""
        from motet.collectives.record import to_json

        return to_json(self)

    @staticmethod
    def from_json(record: str | bytes | Mapping[str, Any]) -> "Program":
        """The Program that was written so; a sentence if it makes no sense."""
        from motet.collectives.record import from_json

        return from_json(record)

    def __str__(self) -> str:
        return f"{self.collective}/{self.algorithm} of {self.ranks} rank{'' if self.ranks == 1 else 's'}"


def messages(step: Step) -> dict[tuple[int, int], list[Transfer]]:
    """What travels together: all that goes from one rank to another in a step is one message."""
    found: dict[tuple[int, int], list[Transfer]] = {}
    for transfer in step:
        found.setdefault((transfer.src, transfer.dst), []).append(transfer)
    return found


def runs(chunks: Iterable[int]) -> list[tuple[int, int]]:
    """Chunk numbers as ranges of neighbours, both ends included: 1 2 3 7 -> (1, 3) (7, 7)."""
    found: list[tuple[int, int]] = []
    for chunk in sorted(chunks):
        if found and found[-1][1] == chunk - 1:
            found[-1] = (found[-1][0], chunk)
        else:
            found.append((chunk, chunk))
    return found


def sending(src: int, dst: int, chunks: Iterable[int], op: Operation = "copy") -> list[Transfer]:
    """The transfers that move these chunks."""
    return [Transfer(src, dst, first, last, op) for first, last in runs(chunks)]
