"""The number of cores that this process may use, by its affinity and the quotas of its control groups."""

import os
from pathlib import Path

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_OWN_CGROUP_FILE = Path("/proc/self/cgroup")


def usable_cores(cgroup_root: Path = _CGROUP_ROOT, own_cgroup_file: Path = _OWN_CGROUP_FILE) -> int:
    """At least 1. A container with a quota of 2.5 cores has 2, since a third thread would only wait."""
    # macOS has no affinity.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min([cores, *_quotas(cgroup_root, own_cgroup_file)])))


def _quotas(cgroup_root: Path, own_cgroup_file: Path) -> list[float]:
    quotas: list[float] = []
    for line in _read_or_empty(own_cgroup_file).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = cgroup_root / controllers if controllers else cgroup_root
        # In a container the path may be the host's, of which only the root is visible.
        folder = root / path.lstrip("/")
        for cgroup in dict.fromkeys([folder, *folder.parents, root]):
            if cgroup == root or root in cgroup.parents:
                quotas += _quota_of(cgroup)
    return quotas


def _quota_of(group: Path) -> list[float]:
    version_1 = _read_or_empty(group / "cpu.cfs_quota_us").split() + _read_or_empty(group / "cpu.cfs_period_us").split()
    quota = _read_or_empty(group / "cpu.max").split() or version_1
    has_quota = len(quota) == 2 and all(map(str.isdigit, quota))  # not "max", and not "-1"
    return [int(quota[0]) / int(quota[1])] if has_quota else []


def _read_or_empty(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
