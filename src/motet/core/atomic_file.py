"""Files that are replaced completely or not at all, and files that are no links to others."""

import errno
import os
import stat
from io import FileIO
from pathlib import Path
from typing import Literal


def write_file_atomically(path: Path, content: bytes) -> None:
    """Write all of the new content, or leave the file unchanged."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open_without_links(partial, "wb") as file:
            while content:  # a full disk may take a part of it
                content = content[file.write(content) :]
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def open_without_links(path: Path, mode: Literal["wb", "ab", "a+b"]) -> FileIO:
    """Open a regular file for unbuffered writing. A symbolic link is refused, and its target unchanged."""

    def opener(name: str, flags: int) -> int:
        descriptor = os.open(name, (flags & ~os.O_TRUNC) | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "it is not a regular file", name)
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
        return descriptor

    return FileIO(str(path), mode, opener=opener)
