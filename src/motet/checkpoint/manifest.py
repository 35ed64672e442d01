"""What a checkpoint says of itself, and the rule by which a folder of checkpoints is read.

`checkpoints/step-00000020/` holds one whole checkpoint: it gets that name only when everything is on disk. A folder
that ends in `.partial` is what a save or a deletion left that did not come to its end; it is never read.
"""

import json
import re
import zlib
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from motet.core.errors import InputError

MANIFEST_FILE = "manifest.json"
PARTIAL_SUFFIX = ".partial"
# How names begin of what only replicas that train apart need; any other run may leave it there.
REPLICA_PREFIXES = ("replica-", "outer/")
# How names begin of what compression goes by: no other layout can read it, and none needs it.
COMPRESSION_STATE_PREFIX = "carried/"
_CHECKPOINT_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class CheckpointManifest:
    """`shapes` names every tensor that is in the checkpoint."""

    step: int
    ranks: int
    threads: int
    torch: str
    data_fingerprint: str
    shapes: dict[str, list[int]]
    dtypes: dict[str, str]
    # How replicas that train apart meet, and the steps that they have taken; empty where none do.
    outer: dict[str, int] = field(default_factory=dict)
    reproducible: str | None = None  # What its bits do not depend on (`run.reproducible`)
    # CRC-32 of every other file of the checkpoint; filled in when it is written.
    checksums: dict[str, int] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        checksums = {path.name: _checksum(path) for path in sorted(folder.iterdir())}
        (folder / MANIFEST_FILE).write_text(json.dumps(asdict(replace(self, checksums=checksums)), indent=1))


def read_manifest(folder: Path) -> CheckpointManifest:
    """The manifest of a whole checkpoint."""
    try:
        return CheckpointManifest(**json.loads((folder / MANIFEST_FILE).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{folder} is not a whole checkpoint ({error}); remove it to use the one before it") from None


def verify_checksums(manifest: CheckpointManifest, folder: Path) -> None:
    """A sentence where a file of a checkpoint is missing or not as it was written."""
    for name, expected in manifest.checksums.items():
        path = folder / name
        problem = "is missing" if not path.is_file() else "has changed" if _checksum(path) != expected else ""
        if problem:
            raise InputError(f"checkpoint {folder} is damaged ({name} {problem}); remove it to use the one before it")


def _checksum(path: Path) -> int:
    total = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            total = zlib.crc32(block, total)
    return total


def is_compression_state(name: str) -> bool:
    """Also of a replica that trains apart."""
    return re.match(rf"(replica-\d+/)?{COMPRESSION_STATE_PREFIX}", name) is not None


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def complete_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of all whole checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    checkpoints = [
        (int(match[1]), path) for path in folder.iterdir() if (match := _CHECKPOINT_NAME.fullmatch(path.name))
    ]
    return sorted(checkpoints)


def check_same_model(manifest: CheckpointManifest, shapes: dict[str, list[int]], folder: Path) -> None:
    """A sentence where the tensors of a checkpoint are not those that the job's model and optimizer need."""
    missing = sorted(shapes.keys() - manifest.shapes.keys())
    unexpected = sorted(
        n
        for n in manifest.shapes.keys() - shapes.keys()
        if not n.startswith((*REPLICA_PREFIXES, COMPRESSION_STATE_PREFIX))
    )
    mismatched = sorted(
        name for name in shapes.keys() & manifest.shapes.keys() if shapes[name] != manifest.shapes[name]
    )
    if not (missing or unexpected or mismatched):
        return
    if mismatched:
        detail = f"{mismatched[0]!r} is {manifest.shapes[mismatched[0]]} there and {shapes[mismatched[0]]} in this job"
    elif missing:
        detail = f"{missing[0]!r} is not in it"
    else:
        detail = f"it holds {unexpected[0]!r}, which this job does not have"
    count = len(missing) + len(unexpected) + len(mismatched)
    raise InputError(
        f"checkpoint {folder} is of another model or optimizer: {detail} ({count} tensors differ); "
        "resume with the job that made it, or start in another run folder"
    )
