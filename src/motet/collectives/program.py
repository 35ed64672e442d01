"""A collective as a value: who sends which chunk to whom in which step, where chunks start and where they must end.

From this one value come the execution (`execute/`), the proof (`prove/`), the cost (`cost/`) and the picture (`draw/`).

Programs that other tools wrote as JSON, version 1 of docs/reference/program.md: read and checked for sense.

Errors between the ranks of a group: RuntimeErrors, as torch's are, that name the operation and the ranks.
"""

import json
import re
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from motet.core.errors import InputError, PeerFailedError, RankFailedError

# One spelling for each chunk, so that no two keys of an object can mean the same chunk.
_CHUNK_KEY = re.compile("0|[1-9][0-9]{0,17}")

_MAX_TOTAL_SIZE = 2**60


class _StrictJsonModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _TransferJson(_StrictJsonModel):
    src: int
    dst: int
    chunk: tuple[int, int]
    op: Literal["copy", "reduce"]


class ProgramJson(_StrictJsonModel):
    """The fields of a Program as JSON has them."""

    version: Literal[1]
    collective: str
    algorithm: str
    ranks: int
    chunks: int
    sizes: list[int]
    initial: list[list[int]]
    final: list[dict[str, list[int]]]
    ports: int = 1
    steps: list[list[_TransferJson]]


def read_program_record(text: str | bytes | Mapping[str, Any], source: str) -> ProgramJson:
    """The record, if it describes a Program; the proof says whether the Program is right."""
    encoded = _to_bytes(text, source)
    try:
        record = ProgramJson.model_validate_json(encoded)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise InputError(f"{source}: {where}: {first['msg']}; docs/reference/program.md lists the fields") from None
    checks = (_bad_chunk_keys, _size_problems, _bad_buffers, _bad_transfers)
    for problem in chain(_repeated_keys(encoded), *(check(record) for check in checks)):
        raise InputError(f"{source}: {problem}")
    return record


def _to_bytes(record: str | bytes | Mapping[str, Any], source: str) -> bytes:
    try:
        match record:
            case Mapping():
                return json.dumps(record).encode()
            case str():
                return record.encode().removeprefix(BOM_UTF8)
            case bytes():
                return record.removeprefix(BOM_UTF8)
    except (TypeError, ValueError) as error:  # values that JSON cannot hold, or half of a surrogate pair
        raise InputError(f"{source}: {error}; docs/reference/program.md lists the fields") from None
    raise InputError(f"{source}: {record!r} is not a Program; give its JSON as text, as bytes or as a mapping")


def _repeated_keys(text: bytes) -> Iterator[str]:
    """JSON readers silently keep the last of two equal keys."""
    repeated: list[str] = []

    def record_repeated(pairs: list[tuple[str, Any]]) -> None:
        if len(dict(pairs)) < len(pairs):
            repeated.append(Counter(key for key, _ in pairs).most_common(1)[0][0])

    json.loads(text, object_pairs_hook=record_repeated)
    yield from (f"the key {key!r} is given twice in one object; leave one out" for key in repeated)


def _bad_chunk_keys(record: ProgramJson) -> Iterator[str]:
    keys = ((rank, key) for rank, held in enumerate(record.final) for key in held)
    yield from (f"final[{r}]: {k!r} is not the number of a chunk" for r, k in keys if not _CHUNK_KEY.fullmatch(k))


def _size_problems(record: ProgramJson) -> Iterator[str]:
    ranks, chunks, sizes = record.ranks, record.chunks, record.sizes
    name, total = f"{record.collective}/{record.algorithm}", sum(sizes)
    entries = len(record.initial), len(record.final)
    bad_count = record.collective == "all-to-all" and chunks != ranks**2
    problems = {
        f"ranks {ranks}, ports {record.ports}: give at least 1 of each": ranks < 1 or record.ports < 1,
        f"chunks {chunks} with {len(sizes)} sizes; give 1 or more, a size for each": chunks < 1 or chunks != len(sizes),
        "sizes: one is negative, or all are 0; give relative sizes": min(sizes, default=0) < 0 or not total,
        "sizes: together they are more than 2^60; they are relative, so give smaller ones": total > _MAX_TOTAL_SIZE,
        f"{name!r}: collective and algorithm are names, of one line without control characters": not name.isprintable(),
        f"initial and final have {entries[0]} and {entries[1]} entries for {ranks} ranks": entries != (ranks, ranks),
        f"chunks {chunks}: all-to-all among {ranks} ranks has {ranks**2}": bad_count,
    }
    yield from (sentence for sentence, is_wrong in problems.items() if is_wrong)


def _bad_buffers(record: ProgramJson) -> Iterator[str]:
    last_rank, last_chunk = record.ranks - 1, record.chunks - 1
    held_chunks = [[*sorted(start), *map(int, end)] for start, end in zip(record.initial, record.final, strict=True)]
    for rank, (chunks, end) in enumerate(zip(held_chunks, record.final, strict=True)):
        beyond = (c for c in chunks if not 0 <= c <= last_chunk)
        yield from (f"rank {rank} holds chunk {chunk}; the last one is {last_chunk}" for chunk in beyond)
        absent = (source for source in chain.from_iterable(end.values()) if not 0 <= source <= last_rank)
        yield from (f"final[{rank}] names rank {source}; the last one is {last_rank}" for source in absent)
    for rank, start in enumerate(record.initial):
        repeated = (chunk for chunk, following in pairwise(sorted(start)) if chunk == following)
        yield from (f"initial[{rank}] names chunk {chunk} twice" for chunk in repeated)
    if not any(record.sizes[chunk] for chunk in chain.from_iterable(held_chunks)):
        yield "no rank holds a chunk with a size: S, the unit of sizes, would be 0"


def _bad_transfers(record: ProgramJson) -> Iterator[str]:
    last_rank, last_chunk = record.ranks - 1, record.chunks - 1
    for index, t in ((index, t) for index, step in enumerate(record.steps) for t in step):
        first, last = t.chunk
        if not (0 <= t.src <= last_rank and 0 <= t.dst <= last_rank) or t.src == t.dst:
            yield f"step {index}: from rank {t.src} to {t.dst}; give two different ranks of 0 to {last_rank}"
        if not 0 <= first <= last <= last_chunk:
            yield f"step {index}: chunks {first} to {last}; give an ascending range within 0 to {last_chunk}"


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


class CollectiveError(RankFailedError, RuntimeError):
    """Ranks do not agree."""


class PeerLostError(PeerFailedError, CollectiveError):
    """Another rank has ended, left the group, failed, or does not take part in time."""
