"""Limits of this process on its host: control groups, cores, memory, and the settings of malloc.

The control groups that limit this process.

The number of cores that this process may use, by its affinity and the quotas of its control groups.

The memory that a process may use: that of the machine and of its control groups, and its own resource limits.

Settings of malloc that keep freed memory for the next step, and how much of it there is.

A training step allocates and frees the same large blocks. By default glibc returns the free top of its heap to the
kernel, and each step pays for fresh zeroed pages.
"""

import ctypes
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUP_FILE = Path("/proc/self/cgroup")
_GPU_DEVICE_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def cgroup_folders(controller: str, cgroup_root: Path, own_cgroup_file: Path) -> Iterator[Path]:
    """The folders that can limit this process: those of its group and of all ancestors, in both versions."""
    for line in read_or_empty(own_cgroup_file).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = cgroup_root / controllers if controllers else cgroup_root
        # In a container the path may be the host's, of which only the root is visible.
        folder = root / path.lstrip("/")
        for cgroup in dict.fromkeys([folder, *folder.parents, root]):
            if cgroup == root or root in cgroup.parents:
                yield cgroup


def read_or_empty(path: Path) -> str:
    """The text of a file, empty where there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""


def usable_cores(cgroup_root: Path = CGROUP_ROOT, own_cgroup_file: Path = OWN_CGROUP_FILE) -> int:
    """Cores, at least 1. A container with a quota of 2.5 cores has 2, since a third thread would only wait."""
    # macOS has no affinity.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = (quota for cgroup in cgroup_folders("cpu", cgroup_root, own_cgroup_file) for quota in _quota_of(cgroup))
    return max(1, int(min([cores, *quotas])))


def _quota_of(group: Path) -> list[float]:
    version_1 = read_or_empty(group / "cpu.cfs_quota_us").split() + read_or_empty(group / "cpu.cfs_period_us").split()
    quota = read_or_empty(group / "cpu.max").split() or version_1
    has_quota = len(quota) == 2 and all(map(str.isdigit, quota))  # not "max", and not "-1"
    return [int(quota[0]) / int(quota[1])] if has_quota else []


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER = 2**31 - 1
_FREE_BYTES = 8  # The place of `fordblks` in the result of mallinfo2


def has_gpu_driver() -> bool:
    """Whether this machine has a driver of GPUs; ranks may still find no device."""
    return any(Path(path).exists() for path in _GPU_DEVICE_FILES)


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
    """Bytes that the process has freed and malloc can give again without asking the kernel; 0 if unknown."""
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


# A lower bound for the memory of a process that has imported torch (measured: 145 MiB on Linux).
TORCH_PROCESS_BYTES = 64 << 20


class MemoryLimit(NamedTuple):
    """One limit."""

    name: str  # With a verb: `this machine has`
    total_bytes: int
    is_shared: bool  # Shared by all ranks of the machine
    process_bytes: int = TORCH_PROCESS_BYTES  # Least bytes that each process takes of it besides the model


def read_memory_limits(
    held_bytes: int | None = None, *, cgroup_root: Path = CGROUP_ROOT, own_cgroup_file: Path = OWN_CGROUP_FILE
) -> Iterator[MemoryLimit]:
    """The limits of ranks. Before they run (None), each takes at least torch's memory; afterwards this process is one,
    and takes the memory that it uses now, besides `held_bytes` of its model."""
    yield MemoryLimit("this machine has", psutil.virtual_memory().total, is_shared=True)
    for cgroup in cgroup_folders("memory", cgroup_root, own_cgroup_file):
        for name in ("memory.max", "memory.limit_in_bytes"):
            if (text := read_or_empty(cgroup / name).strip()).isdigit():  # not "max"
                yield MemoryLimit(f"{name} of {cgroup} allows", int(text), is_shared=True)
    status = dict(line.split(":", 1) for line in read_or_empty(Path("/proc/self/status")).splitlines())
    for name, option, used in (("RLIMIT_DATA", "-d", "VmData"), ("RLIMIT_AS", "-v", "VmSize")):
        limit, _ = resource.getrlimit(getattr(resource, name))
        if limit != resource.RLIM_INFINITY:
            used_bytes = TORCH_PROCESS_BYTES
            if held_bytes is not None and used in status:
                used_bytes = max(0, int(status[used].split()[0]) * 1024 - free_heap_bytes() - held_bytes)
            yield MemoryLimit(f"{name} (ulimit {option}) allows", limit, is_shared=False, process_bytes=used_bytes)
