"""The subfolder of a run: locked while its process lives, removed afterwards; folders that cannot be used."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from motet.core.errors import InputError
from motet.memory.tiers.scratch_folder import run_subfolder

OWNER = """
import sys
from pathlib import Path
from motet.memory.tiers.scratch_folder import run_subfolder
with run_subfolder(Path(sys.argv[1])) as folder:
    (folder / "master.bin").write_text("x")
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_leftovers_of_killed_runs_are_removed_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "motet-state-notes.txt").write_text("a file, not a folder")
    others = set(tmp_path.iterdir())
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        with run_subfolder(tmp_path) as first, run_subfolder(tmp_path) as second:
            assert {*tmp_path.iterdir()} == {*others, folder, first, second}
            assert first.stat().st_mode & 0o777 == 0o700
        assert {*tmp_path.iterdir()} == {*others, folder} and (folder / "master.bin").exists()
        owner.kill()
    assert folder.exists()
    with run_subfolder(tmp_path) as first:
        assert {*tmp_path.iterdir()} == {*others, first}
    assert {*tmp_path.iterdir()} == others


def test_it_is_removed_when_the_run_fails(tmp_path: Path) -> None:
    with pytest.raises(KeyError), run_subfolder(tmp_path) as folder:
        (folder / "master.bin").write_text("x")
        raise KeyError
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def read_only() -> Iterator[Path]:
    """A folder that the user may not write, also where the tests run as root."""
    user = os.geteuid()
    with tempfile.TemporaryDirectory(dir="/tmp") as parent:
        folder = Path(parent, "scratch")
        folder.mkdir(mode=0o555)
        Path(parent).chmod(0o755)
        os.seteuid(user or 65534)
        yield folder
        os.seteuid(user)


def test_a_folder_that_is_not_writable_is_refused(read_only: Path) -> None:
    with pytest.raises(InputError, match=rf"memory.folder {read_only} is not writable; .*set memory.folder to"):
        run_subfolder(read_only).__enter__()


def test_a_folder_that_is_missing_or_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"scratch does not exist; create it, or set memory.folder"):
        run_subfolder(tmp_path / "scratch").__enter__()
    (tmp_path / "scratch").touch()
    with pytest.raises(InputError, match=r"scratch is not a folder; set memory.folder to a writable folder"):
        run_subfolder(tmp_path / "scratch").__enter__()


def test_an_error_of_the_system_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_inodes(**options: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", no_inodes)
    with pytest.raises(InputError, match=r"cannot make a subfolder of memory.folder .*: No space left on device; set"):
        run_subfolder(tmp_path).__enter__()
