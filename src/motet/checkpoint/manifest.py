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

MANIFEST = "manifest.json"
PARTIAL = ".partial"
REPLICAS = ("replica-", "outer/")
"""How names begin of what only replicas that train apart need; any other run may leave it there."""
CARRIED = "carried/"
"""How names begin of what compression goes by: no other layout can read it, and none needs it."""
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Manifest:
    """`shapes` names every tensor that is in the checkpoint."""

    step: int
    ranks: int
    threads: int
    torch: str
    data_fingerprint: str
    shapes: dict[str, list[int]]
    dtypes: dict[str, str]
    outer: dict[str, int] = field(default_factory=dict)
    """How replicas that train apart meet, and the steps that they have taken; empty where none do."""
    reproducible: str | None = None
    """What its bits do not depend on (`run.reproducible`)."""
    checksums: dict[str, int] = field(default_factory=dict)
    """CRC-32 of every other file of the checkpoint; filled in when it is written."""

    def write(self, folder: Path) -> None:
        sums = {path.name: _checksum(path) for path in sorted(folder.iterdir())}
        (folder / MANIFEST).write_text(json.dumps(asdict(replace(self, checksums=sums)), indent=1))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a whole checkpoint."""
    try:
        return Manifest(**json.loads((folder / MANIFEST).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{folder} is not a whole checkpoint ({error}); remove it to use the one before it") from None


def refuse_damaged(manifest: Manifest, where: Path) -> None:
    """A sentence where a file of a checkpoint is missing or not as it was written."""
    for name, expected in manifest.checksums.items():
        path = where / name
        problem = "is missing" if not path.is_file() else "has changed" if _checksum(path) != expected else ""
        if problem:
            raise InputError(f"checkpoint {where} is damaged ({name} {problem}); remove it to use the one before it")


def _checksum(path: Path) -> int:
    total = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            total = zlib.crc32(piece, total)
    return total


def is_carried(name: str) -> bool:
    """Also of a replica that trains apart."""
    return re.match(rf"(replica-\d+/)?{CARRIED}", name) is not None


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def whole_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of all whole checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return sorted(found)


def refuse_other_model(manifest: Manifest, shapes: dict[str, list[int]], where: Path) -> None:
    """A sentence where the tensors of a checkpoint are not those that the job's model and optimizer need."""
    missing = sorted(shapes.keys() - manifest.shapes.keys())
    surplus = sorted(n for n in manifest.shapes.keys() - shapes.keys() if not n.startswith((*REPLICAS, CARRIED)))
    other = sorted(name for name in shapes.keys() & manifest.shapes.keys() if shapes[name] != manifest.shapes[name])
    if not (missing or surplus or other):
        return
    if other:
        detail = f"{other[0]!r} is {manifest.shapes[other[0]]} there and {shapes[other[0]]} in this job"
    elif missing:
        detail = f"{missing[0]!r} is not in it"
    else:
        detail = f"it holds {surplus[0]!r}, which this job does not have"
    count = len(missing) + len(surplus) + len(other)
    raise InputError(
        f"checkpoint {where} is of another model or optimizer: {detail} ({count} tensors differ); "
        "resume with the job that made it, or start in another run folder"
    )
