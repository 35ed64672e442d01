"""The files of a data source in order, by name, size and time, or a dataset of Hugging Face, cut into ranges.
Ranges depend on the files alone; they let many processes share a large file and an interrupted build continue."""

import hashlib
import os
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from motet.core.errors import InputError, check_input

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
