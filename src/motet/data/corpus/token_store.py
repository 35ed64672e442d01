"""The folder of a built corpus: manifest.json (unfinished without it), a tokenizer, and shards.
NNNNN.bin holds the tokens of a shard as little-endian uint16 or uint32; NNNNN.docs holds one `DOCUMENT_DTYPE` record
for each document, in the same order."""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import NonNegativeInt, TypeAdapter, ValidationError

from motet.core.errors import InputError, check_input
from motet.core.text_formats import parse_json

CORPUS_FORMAT, CORPUS_FORMAT_VERSION = "motet tokens", 1

# Tokens; hash of the content, which decides the split; tokens at the start that are no targets; class, or -1.
DOCUMENT_DTYPE = np.dtype([("length", "<u8"), ("hash", "<u8"), ("skip", "<u4"), ("label", "<i4")])

_CORPUS_FILE_NAMES = re.compile(r"manifest\.json|plan\.json|tokenizer(_config)?\.json|\d{5,}\.(bin|docs|done)|.*\.tmp")

TokenDtype = Literal["uint16", "uint32"]
CorpusKind = Literal["built", "megatron", "synthetic"]


@dataclass(frozen=True)
class PreparedCorpus:
    """One corpus of a job's mixture, ready to be read."""

    kind: CorpusKind
    location: str  # A built folder, a Megatron prefix, or `synthetic:RULE`
    weight: float


@dataclass(frozen=True)
class PreparedData:
    """A job's corpora and tokenizer, which any process of the same machine can load."""

    corpora: tuple[PreparedCorpus, ...]
    tokenizer: str  # `bytes`, or a folder with tokenizer.json
    sentinels: int
    vocab_size: int
    classes: int  # The largest label plus 1; 0 without labels
    train_samples: int  # Samples of one epoch


@dataclass(frozen=True)
class CorpusShardEntry:
    """A shard in the manifest."""

    documents: NonNegativeInt
    tokens: NonNegativeInt
    checksum: str


@dataclass(frozen=True)
class CorpusManifest:
    """The content of manifest.json."""

    source: str
    recipe: str  # Changes with the files, fields and tokenizer that the folder was built from
    tokenizer: str  # `bytes`, or the name of a file in the folder
    sentinels: NonNegativeInt
    vocab_size: NonNegativeInt
    dtype: TokenDtype
    documents: NonNegativeInt
    tokens: NonNegativeInt
    corpus_hash: str  # Of the documents' contents, regardless of file names
    loss_mask: bool  # Whether some tokens are no targets: prompts of fine-tuning data
    classes: NonNegativeInt  # The largest label plus 1; 0 without labels
    shards: tuple[CorpusShardEntry, ...]

    def to_json(self) -> dict[str, Any]:
        return {"format": CORPUS_FORMAT, "version": CORPUS_FORMAT_VERSION, **asdict(self)}


_MANIFEST_SCHEMA = TypeAdapter(CorpusManifest)


@dataclass(frozen=True)
class TokenStore:
    """Memory-mapped tokens of a corpus: documents follow one another without gaps, none crosses a file."""

    name: str
    files: tuple[NDArray[Any], ...]
    first_token: NDArray[np.int64]  # [files + 1] start of each file in the stream of all tokens
    documents: NDArray[Any]  # [documents] of `DOCUMENT_DTYPE`
    loss_mask: bool
    classes: int
    fingerprint: str

    def read(self, start: int, count: int) -> NDArray[Any]:
        """`count` tokens from position `start` of the stream."""
        file = int(self.first_token.searchsorted(start, "right")) - 1
        begin = start - int(self.first_token[file])
        tokens = self.files[file][begin : begin + count]
        rest = count - len(tokens)
        return np.concatenate([tokens, self.read(start + len(tokens), rest)]) if rest else tokens


def is_built_corpus(folder: Path) -> bool:
    """Whether a folder holds a finished build, undamaged or not."""
    return bool(_read_json(folder / "manifest.json").get("format") == CORPUS_FORMAT)


def read_corpus_manifest(folder: Path) -> CorpusManifest:
    """The manifest of a built folder."""
    values = _read_json(folder / "manifest.json")
    version = values.get("version")
    built = f"built by `motet data build` (no manifest.json of the format {CORPUS_FORMAT!r})"
    other_version = f"{folder} is of format version {version}, this motet reads {CORPUS_FORMAT_VERSION}; build it again"
    check_input(values.get("format") == CORPUS_FORMAT, f"{folder} holds no corpus {built}")
    check_input(version == CORPUS_FORMAT_VERSION, other_version)
    try:
        manifest = _MANIFEST_SCHEMA.validate_json(json.dumps(values), strict=True)
        check_input(manifest.shards, f"{folder / 'manifest.json'} is damaged (no shards); build the corpus again")
        return manifest
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        what = f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}"
        raise InputError(f"{folder / 'manifest.json'} is damaged ({what}); build the corpus again") from None


def open_built_corpus(folder: Path) -> TokenStore:
    """The tokens of a built folder; raises if it is truncated."""
    manifest = read_corpus_manifest(folder)
    check_undamaged(folder, manifest, checksums=False)
    counts, checksums = [shard.tokens for shard in manifest.shards], "".join(s.checksum for s in manifest.shards)
    tables = [np.fromfile(folder / f"{i:05}.docs", dtype=DOCUMENT_DTYPE) for i in range(len(counts))]
    for shard_id, (table, count) in enumerate(zip(tables, counts, strict=True)):
        is_cut = (table["length"] <= count).all() and table["length"].sum(dtype=np.uint64) == count
        is_known = (table["skip"] <= table["length"]).all() and (table["label"] < max(manifest.classes, 1)).all()
        broken = f"{folder / f'{shard_id:05}.docs'} does not describe the {count} tokens of its shard"
        check_input(is_cut and is_known, f"{broken}; build the corpus again")
    return TokenStore(
        name=f"{manifest.source} (built in {folder})",
        files=tuple(map_tokens(folder / f"{i:05}.bin", manifest.dtype, count) for i, count in enumerate(counts)),
        first_token=np.cumsum([0, *counts], dtype=np.int64),
        documents=np.concatenate(tables),
        loss_mask=manifest.loss_mask,
        classes=manifest.classes,
        fingerprint=hashlib.blake2b(checksums.encode(), digest_size=16).hexdigest(),
    )


def map_tokens(path: Path, dtype: str, count: int) -> NDArray[Any]:
    """`count` little-endian tokens of a file, memory-mapped unless the file is empty."""
    kind = np.dtype(dtype).newbyteorder("<")
    # A plain view: np.memmap's own slices cost three times as much.
    return np.asarray(np.memmap(path, dtype=kind, mode="r", shape=(count,))) if count else np.empty(0, kind)


def find_damage(folder: Path, manifest: CorpusManifest, checksums: bool) -> str | None:
    """The first missing, truncated or (with `checksums`, which reads everything) altered file; None if undamaged."""
    width = np.dtype(manifest.dtype).itemsize
    for shard_id, shard in enumerate(manifest.shards):
        sizes = {".bin": shard.tokens * width, ".docs": shard.documents * DOCUMENT_DTYPE.itemsize}
        for suffix, expected in sizes.items():
            path = folder / f"{shard_id:05}{suffix}"
            if not path.is_file():
                return f"{path} is missing"
            if (size := path.stat().st_size) != expected:
                return f"{path} has {size} bytes where the manifest says {expected}"
        if checksums and shard_checksum(folder, shard_id) != shard.checksum:
            return f"the content of {folder / f'{shard_id:05}.bin'} or its .docs is not what was written"
    return None


def check_undamaged(folder: Path, manifest: CorpusManifest, checksums: bool) -> None:
    """Raise if the folder is damaged."""
    if problem := find_damage(folder, manifest, checksums):
        raise InputError(f"{problem}; build the corpus again")


def shard_checksum(folder: Path, shard_id: int) -> str:
    """A hash of the tokens and the documents of a shard."""
    digest = hashlib.blake2b(digest_size=16)
    for suffix in (".bin", ".docs"):
        with (folder / f"{shard_id:05}{suffix}").open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


def write_json_atomically(path: Path, value: object) -> None:
    """Write all of the file, or nothing."""
    scratch = path.with_name(path.name + ".tmp")
    scratch.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    scratch.replace(path)


def is_corpus_file(path: Path) -> bool:
    """Whether a build writes files of this name."""
    return bool(_CORPUS_FILE_NAMES.fullmatch(path.name))


def delete_corpus_files(folder: Path) -> None:
    """Delete only files that a build writes; manifest.json first, so that the rest counts as unfinished."""
    (folder / "manifest.json").unlink(missing_ok=True)
    for path in filter(is_corpus_file, folder.iterdir()):
        path.unlink()


@contextmanager
def report_write_errors(folder: Path) -> Iterator[None]:
    """Report a full or unwritable disk in one sentence."""
    remedy = "free some space or choose another folder (data.cache, or --out of `motet data build`)"
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write {error.filename or folder}: {error.strerror or error}; {remedy}") from None


def _read_json(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        if isinstance(value := parse_json(path.read_text(encoding="utf-8")), dict):
            return value
    return {}
