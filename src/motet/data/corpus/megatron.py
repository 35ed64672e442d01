"""Reading corpora in Megatron's format: PREFIX.bin with tokens, PREFIX.idx with the lengths of its sequences.

The index: 9 bytes magic, version (uint64), code of the token's dtype (uint8), number of sequences and number of
document borders (uint64 each), lengths of the sequences (int32), their byte places in the .bin (int64), and for each
border the number of the sequence there (int64). Some indices go on with a mode per sequence, which is not needed here.
"""

import hashlib
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from motet.core.errors import InputError
from motet.data.corpus.token_store import DOCUMENT_DTYPE, TokenStore, map_tokens
from motet.data.samples.counter_rng import derive_keys

MAGIC = b"MMIDIDX\x00\x00"
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}

_HEADER = struct.Struct("<9sQBQQ")
_FINGERPRINT_BYTES = 1 << 20


def find_megatron_prefix(source: str) -> Path | None:
    """The prefix of a Megatron corpus, given as PREFIX, PREFIX.bin or PREFIX.idx; None when it is none."""
    path = Path(source).expanduser()
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    files = [Path(f"{prefix}{suffix}") for suffix in (".bin", ".idx")]
    existing_files = [part for part in files if part.is_file()]
    if len(existing_files) == 2:
        return prefix
    if path.suffix in (".bin", ".idx") or (existing_files and not path.exists()):
        missing = next(part for part in files if part not in existing_files)
        raise InputError(f"data source {source!r} is a Megatron corpus, but {missing} does not exist")
    return None


def open_megatron(prefix: Path) -> TokenStore:
    """The tokens and documents of PREFIX.bin and PREFIX.idx."""
    index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    dtype, lengths, borders = _read_index(index)
    total, width = int(lengths.sum(dtype=np.int64)), np.dtype(dtype).itemsize
    if tokens.stat().st_size != total * width:
        raise InputError(
            f"{tokens} has {tokens.stat().st_size} bytes, but {index.name} speaks of {total} tokens of {dtype} = "
            f"{total * width} bytes; copy or build it again"
        )
    if total == 0:
        raise InputError(f"data source {prefix} is empty (0 tokens)")
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    sizes = np.diff(ends[borders])
    documents = np.zeros(int(np.count_nonzero(sizes)), DOCUMENT_DTYPE)
    documents["length"] = sizes[sizes > 0]
    # Contents are not read: the split goes by the document's number, which later documents do not change.
    documents["hash"] = derive_keys(0, np.arange(len(documents)))
    documents["label"] = -1
    return TokenStore(
        name=str(prefix),
        files=(map_tokens(tokens, dtype, total),),
        first_token=np.array([0, total], dtype=np.int64),
        documents=documents,
        loss_mask=False,
        classes=0,
        corpus_hash=(ends_hash := _content_fingerprint(index, tokens)),
        fingerprint=ends_hash,
    )


def _read_index(
    path: Path,
) -> tuple[str, NDArray[np.int32], NDArray[np.int64]]:
    """The dtype, the lengths of the sequences, and the numbers of the sequences at document borders."""
    content = path.read_bytes()
    if content[:9] != MAGIC:
        raise InputError(f"{path} is no Megatron index: it starts with {content[:9]!r} instead of {MAGIC!r}")
    if len(content) < _HEADER.size:
        raise InputError(f"{path} is cut short: {len(content)} bytes, the header alone has {_HEADER.size}")
    _, version, code, sequences, borders = _HEADER.unpack_from(content)
    if version != 1 or code not in DTYPES:
        raise InputError(
            f"{path}: version {version} with dtype code {code} is unknown; version 1 with 1 to 8 can be read"
        )
    needed = _HEADER.size + sequences * 12 + borders * 8
    if len(content) < needed:
        raise InputError(
            f"{path} is cut short: {len(content)} bytes where {sequences} sequences and {borders} borders need {needed}"
        )
    lengths = np.frombuffer(content, "<i4", sequences, _HEADER.size)
    byte_offsets = np.frombuffer(content, "<i8", sequences, _HEADER.size + sequences * 4)
    border_sequences = np.frombuffer(content, "<i8", borders, _HEADER.size + sequences * 12)
    gapless = np.cumsum(lengths, dtype=np.int64) * np.dtype(DTYPES[code]).itemsize
    if (lengths < 0).any() or (sequences and byte_offsets[0] != 0) or (byte_offsets[1:] != gapless[:-1]).any():
        raise InputError(
            f"{path}: the sequences do not follow one another without gaps in the .bin; write the corpus again"
        )
    if (np.diff(border_sequences) < 0).any() or (border_sequences > sequences).any() or (border_sequences < 0).any():
        raise InputError(
            f"{path}: the document borders do not ascend within the {sequences} sequences; write the corpus again"
        )
    # A writer that never ends a document leaves the borders out: then all is covered anyhow.
    return DTYPES[code], lengths, np.unique(np.concatenate([[0], border_sequences, [sequences]]))


def _content_fingerprint(index: Path, tokens: Path) -> str:
    """Of the whole index and the ends of the tokens: to read all of a large corpus at each start takes too long."""
    digest = hashlib.blake2b(index.read_bytes(), digest_size=16)
    size = tokens.stat().st_size
    with tokens.open("rb") as file:
        digest.update(file.read(_FINGERPRINT_BYTES))
        file.seek(max(0, size - _FINGERPRINT_BYTES))
        digest.update(file.read())
    return digest.hexdigest()
