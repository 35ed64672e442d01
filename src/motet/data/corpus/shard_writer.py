"""One shard of a corpus: its documents become tokens on disk, then the shard is marked as done."""

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from motet.core.text_formats import parse_json
from motet.data.corpus.discover import FileRange
from motet.data.corpus.document_reader import TextDocument, read_documents
from motet.data.corpus.token_store import (
    DOCUMENT_DTYPE,
    CorpusShardEntry,
    TokenDtype,
    shard_checksum,
    write_json_atomically,
)
from motet.data.corpus.tokenizer import Tokenizer
from motet.data.settings import DataSourceSettings

# Characters per call of the tokenizer: bounds the memory, feeds several threads, moves the progress bar.
_CHARACTERS_PER_BATCH = 1 << 20
_MAX_TEXT_CHARACTERS = 1 << 20  # A longer text is split before a line


@dataclass(frozen=True)
class CorpusBuildPlan:
    """The content of plan.json, which describes an unfinished build."""

    recipe: str
    fields: DataSourceSettings
    labelled: bool
    tokenizer: str
    sentinels: int
    dtype: TokenDtype
    shards: list[list[FileRange]]


def read_build_plan(folder: Path) -> CorpusBuildPlan | None:
    """The plan of an unfinished build; None if there is no readable one."""
    try:
        values = parse_json((folder / "plan.json").read_text(encoding="utf-8"))
        fields = DataSourceSettings.model_validate(values["fields"])
        shards = [[FileRange(**file_range) for file_range in shard] for shard in values["shards"]]
        return CorpusBuildPlan(**{**values, "fields": fields, "shards": shards})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def read_finished_shard(folder: Path, shard_id: int, verify: bool) -> CorpusShardEntry | None:
    """The entry of a finished shard; None if it is unfinished, or (with `verify`) has another checksum."""
    try:
        entry = CorpusShardEntry(**parse_json((folder / f"{shard_id:05}.done").read_text(encoding="utf-8")))
        return entry if not verify or shard_checksum(folder, shard_id) == entry.checksum else None
    except (OSError, ValueError, TypeError):
        return None


def build_shard(
    folder: Path, plan: CorpusBuildPlan, shard_id: int, *, tokenizer: Tokenizer, advance: Callable[[int], None]
) -> None:
    """Write NNNNN.bin, NNNNN.docs and the mark NNNNN.done; `advance` gets the bytes of text that were read."""
    tables, num_tokens, name = [np.empty(0, DOCUMENT_DTYPE)], 0, f"{shard_id:05}"
    # An orphan of a killed build may write the same shard, so the name has the process id.
    scratch = folder / f"{name}.{os.getpid()}.tmp"
    with scratch.open("wb") as file:
        for documents, bytes_read in _document_batches(plan, shard_id):
            tokens, table = _tokenize(documents, tokenizer, plan.dtype)
            file.write(tokens.tobytes())
            num_tokens += len(tokens)
            tables.append(table)
            advance(bytes_read)
    table = np.concatenate(tables)
    scratch.replace(folder / f"{name}.bin")
    scratch.write_bytes(table.tobytes())
    scratch.replace(folder / f"{name}.docs")
    entry = CorpusShardEntry(documents=len(table), tokens=num_tokens, checksum=shard_checksum(folder, shard_id))
    write_json_atomically(folder / f"{name}.done", asdict(entry))


def _document_batches(plan: CorpusBuildPlan, shard_id: int) -> Iterator[tuple[list[TextDocument], int]]:
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


def _tokenize(documents: list[TextDocument], tokenizer: Tokenizer, dtype: str) -> tuple[NDArray[Any], NDArray[Any]]:
    parts = [
        (row, is_prompt, part)
        for row, document in enumerate(documents)
        for is_prompt, text in ((True, document.prompt or ""), (False, document.text))
        for part in _split_long_text(text)
    ]
    bodies = [list(tokenizer.begin_ids) for _ in documents]
    skips = [len(tokenizer.begin_ids) if document.prompt is not None else 0 for document in documents]
    for (row, is_prompt, _), ids in zip(parts, tokenizer.encode_batch([part for *_, part in parts]), strict=True):
        bodies[row] += ids
        skips[row] += len(ids) if is_prompt else 0
    table = np.empty(len(documents), DOCUMENT_DTYPE)
    for row, document in enumerate(documents):
        bodies[row].append(tokenizer.end_id)
        # The hash of the content makes equal documents fall into the same split.
        content = hashlib.blake2b(f"{document.prompt or ''}\0{document.text}".encode(), digest_size=8).digest()
        table[row] = (len(bodies[row]), int.from_bytes(content, "little"), skips[row], document.label)
    return np.fromiter(chain.from_iterable(bodies), dtype=np.dtype(dtype).newbyteorder("<")), table


def _split_long_text(text: str) -> list[str]:
    """Parts that start with a line: tokenizers work by line there, and memory stays bounded."""
    parts = []
    while len(text) > _MAX_TEXT_CHARACTERS:
        split_at = text.rfind("\n", 0, _MAX_TEXT_CHARACTERS) + 1
        # A line that starts with a space may share a token with the line break before it.
        while split_at > 1 and text[split_at].isspace():
            split_at = text.rfind("\n", 0, split_at - 1) + 1
        parts.append(text[: split_at or _MAX_TEXT_CHARACTERS])
        text = text[split_at or _MAX_TEXT_CHARACTERS :]
    return [*parts, text] if text else parts
