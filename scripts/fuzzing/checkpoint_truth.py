"""Checkpoints of a small model, their content as docs/reference describes it, and checksums that fit a forged one.

Nothing here calls motet's readers: the truth about a folder comes from its JSON and its bytes alone.
"""

import json
import shutil
import struct
import zlib
from math import prod
from pathlib import Path
from typing import Any

import torch

from fuzzing.cases import FindingError, check_equal
from motet.checkpoint.background_writer import save_checkpoint
from motet.checkpoint.data_files import CheckpointShard
from motet.checkpoint.loading import load_checkpoint
from motet.checkpoint.manifest import CheckpointManifest, SavedBy
from motet.checkpoint.verification import checkpoint_verdicts
from motet.core.errors import InputError

State = dict[str, torch.Tensor]

MANIFEST, SAVED_BY, TENSORS, METADATA = "manifest.json", "saved_by.json", "tensors.json", ".metadata"
DATA_FILES = ("rank-00000.safetensors", "rank-00001.safetensors")
MAX_FILE_BYTES = 1 << 24
PAGE = 4096
HEADER_DTYPES = {
    "float32": "F32",
    "float64": "F64",
    "bfloat16": "BF16",
    "int64": "I64",
    "float16": "F16",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}
STEP = 4
# No two have the same shape, so that no part of a file can stand for another.
SHAPES: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
    "model/embedding.weight": (torch.float32, (11, 4)),
    "model/blocks.0.up_proj.weight": (torch.float32, (8, 6)),
    "model/norm.weight": (torch.bfloat16, (5,)),
    "optimizer/step": (torch.int64, ()),
    "optimizer/exp_avg": (torch.float64, (3, 2, 7)),
}


def make_state(seed: int) -> State:
    """Values of the model, other ones for each seed."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(shape, generator=generator, dtype=torch.float64) * 100).to(dtype)
        for name, (dtype, shape) in SHAPES.items()
    }


def save_steps(folder: Path) -> None:
    """`step-N` for two steps as motet saves them."""
    for step in (STEP - 1, STEP):
        _save(folder / "steps", make_state(step), step)
    _spread(folder / "steps" / f"step-{STEP:08d}")


def _save(folder: Path, state: State, step: int) -> None:
    shapes = {name: list(tensor.shape) for name, tensor in state.items()}
    dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in state.items()}
    manifest = CheckpointManifest(step, "data", shapes, dtypes, SavedBy(2, 1, torch.__version__))
    shards = {name: CheckpointShard.from_tensor(tensor) for name, tensor in state.items()}
    save_checkpoint(folder, shards, manifest, keep=9, group=None)


def _spread(folder: Path) -> None:
    """Cut the tensors between their first rows and the others into two files, as two ranks would write them."""
    index, contents = json.loads((folder / TENSORS).read_text()), dict.fromkeys(DATA_FILES, b"")
    source = (folder / DATA_FILES[0]).read_bytes()
    for name, (chunk,) in index.items():
        offsets, lengths, _, start, size, _ = chunk
        content, cut = source[start : start + size], lengths[0] // 2 if lengths else 0
        pieces = [(offsets, lengths, content)]
        if cut:
            row = size // lengths[0]
            pieces = [
                (offsets, [cut, *lengths[1:]], content[: cut * row]),
                ([cut, *offsets[1:]], [lengths[0] - cut, *lengths[1:]], content[cut * row :]),
            ]
        index[name] = []
        for file, (at, size_of_box, piece) in zip(contents, pieces, strict=False):
            index[name].append([at, size_of_box, file, PAGE + len(contents[file]), len(piece), zlib.crc32(piece)])
            contents[file] += piece
    dtypes = json.loads((folder / MANIFEST).read_text())["dtypes"]
    for file, content in contents.items():
        (folder / file).write_bytes(true_header(index, dtypes, file) + content)
    (folder / TENSORS).write_text(json.dumps(index, separators=(",", ":")))
    fit_checksums(folder)


# --- forging -------------------------------------------------------------------------------------------


def write_manifest(folder: Path, content: Any) -> None:
    """Write a manifest with the right checksum of itself, if it has one."""
    if isinstance(content, dict) and "checksum" in content:
        rest = {key: value for key, value in content.items() if key != "checksum"}
        content = rest | {"checksum": zlib.crc32(json.dumps(rest, indent=1).encode())}
    (folder / MANIFEST).write_text(json.dumps(content, indent=1))


def fit_boxes(folder: Path) -> None:
    """Enter the checksums of boxes in the index as the data files are now, where the index can say it."""
    try:
        index = json.loads((folder / TENSORS).read_text())
        for chunk in (chunk for chunks in index.values() for chunk in chunks if chunk[2] in DATA_FILES):
            chunk[5] = zlib.crc32((folder / chunk[2]).read_bytes()[chunk[3] : chunk[3] + chunk[4]])
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OSError, RecursionError):
        return
    (folder / TENSORS).write_text(json.dumps(index, separators=(",", ":")))


def fit_checksums(folder: Path) -> None:
    """Enter all files in the manifest as they are now."""
    content = json.loads((folder / MANIFEST).read_text())
    files = [path for path in sorted(folder.iterdir()) if path.name != MANIFEST and path.is_file()]
    contents = {path.name: path.read_bytes() for path in files if path.name in (SAVED_BY, TENSORS)}
    content["checksums"] = {name: zlib.crc32(data) for name, data in contents.items()}
    content["sizes"] = {path.name: path.stat().st_size for path in files}
    write_manifest(folder, content)


# --- the truth -----------------------------------------------------------------------------------------


def true_state(folder: Path) -> State | None:
    """The tensors in a folder of the present format; None if it is inconsistent."""
    try:
        # A pipe or a device may never end, and the fuzzer makes files of a terabyte.
        _require(all(path.is_file() and path.stat().st_size <= MAX_FILE_BYTES for path in folder.iterdir()))
        text = (folder / MANIFEST).read_bytes()
        content = json.loads(text)
        rest = {key: value for key, value in content.items() if key != "checksum"}
        _require(content["checksum"] == zlib.crc32(json.dumps(rest, indent=1).encode()))
        _require(content["format"] == 3 and f"step-{content['step']:08d}" == folder.name)
        contents = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != MANIFEST}
        _require(content["checksums"] == {name: zlib.crc32(contents[name]) for name in (SAVED_BY, TENSORS)})
        _require(content["sizes"] == {name: len(data) for name, data in contents.items()})
        _require(content["shapes"] == {name: list(shape) for name, (_, shape) in SHAPES.items()})
        _require(isinstance(json.loads(contents[SAVED_BY]), dict))
        index = json.loads(contents[TENSORS])
        for file in contents.keys() - {SAVED_BY, TENSORS}:
            header = true_header(index, content["dtypes"], file)
            _require(contents[file][: len(header)] == header)
        return {name: _true_tensor(index[name], content["dtypes"][name], contents, name) for name in SHAPES}
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OSError, RecursionError, RuntimeError):
        return None


def true_header(index: dict[str, list[Any]], dtypes: dict[str, str], file: str) -> bytes:
    """The header of a data file by its chunks: a page, as long as there are few."""
    entries = {}
    chunks = [(chunk, name) for name, chunks in index.items() for chunk in chunks if chunk[2] == file]
    for (offsets, lengths, _, start, size, _), name in sorted(chunks, key=lambda each: each[0][3]):
        key = name if tuple(lengths) == SHAPES[name][1] else f"{name}@{','.join(map(str, offsets))}"
        dtype = HEADER_DTYPES[dtypes[name]]
        entries[key] = {"dtype": dtype, "shape": lengths, "data_offsets": [start - PAGE, start - PAGE + size]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    return struct.pack("<Q", PAGE - 8) + text.ljust(PAGE - 8)


def _true_tensor(chunks: list[Any], dtype_name: str, contents: dict[str, bytes], name: str) -> torch.Tensor:
    dtype, (wanted, shape) = getattr(torch, dtype_name), SHAPES[name]
    values, times = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=torch.int64)
    for offsets, lengths, file, start, size, checksum in chunks:
        box = tuple(slice(at, at + length) for at, length in zip(offsets, lengths, strict=True))
        _require(size == prod(lengths) * dtype.itemsize and min([0, *offsets]) >= 0 and len(lengths) == len(shape))
        _require(all(at + n <= m for at, n, m in zip(offsets, lengths, shape, strict=True)))
        content = bytearray(contents[file][start : start + size])
        _require(len(content) == size and file not in (SAVED_BY, TENSORS) and zlib.crc32(content) == checksum)
        values[box] = torch.frombuffer(content, dtype=dtype).view(lengths)
        times[box] += 1
    _require(bool((times == 1).all()))
    return values.to(wanted)


def _require(is_right: bool) -> None:
    if not is_right:
        raise ValueError("it does not fit")


def check_load(folder: Path, expected: State | None) -> None:
    """Load a checkpoint; if motet accepts it, it holds the expected tensors, bit for bit."""
    state = {name: torch.full(shape, 77).to(dtype) for name, (dtype, shape) in SHAPES.items()}
    shards = {name: CheckpointShard.from_tensor(tensor) for name, tensor in state.items()}
    (verdict,) = checkpoint_verdicts(folder)
    try:
        manifest = load_checkpoint(folder, shards, None)
    except InputError as error:
        if "is damaged" in str(error) and verdict.problem is None:
            raise FindingError(f"`motet checkpoint verify` calls it whole, and loading refuses it: {error}") from error
        raise
    check_equal("the verdict of `motet checkpoint verify`", verdict.problem, None)
    if expected is None:
        raise FindingError("a checkpoint was loaded that does not fit together")
    check_equal("the step", manifest.step, int(folder.name.removeprefix("step-")))
    for name, tensor in state.items():
        if not same_bits(tensor, expected[name]):
            raise FindingError(
                f"{name} was loaded as {tensor.tolist()!s:.200}, and is {expected[name].tolist()!s:.200}"
            )


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits; `equal` takes two NaN for different."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def copy_checkpoint(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target
