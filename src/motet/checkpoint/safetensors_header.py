"""The header of a data file, which is a safetensors file. It follows from the boxes in the file, so that a reader can
compare every byte of it. Nothing here imports torch.
"""

import json
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from motet.core.direct_io import padded_bytes
from motet.core.units import DTYPE_BYTES

# torch's dtype -> its name in safetensors files; they can hold no other.
SAFETENSORS_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}
# The library reads no larger header.
MAX_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8


class DataBox(NamedTuple):
    """A box of a tensor in a data file: its elements in row-major order."""

    name: str
    dtype: str
    shape: tuple[int, ...]  # Shape of the whole tensor
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return prod(self.lengths) * DTYPE_BYTES[self.dtype]

    @property
    def key(self) -> str:
        """The name of a whole tensor, or NAME@o0,o1 for a box at these offsets. The last @ ends the name."""
        if self.lengths == self.shape and "@" not in self.name and self.name != "__metadata__":  # That is reserved
            return self.name
        return f"{self.name}@{','.join(map(str, self.offsets))}"


def encode_header(boxes: Sequence[DataBox]) -> bytes:
    """The bytes before those of the boxes, which follow in this order. Spaces fill a page, as direct IO needs."""
    entries, start = dict[str, dict[str, object]](), 0
    for box in boxes:
        stop = start + box.size_bytes
        dtype = SAFETENSORS_DTYPES[box.dtype]
        entries[box.key] = {"dtype": dtype, "shape": box.lengths, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text = text.ljust(padded_bytes(_LENGTH_BYTES + len(text)) - _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text
