"""Contents of versions.json, inside and outside of a git repository."""

import subprocess
from pathlib import Path

import pytest

import motet
from motet.train.launch.run_folder import collect_provenance


def git(*arguments: str) -> None:
    who = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *who, *arguments], check=True, capture_output=True)


def test_outside_of_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    found = collect_provenance(2, 3, ["motet", "train"])
    assert (found["ranks"], found["threads"], found["command_line"]) == (2, 3, ["motet", "train"])
    assert (found["motet"], found["git"]) == (motet.__version__, None)
    assert found["torch"][0].isdigit()


def test_the_state_of_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    git("init", "-q")
    Path("a").write_text("1")
    git("add", "a")
    git("commit", "-q", "-m", "first")
    Path("untracked").touch()
    clean = collect_provenance(1, 1, [])["git"]
    assert (len(clean["commit"]), clean["dirty"]) == (40, False)
    Path("a").write_text("2")
    assert collect_provenance(1, 1, [])["git"] == {"commit": clean["commit"], "dirty": True}


def test_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert collect_provenance(1, 1, [])["git"] is None
