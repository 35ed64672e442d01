"""The manifest of a checkpoint, and the rule by which a folder of checkpoints is read.
`checkpoints/step-00000020/` holds one complete checkpoint: it gets that name only when everything is on disk. A folder
that ends in `.partial` is left by an interrupted save or deletion, and is never read. The manifest of a model and its
optimizer is the same for every layout; `saved_by.json` says which run made the checkpoint."""

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from math import prod
from pathlib import Path
from typing import Any

from motet.core.dtypes import DTYPE_BYTES
from motet.core.errors import InputError

MANIFEST_FILE, SAVED_BY_FILE = "manifest.json", "saved_by.json"
PARTIAL_SUFFIX = ".partial"
# Prefixes of tensors that only independent replicas need; any other run ignores them.
REPLICA_PREFIXES = ("replica-", "outer/")
# Prefix of the state of compression, which no other layout can read or needs.
COMPRESSION_STATE_PREFIX = "carried/"
_CHECKPOINT_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class SavedBy:
    """The run that made a checkpoint, and the tensors that only a run like it can read."""

    ranks: int
    threads: int
    torch: str
    reproducible: str | None = None  # The setting `run.reproducible`
    outer: dict[str, int] = field(default_factory=dict)  # Schedule and steps of independent replicas, if any
    shapes: dict[str, list[int]] = field(default_factory=dict)  # Set when it is written
    dtypes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckpointManifest:
    """The tensors of a model and its optimizer at a step, whatever the layout."""

    step: int
    data_fingerprint: str
    shapes: dict[str, list[int]]
    dtypes: dict[str, str]
    saved_by: SavedBy
    has_older_names: bool = False  # The state of compression does not name its sync group
    checksums: dict[str, int] = field(default_factory=dict)  # CRC-32 of the other files; set when it is written

    @property
    def all_shapes(self) -> dict[str, list[int]]:
        return self.shapes | self.saved_by.shapes

    @property
    def size_bytes(self) -> int:
        return sum(prod(shape) * DTYPE_BYTES.get(self.dtypes[name], 0) for name, shape in self.shapes.items())

    def stored_name(self, name: str) -> str:
        """The name of a tensor in the files of this checkpoint."""
        if not self.has_older_names or not is_compression_state(name) or name in self.saved_by.shapes:
            return name
        before, prefix, rest = name.partition(COMPRESSION_STATE_PREFIX)
        return before + prefix + rest.rpartition("/")[2]

    def write(self, folder: Path, *, other_tensors: Mapping[str, tuple[list[int], str]]) -> None:
        """Write the manifest after all other files; `other_tensors` are those in the files besides its own."""
        shapes = {name: shape for name, (shape, _) in other_tensors.items()}
        dtypes = {name: dtype for name, (_, dtype) in other_tensors.items()}
        saved_by = replace(self.saved_by, shapes=shapes, dtypes=dtypes)
        (folder / SAVED_BY_FILE).write_text(json.dumps(asdict(saved_by), indent=1))
        checksums = {path.name: _checksum(path) for path in sorted(folder.iterdir())}
        content = asdict(replace(self, checksums=checksums))
        del content["saved_by"], content["has_older_names"]
        (folder / MANIFEST_FILE).write_text(json.dumps(content, indent=1))


def read_manifest(folder: Path) -> CheckpointManifest:
    """The manifest of a complete checkpoint."""
    try:
        content = dict(json.loads((folder / MANIFEST_FILE).read_text()))
        if "ranks" in content:
            return _manifest_of_one_file(content)
        return CheckpointManifest(**content, saved_by=SavedBy(**json.loads((folder / SAVED_BY_FILE).read_text())))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{folder} is not a whole checkpoint ({error}); remove it to use the one before it") from None


def _manifest_of_one_file(content: dict[str, Any]) -> CheckpointManifest:
    """A manifest of earlier versions, which had everything in one file."""
    prefixes = (*REPLICA_PREFIXES, COMPRESSION_STATE_PREFIX)
    keys = {each.name for each in fields(SavedBy)} & content.keys() - {"shapes", "dtypes"}
    saved_by: dict[str, Any] = {key: content.pop(key) for key in keys}
    for key in ("shapes", "dtypes"):
        saved_by[key] = {name: value for name, value in content[key].items() if name.startswith(prefixes)}
        content[key] = {name: value for name, value in content[key].items() if name not in saved_by[key]}
    return CheckpointManifest(**content, saved_by=SavedBy(**saved_by), has_older_names=True)


def verify_checksums(manifest: CheckpointManifest, folder: Path) -> None:
    """Refuse a checkpoint with a missing or changed file."""
    for name, expected in manifest.checksums.items():
        path = folder / name
        if not path.is_file() or _checksum(path) != expected:
            problem = f"{name} {'has changed' if path.is_file() else 'is missing'}"
            raise InputError(f"checkpoint {folder} is damaged ({problem}); remove it to use the one before it")


def _checksum(path: Path) -> int:
    total = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            total = zlib.crc32(block, total)
    return total


def is_compression_state(name: str) -> bool:
    """Whether a tensor is state of compression, also of one replica."""
    return re.match(rf"(replica-\d+/)?{COMPRESSION_STATE_PREFIX}", name) is not None


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def complete_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of all complete checkpoints, oldest first."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted((int(match[1]), path) for path in paths if (match := _CHECKPOINT_NAME.fullmatch(path.name)))


def check_same_model(manifest: CheckpointManifest, shapes: dict[str, list[int]], folder: Path) -> None:
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
            f"checkpoint {folder} is of another model or optimizer: {details[0]} ({len(details)} tensors differ); "
            "resume with the job that made it, or start in another run folder"
        )
