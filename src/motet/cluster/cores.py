"""How many cores this process may really use: by its affinity and by the quota of its control groups."""

import os
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def usable_cores(groups: Path = _GROUPS, own: Path = _OWN) -> int:
    """At least 1. A container with a quota of 2.5 cores has 2: a thread more would only wait."""
    # macOS has no affinity.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min([cores, *_quotas(groups, own)])))


def _quotas(groups: Path, own: Path) -> list[float]:
    """The quota of our own control group and of every one above it, of version 2 and 1."""
    found: list[float] = []
    for line in _read(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = groups / controllers if controllers else groups
        # In a container the path may be the host's, of which only the root is to be seen.
        folder = root / path.lstrip("/")
        for place in dict.fromkeys([folder, *folder.parents, root]):
            if place == root or root in place.parents:
                found += _quota_of(place)
    return found


def _quota_of(group: Path) -> list[float]:
    two = _read(group / "cpu.max").split()
    one = _read(group / "cpu.cfs_quota_us").split() + _read(group / "cpu.cfs_period_us").split()
    quota = two or one
    if len(quota) != 2 or not quota[0].isdigit() or not quota[1].isdigit():  # "max" and "-1": no quota
        return []
    return [int(quota[0]) / int(quota[1])]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
