"""Reading corpora in Megatron's format: PREFIX.bin with tokens, PREFIX.idx with the lengths of its sequences.
The index holds 9 bytes magic, version (uint64), dtype code of the tokens (uint8), and the numbers of sequences and
document borders (uint64 each). Then follow the lengths of the sequences (int32), their byte offsets in the .bin
(int64), and the sequence at each border (int64). Some indices add a mode per sequence, which is ignored."""

import hashlib
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from motet.core.errors import InputError, check_input
from motet.data.corpus.token_store import DOCUMENT_DTYPE, TokenStore, map_tokens
from motet.data.samples.shuffle_and_mix import derive_keys

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
    check_input(start == MAGIC, f"{path} is no Megatron index: it starts with {start!r} instead of {MAGIC!r}")
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
    # Of the tokens only both ends: a large corpus takes too long to read at each start.
    digest = hashlib.blake2b(index.read_bytes(), digest_size=16)
    with tokens.open("rb") as file:
        digest.update(file.read(_FINGERPRINT_BYTES))
        file.seek(max(0, tokens.stat().st_size - _FINGERPRINT_BYTES))
        digest.update(file.read())
    return digest.hexdigest()
