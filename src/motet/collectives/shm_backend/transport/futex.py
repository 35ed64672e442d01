"""Sleeping until another process rings: a futex on a counter in shared memory.

A rank looks a few times, then offers its core to others, then sleeps. Nobody rings on a counter whose owner is awake.
The ringing may be missed when both look at the same time (a store may pass a load on x86), so no sleep is long.
"""

import ctypes
import platform
import sys

_SYS_FUTEX = 202
_WAIT, _WAKE = 0, 1
_ALL_WAITERS = 1 << 30
_library = ctypes.CDLL(None, use_errno=False)
_syscall = _library.syscall
_syscall.restype = ctypes.c_long
_sched_yield = _library.sched_yield


class _FutexTimespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def is_supported() -> bool:
    """Whether stores of this processor become visible in their order, and the system has what we call."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


def yield_core() -> None:
    """Let other processes, and other threads of this one, run."""
    _sched_yield()


def futex_wait(address: int, timeout_s: float) -> None:
    """Sleep while the word at this address is 1, and not longer than `nap_s`."""
    timeout = _FutexTimespec(0, int(timeout_s * 1e9))
    _syscall(_SYS_FUTEX, ctypes.c_void_p(address), _WAIT, 1, ctypes.byref(timeout), None, 0)


def futex_wake(address: int) -> None:
    """Wake whoever sleeps on this address."""
    _syscall(_SYS_FUTEX, ctypes.c_void_p(address), _WAKE, _ALL_WAITERS, None, None, 0)
