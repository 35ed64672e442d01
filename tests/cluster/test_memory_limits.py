"""The limits of a process: of fake control groups, and of processes that limit themselves."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from motet.cluster.host_limits import TORCH_PROCESS_BYTES, MemoryLimit, free_heap_bytes, read_memory_limits

GIB = 1 << 30
MACHINE = MemoryLimit("this machine has", psutil.virtual_memory().total, is_shared=True)


def limits(folder: Path, own: str, files: dict[str, str]) -> list[MemoryLimit]:
    (folder / "own").write_text(own)
    for name, text in files.items():
        (folder / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "groups" / name).write_text(f"{text}\n")
    return [*read_memory_limits(cgroup_root=folder / "groups", own_cgroup_file=folder / "own")]


@pytest.fixture(autouse=True)
def no_resource_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)


def test_a_machine_without_limits(tmp_path: Path) -> None:
    assert limits(tmp_path, "0::/pod/box\n", {"pod/box/memory.max": "max"}) == [MACHINE]
    assert MACHINE.process_bytes == TORCH_PROCESS_BYTES


def test_version_two_limits_a_group_and_its_ancestors(tmp_path: Path) -> None:
    files = {"pod/box/memory.max": str(3 * GIB), "pod/memory.max": str(2 * GIB), "other/memory.max": "1"}
    root = tmp_path / "groups"
    assert limits(tmp_path, "0::/pod/box\n", files) == [
        MACHINE,
        MemoryLimit(f"memory.max of {root}/pod/box allows", 3 * GIB, is_shared=True),
        MemoryLimit(f"memory.max of {root}/pod allows", 2 * GIB, is_shared=True),
    ]


def test_a_container_that_sees_only_its_root(tmp_path: Path) -> None:
    *_, limit = limits(tmp_path, "0::/../../host/path\n", {"memory.max": str(GIB)})
    assert (limit.name, limit.total_bytes) == (f"memory.max of {tmp_path}/groups allows", GIB)


def test_version_one_has_its_folder_for_memory(tmp_path: Path) -> None:
    own = "4:memory:/a/b\n3:cpu,cpuacct:/a/b\n0::/\n"
    files = {"memory/a/b/memory.limit_in_bytes": str(2**63 - 4096), "memory/a/memory.limit_in_bytes": str(GIB)}
    found = limits(tmp_path, own, files | {"cpu,cpuacct/a/b/memory.limit_in_bytes": "5"})
    assert [limit.total_bytes for limit in found[1:]] == [2**63 - 4096, GIB]
    assert found[2].name == f"memory.limit_in_bytes of {tmp_path}/groups/memory/a allows"


def test_resource_limits_count_what_a_rank_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {resource.RLIMIT_DATA: 5 * GIB, resource.RLIMIT_AS: 90 * GIB}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (values[which], resource.RLIM_INFINITY))
    before = {limit.name: limit for limit in read_memory_limits() if not limit.is_shared}
    assert before == {
        "RLIMIT_DATA (ulimit -d) allows": MemoryLimit(
            "RLIMIT_DATA (ulimit -d) allows", 5 * GIB, False, TORCH_PROCESS_BYTES
        ),
        "RLIMIT_AS (ulimit -v) allows": MemoryLimit(
            "RLIMIT_AS (ulimit -v) allows", 90 * GIB, False, TORCH_PROCESS_BYTES
        ),
    }
    block = bytearray(64 << 20)
    data, space = (limit.process_bytes for limit in read_memory_limits(0) if not limit.is_shared)
    held, _ = (limit.process_bytes for limit in read_memory_limits(len(block)) if not limit.is_shared)
    assert len(block) < data < space and 0 <= data - held <= len(block) + (1 << 20)
    assert abs(space - psutil.Process(os.getpid()).memory_info().vms) < (16 << 20) + free_heap_bytes()


def test_the_kernel_refuses_what_the_limit_says() -> None:
    """A process under RLIMIT_DATA gets almost all that is left by the count of `read_memory_limits`, and no more."""
    code = f"""
import mmap, resource
from motet.cluster.host_limits import read_memory_limits
def limit():
    return next(each for each in read_memory_limits(0) if each.name.startswith("RLIMIT_DATA"))
resource.setrlimit(resource.RLIMIT_DATA, ({GIB}, resource.RLIM_INFINITY))
left = limit().total_bytes - limit().process_bytes
try:
    mmap.mmap(-1, left + (4 << 20), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
except OSError:
    print("refused")
mmap.mmap(-1, left - (16 << 20), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
print("given")
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert said.stdout.split() == ["refused", "given"], said.stderr
