"""One shard of a corpus: read its documents, turn them into tokens, write them, mark the shard as done."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from motet.data.corpus import Piece
from motet.data.documents import Document, read_documents
from motet.data.settings import SourceSettings
from motet.data.store import DOCUMENT, ShardEntry, checksum, write_json
from motet.data.tokens import Tokenizer

_AT_ONCE = 1 << 20
"""Characters that are tokenised in one go: bounds the memory, feeds several threads, moves the progress bar."""
_LONGEST = 1 << 20
"""Characters of one text given to the tokenizer; a longer one is cut where a line starts."""


@dataclass(frozen=True)
class Plan:
    """What an unfinished build is about, kept in plan.json."""

    recipe: str
    fields: SourceSettings
    labelled: bool
    tokenizer: str
    sentinels: int
    dtype: str
    shards: list[list[Piece]]

    def size(self, number: int) -> int:
        """Bytes of text of a shard."""
        return sum(piece.size for piece in self.shards[number])

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "fields": self.fields.model_dump()}

    @classmethod
    def from_json(cls, read: dict[str, Any]) -> Self:
        fields = SourceSettings.model_validate(read["fields"])
        shards = [[Piece(**piece) for piece in shard] for shard in read["shards"]]
        return cls(**{**read, "fields": fields, "shards": shards})


def read_plan(folder: Path) -> Plan | None:
    """The plan of an unfinished build; None where there is none that can be read."""
    try:
        return Plan.from_json(json.loads((folder / "plan.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def shard_done(folder: Path, number: int, verify: bool) -> ShardEntry | None:
    """The mark of a finished shard; None when it is not finished, or (with `verify`) not what was marked."""
    try:
        entry = ShardEntry(**json.loads((folder / f"{number:05}.done").read_text(encoding="utf-8")))
        return entry if not verify or checksum(folder, number) == entry.checksum else None
    except (OSError, ValueError, TypeError):
        return None


def build_shard(folder: Path, plan: Plan, number: int, tokenizer: Tokenizer, advance: Callable[[int], None]) -> None:
    """Write NNNNN.bin, NNNNN.docs and the mark NNNNN.done; `advance` is told the bytes of text that went in."""
    table, written = [np.empty(0, DOCUMENT)], 0
    # Another process may write the same shard: one that was left over when a build was killed.
    scratch = folder / f"{number:05}.{os.getpid()}.tmp"
    with scratch.open("wb") as file:
        for documents, read in _batches(plan, number):
            tokens, rows = _tokenise(documents, tokenizer, plan.dtype)
            file.write(tokens.tobytes())
            written += len(tokens)
            table.append(rows)
            advance(read)
    documents_table = np.concatenate(table)
    scratch.replace(folder / f"{number:05}.bin")
    scratch.write_bytes(documents_table.tobytes())
    scratch.replace(folder / f"{number:05}.docs")
    entry = ShardEntry(documents=len(documents_table), tokens=written, checksum=checksum(folder, number))
    write_json(folder / f"{number:05}.done", asdict(entry))


def _batches(plan: Plan, number: int) -> Iterator[tuple[list[Document], int]]:
    """The documents of a shard, some at a time, and the bytes of the pieces that were finished with them."""
    batch: list[Document] = []
    characters = read = 0
    for piece in plan.shards[number]:
        for document in read_documents(piece, plan.fields, plan.labelled):
            batch.append(document)
            characters += len(document.text)
            if characters >= _AT_ONCE:
                yield batch, read
                batch, characters, read = [], 0, 0
        read += piece.size
    yield batch, read


def _tokenise(documents: list[Document], tokenizer: Tokenizer, dtype: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """The tokens of some documents, and their rows of the table."""
    parts: list[str] = []
    owners: list[tuple[int, bool]] = []
    for number, document in enumerate(documents):
        for text, is_prompt in ((document.prompt or "", True), (document.text, False)):
            pieces = _cut(text)
            parts += pieces
            owners += [(number, is_prompt)] * len(pieces)
    begin = tokenizer.begin_ids
    skips, bodies = [0] * len(documents), [list(begin) for _ in documents]
    for (number, is_prompt), ids in zip(owners, tokenizer.encode_batch(parts), strict=True):
        bodies[number] += ids
        skips[number] += len(ids) if is_prompt else 0
    rows = np.empty(len(documents), DOCUMENT)
    for number, document in enumerate(documents):
        bodies[number].append(tokenizer.end_id)
        skip = len(begin) + skips[number] if document.prompt is not None else 0
        rows[number] = (len(bodies[number]), _hash(document), skip, document.label)
    flat = np.fromiter(chain.from_iterable(bodies), dtype=np.dtype(dtype).newbyteorder("<"))
    return flat, rows


def _cut(text: str) -> list[str]:
    """A long text in parts that start with a line: tokenizers work line by line there, and memory stays bounded."""
    parts = []
    while len(text) > _LONGEST:
        at = text.rfind("\n", 0, _LONGEST) + 1
        # A line that starts with a space would be split from the line break that it may share a token with.
        while at > 1 and text[at].isspace():
            at = text.rfind("\n", 0, at - 1) + 1
        at = at or _LONGEST
        parts.append(text[:at])
        text = text[at:]
    return [*parts, text] if text else parts


def _hash(document: Document) -> int:
    """A document's content as 64 bits: equal documents fall into the same split, wherever they stand."""
    content = f"{document.prompt or ''}\0{document.text}".encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
