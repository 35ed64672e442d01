"""The way of a checkpoint from the files of ranks to its name, and the folders that a save or a deletion leaves.

Each rank writes its file and a record of it to `step-N.partial`, without a message to others. When all records are
there, rank 0 writes the index and the manifest, and renames the folder to `step-N`. Nothing here imports torch.
"""

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter

from motet.checkpoint.checkpoint_folders import PARTIAL_SUFFIX, REPLACED_SUFFIX, complete_checkpoints
from motet.checkpoint.manifest import (
    MANIFEST_FILE,
    SAVED_BY_FILE,
    TENSORS_FILE,
    CheckpointManifest,
    validate_json,
    write_durably,
)
from motet.checkpoint.safetensors_header import SAFETENSORS_DTYPES
from motet.checkpoint.tensor_index import TensorIndex, index_problems, index_to_text
from motet.core.errors import CheckpointSaveError, PeerFailedError, convert_os_errors

_MOST_S_BETWEEN_LOOKS = 0.05
_RECORD_SUFFIX = ".written.json"


@dataclass(frozen=True)
class Retention:
    """The checkpoints that stay in a folder."""

    newest: int
    every: int | None = None  # Multiples of these steps stay whatever comes after them

    def removed(self, folder: Path) -> Iterator[Path]:
        for step, path in complete_checkpoints(folder)[: -self.newest]:
            if self.every is None or step % self.every:
                yield path


@dataclass(frozen=True)
class RankRecord:
    """The tensors that a rank has written to a checkpoint, all of which are on disk."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    file: str | None  # None: this rank writes no element
    size_bytes: Annotated[int, Field(ge=0)]
    chunks: TensorIndex
    shapes: dict[str, list[int]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    copied_bytes: int = 0  # Bytes that were copied before an update could change them
    stall_s: float = 0.0  # In which updates waited for copies and writes
    problem: str = ""  # The reason why it could not write them


_RECORD = TypeAdapter(RankRecord)


def write_record(folder: Path, rank: int, record: RankRecord) -> None:
    """Tell the first rank that another one has written all that it writes, or cannot."""
    path = folder / f"rank-{rank:05d}{_RECORD_SUFFIX}"
    new = path.with_suffix(".new")
    new.write_text(json.dumps(vars(record)), encoding="utf-8")
    new.rename(path)  # A record is complete when it has its name


def wait_for_records(folder: Path, ranks: int, patience_s: Callable[[], float]) -> list[RankRecord]:
    """The records of all ranks but the first, in their order. They are given up as `looks_at` says."""
    missing = {f"rank-{rank:05d}{_RECORD_SUFFIX}": rank for rank in range(1, ranks)}
    records = dict[int, RankRecord]()
    for _ in looks_at(folder, patience_s):
        for name in sorted(missing.keys() & {entry.name for entry in os.scandir(folder)}):
            record = records[missing.pop(name)] = validate_json(_RECORD, name, (folder / name).read_bytes())
            (folder / name).unlink()
            if record.problem:
                raise PeerFailedError(record.problem)
        if not missing:
            return [records[rank] for rank in range(1, ranks)]
    raise CheckpointSaveError(
        f"could not save {folder.with_suffix('')}: rank {min(missing.values())} has not written its part, and no rank "
        f"has written anything for {patience_s():.0f} s; earlier checkpoints are whole, so --resume continues from the "
        "last"
    )


def looks_at(folder: Path, patience_s: Callable[[], float]) -> Iterator[None]:
    """Let the caller look at a folder again and again, with pauses. It ends when nothing was written there for
    `patience_s()` seconds since they were finite."""
    pause_s, last, last_s = 0.001, dict[str, int](), time.monotonic()
    while True:
        yield
        if math.isinf(most_s := patience_s()):
            last_s = time.monotonic()
        elif most_s and (now := _times_of_writes(folder)) != last:
            last, last_s = now, time.monotonic()
        elif time.monotonic() - last_s >= most_s:
            return
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _MOST_S_BETWEEN_LOOKS)


def _times_of_writes(folder: Path) -> dict[str, int]:
    times = dict[str, int]()
    with suppress(FileNotFoundError):  # Records get another name, and then the folder does
        for entry in os.scandir(folder):
            times[entry.name] = entry.stat().st_mtime_ns
    return times


def publish(unfinished: Path, final: Path, *, manifest: CheckpointManifest, records: list[RankRecord]) -> None:
    """Write the files about the tensors, the manifest last, and give the checkpoint its name."""
    _describe(unfinished, manifest, records)
    _commit(unfinished, final)


def _describe(unfinished: Path, manifest: CheckpointManifest, records: list[RankRecord]) -> None:
    index: TensorIndex = {}
    for name, chunks in (item for record in records for item in record.chunks.items()):
        index.setdefault(name, []).extend(chunks)
    shapes = {name: shape for record in records for name, shape in record.shapes.items() if name not in manifest.shapes}
    dtypes = {name: dtype for record in records for name, dtype in record.dtypes.items() if name in shapes}
    saved_by = replace(manifest.saved_by, shapes=shapes, dtypes=dtypes)
    sizes = {record.file: record.size_bytes for record in records if record.file}
    for problem in index_problems(index, replace(manifest, saved_by=saved_by, sizes=sizes)):
        raise AssertionError(problem)
    texts = {SAVED_BY_FILE: json.dumps(asdict(saved_by), indent=1), TENSORS_FILE: index_to_text(index)}
    written = {name: write_durably(unfinished / name, text) for name, text in texts.items()}
    sizes |= {name: file.size_bytes for name, file in written.items()}
    checksums = {name: file.checksum for name, file in written.items()}
    complete = replace(manifest, saved_by=saved_by, checksums=checksums, sizes=dict(sorted(sizes.items())))
    write_durably(unfinished / MANIFEST_FILE, complete.to_text())
    _flush(unfinished)


def _commit(unfinished: Path, final: Path) -> None:
    """Rename; a checkpoint of the same step, e.g. of a run that is then extended, stays readable until that is done."""
    replaced = final.with_name(final.name + REPLACED_SUFFIX)
    if final.exists():
        final.rename(replaced)
    unfinished.rename(final)
    _flush(final.parent)
    if replaced.exists():
        _delete(replaced)


def check_dtypes(manifest: CheckpointManifest) -> None:
    """Refuse tensors that no checkpoint can hold."""
    for name, dtype in manifest.dtypes.items():
        if dtype not in SAFETENSORS_DTYPES:
            raise CheckpointSaveError(
                f"could not save {name}: a checkpoint cannot hold {dtype}; give it another dtype, or register a buffer "
                "with persistent=False"
            )


def clear_leftovers(folder: Path) -> None:
    """Clear the rests of interrupted saves. A replaced checkpoint whose successor is missing gets its name back."""
    for leftover in folder.glob(f"*{PARTIAL_SUFFIX}"):
        shutil.rmtree(leftover)
    for replaced in folder.glob(f"step-*{REPLACED_SUFFIX}"):
        successor = replaced.with_suffix("")
        if successor.exists():
            _delete(replaced)
        else:
            replaced.rename(successor)


def delete_old(folder: Path, retention: Retention) -> None:
    """Delete the checkpoints that do not stay."""
    for old in retention.removed(folder):
        _delete(old)


def _delete(checkpoint: Path) -> None:
    """Rename first: half deleted, it must not look complete."""
    with convert_os_errors(f"delete {checkpoint}", "make the folder writable, then --resume", CheckpointSaveError):
        doomed = checkpoint.with_name(checkpoint.name + PARTIAL_SUFFIX)
        checkpoint.rename(doomed)
        shutil.rmtree(doomed)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
