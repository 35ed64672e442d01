"""A filesystem without direct IO, by a stand-in for `os.open`."""

import errno
import os
from pathlib import Path

import pytest

O_DIRECT = getattr(os, "O_DIRECT", 0)


def refuse_direct_io(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files open as on a filesystem without direct IO: Linux makes the file and then refuses to open it."""
    real_open = os.open

    def open_buffered(path: Path, flags: int, mode: int = 0o777, **options: int) -> int:
        if flags & O_DIRECT == O_DIRECT != 0:
            os.close(real_open(path, flags & ~O_DIRECT, mode, **options))
            raise OSError(errno.EINVAL, "Invalid argument", str(path))
        return real_open(path, flags, mode, **options)

    monkeypatch.setattr(os, "open", open_buffered)
