"""Settings of malloc that keep freed memory for the next step, and how much of it there is.

A training step allocates and frees the same large blocks. By default glibc returns the free top of its heap to the
kernel, and each step pays for fresh zeroed pages.
"""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20
_NEVER = 2**31 - 1
_FREE_BYTES = 8  # The place of `fordblks` in what mallinfo2 returns


def keep_freed_memory() -> bool:
    """Keep freed blocks of up to 32 MiB in the process. False if the C library is not glibc.

    Measured on one thread, steps of the job `tiny`: 7-11 % less time in bfloat16, 3-4 % in float32, the same peak.
    """
    library = _glibc()
    if library is None:
        return False
    keeps_blocks = library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    return bool(keeps_blocks and library.mallopt(_M_TRIM_THRESHOLD, _NEVER))


def free_heap_bytes() -> int:
    """Bytes that the process has freed and malloc can give again without asking the kernel; 0 if it does not say."""
    library = _glibc()
    if library is None or not hasattr(library, "mallinfo2"):
        return 0
    library.mallinfo2.restype = _MallocInfo
    return int(library.mallinfo2().sizes[_FREE_BYTES])


class _MallocInfo(ctypes.Structure):
    _fields_ = [("sizes", ctypes.c_size_t * 10)]


def _glibc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return library if hasattr(library, "gnu_get_libc_version") else None
