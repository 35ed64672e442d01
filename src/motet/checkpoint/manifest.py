"""The manifest of a checkpoint, and the rule by which a folder of checkpoints is read.
`checkpoints/step-00000020/` holds one complete checkpoint: it gets that name only when everything is on disk. A folder
that ends in `.partial` is left by an interrupted save or deletion, and is never read."""

import json
import re
import zlib
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from motet.core.errors import InputError

MANIFEST_FILE = "manifest.json"
PARTIAL_SUFFIX = ".partial"
# Prefixes of tensors that only independent replicas need; any other run ignores them.
REPLICA_PREFIXES = ("replica-", "outer/")
# Prefix of the state of compression, which no other layout can read or needs.
COMPRESSION_STATE_PREFIX = "carried/"
_CHECKPOINT_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class CheckpointManifest:
    """`shapes` names every tensor in the checkpoint."""

    step: int
    ranks: int
    threads: int
    torch: str
    data_fingerprint: str
    shapes: dict[str, list[int]]
    dtypes: dict[str, str]
    outer: dict[str, int] = field(default_factory=dict)  # Schedule and steps of independent replicas, if any
    reproducible: str | None = None  # The setting `run.reproducible`
    checksums: dict[str, int] = field(default_factory=dict)  # CRC-32 of the other files; set when it is written

    def write(self, folder: Path) -> None:
        checksums = {path.name: _checksum(path) for path in sorted(folder.iterdir())}
        (folder / MANIFEST_FILE).write_text(json.dumps(asdict(replace(self, checksums=checksums)), indent=1))


def read_manifest(folder: Path) -> CheckpointManifest:
    """The manifest of a complete checkpoint."""
    try:
        return CheckpointManifest(**json.loads((folder / MANIFEST_FILE).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{folder} is not a whole checkpoint ({error}); remove it to use the one before it") from None


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
    stored, optional = manifest.shapes, (*REPLICA_PREFIXES, COMPRESSION_STATE_PREFIX)
    missing = sorted(shapes.keys() - stored.keys())
    unexpected = sorted(name for name in stored.keys() - shapes.keys() if not name.startswith(optional))
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
