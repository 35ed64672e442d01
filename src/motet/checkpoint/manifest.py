"""The manifest of a checkpoint: one description of its fields, which every manifest that is read must match.
The manifest of a model and its optimizer is the same for every layout; `saved_by.json` names the run of the checkpoint.
Nothing here imports torch.
"""

import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from reprlib import Repr
from stat import S_ISREG
from typing import Annotated, Any, BinaryIO, Final, Literal, NamedTuple, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from motet.checkpoint.checkpoint_folders import REPLACED_SUFFIX, checkpoint_name
from motet.checkpoint.safetensors_header import SAFETENSORS_DTYPES
from motet.core.config_loading import describe_requirement
from motet.core.errors import InputError, check_input
from motet.core.units import DTYPE_BYTES
from motet.precision.recipe import LossScale

MANIFEST_FILE, SAVED_BY_FILE, TENSORS_FILE = "manifest.json", "saved_by.json", "tensors.json"
# The one format that is written and read. Manifests of versions before 0.1.0 have no number.
FORMAT: Final = 3
# A larger file of JSON is neither written nor read.
MAX_JSON_BYTES = 2**28
# Prefixes of tensors that only independent replicas need; any other run ignores them.
REPLICA_PREFIXES = ("replica-", "outer/")
# Prefix of the state of compression, which no other layout can read or needs.
COMPRESSION_STATE_PREFIX = "carried/"

ParsedT = TypeVar("ParsedT")


def _check_dtype(name: str) -> str:
    if name not in SAFETENSORS_DTYPES:
        raise PydanticCustomError("dtype", "must be a dtype that a checkpoint can hold")
    return name


def _check_numel(shape: list[int]) -> list[int]:
    if prod(filter(None, shape)) > 2**60:
        raise PydanticCustomError("shape", "must have at most 2^60 elements")
    return shape


Count = Annotated[int, Field(ge=0, le=2**53)]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$")]
Shape = Annotated[list[Count], Field(max_length=64), AfterValidator(_check_numel)]
TensorName = Annotated[str, Field(min_length=1, max_length=2000)]
Checksum = Annotated[int, Field(ge=0, lt=2**32)]
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
    checksums: dict[FileName, Checksum] = field(default_factory=dict)  # CRC-32 of the files of JSON; set when written
    sizes: dict[FileName, Count] = field(default_factory=dict)  # Bytes of all other files
    format: Literal[3] = FORMAT

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
        return self.sizes.keys() - {SAVED_BY_FILE, TENSORS_FILE}

    def to_text(self) -> str:
        """The content of `manifest.json`; its last field is the CRC-32 of the same text without that field."""
        content = {"format": self.format} | asdict(self)
        del content["saved_by"]
        text = json.dumps(content, indent=1)
        return json.dumps(content | {"checksum": zlib.crc32(text.encode())}, indent=1)


class StoredJson(NamedTuple):
    """The bytes of a file of JSON, and their CRC-32."""

    size_bytes: int
    checksum: int


def write_durably(path: Path, text: str) -> StoredJson:
    """Write a new file of JSON, which is on disk when this returns."""
    content = text.encode()
    assert len(content) <= MAX_JSON_BYTES, f"{path}: {len(content)} bytes are more than a reader takes"
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return StoredJson(len(content), zlib.crc32(content))


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
        text = read_limited(folder / MANIFEST_FILE)
        content = _parse_object(MANIFEST_FILE, text)
        _refuse_other_format(folder, content)
        if content.get("format") != FORMAT:
            raise ValueError(f"{MANIFEST_FILE}: format = {_SHORT.repr(content.get('format'))} must be {FORMAT}")
        checksum, saved_by_text = content.pop("checksum", None), read_limited(folder / SAVED_BY_FILE)
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


def _refuse_other_format(folder: Path, content: Mapping[str, Any]) -> None:
    """Refuse the manifest of another version; one without a number has no checksum of itself, or is damaged."""
    number = content.get("format")
    is_of_other_version = type(number) is int and 0 < number < 10**6 and number != FORMAT
    is_without_number = "checksums" in content and not {"format", "checksum"} & content.keys()
    check_input(
        not is_of_other_version and not is_without_number,
        f"checkpoint {folder} has {f'format {number}' if is_of_other_version else 'no format number'}, so another "
        f"version of motet saved it, and this version reads format {FORMAT} alone: resume with the version that saved "
        "it, or start in another run folder",
    )


def _parse_object(name: str, text: bytes) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{name} is not JSON: {str(error).partition(';')[0]}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{name} = {_SHORT.repr(content)} must be a section with keys")
    return content


def _inconsistencies(manifest: CheckpointManifest, folder_name: str) -> Iterator[str]:
    saved_by, required = manifest.saved_by, {TENSORS_FILE, SAVED_BY_FILE}
    if folder_name.removesuffix(REPLACED_SUFFIX) != checkpoint_name(manifest.step):
        yield f"step = {manifest.step} must be that of the folder's name, {folder_name}"
    for shapes, dtypes in ((manifest.shapes, manifest.dtypes), (saved_by.shapes, saved_by.dtypes)):
        for name in sorted(shapes.keys() ^ dtypes.keys()):
            yield f"{name!r} must have a shape and a dtype"
    for name in sorted(manifest.shapes.keys() & saved_by.shapes.keys()):
        yield f"{name!r} must not be in {SAVED_BY_FILE} as well"
    for name in sorted(manifest.checksums.keys() ^ required):
        state = "is not" if name in required else "is"
        yield f"checksums must be of {TENSORS_FILE} and {SAVED_BY_FILE}; {name} {state} there"
    for name in sorted({MANIFEST_FILE} & manifest.sizes.keys() | required - manifest.sizes.keys()):
        yield f"sizes must be of the other files; {name} {'is not' if name in required else 'is'} among them"
    if saved_by.outer and "replicas" not in saved_by.outer:
        yield "saved_by.outer must have the number of replicas"


def read_limited(path: Path) -> bytes:
    """The content of a file of metadata, which must not be larger than a manifest may be."""
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
    """The content of a file of JSON whose checksum is that of the manifest."""
    content = read_limited(folder / name)
    _check_content(manifest, name, content)
    return content


def _check_content(manifest: CheckpointManifest, name: str, content: bytes) -> None:
    if zlib.crc32(content) != manifest.checksums.get(name):
        raise ValueError(f"{name} has changed")


def verify_listing(folder: Path, manifest: CheckpointManifest) -> None:
    """Raise a `ValueError` unless the folder holds the files of its manifest with their sizes, and no other."""
    present, listed = {path.name for path in folder.iterdir()}, manifest.sizes.keys() | {MANIFEST_FILE}
    for name in sorted(present ^ listed):
        raise ValueError(f"{name} is missing" if name in listed else f"{_SHORT.repr(name)} is not in its manifest")
    for name in sorted(listed):
        if not (folder / name).is_file():
            raise ValueError(f"{name} is not a regular file")
        expected_bytes = manifest.sizes.get(name)
        size_bytes = (folder / name).stat().st_size
        if expected_bytes not in (size_bytes, None):
            raise ValueError(f"{name} has {size_bytes} bytes and had {expected_bytes}")


_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60
_MANIFEST = TypeAdapter(CheckpointManifest)


def is_compression_state(name: str) -> bool:
    """Whether a tensor is state of compression, of the run or of one replica."""
    return re.match(rf"(replica-\d+/)?{COMPRESSION_STATE_PREFIX}", name) is not None


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
