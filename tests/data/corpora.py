"""Small corpora for the tests of the package data."""

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from motet.data.settings import DataSettings

# As Megatron-LM defines them (`DType` and the header of an index).
MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "f8", 7: "f4", 8: "u2"}
SMALL = Path(__file__).with_name("small.txt")


def write_records(path: Path, records: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def numbered(count: int) -> list[dict[str, Any]]:
    return [{"text": f"Record {i} " + "and so on " * (i % 7) + "\n"} for i in range(count)]


def write_megatron(prefix: Path, documents: Sequence[Sequence[Sequence[int]]], code: int) -> Path:
    """A corpus of documents of sequences of tokens, written from the description of the format."""
    sequences = [sequence for document in documents for sequence in document]
    dtype = np.dtype(f"<{MEGATRON_DTYPES[code]}")
    lengths = [len(sequence) for sequence in sequences]
    places = (np.cumsum([0, *lengths])[:-1] * dtype.itemsize).tolist()
    borders = np.cumsum([0, *(len(document) for document in documents)]).tolist()
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(borders))
    index += struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(places)}q", *places)
    Path(f"{prefix}.idx").write_bytes(index + struct.pack(f"<{len(borders)}q", *borders))
    Path(f"{prefix}.bin").write_bytes(np.array([t for s in sequences for t in s], dtype).tobytes())
    return prefix


def settings(tmp_path: Path, **values: Any) -> DataSettings:
    """Bytes as tokens and a cache of the test's own."""
    given = {"source": str(SMALL), "tokenizer": "bytes", "sequence_length": 32, "batch_sequences": 4}
    return DataSettings.model_validate({**given, "cache": str(tmp_path / "cache"), **values})
