"""The folder of a built corpus, read through memory maps: manifest.json (unfinished without it), a tokenizer, shards.
NNNNN.bin holds the tokens of a shard as little-endian uint16 or uint32; NNNNN.docs holds one `DOCUMENT_DTYPE` record
for each document, in the same order. A shard with conversations has NNNNN.mask with a bit for each token, the lowest of
a byte first: whether the token is a target.

Reading corpora in Megatron's format: PREFIX.bin with tokens, PREFIX.idx with the lengths of its sequences.
The index holds 9 bytes magic, version (uint64), dtype code of the tokens (uint8), and the numbers of sequences and
document borders (uint64 each). Then follow the lengths of the sequences (int32), their byte offsets in the .bin
(int64), and the sequence at each border (int64). Some indices add a mode per sequence, which is ignored.
"""

import hashlib
import json
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import NonNegativeInt, TypeAdapter, ValidationError

from motet.core.errors import InputError, check_input
from motet.core.text_files import parse_json
from motet.data.corpus.discover import WITHOUT_TEXT
from motet.data.samples.shuffle_and_mix import derive_keys

CORPUS_FORMAT, CORPUS_FORMAT_VERSION = "motet tokens", 2

# Tokens; hash of the content, which decides the split; tokens at the start that are not targets; class, or -1.
DOCUMENT_DTYPE = np.dtype([("length", "<u8"), ("hash", "<u8"), ("skip", "<u4"), ("label", "<i4")])

_CORPUS_FILE_NAMES = re.compile(
    r"(manifest|plan|tokenizer|tokenizer_config|special_tokens_map|config)\.json|chat_template\.jinja|"
    r"\d{5,}\.(bin|docs|mask|done)|.*\.tmp"
)

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
    has_mask: bool = False  # Whether it has a .mask
    skipped: dict[str, NonNegativeInt] = field(default_factory=dict)  # Records that were left out, by the reason


@dataclass(frozen=True)
class CorpusManifest:
    """The content of manifest.json."""

    source: str
    recipe: str  # A hash of the files, fields and tokenizer of the build
    tokenizer: str  # `bytes`, or the name of a file in the folder
    sentinels: NonNegativeInt
    vocab_size: NonNegativeInt
    dtype: TokenDtype
    documents: NonNegativeInt
    tokens: NonNegativeInt
    corpus_hash: str  # Hash of the documents' contents, regardless of file names
    loss_mask: bool  # Whether some tokens are not targets, as in fine-tuning data
    classes: NonNegativeInt  # The largest label plus 1; 0 without labels
    shards: tuple[CorpusShardEntry, ...]

    @property
    def skipped(self) -> dict[str, int]:
        """Records that were left out, by the reason."""
        return dict(sum((Counter(shard.skipped) for shard in self.shards), Counter[str]()))

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        for shard in values["shards"]:  # Most have neither
            if not shard["has_mask"]:
                del shard["has_mask"]
            if not shard["skipped"]:
                del shard["skipped"]
        return {"format": CORPUS_FORMAT, "version": CORPUS_FORMAT_VERSION, **values}


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
    masks: tuple[NDArray[np.uint8] | None, ...] = ()  # For each file, a bit for each token that is a target
    skipped: dict[str, int] = field(default_factory=dict)  # Records that its build left out, by the reason

    def read(self, start: int, count: int) -> NDArray[Any]:
        """`count` tokens from position `start` of the stream."""
        file = int(self.first_token.searchsorted(start, "right")) - 1
        begin = start - int(self.first_token[file])
        tokens = self.files[file][begin : begin + count]
        rest = count - len(tokens)
        return np.concatenate([tokens, self.read(start + len(tokens), rest)]) if rest else tokens

    @property
    def has_masks(self) -> bool:
        return any(mask is not None for mask in self.masks)

    def read_targets(self, start: int, count: int) -> NDArray[np.bool_]:
        """Which of `count` tokens from position `start` may be targets, by the masks; prompts have none."""
        file = int(self.first_token.searchsorted(start, "right")) - 1
        begin, length = start - int(self.first_token[file]), int(self.first_token[file + 1]) - start
        here, mask = min(count, length), self.masks[file] if self.masks else None
        targets = np.ones(here, np.bool_)
        if mask is not None:
            bits = np.unpackbits(mask[begin // 8 : -(-(begin + here) // 8)], bitorder="little")
            targets = bits[begin % 8 : begin % 8 + here].astype(np.bool_)
        return np.concatenate([targets, self.read_targets(start + here, count - here)]) if count > here else targets


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
        problem = f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}"
        raise InputError(f"{folder / 'manifest.json'} is damaged ({problem}); build the corpus again") from None


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
        masks=tuple(
            map_bytes(folder / f"{i:05}.mask", mask_bytes(shard.tokens)) if shard.has_mask else None
            for i, shard in enumerate(manifest.shards)
        ),
        skipped=manifest.skipped,
    )


def describe_skipped(skipped: Mapping[str, int]) -> str:
    """Records that a build left out, in words; empty texts alone are not worth a word."""
    if not set(skipped) - {WITHOUT_TEXT}:
        return ""
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
    total = sum(skipped.values())
    return f"{total} record{'s' * (total != 1)} ({reasons})"


def mask_bytes(tokens: int) -> int:
    """The size of the mask of this number of tokens."""
    return -(-tokens // 8)


def map_bytes(path: Path, count: int) -> NDArray[np.uint8]:
    """The bytes of a file, memory-mapped."""
    return np.asarray(np.memmap(path, dtype=np.uint8, mode="r", shape=(count,)))


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
        sizes |= {".mask": mask_bytes(shard.tokens)} if shard.has_mask else {}
        for suffix, expected in sizes.items():
            path = folder / f"{shard_id:05}{suffix}"
            if not path.is_file():
                return f"{path} is missing"
            if (size := path.stat().st_size) != expected:
                return f"{path} has {size} bytes where the manifest says {expected}"
        if checksums and shard_checksum(folder, shard_id) != shard.checksum:
            others = ".docs or .mask" if shard.has_mask else ".docs"
            return f"the content of {folder / f'{shard_id:05}.bin'} or its {others} has changed"
    return None


def check_undamaged(folder: Path, manifest: CorpusManifest, checksums: bool) -> None:
    """Raise if the folder is damaged."""
    if problem := find_damage(folder, manifest, checksums):
        raise InputError(f"{problem}; build the corpus again")


def shard_checksum(folder: Path, shard_id: int) -> str:
    """A hash of the tokens, the documents and the mask of a shard."""
    digest = hashlib.blake2b(digest_size=16)
    for suffix in (".bin", ".docs", ".mask"):
        if suffix == ".mask" and not (folder / f"{shard_id:05}.mask").exists():
            continue
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


MAGIC = b"MMIDIDX\x00\x00"
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}

_HEADER = struct.Struct("<9sQBQQ")
_FINGERPRINT_BYTES = 1 << 20


def find_megatron_prefix(source: str) -> Path | None:
    """The prefix of a Megatron corpus, given as PREFIX, PREFIX.bin or PREFIX.idx; None for anything else."""
    path, suffixes = Path(source).expanduser(), (".bin", ".idx")
    prefix = path.with_suffix("") if path.suffix in suffixes else path
    missing = [file for suffix in suffixes if not (file := Path(f"{prefix}{suffix}")).is_file()]
    if missing and (path.suffix in suffixes or (len(missing) == 1 and not path.exists())):
        raise InputError(f"data source {source!r} is a Megatron corpus, but {missing[0]} does not exist")
    return None if missing else prefix


def open_megatron(prefix: Path) -> TokenStore:
    """The tokens and documents of PREFIX.bin and PREFIX.idx."""
    index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    dtype, lengths, borders = _read_index(index)
    total, width = int(lengths.sum(dtype=np.int64)), np.dtype(dtype).itemsize
    size, says = tokens.stat().st_size, f"{index.name} says {total} tokens of {dtype} = {total * width} bytes"
    check_input(size == total * width, f"{tokens} has {size} bytes, but {says}; copy or build it again")
    check_input(total, f"data source {prefix} is empty (0 tokens)")
    sizes = np.diff(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])[borders])
    documents = np.zeros(int(np.count_nonzero(sizes)), DOCUMENT_DTYPE)
    documents["length"] = sizes[sizes > 0]
    # Contents are not read: the split depends on the document's index, which later documents do not change.
    documents["hash"] = derive_keys(0, np.arange(len(documents)))
    documents["label"] = -1
    files, first_token = (map_tokens(tokens, dtype, total),), np.array([0, total], dtype=np.int64)
    fingerprint = _content_fingerprint(index, tokens)
    return TokenStore(str(prefix), files, first_token, documents, loss_mask=False, classes=0, fingerprint=fingerprint)


def _read_index(path: Path) -> tuple[str, NDArray[np.int32], NDArray[np.int64]]:
    content = path.read_bytes()
    start, size = content[:9], len(content)
    check_input(start == MAGIC, f"{path} is not a Megatron index: it starts with {start!r} instead of {MAGIC!r}")
    check_input(size >= _HEADER.size, f"{path} is cut short: {size} bytes, the header alone has {_HEADER.size}")
    _, version, code, sequences, borders = _HEADER.unpack_from(content)
    needed = _HEADER.size + sequences * 12 + borders * 8
    unknown = f"{path}: version {version} with dtype code {code} is unknown; version 1 with 1 to 8 can be read"
    cut = f"{path} is cut short: {size} bytes where {sequences} sequences and {borders} borders need {needed}"
    check_input(version == 1 and code in DTYPES, unknown)
    check_input(size >= needed, cut)
    lengths = np.frombuffer(content, "<i4", sequences, _HEADER.size)
    byte_offsets = np.frombuffer(content, "<i8", sequences, _HEADER.size + sequences * 4)
    border_ids = np.frombuffer(content, "<i8", borders, _HEADER.size + sequences * 12)
    ends = np.cumsum(lengths, dtype=np.int64) * np.dtype(DTYPES[code]).itemsize
    has_gaps = (lengths < 0).any() or (sequences and byte_offsets[0] != 0) or (byte_offsets[1:] != ends[:-1]).any()
    is_unordered = (np.diff(border_ids) < 0).any() or (border_ids > sequences).any() or (border_ids < 0).any()
    disorder = f"{path}: the document borders do not ascend within the {sequences} sequences; write the corpus again"
    check_input(not has_gaps, f"{path}: the sequences have gaps or overlaps in the .bin; write the corpus again")
    check_input(not is_unordered, disorder)
    # A writer that never ends a document leaves the borders out.
    return DTYPES[code], lengths, np.unique(np.concatenate([[0], border_ids, [sequences]]))


def _content_fingerprint(index: Path, tokens: Path) -> str:
    # Only both ends of the tokens: a large corpus takes too long to read at each start.
    digest = hashlib.blake2b(index.read_bytes(), digest_size=16)
    with tokens.open("rb") as file:
        digest.update(file.read(_FINGERPRINT_BYTES))
        file.seek(max(0, tokens.stat().st_size - _FINGERPRINT_BYTES))
        digest.update(file.read())
    return digest.hexdigest()
