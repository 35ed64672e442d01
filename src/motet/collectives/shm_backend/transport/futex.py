"""Sleeping until another process wakes this one: a futex on a word in shared memory.

A waiting rank spins, then yields its core, then sleeps. A rank that is awake costs no system call to its peers. A wake
may be missed when both sides look in the same moment (on x86 a load may pass a store), so every sleep is short.
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
    """Whether stores become visible to other processors in their order, and the system has these calls."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


def yield_core() -> None:
    """Let other processes and threads run."""
    _sched_yield()


def futex_wait(address: int, timeout_s: float) -> None:
    """Sleep while the word at this address is 1."""
    timeout = _FutexTimespec(0, int(timeout_s * 1e9))
    _syscall(_SYS_FUTEX, ctypes.c_void_p(address), _WAIT, 1, ctypes.byref(timeout), None, 0)


def futex_wake(address: int) -> None:
    """Wake all processes that sleep on this address."""
    _syscall(_SYS_FUTEX, ctypes.c_void_p(address), _WAKE, _ALL_WAITERS, None, None, 0)
