"""The tensors of safetensors files, found by their headers and read by boxes. Nothing here imports torch."""

import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # Planning reads headers, and starts without numpy
    import numpy as np

    from motet.models.weight_init import TensorBox

# Names of dtypes in the files, and in NumPy, which has no bfloat16
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "uint16"}
_DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
FINGERPRINT_BYTES = 4 << 20
_COMPARED_BYTES = 1 << 24
_INDEX, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True)
class WeightOnDisk:
    """A tensor of a safetensors file. The file is mapped for reading only, so no memory is reserved for it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int  # The first byte in the file
    stop: int

    def read(self, box: "TensorBox") -> "np.ndarray[Any, Any]":
        """A box of the tensor, in its dtype on disk; bfloat16 as uint16."""
        import numpy as np

        mapped: Any = (
            np.memmap(self.file, mode="r")[self.start : self.stop].view(_DTYPES[self.dtype]).reshape(self.shape)
        )
        return np.array(mapped[tuple(slice(first, first + n) for first, n in zip(*box, strict=True))])


def read_weight_headers(folder: Path) -> dict[str, WeightOnDisk]:
    """All tensors of the safetensors files of a folder. Raises what a damaged header leads to."""
    return {key: weight for file in _weight_files(folder) for key, weight in read_header(file).items()}


# Errors of a header that is damaged or not of a safetensors file.
HEADER_ERRORS = (OSError, ValueError, LookupError, TypeError, AttributeError)


def fingerprint_of(weights: Iterable[WeightOnDisk]) -> str:
    """A fingerprint of the files that hold these tensors."""
    return " ".join(map(_fingerprint, sorted({weight.file for weight in weights})))


def _fingerprint(file: Path) -> str:
    """The name, the size, and a checksum of the header and the first values: quick to compute for a large file."""
    with file.open("rb") as stream:
        return f"{file.name}:{file.stat().st_size}:{zlib.crc32(stream.read(FINGERPRINT_BYTES)):08x}"


def _weight_files(folder: Path) -> list[Path]:
    if (folder / _INDEX).is_file() and not (folder / SINGLE_FILE).is_file():
        files = json.loads((folder / _INDEX).read_text())["weight_map"].values()
        return [folder / file for file in dict.fromkeys(files)]
    return [folder / SINGLE_FILE]


def read_header(file: Path) -> dict[str, WeightOnDisk]:
    """The tensors of one safetensors file."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(min(length, file.stat().st_size)))
    header.pop("__metadata__", None)
    base, weights = 8 + length, {}
    for name, entry in header.items():
        start, stop = (base + offset for offset in entry["data_offsets"])
        weights[name] = WeightOnDisk(file, entry["dtype"], tuple(entry["shape"]), start, stop)
        if stop - start != _DTYPE_BYTES[entry["dtype"]] * prod(entry["shape"]):
            raise ValueError(f"{name} has {stop - start} bytes")
    if file.stat().st_size != max((weight.stop for weight in weights.values()), default=base):
        raise ValueError(f"{file.name} is not as long as its header says")
    return weights


def have_equal_bytes(a: WeightOnDisk, b: WeightOnDisk) -> bool:
    """Whether two tensors have the same dtype, shape and values."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    size = a.stop - a.start
    with a.file.open("rb") as first, b.file.open("rb") as second:
        for start in range(0, size, _COMPARED_BYTES):
            count = min(_COMPARED_BYTES, size - start)
            first.seek(a.start + start)
            second.seek(b.start + start)
            if first.read(count) != second.read(count):
                return False
    return True
