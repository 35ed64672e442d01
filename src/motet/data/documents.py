"""Reading the documents of a piece: a text file is one document, a record of JSONL, Parquet or a dataset is one.

A record with a prompt and an answer is fine-tuning data. Whatever is wrong is told with its file and line.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from motet.core.errors import InputError
from motet.data.corpus import Piece
from motet.data.huggingface import open_dataset
from motet.data.settings import SourceSettings


@dataclass(frozen=True, slots=True)
class Document:
    """A text, after a prompt that is not a target, with a class where there is one."""

    text: str
    prompt: str | None = None
    label: int = -1


def read_documents(piece: Piece, fields: SourceSettings, labelled: bool) -> Iterator[Document]:
    """The documents of a piece in order, without empty ones."""
    try:
        yield from (document for document in _read(piece, fields, labelled) if document.text)
    except OSError as error:
        raise InputError(f"cannot read {piece.path}: {error.strerror or error}") from None


def _read(piece: Piece, fields: SourceSettings, labelled: bool) -> Iterator[Document]:
    if piece.format == "text":
        if labelled:
            raise InputError(f"{piece.path} is plain text, but objective `classify` needs records with a label")
        # A stray byte that is not UTF-8 must not end a build of a million files.
        yield Document(Path(piece.path).read_bytes().decode("utf-8", "replace"))
        return
    records = {"jsonl": _jsonl, "parquet": _parquet, "hf": _dataset}[piece.format]
    for where, record in records(piece, fields, labelled):
        yield _document(record, fields, labelled, where)


Records = Iterator[tuple["Place", Any]]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record stands: a line or row, counted from 1 when someone asks."""

    path: str
    number: int
    from_byte: int = 0

    def __str__(self) -> str:
        if not self.from_byte:
            return f"{self.path}:{self.number}"
        with Path(self.path).open("rb") as file:  # lines before the piece are counted only for a message
            before = sum(chunk.count(b"\n") for chunk in _chunks(file.read, self.from_byte))
        return f"{self.path}:{before + self.number}"


def _chunks(read: Any, total: int) -> Iterator[bytes]:
    for start in range(0, total, 1 << 20):
        yield read(min(1 << 20, total - start))


def _jsonl(piece: Piece, _fields: SourceSettings, _labelled: bool) -> Records:
    """The lines whose first byte lies in the piece."""
    with Path(piece.path).open("rb") as file:
        if piece.start:
            file.seek(piece.start - 1)
            file.readline()
        start, number = file.tell(), 0
        while file.tell() < piece.stop and (line := file.readline()):
            number += 1
            if not line.strip():
                continue
            place = Place(piece.path, number, start)
            try:
                yield place, json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                # The line alone was parsed: where it stands in the file is told by its place.
                what = _json_problem(error) if isinstance(error, json.JSONDecodeError) else error
                raise InputError(f"{place}: not valid JSON: {what}; mend or remove this line") from None


def _json_problem(error: json.JSONDecodeError) -> str:
    return f"{error.msg.removesuffix(' at')} at character {error.pos + 1}"


def _parquet(piece: Piece, fields: SourceSettings, labelled: bool) -> Records:
    import pyarrow.lib
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(piece.path) as file:
            columns = _wanted(file.schema_arrow.names, fields, labelled)
            number = sum(file.metadata.row_group(group).num_rows for group in range(piece.start))
            for batch in file.iter_batches(row_groups=list(range(piece.start, piece.stop)), columns=columns):
                for record in batch.to_pylist():
                    number += 1
                    yield Place(piece.path, number), record
    except pyarrow.lib.ArrowException as error:
        raise InputError(f"{piece.path} cannot be read as Parquet: {str(error).splitlines()[0]}") from None


def _dataset(piece: Piece, fields: SourceSettings, labelled: bool) -> Records:
    dataset = open_dataset(piece.path)
    columns = _wanted(dataset.column_names, fields, labelled)
    dataset = dataset.select_columns(columns)
    for start in range(piece.start, piece.stop, 1000):
        stop = min(start + 1000, piece.stop)
        batch = dataset[start:stop]
        for row in range(stop - start):
            yield Place(piece.path, start + row + 1), {name: batch[name][row] for name in columns}


def _wanted(names: list[str], fields: SourceSettings, labelled: bool) -> list[str]:
    """The columns to read; all where none is wanted, so that the complaint can name them."""
    wanted = {fields.text_field, fields.prompt_field, fields.answer_field}
    wanted |= {fields.label_field} if labelled else set()
    return [name for name in names if name in wanted] or names


def _document(record: Any, fields: SourceSettings, labelled: bool, where: Place) -> Document:
    if not isinstance(record, dict):
        raise InputError(f"{where}: a record is an object with fields, not {json.dumps(record)[:40]}")
    label = _label(record, fields.label_field, where) if labelled else -1
    if not labelled and fields.prompt_field in record and fields.answer_field in record:
        return Document(_text(record, fields.answer_field, where), _text(record, fields.prompt_field, where))
    if fields.text_field not in record:
        raise InputError(
            f"{where}: the record has neither the field {fields.text_field!r} nor both {fields.prompt_field!r} and "
            f"{fields.answer_field!r}, only {', '.join(map(repr, record)) or 'none'}; name yours with text_field "
            "(in data.mixture, or text_field=NAME for `motet data build`)"
        )
    return Document(_text(record, fields.text_field, where), label=label)


def _text(record: dict[str, Any], field: str, where: Place) -> str:
    value = record[field]
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InputError(
            f"{where}: field {field!r} is {json.dumps(value, default=str)[:40]}, not a text; "
            "make it one, or read another field"
        )
    # Half of a surrogate pair is valid in JSON, but no tokenizer takes it.
    return value.encode("utf-8", "replace").decode("utf-8")


def _label(record: dict[str, Any], field: str, where: Place) -> int:
    value = record.get(field)
    if not isinstance(value, int) or not 0 <= value < 1 << 31:  # True and False are 1 and 0
        shown = json.dumps(value, default=str)[:40] if field in record else "missing"
        raise InputError(
            f"{where}: the label {field!r} is {shown}; number the classes from 0, or name the field with label_field"
        )
    return int(value)
