"""The memory that a process may use: that of the machine and of its control groups, and its own resource limits."""

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from motet.cluster.cgroups import CGROUP_ROOT, OWN_CGROUP_FILE, cgroup_folders, read_or_empty
from motet.cluster.malloc_tuning import free_heap_bytes

# A lower bound for the memory of a process that has imported torch (measured: 145 MiB on Linux).
TORCH_PROCESS_BYTES = 64 << 20


class MemoryLimit(NamedTuple):
    """One limit."""

    name: str  # With a verb: `this machine has`
    total_bytes: int
    is_shared: bool  # By all ranks of the machine
    process_bytes: int = TORCH_PROCESS_BYTES  # What each process takes of it besides the model, at least


def read_memory_limits(
    held_bytes: int | None = None, *, cgroup_root: Path = CGROUP_ROOT, own_cgroup_file: Path = OWN_CGROUP_FILE
) -> Iterator[MemoryLimit]:
    """The limits of ranks. Before they run (None), each takes at least what torch does; afterwards this process is one,
    and takes what it uses now, besides `held_bytes` of its model."""
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
