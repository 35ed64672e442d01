"""The number of cores that this process may use, by its affinity and the quotas of its control groups."""

import os
from pathlib import Path

from motet.cluster.cgroups import CGROUP_ROOT, OWN_CGROUP_FILE, cgroup_folders, read_or_empty


def usable_cores(cgroup_root: Path = CGROUP_ROOT, own_cgroup_file: Path = OWN_CGROUP_FILE) -> int:
    """At least 1. A container with a quota of 2.5 cores has 2, since a third thread would only wait."""
    # macOS has no affinity.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = (quota for cgroup in cgroup_folders("cpu", cgroup_root, own_cgroup_file) for quota in _quota_of(cgroup))
    return max(1, int(min([cores, *quotas])))


def _quota_of(group: Path) -> list[float]:
    version_1 = read_or_empty(group / "cpu.cfs_quota_us").split() + read_or_empty(group / "cpu.cfs_period_us").split()
    quota = read_or_empty(group / "cpu.max").split() or version_1
    has_quota = len(quota) == 2 and all(map(str.isdigit, quota))  # not "max", and not "-1"
    return [int(quota[0]) / int(quota[1])] if has_quota else []
