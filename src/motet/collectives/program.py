"""A collective as a value: who sends which chunk to whom in which step, where chunks start and where they must end.

From this one value come the execution (`execute/`), the proof (`prove/`), the cost (`cost/`) and the picture (`draw/`).
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, chain
from typing import Any, Literal, NamedTuple

TransferOp = Literal["copy", "reduce"]


class ChunkTransfer(NamedTuple):
    """Chunks `first` to `last`, both included, that travel between two ranks and replace or add to the receiver's."""

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


# Simultaneous transfers: each reads the state before the step. Arrivals in one chunk are applied in the list's order.
Step = tuple[ChunkTransfer, ...]

Contributors = tuple[int, ...]  # Ascending ranks whose contributions a chunk consists of


@dataclass(frozen=True)
class Program:
    """A collective. A chunk has one index on all ranks; chunk `i * ranks + j` of an all-to-all goes from i to j."""

    collective: str
    algorithm: str
    ranks: int
    sizes: tuple[int, ...]  # The relative size of each chunk
    initial: tuple[tuple[int, ...], ...]  # The chunks that each rank holds at the start
    final: tuple[Mapping[int, Contributors], ...]  # The chunks that each rank must hold at the end, with contributors
    steps: tuple[Step, ...]
    ports: int = 1  # Messages that a rank may send, and receive, in one step

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """A hash of some fields only, since Programs are keys of caches; integers hash alike in all processes."""
        return hash((self.ranks, self.sizes, len(self.steps)))

    @cached_property
    def has_reductions(self) -> bool:
        """Whether the Program adds chunks; otherwise chunks only move."""
        return any(t.op == "reduce" for step in self.steps for t in step)

    @property
    def chunks(self) -> int:
        return len(self.sizes)

    @cached_property
    def message_size_units(self) -> int:
        """The message size S in the units of `sizes`, as nccl-tests counts it: the largest buffer of any rank."""
        return max(sum(map(self.sizes.__getitem__, chunks)) for chunks in chain(self.initial, self.final))

    def relative_size(self, transfer: ChunkTransfer) -> int:
        """The relative size of the chunks that a transfer moves."""
        return self._size_prefix_sums[transfer.last + 1] - self._size_prefix_sums[transfer.first]

    @cached_property
    def _size_prefix_sums(self) -> tuple[int, ...]:
        return tuple(accumulate(self.sizes, initial=0))

    @cached_property
    def message_count(self) -> int:
        """The number of messages in all steps."""
        return sum(len({(src, dst) for src, dst, _, _, _ in step}) for step in self.steps)

    def send_fraction(self, rank: int) -> Fraction:
        """The bytes that a rank sends in all steps, as a fraction of S."""
        return Fraction(self._sent_sizes[rank], self.message_size_units)

    @cached_property
    def _sent_sizes(self) -> tuple[int, ...]:
        sums = [0] * self.ranks  # one pass, because there may be millions of transfers
        prefix_sums = self._size_prefix_sums
        for step in self.steps:
            for src, _, first, last, _ in step:
                sums[src] += prefix_sums[last + 1] - prefix_sums[first]
        return tuple(sums)

    def to_json(self) -> str:
        """The Program as JSON of docs/reference/program.md, with one line per step for human readers."""
        names = ("collective", "algorithm", "ranks", "chunks", "sizes", "initial", "final", "ports")
        head = {"version": 1, **{name: getattr(self, name) for name in names}}
        head["final"] = [dict(held) for held in self.final]
        lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
        steps = ",\n  ".join(
            json.dumps([{"src": t.src, "dst": t.dst, "chunk": [t.first, t.last], "op": t.op} for t in step])
            for step in self.steps
        )
        return "{" + ",\n ".join([*lines, f'"steps": [\n  {steps}]']) + "}\n"

    @staticmethod
    def from_json(text: str | bytes | Mapping[str, Any], source: str = "the Program") -> "Program":
        """The Program of a JSON record; an `InputError` that names `source` if the record makes no sense."""
        from motet.collectives.program_json import read_program_record

        record = read_program_record(text, source)
        return Program(
            record.collective,
            record.algorithm,
            record.ranks,
            tuple(record.sizes),
            tuple(tuple(sorted(chunks)) for chunks in record.initial),
            tuple({int(chunk): tuple(sorted(ranks)) for chunk, ranks in held.items()} for held in record.final),
            tuple(tuple(ChunkTransfer(t.src, t.dst, *t.chunk, t.op) for t in step) for step in record.steps),
            record.ports,
        )

    def __str__(self) -> str:
        return f"{self.collective}/{self.algorithm} of {self.ranks} rank{'' if self.ranks == 1 else 's'}"


def group_by_pair(step: Step) -> dict[tuple[int, int], list[ChunkTransfer]]:
    """The messages of a step: everything that one rank sends to another in a step is one message."""
    by_pair: dict[tuple[int, int], list[ChunkTransfer]] = {}
    for transfer in step:
        by_pair.setdefault((transfer.src, transfer.dst), []).append(transfer)
    return by_pair


def contiguous_ranges(chunks: Iterable[int]) -> list[tuple[int, int]]:
    """Runs of consecutive chunks, both ends included: 1 2 3 7 -> (1, 3) (7, 7)."""
    ranges: list[tuple[int, int]] = []
    for chunk in sorted(chunks):
        if ranges and ranges[-1][1] == chunk - 1:
            ranges[-1] = (ranges[-1][0], chunk)
        else:
            ranges.append((chunk, chunk))
    return ranges


def copy_chunk(src: int, dst: int, chunk: int) -> ChunkTransfer:
    """The copy of one chunk."""
    return ChunkTransfer(src, dst, chunk, chunk, "copy")


def transfers_for(src: int, dst: int, chunks: Iterable[int], op: TransferOp = "copy") -> list[ChunkTransfer]:
    """The transfers that move these chunks."""
    return [ChunkTransfer(src, dst, first, last, op) for first, last in contiguous_ranges(chunks)]
