"""The documents of a file range: a text file is one, as is a record of JSONL, Parquet or a dataset.
A record with a prompt and an answer is fine-tuning data. Errors name the file and line."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from motet.core.errors import InputError, check_input
from motet.core.text_formats import parse_json
from motet.data.corpus.discover import FileRange, first_printable_line, open_hf_dataset
from motet.data.settings import DataSourceSettings


@dataclass(frozen=True, slots=True)
class TextDocument:
    """A text, after a prompt that is not a target, and its class."""

    text: str
    prompt: str | None = None
    label: int = -1


def read_documents(file_range: FileRange, fields: DataSourceSettings, has_labels: bool) -> Iterator[TextDocument]:
    """The documents of a range in order, without empty ones."""
    try:
        yield from (document for document in _read_file_range(file_range, fields, has_labels) if document.text)
    except OSError as error:
        raise InputError(f"cannot read {file_range.path}: {error.strerror or first_printable_line(error)}") from None


def _read_file_range(file_range: FileRange, fields: DataSourceSettings, has_labels: bool) -> Iterator[TextDocument]:
    if file_range.format == "text":
        plain_text = f"{file_range.path} is plain text, but objective `classify` needs records with a label"
        check_input(not has_labels, plain_text)
        # A stray byte that is not UTF-8 must not end a build of a million files.
        yield TextDocument(Path(file_range.path).read_bytes().decode("utf-8", "replace"))
        return
    labels = [fields.label_field] if has_labels else []
    columns = [fields.text_field, fields.prompt_field, fields.answer_field, *labels]
    records = {"jsonl": _read_jsonl, "parquet": _read_parquet, "hf": _read_hf_dataset}[file_range.format]
    for location, record in records(file_range, columns):
        if not isinstance(record, dict):
            raise InputError(f"{location}: a record is an object with fields, not {json.dumps(record)[:40]}")
        yield _parse_document(record, fields, location, has_labels=has_labels)


@dataclass(frozen=True, slots=True)
class SourceRecordLocation:
    """The line or row of a record, counted from 1 when it is printed."""

    path: str
    record_number: int
    from_byte: int = 0

    def __str__(self) -> str:
        number, step = self.record_number, 1 << 20
        if self.from_byte:  # lines before the range are counted only for a message
            with Path(self.path).open("rb") as file:
                chunks = (file.read(min(step, self.from_byte - start)) for start in range(0, self.from_byte, step))
                number += sum(chunk.count(b"\n") for chunk in chunks)
        return f"{self.path}:{number}"


LocatedRecords = Iterator[tuple[SourceRecordLocation, Any]]


def _read_jsonl(file_range: FileRange, _columns: list[str]) -> LocatedRecords:
    """The lines whose first byte lies in the range."""
    with Path(file_range.path).open("rb") as file:
        if file_range.start:
            file.seek(file_range.start - 1)
            file.readline()
        start, line_number = file.tell(), 0
        while file.tell() < file_range.stop and (line := file.readline()):
            line_number += 1
            location = SourceRecordLocation(file_range.path, line_number, start)
            try:
                if line.strip():
                    yield location, parse_json(line)
            except ValueError as error:
                what: object = error
                if isinstance(error, json.JSONDecodeError):  # whose line number is always 1: the line was parsed alone
                    what = f"{error.msg.removesuffix(' at')} at character {error.pos + 1}"
                raise InputError(f"{location}: not valid JSON: {what}; fix or remove this line") from None


def _read_parquet(file_range: FileRange, columns: list[str]) -> LocatedRecords:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file_range.path) as file:
            columns = _existing_columns(file.schema_arrow.names, columns)
            row_number = sum(file.metadata.row_group(group).num_rows for group in range(file_range.start))
            for batch in file.iter_batches(row_groups=list(range(file_range.start, file_range.stop)), columns=columns):
                rows = f"rows {row_number + 1} to {row_number + batch.num_rows}"
                for record in _python_values(file_range.path, rows, batch.to_pylist):
                    row_number += 1
                    yield SourceRecordLocation(file_range.path, row_number), record
    except pyarrow.ArrowException as error:
        raise InputError(f"{file_range.path} cannot be read as Parquet: {first_printable_line(error)}") from None


def _read_hf_dataset(file_range: FileRange, columns: list[str]) -> LocatedRecords:
    dataset = open_hf_dataset(file_range.path)
    columns = _existing_columns(dataset.column_names, columns)
    for start in range(file_range.start, file_range.stop, 1000):
        stop = min(start + 1000, file_range.stop)
        read = partial(dataset.select_columns(columns).__getitem__, slice(start, stop))
        batch = _python_values(file_range.path, f"rows {start + 1} to {stop}", read)
        for number, row in enumerate(zip(*(batch[name] for name in columns), strict=True), start + 1):
            yield SourceRecordLocation(file_range.path, number), dict(zip(columns, row, strict=True))


def _python_values(path: str, rows: str, read: Callable[[], Any]) -> Any:
    """The values of these rows, some of which may have no counterpart in Python, such as text that is not UTF-8."""
    try:
        return read()
    except (ValueError, OverflowError) as error:
        raise InputError(f"{path}, {rows}: a value cannot be read: {error}; write it again, texts as UTF-8") from None


def _existing_columns(names: list[str], columns: list[str]) -> list[str]:
    return [name for name in names if name in columns] or names


def _parse_document(
    record: dict[str, Any], fields: DataSourceSettings, location: SourceRecordLocation, *, has_labels: bool
) -> TextDocument:
    label = _parse_label(record, fields.label_field, location) if has_labels else -1
    text, prompt, answer = fields.text_field, fields.prompt_field, fields.answer_field
    if not has_labels and prompt in record and answer in record:
        return TextDocument(_parse_text(record, answer, location), _parse_text(record, prompt, location))
    if text not in record:
        only = ", ".join(map(repr, record)) or "none"
        raise InputError(
            f"{location}: the record has neither the field {text!r} nor both {prompt!r} and {answer!r}, only {only}; "
            "name yours with text_field (in data.mixture, or text_field=NAME for `motet data build`)"
        )
    return TextDocument(_parse_text(record, text, location), label=label)


def _parse_text(record: dict[str, Any], field: str, location: SourceRecordLocation) -> str:
    value = "" if record[field] is None else record[field]
    if not isinstance(value, str):
        shown = json.dumps(value, default=str)[:40]
        raise InputError(f"{location}: field {field!r} is {shown}, not a text; make it one, or read another field")
    # Half of a surrogate pair is valid in JSON, but no tokenizer takes it.
    return value.encode("utf-8", "replace").decode("utf-8")


def _parse_label(record: dict[str, Any], field: str, location: SourceRecordLocation) -> int:
    value = record.get(field)
    if not isinstance(value, int) or not 0 <= value < 1 << 31:  # True and False are 1 and 0
        shown = json.dumps(value, default=str)[:40] if field in record else "missing"
        remedy = "number the classes from 0, or name the field with label_field"
        raise InputError(f"{location}: the label {field!r} is {shown}; {remedy}")
    return int(value)
