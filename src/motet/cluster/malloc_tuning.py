"""Settings of malloc that keep freed memory for the next step, and how much of it there is.

A training step allocates and frees the same large blocks. By default glibc returns the free top of its heap to the
kernel, and each step pays for fresh zeroed pages.
"""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER = 2**31 - 1
_FREE_BYTES = 8  # The place of `fordblks` in what mallinfo2 returns


def keep_freed_memory(up_to_bytes: int = 32 << 20) -> bool:
    """Keep freed blocks of at most `up_to_bytes`, itself 32 MiB at most. False if the C library is not glibc.

    Measured on one thread, steps of the job `tiny`: 7-11 % less time in bfloat16, 3-4 % in float32, the same peak.
    Where large blocks that stay are allocated between large blocks that are freed, the heap grows by the holes.
    Measured at stage 3 on 4 ranks with 35 million parameters: 2.9 times the bytes of the weights in each rank with
    32 MiB, 1.4 times with 1 MiB; 1.1 are in use.
    """
    library = _glibc()
    if library is None:
        return False
    keeps_blocks = library.mallopt(_M_MMAP_THRESHOLD, up_to_bytes)
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
