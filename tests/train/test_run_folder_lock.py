"""The lock of a run folder, and what a run says whose folder is taken away while it trains."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import motet
from motet.core.errors import CheckpointSaveError, InputError
from motet.monitor.events import RunStarted
from motet.train.launch import run_folder
from motet.train.launch.run_folder import lock_run_folder
from train.runs import small_job
from waiting import until

LOCK = "run.lock"


def test_one_at_a_time_and_the_lock_is_left_empty(tmp_path: Path) -> None:
    for _ in range(2):
        with lock_run_folder(tmp_path, print):
            refusal = rf"is in use by another motet \(process {os.getpid()} on .+\); wait for it, or stop it"
            with pytest.raises(InputError, match=refusal), lock_run_folder(tmp_path, print):
                pass
        assert (tmp_path / LOCK).read_bytes() == b""


def test_what_a_link_in_place_of_the_lock_points_to_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("words")
    for target in ("precious", "nothing", LOCK):
        (tmp_path / LOCK).symlink_to(tmp_path / target)
        with pytest.raises(InputError, match="is a symbolic link"), lock_run_folder(tmp_path, print):
            pass
        (tmp_path / LOCK).unlink()
    assert (tmp_path / "precious").read_text() == "words" and not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_lock_that_is_no_file(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / LOCK)
    with pytest.raises(InputError, match=rf"{LOCK}"), lock_run_folder(tmp_path, print):
        pass


def move(run: Path) -> None:
    run.rename(run.with_name("elsewhere"))


def take_over(run: Path) -> None:
    """Do what another run does where files cannot be locked."""
    (run / LOCK).write_text("process 1 on another")


def replace(run: Path) -> None:
    move(run)
    run.mkdir()
    (run / LOCK).touch()


def protect(run: Path) -> None:
    run.chmod(0o555)


def protect_checkpoints(run: Path) -> None:
    (run / "checkpoints").mkdir(mode=0o555)


@contextmanager
def as_somebody_else(path: Path) -> Iterator[None]:
    """The superuser may write anywhere, so be nobody for a moment."""
    user = os.geteuid()
    path.chmod(0o755)
    if user == 0:
        os.chown(path, 65534, -1)
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (shutil.rmtree, "was removed or renamed"),
        (move, "was removed or renamed"),
        (take_over, "another one took its place"),
        (replace, "another one took its place"),
        (protect, "made read-only"),
        (protect_checkpoints, "made read-only"),
    ],
)
def test_a_folder_that_is_taken_away_is_a_problem(
    harm: Callable[[Path], None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "CHECK_S", 0.001)
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as parent, as_somebody_else(Path(parent)):
        run = Path(parent, "run")
        run.mkdir()
        with lock_run_folder(run, problems.append):
            (run / "events.jsonl").touch()
            harm(run)
            until(lambda: problems)
            for path in Path(parent).glob("*"):
                path.chmod(0o755)
    assert len(problems) == 1 and words in problems[0]


class Harmful(motet.Callback):
    def __init__(self, harm: Callable[[], object]) -> None:
        self.harm = harm

    def on_start(self, event: RunStarted) -> None:
        self.harm()


@pytest.mark.parametrize("name", ["run", "run/events.jsonl"])
def test_a_run_ends_when_its_events_are_lost(tmp_path: Path, name: str) -> None:
    job = small_job(tmp_path, "run.steps=50", f"run.folder={tmp_path / 'run'}")
    lose = Harmful(lambda: (tmp_path / name).rename(tmp_path / "lost"))
    with pytest.raises(CheckpointSaveError, match=r"events\.jsonl was moved, removed or replaced while the run"):
        motet.run(job, callbacks=[lose])
    assert not (tmp_path / name).exists()


def test_a_run_ends_at_its_next_step_when_its_folder_has_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "find_problem", lambda *_: "run folder x is gone")
    monkeypatch.setattr(run_folder, "CHECK_S", 0.001)
    job = small_job(tmp_path, "run.steps=50", f"run.folder={tmp_path / 'run'}")
    with pytest.raises(CheckpointSaveError, match="run folder x is gone; earlier checkpoints"):
        motet.run(job)
