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

from motet.data.corpus.discover import FileRange
from motet.data.corpus.document_reader import TextDocument, read_documents
from motet.data.corpus.token_store import DOCUMENT_DTYPE, CorpusShardEntry, shard_checksum, write_json_atomically
from motet.data.corpus.tokenizer import Tokenizer
from motet.data.settings import DataSourceSettings

# Characters that are tokenised in one go: bounds the memory, feeds several threads, moves the progress bar.
_CHARACTERS_PER_BATCH = 1 << 20
_MAX_TEXT_CHARACTERS = 1 << 20  # Characters of one text given to the tokenizer; a longer one is cut where a line starts


@dataclass(frozen=True)
class CorpusBuildPlan:
    """What an unfinished build is about, kept in plan.json."""

    recipe: str
    fields: DataSourceSettings
    labelled: bool
    tokenizer: str
    sentinels: int
    dtype: str
    shards: list[list[FileRange]]

    def shard_bytes(self, shard_id: int) -> int:
        """Bytes of text of a shard."""
        return sum(piece.size for piece in self.shards[shard_id])

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "fields": self.fields.model_dump()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        fields = DataSourceSettings.model_validate(values["fields"])
        shards = [[FileRange(**piece) for piece in shard] for shard in values["shards"]]
        return cls(**{**values, "fields": fields, "shards": shards})


def read_build_plan(folder: Path) -> CorpusBuildPlan | None:
    """The plan of an unfinished build; None where there is none that can be read."""
    try:
        return CorpusBuildPlan.from_json(json.loads((folder / "plan.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def read_finished_shard(folder: Path, shard_id: int, verify: bool) -> CorpusShardEntry | None:
    """The mark of a finished shard; None when it is not finished, or (with `verify`) not what was marked."""
    try:
        entry = CorpusShardEntry(**json.loads((folder / f"{shard_id:05}.done").read_text(encoding="utf-8")))
        return entry if not verify or shard_checksum(folder, shard_id) == entry.checksum else None
    except (OSError, ValueError, TypeError):
        return None


def build_shard(
    folder: Path, plan: CorpusBuildPlan, shard_id: int, tokenizer: Tokenizer, report_bytes_read: Callable[[int], None]
) -> None:
    """Write NNNNN.bin, NNNNN.docs and the mark NNNNN.done; `advance` is told the bytes of text that went in."""
    table, written = [np.empty(0, DOCUMENT_DTYPE)], 0
    # Another process may write the same shard: one that was left over when a build was killed.
    scratch = folder / f"{shard_id:05}.{os.getpid()}.tmp"
    with scratch.open("wb") as file:
        for documents, bytes_read in _document_batches(plan, shard_id):
            tokens, rows = _tokenize_documents(documents, tokenizer, plan.dtype)
            file.write(tokens.tobytes())
            written += len(tokens)
            table.append(rows)
            report_bytes_read(bytes_read)
    documents_table = np.concatenate(table)
    scratch.replace(folder / f"{shard_id:05}.bin")
    scratch.write_bytes(documents_table.tobytes())
    scratch.replace(folder / f"{shard_id:05}.docs")
    entry = CorpusShardEntry(documents=len(documents_table), tokens=written, checksum=shard_checksum(folder, shard_id))
    write_json_atomically(folder / f"{shard_id:05}.done", asdict(entry))


def _document_batches(plan: CorpusBuildPlan, shard_id: int) -> Iterator[tuple[list[TextDocument], int]]:
    """The documents of a shard, some at a time, and the bytes of the pieces that were finished with them."""
    batch: list[TextDocument] = []
    characters = bytes_read = 0
    for file_range in plan.shards[shard_id]:
        for document in read_documents(file_range, plan.fields, plan.labelled):
            batch.append(document)
            characters += len(document.text)
            if characters >= _CHARACTERS_PER_BATCH:
                yield batch, bytes_read
                batch, characters, bytes_read = [], 0, 0
        bytes_read += file_range.size
    yield batch, bytes_read


def _tokenize_documents(
    documents: list[TextDocument], tokenizer: Tokenizer, dtype: str
) -> tuple[NDArray[Any], NDArray[Any]]:
    """The tokens of some documents, and their rows of the table."""
    texts: list[str] = []
    owners: list[tuple[int, bool]] = []
    for document_id, document in enumerate(documents):
        for text, is_prompt in ((document.prompt or "", True), (document.text, False)):
            text_parts = _split_long_text(text)
            texts += text_parts
            owners += [(document_id, is_prompt)] * len(text_parts)
    begin = tokenizer.begin_ids
    skips, bodies = [0] * len(documents), [list(begin) for _ in documents]
    for (document_id, is_prompt), ids in zip(owners, tokenizer.encode_batch(texts), strict=True):
        bodies[document_id] += ids
        skips[document_id] += len(ids) if is_prompt else 0
    rows = np.empty(len(documents), DOCUMENT_DTYPE)
    for document_id, document in enumerate(documents):
        bodies[document_id].append(tokenizer.end_id)
        skip = len(begin) + skips[document_id] if document.prompt is not None else 0
        rows[document_id] = (len(bodies[document_id]), _content_hash(document), skip, document.label)
    flat = np.fromiter(chain.from_iterable(bodies), dtype=np.dtype(dtype).newbyteorder("<"))
    return flat, rows


def _split_long_text(text: str) -> list[str]:
    """A long text in parts that start with a line: tokenizers work line by line there, and memory stays bounded."""
    parts = []
    while len(text) > _MAX_TEXT_CHARACTERS:
        split_at = text.rfind("\n", 0, _MAX_TEXT_CHARACTERS) + 1
        # A line that starts with a space would be split from the line break that it may share a token with.
        while split_at > 1 and text[split_at].isspace():
            split_at = text.rfind("\n", 0, split_at - 1) + 1
        split_at = split_at or _MAX_TEXT_CHARACTERS
        parts.append(text[:split_at])
        text = text[split_at:]
    return [*parts, text] if text else parts


def _content_hash(document: TextDocument) -> int:
    """A document's content as 64 bits: equal documents fall into the same split, wherever they stand."""
    content = f"{document.prompt or ''}\0{document.text}".encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
