"""Temporary folders of a killed process are removed by the next one, and those of living processes stay."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from motet.train.launch.supervisor import locked_temporary_folder, remove_abandoned_temporary_folders

OWNER = """
import sys
from motet.train.launch.supervisor import locked_temporary_folder
with locked_temporary_folder() as folder:
    (folder / "store").write_text("x")
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_the_folder_of_a_killed_process_is_removed_and_that_of_a_living_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        other = tmp_path / "motet-of-somebody-else"
        other.mkdir()
        remove_abandoned_temporary_folders()
        assert sorted(tmp_path.iterdir()) == sorted([folder, other])
        owner.kill()
    assert folder.exists()
    with locked_temporary_folder() as own:
        assert sorted(tmp_path.iterdir()) == sorted([own, other])
        assert own.stat().st_mode & 0o777 == 0o700
        remove_abandoned_temporary_folders()
        assert own.exists()
    assert list(tmp_path.iterdir()) == [other]
