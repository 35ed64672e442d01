"""The control groups that limit this process."""

from collections.abc import Iterator
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUP_FILE = Path("/proc/self/cgroup")


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
