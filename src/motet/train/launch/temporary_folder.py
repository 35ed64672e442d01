"""Temporary folders that do not outlive a killed process for long: the next process that makes one removes them.
The owner holds a lock on its folder, which the kernel releases when the owner ends, however it ends."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "motet-locked-"


@contextmanager
def locked_temporary_folder() -> Iterator[Path]:
    """A folder of mode 0700, which is removed when the block ends, or by a later process if this one is killed."""
    remove_abandoned_folders()
    folder, descriptor = _make_locked()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def remove_abandoned_folders() -> None:
    """Remove the temporary folders of this user whose owner has ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # Another process removes it, it is another user's, or its owner is alive
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if os.fstat(descriptor).st_uid == os.geteuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)
            finally:
                os.close(descriptor)


def _make_locked() -> tuple[Path, int]:
    """A new folder and the descriptor that locks it. Another process may remove it before it is locked."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        with suppress(FileNotFoundError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with suppress(OSError):  # Without locks no other process can remove it either
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if folder.exists():
                return folder, descriptor
            os.close(descriptor)
