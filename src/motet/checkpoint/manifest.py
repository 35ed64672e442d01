"""The manifest of a checkpoint: one description of its fields, which every manifest that is read must match.
`checkpoints/step-00000020/` holds one complete checkpoint: it gets that name only when everything is on disk. The
manifest of a model and its optimizer is the same for every layout; `saved_by.json` names the run of the checkpoint.
Nothing here imports torch.

The index of a checkpoint, `tensors.json`: the place of each tensor's elements in the files, read with every check.
Nothing here imports torch.

The complete and the damaged checkpoints of a folder, and its other files. Nothing here imports torch.
"""

import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import combinations, groupby
from math import prod
from operator import attrgetter
from pathlib import Path
from reprlib import Repr
from stat import S_ISREG
from typing import Annotated, Any, BinaryIO, Final, Literal, NamedTuple, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from motet.core.config_loading import describe_requirement
from motet.core.errors import InputError, check_input
from motet.core.units import DTYPE_BYTES
from motet.precision.recipe import LossScale

MANIFEST_FILE, SAVED_BY_FILE, TENSORS_FILE = "manifest.json", "saved_by.json", "tensors.json"
# The one format that is written and read. Manifests of versions before it have neither a number nor a checksum.
FORMAT: Final = 2
# A larger file of JSON is neither written nor read.
MAX_JSON_BYTES = 2**28
# Prefixes of tensors that only independent replicas need; any other run ignores them.
REPLICA_PREFIXES = ("replica-", "outer/")
# Prefix of the state of compression, which no other layout can read or needs.
COMPRESSION_STATE_PREFIX = "carried/"

ParsedT = TypeVar("ParsedT")


def _check_dtype(name: str) -> str:
    if name not in DTYPE_BYTES:
        raise PydanticCustomError("dtype", "must be a dtype that motet knows")
    return name


def _check_numel(shape: list[int]) -> list[int]:
    if prod(filter(None, shape)) > 2**60:
        raise PydanticCustomError("shape", "must have at most 2^60 elements")
    return shape


Count = Annotated[int, Field(ge=0, le=2**53)]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$")]
Shape = Annotated[list[Count], Field(max_length=64), AfterValidator(_check_numel)]
TensorName = Annotated[str, Field(min_length=1, max_length=2000)]
_Checksum = Annotated[int, Field(ge=0, lt=2**32)]
_Dtype = Annotated[str, AfterValidator(_check_dtype)]
_Positive = Annotated[int, Field(ge=1, le=2**31)]
_Text = Annotated[str, Field(max_length=200)]


@dataclass(frozen=True)
class LossScaling:
    """The loss scale of a run in fp16, and the counts that decide when it changes."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    scale: LossScale
    good_steps: Count
    overflows_at_smallest: Count
    targets: Count


@dataclass(frozen=True)
class SavedBy:
    """The run that made a checkpoint, and the tensors that only a run like it can read."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    ranks: _Positive
    threads: _Positive
    torch: _Text
    reproducible: _Text | None = None  # The setting `run.reproducible`
    outer: dict[_Text, Count] = field(default_factory=dict)  # Schedule and steps of independent replicas, if any
    loss_scaling: LossScaling | None = None  # Set in fp16
    shapes: dict[TensorName, Shape] = field(default_factory=dict)  # Set when the checkpoint is written
    dtypes: dict[TensorName, _Dtype] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckpointManifest:
    """The tensors of a model and its optimizer at a step, whatever the layout."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    step: Count
    data_fingerprint: _Text
    shapes: dict[TensorName, Shape]
    dtypes: dict[TensorName, _Dtype]
    saved_by: SavedBy
    checksums: dict[FileName, _Checksum] = field(default_factory=dict)  # CRC-32 of the other files; set when written
    sizes: dict[FileName, Count] = field(default_factory=dict)  # Bytes of these files
    format: Literal[2] = FORMAT

    @property
    def all_shapes(self) -> dict[str, list[int]]:
        return self.shapes | self.saved_by.shapes

    @property
    def all_dtypes(self) -> dict[str, str]:
        return self.dtypes | self.saved_by.dtypes

    @property
    def size_bytes(self) -> int:
        return sum(prod(shape) * DTYPE_BYTES[self.dtypes[name]] for name, shape in self.shapes.items())

    @property
    def data_files(self) -> set[str]:
        """The files that hold tensors."""
        return self.checksums.keys() - {SAVED_BY_FILE, TENSORS_FILE}

    def to_text(self) -> str:
        """The content of `manifest.json`; its last field is the CRC-32 of the same text without that field."""
        content = {"format": self.format} | asdict(self)
        del content["saved_by"]
        text = json.dumps(content, indent=1)
        return json.dumps(content | {"checksum": zlib.crc32(text.encode())}, indent=1)


class StoredFile(NamedTuple):
    """The bytes of a file, and their CRC-32."""

    size_bytes: int
    checksum: int


def write_durably(path: Path, text: str) -> StoredFile:
    """Write a new file of JSON, which is on disk when this returns."""
    content = text.encode()
    assert len(content) <= MAX_JSON_BYTES, f"{path}: {len(content)} bytes are more than a reader takes"
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return StoredFile(len(content), zlib.crc32(content))


# --- reading ---------------------------------------------------------------------------------------------


@contextmanager
def refuse_damage(folder: Path) -> Iterator[None]:
    """Raise a problem that the block finds in a checkpoint as one sentence."""
    try:
        yield
    except InputError:
        raise
    except OSError as error:
        reason = f"{Path(error.filename or folder).name}: {error.strerror}"
        if isinstance(error, PermissionError):
            raise InputError(f"cannot read checkpoint {folder} ({reason}); make it readable for this user") from None
        raise InputError(_damage(folder, reason)) from None
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InputError(_damage(folder, reason)) from None


def _damage(folder: Path, reason: str) -> str:
    reason = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in reason[:400])
    return f"checkpoint {folder} is damaged ({reason}); remove it to use the one before it"


def read_manifest(folder: Path) -> CheckpointManifest:
    """The manifest of a checkpoint, which agrees with itself; whether the files are whole is not checked."""
    with refuse_damage(folder):
        text = _read_limited(folder / MANIFEST_FILE)
        content = _parse_object(MANIFEST_FILE, text)
        check_input(
            "checksums" not in content or {"format", "checksum"} & content.keys(),
            f"checkpoint {folder} has no format number, so a version of motet before 0.1.0 saved it, and this version "
            f"reads format {FORMAT} alone: resume with the version that saved it, or start in another run folder",
        )
        if content.get("format") != FORMAT:
            raise ValueError(f"{MANIFEST_FILE}: format = {_SHORT.repr(content.get('format'))} must be {FORMAT}")
        checksum, saved_by_text = content.pop("checksum", None), _read_limited(folder / SAVED_BY_FILE)
        content["saved_by"] = _parse_object(SAVED_BY_FILE, saved_by_text)
        manifest = validate_json(_MANIFEST, MANIFEST_FILE, json.dumps(content).encode())
        for problem in _inconsistencies(manifest, folder.absolute().name):
            raise ValueError(f"{MANIFEST_FILE}: {problem}")
        if manifest.to_text().encode() != text:
            raise ValueError(f"{MANIFEST_FILE} has changed: its checksum is not {_SHORT.repr(checksum)}")
        _check_content(manifest, SAVED_BY_FILE, saved_by_text)
        return manifest


def validate_json(schema: TypeAdapter[ParsedT], name: str, text: bytes) -> ParsedT:
    """The value of a text of JSON, or a sentence that names the first field that is wrong."""
    try:
        return schema.validate_json(text)
    except ValidationError as error:
        detail: dict[str, Any] = dict(error.errors(include_url=False)[0])
        key = ".".join(str(part) for part in detail["loc"] if part != "[key]") or "its content"
        value = "" if detail["type"].startswith("missing") else f" = {_SHORT.repr(detail['input'])}"
        raise ValueError(f"{name}: {key}{value} {describe_requirement(detail)}") from None


def _parse_object(name: str, text: bytes) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{name} is not JSON: {str(error).partition(';')[0]}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{name} = {_SHORT.repr(content)} must be a section with keys")
    return content


def _inconsistencies(manifest: CheckpointManifest, folder_name: str) -> Iterator[str]:
    saved_by, files, required = manifest.saved_by, manifest.checksums.keys(), {TENSORS_FILE, SAVED_BY_FILE}
    if folder_name.removesuffix(REPLACED_SUFFIX) != checkpoint_name(manifest.step):
        yield f"step = {manifest.step} must be that of the folder's name, {folder_name}"
    for shapes, dtypes in ((manifest.shapes, manifest.dtypes), (saved_by.shapes, saved_by.dtypes)):
        for name in sorted(shapes.keys() ^ dtypes.keys()):
            yield f"{name!r} must have a shape and a dtype"
    for name in sorted(manifest.shapes.keys() & saved_by.shapes.keys()):
        yield f"{name!r} must not be in {SAVED_BY_FILE} as well"
    for name in sorted({MANIFEST_FILE} & files | required - files):
        yield f"checksums must be those of the other files; {name} {'is' if name in files else 'is not'} among them"
    if manifest.sizes.keys() != files:
        yield "sizes must be of the files that have checksums"
    if saved_by.outer and "replicas" not in saved_by.outer:
        yield "saved_by.outer must have the number of replicas"


def _read_limited(path: Path) -> bytes:
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size  # `read` allocates all bytes of a request
        content = file.read(size + 1) if size <= MAX_JSON_BYTES else b""
    if max(size, len(content)) > MAX_JSON_BYTES:
        raise ValueError(f"{path.name} is larger than {MAX_JSON_BYTES} bytes")
    return content


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. A device or a pipe in its place could block, or never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path.name} is not a regular file")
    return os.fdopen(descriptor, "rb")


def read_listed(folder: Path, manifest: CheckpointManifest, name: str) -> bytes:
    """The content of a small file whose checksum is that of the manifest."""
    content = _read_limited(folder / name)
    _check_content(manifest, name, content)
    return content


def _check_content(manifest: CheckpointManifest, name: str, content: bytes) -> None:
    if zlib.crc32(content) != manifest.checksums.get(name):
        raise ValueError(f"{name} has changed")


def verify_listing(folder: Path, manifest: CheckpointManifest) -> None:
    """Raise a `ValueError` unless the folder holds the files of its manifest, and no other."""
    present, listed = {path.name for path in folder.iterdir()}, manifest.checksums.keys() | {MANIFEST_FILE}
    for name in sorted(present ^ listed):
        raise ValueError(f"{name} is missing" if name in listed else f"{_SHORT.repr(name)} is not in its manifest")
    for name in sorted(listed):
        if not (folder / name).is_file():
            raise ValueError(f"{name} is not a regular file")


def verify_file(folder: Path, manifest: CheckpointManifest, name: str) -> None:
    """Raise a `ValueError` unless a file of a checkpoint is unchanged."""
    expected_bytes, checksum = manifest.sizes[name], 0
    with open_regular(folder / name) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes != expected_bytes:
            raise ValueError(f"{name} has {size_bytes} bytes and had {expected_bytes}")
        while block := file.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    if checksum != manifest.checksums[name]:
        raise ValueError(f"{name} has changed")


_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60
_MANIFEST = TypeAdapter(CheckpointManifest)


# --- names -----------------------------------------------------------------------------------------------

# A folder that an interrupted save or deletion leaves, and that is never read.
PARTIAL_SUFFIX = ".partial"
# A complete checkpoint while the same step is saved again; it is read if the new one did not get its name.
REPLACED_SUFFIX = ".old"
_CHECKPOINT_NAME = re.compile(rf"step-([0-9]{{8}}|[1-9][0-9]{{8,}})({re.escape(REPLACED_SUFFIX)})?")


def is_compression_state(name: str) -> bool:
    """Whether a tensor is state of compression, of the run or of one replica."""
    return re.match(rf"(replica-\d+/)?{COMPRESSION_STATE_PREFIX}", name) is not None


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of_name(name: str) -> int | None:
    """The step of a complete checkpoint by the name of its folder; None for another name."""
    match = _CHECKPOINT_NAME.fullmatch(name)
    return int(match[1]) if match else None


def complete_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of all complete checkpoints, oldest first, one for each step."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    by_step: dict[int, Path] = {}
    for path in paths:  # `.old` comes after the name without it
        if (step := step_of_name(path.name)) is not None:
            by_step.setdefault(step, path)
    return sorted(by_step.items())


def check_same_model(manifest: CheckpointManifest, shapes: Mapping[str, list[int]], folder: Path) -> None:
    """Refuse a checkpoint whose tensors do not match the model and the optimizer of the job."""
    stored = manifest.all_shapes
    missing = sorted(shapes.keys() - stored.keys())
    unexpected = sorted(manifest.shapes.keys() - shapes.keys())
    mismatched = sorted(name for name in shapes.keys() & stored.keys() if shapes[name] != stored[name])
    details = [
        *(f"{name!r} is {stored[name]} there and {shapes[name]} in this job" for name in mismatched),
        *(f"{name!r} is not in it" for name in missing),
        *(f"it holds {name!r}, which this job does not have" for name in unexpected),
    ]
    if details:
        raise InputError(
            f"checkpoint {folder} belongs to another model or optimizer: {details[0]} ({len(details)} tensors differ); "
            "resume with the job that made it, or start in another run folder"
        )


Box = tuple[tuple[int, ...], tuple[int, ...]]  # Offsets and lengths in the whole tensor


class StoredChunk(NamedTuple):
    """A box of a tensor, and where its bytes are: its elements in row-major order."""

    offsets: Annotated[tuple[Count, ...], Field(max_length=64)]
    lengths: Annotated[tuple[Annotated[int, Field(ge=1, le=2**53)], ...], Field(max_length=64)]
    file: FileName
    start: Count
    size_bytes: Annotated[int, Field(ge=1, le=2**53)]


TensorIndex = dict[str, list[StoredChunk]]
_INDEX = TypeAdapter(dict[TensorName, list[StoredChunk]], config=ConfigDict(strict=True))


def index_to_text(index: Mapping[str, Sequence[StoredChunk]]) -> str:
    """The content of `tensors.json`: a list for each chunk, in the order of the fields of `StoredChunk`."""
    return json.dumps(index, separators=(",", ":"))


def read_checkpoint(folder: Path) -> tuple[CheckpointManifest, TensorIndex]:
    """The manifest and the index of a checkpoint, which agree with each other and with the files that are there."""
    manifest = read_manifest(folder)
    with refuse_damage(folder):
        verify_listing(folder, manifest)
        index = validate_json(_INDEX, TENSORS_FILE, read_listed(folder, manifest, TENSORS_FILE))
        sizes = {name: (folder / name).stat().st_size for name in manifest.data_files}
        for problem in index_problems(index, manifest, sizes):
            raise ValueError(f"{TENSORS_FILE}: {problem}")
    return manifest, index


def verify_files(folder: Path, manifest: CheckpointManifest, *, share: int = 0, shares: int = 1) -> None:
    """Refuse a checkpoint with a changed file; each of several ranks reads its share of the files."""
    names = sorted(manifest.checksums, key=lambda name: (-manifest.sizes[name], name))
    with refuse_damage(folder):
        for name in names[share::shares]:
            verify_file(folder, manifest, name)


def index_problems(index: TensorIndex, manifest: CheckpointManifest, file_sizes: Mapping[str, int]) -> Iterator[str]:
    """List what is wrong: chunks must hold each element of each tensor once, and fill the files without a gap."""
    shapes, dtypes = manifest.all_shapes, manifest.all_dtypes
    for name in sorted(index.keys() - shapes.keys()):
        yield f"{name!r} is not in the manifest"
    for name, shape in shapes.items():
        yield from _tensor_problems(name, shape, index.get(name, []))
        for chunk in index.get(name, []):
            size_bytes = prod(chunk.lengths) * DTYPE_BYTES[dtypes[name]]
            if chunk.size_bytes != size_bytes:
                yield f"{name}: size_bytes = {chunk.size_bytes} must be {size_bytes} for {chunk.lengths}"
    chunks = sorted((chunk for each in index.values() for chunk in each), key=attrgetter("file", "start"))
    by_file = {file: list(each) for file, each in groupby(chunks, attrgetter("file"))}
    for file in sorted(by_file.keys() ^ file_sizes.keys()):
        yield f"{file} holds tensors and must be in both the manifest and the index"
    for file in sorted(by_file.keys() & file_sizes.keys()):
        ends = [0, *(chunk.start + chunk.size_bytes for chunk in by_file[file])]
        if [*(chunk.start for chunk in by_file[file]), file_sizes[file]] != ends:
            yield f"the chunks in {file} must fill its {file_sizes[file]} bytes one after the other"


def _tensor_problems(name: str, shape: list[int], chunks: Sequence[StoredChunk]) -> Iterator[str]:
    for chunk in chunks:
        if not len(chunk.offsets) == len(chunk.lengths) == len(shape):
            yield f"{name}: a chunk has {len(chunk.lengths)} dimensions, and the tensor {len(shape)}"
        elif any(at + n > m for at, n, m in zip(chunk.offsets, chunk.lengths, shape, strict=True)):
            yield f"{name}: the chunk of {chunk.lengths} at {chunk.offsets} is not inside {shape}"
    elements = sum(prod(chunk.lengths) for chunk in chunks)
    if elements != prod(shape):
        yield f"{name}: {elements} elements of {shape} are there, and must be {prod(shape)}"
    elif have_overlap([(chunk.offsets, chunk.lengths) for chunk in chunks]):
        yield f"{name}: an element is there twice"


def have_overlap(boxes: Sequence[Box], *, dim: int = 0, undivided: int = 0) -> bool:
    """Whether two boxes share an element. Planes that cut no box divide them, first across `dim`."""
    if len(boxes) < 2:
        return False
    dims = len(boxes[0][0])
    if undivided == dims:  # no plane divides them
        return any(_share_elements(a, b) for a, b in combinations(boxes, 2))
    ordered, end, groups = sorted(boxes, key=lambda box: box[0][dim]), -1, list[list[Box]]()
    for offsets, lengths in ordered:
        if offsets[dim] >= end:
            groups.append([])
        groups[-1].append((offsets, lengths))
        end = max(end, offsets[dim] + lengths[dim])
    undivided = undivided + 1 if len(groups) == 1 else 0
    return any(have_overlap(group, dim=(dim + 1) % dims, undivided=undivided) for group in groups)


def _share_elements(a: Box, b: Box) -> bool:
    return all(max(x, y) < min(x + n, y + m) for x, n, y, m in zip(*a, *b, strict=True))


@dataclass(frozen=True)
class CheckpointVerdict:
    """A checkpoint, which is complete unless it has a problem."""

    path: str
    step: int | None  # None if it is not a checkpoint, such as the rest of an interrupted save
    files: int
    size_bytes: int
    problem: str | None = None


def checkpoint_verdicts(run: Path) -> Iterator[CheckpointVerdict]:
    """Read all files of each checkpoint of a run, of a folder of checkpoints, or of one checkpoint."""
    folder = run / "checkpoints" if (run / "checkpoints").is_dir() else run
    if (run / MANIFEST_FILE).is_file() or step_of_name(run.absolute().name) is not None:
        yield _verdict_of(run)
        return
    checkpoints = {path for _, path in complete_checkpoints(folder)}
    check_input(checkpoints, f"{run} holds no checkpoint; give a run, its folder of checkpoints or one checkpoint")
    for path in sorted(folder.iterdir()):
        verdict = _verdict_of(path) if path in checkpoints else CheckpointVerdict(str(path), None, *_size_of(path))
        if path.exists():  # a run that goes on may have deleted it
            yield verdict


def _verdict_of(checkpoint: Path) -> CheckpointVerdict:
    step, problem = step_of_name(checkpoint.absolute().name), None
    try:
        manifest, _ = read_checkpoint(checkpoint)
        verify_files(checkpoint, manifest)
        step = manifest.step
    except InputError as error:
        problem = str(error)
    return CheckpointVerdict(str(checkpoint), step, *_size_of(checkpoint), problem)


def _size_of(path: Path) -> tuple[int, int]:
    files = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]
    return len(files), sum(each.lstat().st_size for each in files if each.is_symlink() or each.exists())
