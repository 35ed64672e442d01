"""Reading the documents of a piece: a text file is one document, a record of JSONL, Parquet or a dataset is one.

A record with a prompt and an answer is fine-tuning data. Whatever is wrong is told with its file and line.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from motet.core.errors import InputError
from motet.data.corpus.discover import FileRange
from motet.data.corpus.huggingface import open_hf_dataset
from motet.data.settings import DataSourceSettings


@dataclass(frozen=True, slots=True)
class TextDocument:
    """A text, after a prompt that is not a target, with a class where there is one."""

    text: str
    prompt: str | None = None
    label: int = -1


def read_documents(file_range: FileRange, fields: DataSourceSettings, has_labels: bool) -> Iterator[TextDocument]:
    """The documents of a piece in order, without empty ones."""
    try:
        yield from (document for document in _read_file_range(file_range, fields, has_labels) if document.text)
    except OSError as error:
        raise InputError(f"cannot read {file_range.path}: {error.strerror or error}") from None


def _read_file_range(file_range: FileRange, fields: DataSourceSettings, has_labels: bool) -> Iterator[TextDocument]:
    if file_range.format == "text":
        if has_labels:
            raise InputError(f"{file_range.path} is plain text, but objective `classify` needs records with a label")
        # A stray byte that is not UTF-8 must not end a build of a million files.
        yield TextDocument(Path(file_range.path).read_bytes().decode("utf-8", "replace"))
        return
    records = {"jsonl": _read_jsonl, "parquet": _read_parquet, "hf": _read_hf_dataset}[file_range.format]
    for location, record in records(file_range, fields, has_labels):
        yield _parse_document(record, fields, has_labels, location)


LocatedRecords = Iterator[tuple["RecordLocation", Any]]


@dataclass(frozen=True, slots=True)
class RecordLocation:
    """Where a record stands: a line or row, counted from 1 when someone asks."""

    path: str
    record_number: int
    from_byte: int = 0

    def __str__(self) -> str:
        if not self.from_byte:
            return f"{self.path}:{self.record_number}"
        with Path(self.path).open("rb") as file:  # lines before the piece are counted only for a message
            before = sum(chunk.count(b"\n") for chunk in _chunks(file.read, self.from_byte))
        return f"{self.path}:{before + self.record_number}"


def _chunks(read_bytes: Any, total: int) -> Iterator[bytes]:
    for start in range(0, total, 1 << 20):
        yield read_bytes(min(1 << 20, total - start))


def _read_jsonl(file_range: FileRange, _fields: DataSourceSettings, _labelled: bool) -> LocatedRecords:
    """The lines whose first byte lies in the piece."""
    with Path(file_range.path).open("rb") as file:
        if file_range.start:
            file.seek(file_range.start - 1)
            file.readline()
        start, line_number = file.tell(), 0
        while file.tell() < file_range.stop and (line := file.readline()):
            line_number += 1
            if not line.strip():
                continue
            location = RecordLocation(file_range.path, line_number, start)
            try:
                yield location, json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                # The line alone was parsed: where it stands in the file is told by its place.
                what = _json_problem(error) if isinstance(error, json.JSONDecodeError) else error
                raise InputError(f"{location}: not valid JSON: {what}; mend or remove this line") from None


def _json_problem(error: json.JSONDecodeError) -> str:
    return f"{error.msg.removesuffix(' at')} at character {error.pos + 1}"


def _read_parquet(file_range: FileRange, fields: DataSourceSettings, has_labels: bool) -> LocatedRecords:
    import pyarrow.lib
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file_range.path) as file:
            columns = _columns_to_read(file.schema_arrow.names, fields, has_labels)
            row_number = sum(file.metadata.row_group(group).num_rows for group in range(file_range.start))
            for batch in file.iter_batches(row_groups=list(range(file_range.start, file_range.stop)), columns=columns):
                for record in batch.to_pylist():
                    row_number += 1
                    yield RecordLocation(file_range.path, row_number), record
    except pyarrow.lib.ArrowException as error:
        raise InputError(f"{file_range.path} cannot be read as Parquet: {str(error).splitlines()[0]}") from None


def _read_hf_dataset(file_range: FileRange, fields: DataSourceSettings, has_labels: bool) -> LocatedRecords:
    dataset = open_hf_dataset(file_range.path)
    columns = _columns_to_read(dataset.column_names, fields, has_labels)
    dataset = dataset.select_columns(columns)
    for start in range(file_range.start, file_range.stop, 1000):
        stop = min(start + 1000, file_range.stop)
        batch = dataset[start:stop]
        for row in range(stop - start):
            yield RecordLocation(file_range.path, start + row + 1), {name: batch[name][row] for name in columns}


def _columns_to_read(names: list[str], fields: DataSourceSettings, has_labels: bool) -> list[str]:
    """The columns to read; all where none is wanted, so that the complaint can name them."""
    needed_columns = {fields.text_field, fields.prompt_field, fields.answer_field}
    needed_columns |= {fields.label_field} if has_labels else set()
    return [name for name in names if name in needed_columns] or names


def _parse_document(
    record: Any, fields: DataSourceSettings, has_labels: bool, location: RecordLocation
) -> TextDocument:
    if not isinstance(record, dict):
        raise InputError(f"{location}: a record is an object with fields, not {json.dumps(record)[:40]}")
    label = _parse_label(record, fields.label_field, location) if has_labels else -1
    if not has_labels and fields.prompt_field in record and fields.answer_field in record:
        return TextDocument(
            _parse_text(record, fields.answer_field, location), _parse_text(record, fields.prompt_field, location)
        )
    if fields.text_field not in record:
        raise InputError(
            f"{location}: the record has neither the field {fields.text_field!r} nor both {fields.prompt_field!r} and "
            f"{fields.answer_field!r}, only {', '.join(map(repr, record)) or 'none'}; name yours with text_field "
            "(in data.mixture, or text_field=NAME for `motet data build`)"
        )
    return TextDocument(_parse_text(record, fields.text_field, location), label=label)


def _parse_text(record: dict[str, Any], field: str, location: RecordLocation) -> str:
    value = record[field]
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InputError(
            f"{location}: field {field!r} is {json.dumps(value, default=str)[:40]}, not a text; "
            "make it one, or read another field"
        )
    # Half of a surrogate pair is valid in JSON, but no tokenizer takes it.
    return value.encode("utf-8", "replace").decode("utf-8")


def _parse_label(record: dict[str, Any], field: str, location: RecordLocation) -> int:
    value = record.get(field)
    if not isinstance(value, int) or not 0 <= value < 1 << 31:  # True and False are 1 and 0
        shown = json.dumps(value, default=str)[:40] if field in record else "missing"
        raise InputError(
            f"{location}: the label {field!r} is {shown}; number the classes from 0, or name the field with label_field"
        )
    return int(value)
