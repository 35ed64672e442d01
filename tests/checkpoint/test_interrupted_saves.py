"""At every moment of a save a whole checkpoint is there and is read; a save that fails says why."""

import errno
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.forged import load_state, save_state, some_state
from motet.checkpoint.background_writer import CheckpointSaver
from motet.checkpoint.checkpoint_folders import complete_checkpoints
from motet.checkpoint.publication import Retention
from motet.core.errors import CheckpointSaveError

# The system calls that change a folder, as Python's audit events.
CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink"}


class _Killed(BaseException):
    """The process has ended: nothing that it does afterwards has an effect."""


class _Killer:
    """Ends the process, as far as its folder shows, before the call of a number that changes a folder."""

    armed: "_Killer | None" = None

    def __init__(self, folder: Path, calls: int) -> None:
        self.folder, self.calls_left = str(folder), calls

    def __enter__(self) -> None:
        _Killer.armed = self

    def __exit__(self, *_: object) -> None:
        _Killer.armed = None

    def before(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in CHANGES or (not str(arguments[0]).startswith(self.folder) and event != "os.remove"):
            return
        self.calls_left -= 1
        if self.calls_left < 0:
            raise _Killed


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _Killer.armed is not None:
        _Killer.armed.before(event, arguments)


@pytest.fixture(scope="module", autouse=True)
def audited() -> None:
    sys.addaudithook(_audit)  # cannot be removed, and does nothing unless armed


def _saved_before(folder: Path, keep: int) -> None:
    for step in range(1, keep + 1):
        save_state(folder, step, some_state(float(step)), keep=keep)


def _check_complete(folder: Path, step: int, keep: int) -> None:
    """At least as many checkpoints as are kept can be read, and hold what was saved, before or again."""
    complete = complete_checkpoints(folder)
    assert len(complete) >= keep, sorted(path.name for path in folder.iterdir())
    for saved_step, where in complete:
        loaded = some_state(0.0)
        assert load_state(where, loaded).step == saved_step
        assert loaded["b"].item() in ({float(saved_step), 99.0} if saved_step == step else {float(saved_step)})


def _save_killed_at(folder: Path, step: int, keep: int, moment: int) -> bool:
    """Save until the kill. Returns whether it came before the save was done."""
    try:
        with _Killer(folder, moment):
            save_state(folder, step, some_state(99.0), keep=keep)
    except _Killed:
        return True
    return False


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("again", [False, True])
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path, keep: int, again: bool) -> None:
    """Before each call that changes the folder; the next save, or a resumed run, leaves nothing else."""
    step, moments = keep if again else keep + 1, 0
    while True:
        folder = tmp_path / f"{moments}"
        _saved_before(folder, keep)
        if not _save_killed_at(folder, step, keep, moments):
            break
        _check_complete(folder, step, keep)
        steps = [saved_step for saved_step, _ in complete_checkpoints(folder)]
        resumed = Path(shutil.copytree(folder, tmp_path / f"{moments}-resumed"))
        CheckpointSaver(resumed, None, Retention(keep), device=torch.device("cpu")).clear()
        assert [path.name for path in sorted(resumed.iterdir())] == [f"step-{each:08d}" for each in steps[-keep:]]
        save_state(folder, step + 1, some_state(5.0), keep=keep)
        expected = [f"step-{each:08d}" for each in [*steps, step + 1][-keep:]]
        assert [path.name for path in sorted(folder.iterdir())] == expected
        moments += 1
    assert moments > 12  # files, folders and renames of a save


def test_a_kill_while_the_next_save_clears_up_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """The first kill came when the only checkpoint had made room for its successor of the same step."""
    for moment in range(30):
        folder = tmp_path / f"{moment}"
        _saved_before(folder, 1)
        (folder / "step-00000001").rename(folder / "step-00000001.old")
        if not _save_killed_at(folder, 1, 1, moment):
            break
        _check_complete(folder, 1, 1)
    assert moment > 12 and [path.name for path in folder.iterdir()] == ["step-00000001"]


def test_everything_is_on_disk_before_the_old_checkpoint_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without power a rename may be on disk before the files that it names, and a deletion before a rename."""
    folder, done, fsync, rename = tmp_path, list[str](), os.fsync, os.rename
    save_state(folder, 1, some_state(), keep=1)

    def flush(descriptor: int) -> None:
        done.append("flush " + Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def move(before: Path, after: Path) -> None:
        done.append(f"rename {Path(before).name} {Path(after).name}")
        rename(before, after)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "rename", move)
    save_state(folder, 1, some_state(), keep=1)
    name = "step-00000001"
    assert sorted(done[:3]) == ["flush rank-00000.safetensors", "flush saved_by.json", "flush tensors.json"]
    assert done[3:] == [
        *("flush manifest.json", f"flush {name}.partial", f"rename {name} {name}.old", f"rename {name}.partial {name}"),
        *(f"flush {folder.name}", f"rename {name}.old {name}.old.partial"),
    ]


@pytest.fixture
def small_disk(tmp_path: Path) -> Path:
    where = tmp_path / "disk"
    where.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(where)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)


def test_a_full_disk_leaves_the_checkpoint_before_whole(small_disk: Path) -> None:
    folder = small_disk / "checkpoints"
    before = save_state(folder, 1, {"w": torch.ones(2**18)})
    sentence = r"step-00000002 \(No space left on device\): it needs 8 MiB and .* free"
    with pytest.raises(CheckpointSaveError, match=sentence):
        save_state(folder, 2, {"w": torch.zeros(2**21)})
    assert [path for _, path in complete_checkpoints(folder)] == [before]
    state = {"w": torch.zeros(2**18)}
    load_state(before, state)
    assert state["w"].eq(1).all()
    assert sorted(p.name for p in folder.iterdir()) == ["step-00000001"]  # the room is free again


def test_an_unwritable_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(CheckpointSaveError, match="could not save"):
        save_state(tmp_path / "checkpoints", 1, some_state())


def test_a_limit_of_files_is_told_as_such(tmp_path: Path) -> None:
    before, limits = save_state(tmp_path, 1, some_state()), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        sentence = r"\(File too large\): it needs 8 MiB, and this process may write files of at most 1 MiB;.*ulimit -f"
        with pytest.raises(CheckpointSaveError, match=sentence):
            save_state(tmp_path, 2, {"w": torch.zeros(2**21)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == [before]


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (errno.EDQUOT, r"quota of this user is used up; earlier checkpoints are whole; delete other files"),
        (errno.EROFS, r"Read-only file system\): earlier checkpoints are whole; make the folder writable"),
        (errno.EIO, r"earlier checkpoints may be damaged too \(`motet checkpoint verify RUN`"),
        (errno.EBUSY, r"busy\): earlier checkpoints are whole; repair the folder"),
    ],
)
def test_the_reason_of_the_system_has_its_own_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, sentence: str
) -> None:
    before = save_state(tmp_path, 1, some_state())
    monkeypatch.setattr(os, "fsync", _raise(number))
    with pytest.raises(CheckpointSaveError, match=sentence):
        save_state(tmp_path, 2, some_state())
    assert list(tmp_path.iterdir()) == [before]


def _raise(number: int) -> Callable[[int], None]:
    def fail(_: int) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_run_folder_that_vanished_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, fsync = tmp_path / "run/checkpoints", os.fsync
    folder.parent.mkdir()
    save_state(folder, 1, some_state())

    def vanish(descriptor: int) -> None:
        fsync(descriptor)
        shutil.rmtree(tmp_path / "run", ignore_errors=True)

    sentence = (
        r"could not save .*step-00000002 \(No such file or directory\): the folder was removed, renamed or unmounted"
    )
    with monkeypatch.context() as patch, pytest.raises(CheckpointSaveError, match=sentence):
        patch.setattr(os, "fsync", vanish)
        save_state(folder, 2, some_state())
    with pytest.raises(CheckpointSaveError, match=sentence):
        save_state(folder, 2, some_state())
    assert list(tmp_path.iterdir()) == []
