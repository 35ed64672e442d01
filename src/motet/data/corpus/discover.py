"""The files of a data source in order, by name, size and time, or a dataset of Hugging Face, cut into ranges.
Ranges depend on the files alone; they let many processes share a large file and an interrupted build continue.

The documents of a file range: a text file is one, as is a record of JSONL, Parquet or a dataset.
A record with messages, or with a prompt and an answer, is fine-tuning data. Errors name the file and line.
"""

import hashlib
import json
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

from motet.core.errors import InputError, check_input
from motet.core.text_files import parse_json
from motet.data.corpus.chat import Conversation, ConversationError, UntrainableConversationError, parse_conversation
from motet.data.settings import DataSourceSettings

FileFormat = Literal["text", "jsonl", "parquet", "hf"]

_PROSE = "txt text md rst tex html xml csv tsv toml yaml yml ini cfg"
_CODE = "py pyi c h cc cpp hpp cu cuh java js jsx ts tsx go rs rb php pl lua jl scala kt swift sh sql css"
TEXT_SUFFIXES = frozenset(f".{name}" for name in f"{_PROSE} {_CODE}".split())
RECORD_SUFFIXES: dict[str, FileFormat] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}

_EXCLUDED_STDLIB_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_MIN_RANGE_BYTES, _MAX_RANGE_BYTES, _TARGET_RANGES = 2 << 20, 256 << 20, 256


@dataclass(frozen=True)
class FileRange:
    """A part of a corpus that one process reads."""

    path: str
    format: FileFormat
    start: int  # First byte of a JSONL file, row group of a Parquet file, or row of a dataset; 0 for text
    stop: int
    size: int  # Approximate bytes, for balance and progress


@dataclass(frozen=True)
class SourceFileRanges:
    """The ranges of a source in the order of its documents."""

    name: str
    file_ranges: tuple[FileRange, ...]
    identity: str  # Changes when a file is added, removed, moved or written; compared with that of an earlier build

    @property
    def size(self) -> int:
        return sum(file_range.size for file_range in self.file_ranges)

    def shards(self) -> list[list[FileRange]]:
        """Ranges in groups of about equal size; a group becomes one file of tokens."""
        groups: list[list[FileRange]] = []
        limit, filled = target_range_bytes(self.size), 0
        for file_range in self.file_ranges:
            filled += file_range.size
            if not groups or filled > limit:
                groups.append([])
                filled = file_range.size
            groups[-1].append(file_range)
        return groups


def target_range_bytes(total: int) -> int:
    """Bytes of a range or shard: a small corpus still feeds several processes, a large one has some thousand shards."""
    return min(max(total // _TARGET_RANGES, _MIN_RANGE_BYTES), _MAX_RANGE_BYTES)


def discover_corpus(source: str) -> SourceFileRanges:
    """The corpus of `stdlib`, of `hf:NAME`, or of a file, folder or pattern."""
    if source.startswith("hf:"):
        dataset = open_hf_dataset(source)
        rows, size = len(dataset), int(dataset.data.nbytes)
        check_input(rows, f"data source {source!r} is empty (0 rows); give one that holds text")
        ranges = _split_into_ranges(source, "hf", rows, range_bytes=target_range_bytes(size), size=size)
        return SourceFileRanges(source, tuple(ranges), _identity_hash([source, str(dataset._fingerprint), str(rows)]))
    files = _find_files(source)
    stats = [(path, path.stat()) for path in files]
    total = sum(stat.st_size for _, stat in stats)
    check_input(total, f"data source {source!r} is empty ({len(files)} files of 0 bytes); give one that holds text")
    ranges = [part for path, stat in stats for part in _ranges_of_file(path, stat.st_size, target_range_bytes(total))]
    states = [f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}" for path, stat in stats]
    return SourceFileRanges(source, tuple(ranges), _identity_hash(states))


@lru_cache(maxsize=4)
def open_hf_dataset(source: str) -> Any:
    """The dataset of `hf:NAME`, `hf:NAME:CONFIG`, or `hf:FOLDER` of `Dataset.save_to_disk`; opened once per process.
    Of several splits only `train` is read, since motet splits by itself."""
    try:
        import datasets
    except ImportError:
        raise InputError(f"data source {source!r} needs the package `datasets`; install motet[hf]") from None
    name = source.removeprefix("hf:")
    folder, (repository, _, config) = Path(name).expanduser(), name.partition(":")
    try:
        if folder.is_dir():
            dataset = datasets.load_from_disk(str(folder))
        else:
            dataset = datasets.load_dataset(repository, config or None)
    except Exception as error:  # noqa: BLE001 - the library has different errors for every host and format
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"data source {source!r} could not be loaded: {first_line}") from None
    if not isinstance(dataset, dict):
        return dataset
    check_input("train" in dataset, f"data source {source!r} has no split `train`, only {', '.join(dataset)}")
    return dataset["train"]


def _identity_hash(parts: Iterable[str]) -> str:
    return hashlib.blake2b("\n".join(parts).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def _ranges_of_file(path: Path, size: int, range_bytes: int) -> list[FileRange]:
    kind = RECORD_SUFFIXES.get(path.suffix.lower(), "text")
    if kind == "text":
        return [FileRange(str(path), kind, 0, size, size)] if size else []
    units = size if kind == "jsonl" else _count_row_groups(path)
    return _split_into_ranges(str(path), kind, units, range_bytes=range_bytes, size=size)


def _split_into_ranges(path: str, kind: FileFormat, units: int, *, range_bytes: int, size: int) -> list[FileRange]:
    step = max(1, units * range_bytes // max(size, 1))
    spans = [(start, min(start + step, units)) for start in range(0, units, step)]
    return [FileRange(path, kind, start, stop, size * (stop - start) // units) for start, stop in spans]


def _count_row_groups(path: Path) -> int:
    import pyarrow.parquet

    try:
        return int(pyarrow.parquet.read_metadata(path).num_row_groups)
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{path} cannot be read as Parquet: {first_printable_line(error)}") from None


def first_printable_line(error: Exception) -> str:
    """The first line of a library's message, which may repeat bytes of a damaged file."""
    return "".join(c if c.isprintable() else "?" for c in (str(error).strip().splitlines() or [""])[0])


def _find_files(source: str) -> list[Path]:
    if source == "stdlib":  # as source text, which differs between Python versions
        files = _walk_files(Path(sysconfig.get_path("stdlib")), _EXCLUDED_STDLIB_FOLDERS)
        return [path for path in files if path.suffix == ".py"]
    path = Path(source).expanduser()
    if path.is_file():
        known = f"{', '.join(sorted(RECORD_SUFFIXES))} for records and {', '.join(sorted(TEXT_SUFFIXES))} for text"
        unknown = f"data source {source!r} has the unknown extension {path.suffix or '(none)'!r}; known are {known}"
        check_input(_is_known_file(path), unknown)
        return [path.resolve()]
    nowhere = f"data source {source!r} does not exist; give a file, a folder, a pattern, `stdlib` or hf:NAME"
    check_input(path.is_dir() or set("*?[") & set(source), nowhere)
    files = _walk_files(path) if path.is_dir() else _glob_files(path)
    known = "known are .txt, .md, .py, .jsonl, .parquet and other source files"
    check_input(files, f"data source {source!r} holds no file of a known kind; {known}")
    return [file.resolve() for file in files]


def _is_known_file(path: Path) -> bool:
    return path.suffix.lower() in {*TEXT_SUFFIXES, *RECORD_SUFFIXES} and path.is_file()


def _walk_files(root: Path, excluded: frozenset[str] = frozenset()) -> list[Path]:
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in excluded]
        files += [path for name in names if not name.startswith(".") and _is_known_file(path := Path(folder, name))]
    return sorted(files, key=lambda path: path.relative_to(root).parts)


def _glob_files(pattern: Path) -> list[Path]:
    """The files that match, sorted, without hidden ones; the search starts at the first `*`, `?` or `[`."""
    first = next(i for i, part in enumerate(pattern.parts) if any(mark in part for mark in "*?["))
    base = Path(*pattern.parts[:first])
    files = [path for path in sorted(base.glob(str(Path(*pattern.parts[first:])))) if _is_known_file(path)]
    return [path for path in files if not any(part.startswith(".") for part in path.relative_to(base).parts)]


WITHOUT_TEXT = "without text"  # Why a document is left out that is nothing else


@dataclass(frozen=True, slots=True)
class TextDocument:
    """A text, after a prompt that is not a target, and its class; or a conversation."""

    text: str  # That of a conversation is its messages as JSON, by which equal ones are known
    prompt: str | None = None
    label: int = -1
    conversation: Conversation | None = None
    skipped: str = ""  # Why the document is left out


def read_documents(
    file_range: FileRange,
    fields: DataSourceSettings,
    has_labels: bool,
    *,
    on_skip: Callable[[str], None] = lambda reason: None,
) -> Iterator[TextDocument]:
    """The documents of a range in order. Those without text are left out: `on_skip` gets the reason for each."""
    try:
        for document in _read_file_range(file_range, fields, has_labels):
            if document.text:
                yield document
            else:
                on_skip(document.skipped or WITHOUT_TEXT)
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
    chats = [] if has_labels else [fields.messages_field, *_CHAT_FIELDS]
    columns = [fields.text_field, fields.prompt_field, fields.answer_field, *chats, *labels]
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
                reason: object = error
                if isinstance(error, json.JSONDecodeError):  # its line number is always 1: the line was parsed alone
                    reason = f"{error.msg.removesuffix(' at')} at character {error.pos + 1}"
                raise InputError(f"{location}: not valid JSON: {reason}; fix or remove this line") from None


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


_CHAT_FIELDS = ("conversations", "tools")


def _existing_columns(names: list[str], columns: list[str]) -> list[str]:
    return [name for name in names if name in columns] or names


def _parse_document(
    record: dict[str, Any], fields: DataSourceSettings, location: SourceRecordLocation, *, has_labels: bool
) -> TextDocument:
    label = _parse_label(record, fields.label_field, location) if has_labels else -1
    text, prompt, answer = fields.text_field, fields.prompt_field, fields.answer_field
    messages = next((name for name in (fields.messages_field, _CHAT_FIELDS[0]) if record.get(name) is not None), None)
    if not has_labels and messages:
        return _parse_chat(record, messages, location)
    if not has_labels and prompt in record and answer in record:
        return TextDocument(_parse_text(record, answer, location), _parse_text(record, prompt, location))
    if text not in record:
        only = ", ".join(map(repr, record)) or "none"
        raise InputError(
            f"{location}: the record has neither the field {text!r} nor both {prompt!r} and {answer!r} nor "
            f"{fields.messages_field!r}, only {only}; name yours with text_field or messages_field (in data.mixture, "
            "or text_field=NAME for `motet data build`)"
        )
    return TextDocument(_parse_text(record, text, location), label=label)


def _parse_chat(record: dict[str, Any], field: str, location: SourceRecordLocation) -> TextDocument:
    try:
        conversation = parse_conversation(record[field], record.get("tools"), location)
    except UntrainableConversationError as error:
        return TextDocument("", skipped=str(error))
    except ConversationError as error:
        raise InputError(f"{location}: field {field!r} {error}; correct or remove this record") from None
    return TextDocument(conversation.to_json(), conversation=conversation)


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
