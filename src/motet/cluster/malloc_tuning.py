"""Settings of malloc that keep freed memory for the next step.

A training step allocates and frees the same large blocks. By default glibc returns the free top of its heap to the
kernel, and each step pays for fresh zeroed pages.
"""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Keep freed blocks of up to 32 MiB in the process. False if the C library is not glibc.

    Measured on one thread, steps of the job `tiny`: 7-11 % less time in bfloat16, 3-4 % in float32, the same peak.
    """
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if library is None or not hasattr(library, "gnu_get_libc_version"):
        return False
    keeps_blocks = library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    return bool(keeps_blocks and library.mallopt(_M_TRIM_THRESHOLD, _NEVER))
