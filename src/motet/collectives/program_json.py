"""Programs that other tools wrote as JSON, version 1 of docs/reference/program.md: read and checked for sense."""

import json
import re
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain, pairwise
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from motet.core.errors import InputError

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
    """The record, if it describes a Program at all; the proof says whether the Program is right."""
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
    raise InputError(f"{source}: {record!r} is no Program; give its JSON as text, as bytes or as a mapping")


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
        f"ranks {ranks}, ports {record.ports}: both are at least 1": ranks < 1 or record.ports < 1,
        f"chunks {chunks}: there are {len(sizes)} sizes, and at least 1 chunk": chunks < 1 or chunks != len(sizes),
        "sizes: none may be negative, and not all 0": min(sizes, default=0) < 0 or not total,
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
        yield "no rank holds anything, or must in the end: S, what sizes are relative to, would be 0"


def _bad_transfers(record: ProgramJson) -> Iterator[str]:
    last_rank, last_chunk = record.ranks - 1, record.chunks - 1
    for index, t in ((index, t) for index, step in enumerate(record.steps) for t in step):
        first, last = t.chunk
        if not (0 <= t.src <= last_rank and 0 <= t.dst <= last_rank) or t.src == t.dst:
            yield f"step {index}: from rank {t.src} to {t.dst}; they are two different ones of 0 to {last_rank}"
        if not 0 <= first <= last <= last_chunk:
            yield f"step {index}: chunks {first} to {last}; they go up from 0 to at most {last_chunk}"
