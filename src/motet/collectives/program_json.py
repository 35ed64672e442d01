"""Programs as JSON, for other tools to read and write: version 1, which docs/reference/program.md describes."""

import json
import re
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from motet.collectives.program import ChunkTransfer, Program, TransferOp
from motet.core.errors import InputError

# One spelling for each chunk, so that no two keys of an object can mean the same one.
_CHUNK_KEY = re.compile("0|[1-9][0-9]{0,17}")

_MAX_TOTAL_SIZE = 2**60


class _StrictJsonModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _ChunkTransferJson(_StrictJsonModel):
    src: int
    dst: int
    chunk: tuple[int, int]
    op: TransferOp


class _CollectiveProgramJson(_StrictJsonModel):
    version: Literal[1]
    collective: str
    algorithm: str
    ranks: int
    chunks: int
    sizes: list[int]
    initial: list[list[int]]
    final: list[dict[str, list[int]]]
    ports: int = 1
    steps: list[list[_ChunkTransferJson]]


def to_json(program: Program) -> str:
    """One line per step, so that people can read it too."""
    head = {
        "version": 1,
        "collective": program.collective,
        "algorithm": program.algorithm,
        "ranks": program.ranks,
        "chunks": program.chunks,
        "sizes": program.sizes,
        "initial": program.initial,
        "final": [dict(held) for held in program.final],
        "ports": program.ports,
    }
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    steps = ",\n  ".join(json.dumps([_transfer_to_json(transfer) for transfer in step]) for step in program.steps)
    return "{" + ",\n ".join([*lines, f'"steps": [\n  {steps}]']) + "}\n"


def _transfer_to_json(transfer: ChunkTransfer) -> dict[str, object]:
    return {"src": transfer.src, "dst": transfer.dst, "chunk": [transfer.first, transfer.last], "op": transfer.op}


def from_json(record: str | bytes | Mapping[str, Any], source: str = "the Program") -> Program:
    """The Program that was written so, checked as far as it makes sense at all; whether it is right `prove` says."""
    text = _to_bytes(record, source)
    try:
        parsed = _CollectiveProgramJson.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise InputError(f"{source}: {where}: {first['msg']}; docs/reference/program.md lists the fields") from None
    duplicate = _duplicate_key(text)
    if duplicate is not None:
        raise InputError(f"{source}: the key {duplicate!r} is given twice in one object; leave one out")
    for rank, held in enumerate(parsed.final):
        for chunk in held:
            if not _CHUNK_KEY.fullmatch(chunk):
                raise InputError(f"{source}: final[{rank}]: {chunk!r} is not the number of a chunk")
    program = Program(
        parsed.collective,
        parsed.algorithm,
        parsed.ranks,
        tuple(parsed.sizes),
        tuple(tuple(sorted(chunks)) for chunks in parsed.initial),
        tuple({int(chunk): tuple(sorted(ranks)) for chunk, ranks in held.items()} for held in parsed.final),
        tuple(tuple(ChunkTransfer(t.src, t.dst, *t.chunk, t.op) for t in step) for step in parsed.steps),
        parsed.ports,
    )
    problem = _find_structural_error(program, parsed.chunks)
    if problem:
        raise InputError(f"{source}: {problem}")
    return program


def _to_bytes(record: str | bytes | Mapping[str, Any], source: str) -> bytes:
    """The record as UTF-8 without a byte order mark."""
    try:
        if isinstance(record, Mapping):
            return json.dumps(record).encode()
        if isinstance(record, str | bytes):
            return (record.encode() if isinstance(record, str) else record).removeprefix(BOM_UTF8)
    except (TypeError, ValueError) as error:  # values that JSON has not, or halves of characters
        raise InputError(f"{source}: {error}; docs/reference/program.md lists the fields") from None
    raise InputError(f"{source}: {record!r} is no Program; give its JSON as text, as bytes or as a mapping")


def _duplicate_key(text: str | bytes) -> str | None:
    """A key that an object has twice, of which readers of JSON keep the last one without a word."""
    duplicates: list[str] = []

    def record_duplicates(pairs: list[tuple[str, Any]]) -> None:
        if len(dict(pairs)) < len(pairs):
            duplicates.append(Counter(key for key, _ in pairs).most_common(1)[0][0])

    json.loads(text, object_pairs_hook=record_duplicates)
    return duplicates[0] if duplicates else None


def _find_structural_error(program: Program, declared_chunks: int) -> str | None:
    """What makes a Program no Program at all, if anything does."""
    ranks = program.ranks
    if ranks < 1 or program.ports < 1:
        return f"ranks {ranks}, ports {program.ports}: both are at least 1"
    if declared_chunks < 1 or declared_chunks != program.chunks:
        return f"chunks {declared_chunks}: there are {program.chunks} sizes, and at least 1 chunk"
    if min(program.sizes) < 0 or not sum(program.sizes):
        return "sizes: none may be negative, and not all 0"
    if sum(program.sizes) > _MAX_TOTAL_SIZE:
        return "sizes: together they are more than 2^60; they are relative, so give smaller ones"
    if not str(program).isprintable():
        return f"{str(program)!r}: collective and algorithm are names, of one line without control characters"
    if len(program.initial) != ranks or len(program.final) != ranks:
        return f"initial and final have {len(program.initial)} and {len(program.final)} entries for {ranks} ranks"
    if program.collective == "all-to-all" and declared_chunks != ranks**2:
        return f"chunks {declared_chunks}: all-to-all among {ranks} ranks has {ranks**2}"
    return _find_out_of_range_index(program) or _find_repeated_initial_chunk(program) or _find_missing_data(program)


def _find_out_of_range_index(program: Program) -> str | None:
    last_rank, last_chunk = program.ranks - 1, program.chunks - 1
    for rank, (start, end) in enumerate(zip(program.initial, program.final, strict=True)):
        for chunk in (*start, *end):
            if not 0 <= chunk <= last_chunk:
                return f"rank {rank} holds chunk {chunk}; the last one is {last_chunk}"
        for source in {source for sources in end.values() for source in sources}:
            if not 0 <= source <= last_rank:
                return f"final[{rank}] names rank {source}; the last one is {last_rank}"
    for step_index, step in enumerate(program.steps):
        for t in step:
            if not (0 <= t.src <= last_rank and 0 <= t.dst <= last_rank) or t.src == t.dst:
                return (
                    f"step {step_index}: from rank {t.src} to {t.dst}; they are two different ones of 0 to {last_rank}"
                )
            if not 0 <= t.first <= t.last <= last_chunk:
                return f"step {step_index}: chunks {t.first} to {t.last}; they go up from 0 to at most {last_chunk}"
    return None


def _find_repeated_initial_chunk(program: Program) -> str | None:
    for rank, start in enumerate(program.initial):
        for chunk, next_chunk in pairwise(start):
            if chunk == next_chunk:
                return f"initial[{rank}] names chunk {chunk} twice"
    return None


def _find_missing_data(program: Program) -> str | None:
    if program.message_size_units:
        return None
    return "no rank holds anything, or must in the end: S, what sizes are relative to, would be 0"
