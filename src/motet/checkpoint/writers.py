"""The writers of a checkpoint: each element has one, and the ranks that hold the same elements share the bytes.

The sentence for a checkpoint that cannot be saved: the true reason, and the remedy.
"""

import errno
import resource
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import NamedTuple

from motet.core.errors import CheckpointSaveError
from motet.core.units import format_bytes
from motet.parallel.step_plan.plan import HeldRun

# A longer run is written in parts, which a reader holds one at a time.
MAX_PART_NUMEL = 2**22


class _WritePart(NamedTuple):
    size_bytes: int
    name: str
    first: int
    stop: int


def parts_to_write(
    runs: Mapping[str, tuple[HeldRun, int]], rank: int, *, max_numel: int = MAX_PART_NUMEL
) -> dict[str, tuple[HeldRun, list[tuple[int, int]]]]:
    """The elements, (first, stop), that a rank writes from its runs, by the name of the tensor.

    `runs` are all that the rank holds, with the bytes of an element. Ranks that hold the same runs divide them: the
    largest part first, each to the rank with the fewest bytes so far. All of them compute the same answer.
    """
    parts = [
        _WritePart((stop - first) * itemsize, name, first, stop)
        for name, (run, itemsize) in runs.items()
        for first, stop in _cut_between_rows(run, max_numel)
    ]
    written_bytes: dict[tuple[int, ...], dict[int, int]] = {}
    by_name: dict[str, tuple[HeldRun, list[tuple[int, int]]]] = {}
    for part in sorted(parts, key=lambda part: (-part.size_bytes, part.name, part.first)):
        run, _ = runs[part.name]
        by_rank = written_bytes.setdefault(run.ranks, dict.fromkeys(run.ranks, 0))
        writer = min(by_rank, key=by_rank.__getitem__)
        by_rank[writer] += part.size_bytes
        if writer == rank:
            by_name.setdefault(part.name, (run, []))[1].append((part.first, part.stop))
    return by_name


def _cut_between_rows(run: HeldRun, max_numel: int) -> list[tuple[int, int]]:
    """(first, stop) of parts of at most `max_numel` elements, or of one row where a row has more."""
    row = max(1, prod(run.spec.local_shape[1:]))
    length = max(1, max_numel // row) * row
    edges = [run.start, *range((run.start // length + 1) * length, run.stop, length), run.stop]
    return list(pairwise(edges))


_ROOM = "it needs {needed} and {free} are free; earlier checkpoints are whole; make room or choose another run.folder"
_WRITABLE = "earlier checkpoints are whole; make the folder writable or choose another run.folder"
_GONE = "the folder was removed, renamed or unmounted during the run; bring it back or choose another run.folder"
_ADVICE = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: "it needs {needed}, and the quota of this user is used up; earlier checkpoints are whole; delete "
    "other files, ask for a larger quota or choose another run.folder",
    errno.EFBIG: "it needs {needed}, and {largest}; earlier checkpoints are whole; raise that limit (`ulimit -f "
    "unlimited`), or use more ranks, which each write a smaller file",
    errno.EROFS: _WRITABLE,
    errno.EACCES: _WRITABLE,
    errno.EPERM: _WRITABLE,
    errno.ENOENT: _GONE,
    errno.ESTALE: _GONE,
    errno.EIO: "earlier checkpoints may be damaged too (`motet checkpoint verify RUN` says which are whole); check the "
    "disk, or choose another run.folder",
}
_OTHER = "earlier checkpoints are whole; repair the folder or choose another run.folder"


@contextmanager
def convert_save_errors(final: Path, needed_bytes: int) -> Iterator[None]:
    """Raise an error of the system while a checkpoint is saved as one for the user."""
    try:
        yield
    except OSError as error:
        reason = _advise(error, final, needed_bytes)
        raise CheckpointSaveError(
            f"could not save {final} ({error.strerror or error}): {reason}, then --resume"
        ) from error


def _advise(error: OSError, final: Path, needed_bytes: int) -> str:
    free_bytes = shutil.disk_usage(final.parent).free if final.parent.is_dir() else 0
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    largest = f"this process may write files of at most {format_bytes(limit_bytes)}"
    if limit_bytes == resource.RLIM_INFINITY:
        largest = "this file system holds no file that large"
    needed, free = format_bytes(needed_bytes), format_bytes(free_bytes)
    return _ADVICE.get(error.errno or 0, _OTHER).format(needed=needed, free=free, largest=largest)
