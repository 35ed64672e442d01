"""Freed memory stays with the process."""

import subprocess
import sys

import pytest

from motet.cluster.malloc_tuning import keep_freed_memory

_CODE = """
import ctypes, psutil
from motet.cluster.malloc_tuning import keep_freed_memory
kept = {} and keep_freed_memory()
library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.free.argtypes = [ctypes.c_void_p]
blocks = [library.malloc(16 << 20) for _ in range(16)]
for block in blocks:
    ctypes.memset(block, 1, 16 << 20)
for block in blocks:
    library.free(block)
print(psutil.Process().memory_info().rss >> 20)
"""


def _resident_mib(keep: bool) -> int:
    done = subprocess.run([sys.executable, "-c", _CODE.format(keep)], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is Linux's")
def test_what_was_freed_is_still_there() -> None:
    assert _resident_mib(keep=False) < 128
    assert _resident_mib(keep=True) > 256


def test_elsewhere_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert keep_freed_memory() is False
