"""Folders that do not outlive a killed process for long: the next process that makes one there removes them.

The owner holds a lock on its folder, which the kernel releases when the owner ends, however it ends.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def locked_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A folder of mode 0700 whose name begins with `prefix`. It is removed when the block ends, or by a later process
    if this one is killed."""
    remove_abandoned_folders(parent, prefix)
    folder, descriptor = _make_locked(parent, prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def remove_abandoned_folders(parent: Path, prefix: str) -> None:
    """Remove the folders of this user with this prefix whose owner has ended."""
    for folder in parent.glob(f"{prefix}*"):
        with suppress(OSError):  # Another process removes it, it is another user's, or its owner is alive
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if os.fstat(descriptor).st_uid == os.geteuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)
            finally:
                os.close(descriptor)


def _make_locked(parent: Path, prefix: str) -> tuple[Path, int]:
    """A new folder and the descriptor that locks it. Another process may remove it before it is locked."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        with suppress(FileNotFoundError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with suppress(OSError):  # Without locks no other process can remove it either
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if folder.exists():
                return folder, descriptor
            os.close(descriptor)
