"""Finding the documents of a source: which files, in which order, cut into which pieces.

Nothing is read here but names, sizes and times. Large files are cut into pieces, so that many processes can share
the work and a build that was broken off need not start again; the pieces depend on the files alone.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from motet.core.errors import InputError
from motet.data.huggingface import find_dataset

Format = Literal["text", "jsonl", "parquet", "hf"]

_PROSE = "txt text md rst tex html xml csv tsv toml yaml yml ini cfg"
_CODE = "py pyi c h cc cpp hpp cu cuh java js jsx ts tsx go rs rb php pl lua jl scala kt swift sh sql css"
TEXT_SUFFIXES = frozenset(f".{name}" for name in f"{_PROSE} {_CODE}".split())
RECORD_SUFFIXES: dict[str, Format] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}

_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_SMALLEST_PIECE, _LARGEST_PIECE, _PIECES = 2 << 20, 256 << 20, 256


@dataclass(frozen=True)
class Piece:
    """A part of a corpus that is read in one go."""

    path: str
    format: Format
    start: int
    """First byte of a JSONL file, row group of a Parquet file, or row of a dataset; 0 for text."""
    stop: int
    size: int
    """Bytes, roughly: for balance and progress."""


@dataclass(frozen=True)
class Corpus:
    """The pieces of a source in the order of its documents."""

    name: str
    pieces: tuple[Piece, ...]
    identity: str
    """Changes when a file is added, removed, moved or written; compared with that of an earlier build."""

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)

    def shards(self) -> list[list[Piece]]:
        """Pieces in groups of about equal size: one group is one file of tokens."""
        groups: list[list[Piece]] = []
        limit, filled = piece_size(self.size), 0
        for piece in self.pieces:
            if not groups or filled + piece.size > limit:
                groups.append([piece])
                filled = piece.size
            else:
                groups[-1].append(piece)
                filled += piece.size
        return groups


def piece_size(total: int) -> int:
    """Bytes of a piece or shard: a small corpus still feeds several processes, a large one has some thousand shards."""
    return min(max(total // _PIECES, _SMALLEST_PIECE), _LARGEST_PIECE)


def find_corpus(source: str) -> Corpus:
    """The corpus of `stdlib`, of `hf:NAME`, or of a file, folder or pattern."""
    if source.startswith("hf:"):
        rows, size, fingerprint = find_dataset(source)
        step = max(1, rows * piece_size(size) // max(size, 1))
        pieces = _cut(source, "hf", rows, step, size)
        return Corpus(source, tuple(pieces), _identity([source, fingerprint, str(rows)]))
    files = _library_files() if source == "stdlib" else _files(source)
    stats = [(path, path.stat()) for path in files]
    total = sum(stat.st_size for _, stat in stats)
    if total == 0:
        raise InputError(f"data source {source!r} is empty ({len(files)} files of 0 bytes); give one that holds text")
    step = piece_size(total)
    pieces = [piece for path, stat in stats for piece in _pieces(path, stat.st_size, step)]
    parts = [f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}" for path, stat in stats]
    return Corpus(source, tuple(pieces), _identity(parts))


def _identity(parts: Iterable[str]) -> str:
    return hashlib.blake2b("\n".join(parts).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def _pieces(path: Path, size: int, step: int) -> list[Piece]:
    kind = RECORD_SUFFIXES.get(path.suffix.lower(), "text")
    if kind == "jsonl":
        return _cut(str(path), kind, size, step, size)
    if kind == "parquet":
        groups = _row_groups(path)
        return _cut(str(path), kind, groups, max(1, groups * step // max(size, 1)), size)
    return [Piece(str(path), "text", 0, size, size)] if size else []


def _cut(path: str, kind: Format, units: int, step: int, size: int) -> list[Piece]:
    """`units` in pieces of `step`, `size` bytes in all."""
    spans = [(start, min(start + step, units)) for start in range(0, units, step)]
    return [Piece(path, kind, start, stop, size * (stop - start) // units) for start, stop in spans]


def _row_groups(path: Path) -> int:
    import pyarrow.lib
    import pyarrow.parquet

    try:
        return int(pyarrow.parquet.read_metadata(path).num_row_groups)
    except (pyarrow.lib.ArrowException, OSError) as error:
        raise InputError(f"{path} cannot be read as Parquet: {str(error).splitlines()[0]}") from None


def _library_files() -> list[Path]:
    """Python's own library as source text: on every machine, though it differs between Python versions."""
    files = _walk(Path(sysconfig.get_path("stdlib")), _NOT_LIBRARY)
    return [path for path in files if path.suffix == ".py"]


def _files(source: str) -> list[Path]:
    path = Path(source).expanduser()
    if path.is_file():
        if not _known(path):
            raise InputError(
                f"data source {source!r} has the unknown extension {path.suffix or '(none)'!r}; known are "
                f"{', '.join(sorted(RECORD_SUFFIXES))} for records and {', '.join(sorted(TEXT_SUFFIXES))} for text"
            )
        return [path.resolve()]
    if path.is_dir():
        found = [file.resolve() for file in _walk(path)]
    elif any(mark in source for mark in "*?["):
        found = [file.resolve() for file in _matches(path) if file.is_file() and _known(file)]
    else:
        raise InputError(
            f"data source {source!r} does not exist; give a file, a folder, a pattern, `stdlib` or hf:NAME"
        )
    if not found:
        raise InputError(f"data source {source!r} holds no file of a known kind; known are .txt, .md, .py, .jsonl, "
                         ".parquet and other source files")  # fmt: skip
    return found


def _known(path: Path) -> bool:
    return path.suffix.lower() in TEXT_SUFFIXES or path.suffix.lower() in RECORD_SUFFIXES


def _walk(root: Path, without: frozenset[str] = frozenset()) -> list[Path]:
    """The files of known kinds below a folder, by relative name; hidden ones and the folders `without` are left out."""
    found = []
    for folder, inner, files in os.walk(root):
        inner[:] = [name for name in inner if not name.startswith(".") and name not in without]
        paths = [Path(folder, name) for name in files if not name.startswith(".")]
        found += [path for path in paths if _known(path) and path.is_file()]
    return sorted(found, key=lambda path: path.relative_to(root).parts)


def _matches(pattern: Path) -> list[Path]:
    """The paths that match, sorted, without hidden ones; the search starts where the first `*`, `?` or `[` is."""
    parts = pattern.parts
    first = next(i for i, part in enumerate(parts) if any(mark in part for mark in "*?["))
    base = Path(*parts[:first])
    found = sorted(base.glob(str(Path(*parts[first:]))))
    return [path for path in found if not any(part.startswith(".") for part in path.relative_to(base).parts)]
