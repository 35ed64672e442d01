"""The sentence for a checkpoint that cannot be saved: the true reason, and what can be done about it."""

import errno
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from motet.core.errors import CheckpointSaveError
from motet.core.units import format_bytes

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
