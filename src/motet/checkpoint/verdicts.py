"""Which checkpoints of a folder are whole, and what else is in it. Nothing here imports torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from motet.checkpoint.manifest import MANIFEST_FILE, complete_checkpoints, step_of_name
from motet.checkpoint.tensor_index import read_checkpoint, verify_files
from motet.core.errors import InputError, check_input


@dataclass(frozen=True)
class CheckpointVerdict:
    """A checkpoint, which is whole unless it has a problem."""

    path: str
    step: int | None  # None for what is no checkpoint, such as the rest of an interrupted save
    files: int
    size_bytes: int
    problem: str | None = None


def checkpoint_verdicts(run: Path) -> Iterator[CheckpointVerdict]:
    """Read all files of each checkpoint of a run, of a folder of checkpoints, or of one checkpoint."""
    folder = run / "checkpoints" if (run / "checkpoints").is_dir() else run
    if (run / MANIFEST_FILE).is_file() or step_of_name(run.absolute().name) is not None:
        yield _verdict_of(run)
        return
    checkpoints = {path for _, path in complete_checkpoints(folder)}
    check_input(checkpoints, f"{run} holds no checkpoint; give a run, its folder of checkpoints or one checkpoint")
    for path in sorted(folder.iterdir()):
        verdict = _verdict_of(path) if path in checkpoints else CheckpointVerdict(str(path), None, *_size_of(path))
        if path.exists():  # a run that goes on may have deleted it
            yield verdict


def _verdict_of(checkpoint: Path) -> CheckpointVerdict:
    step, problem = step_of_name(checkpoint.absolute().name), None
    try:
        manifest, _ = read_checkpoint(checkpoint)
        verify_files(checkpoint, manifest)
        step = manifest.step
    except InputError as error:
        problem = str(error)
    return CheckpointVerdict(str(checkpoint), step, *_size_of(checkpoint), problem)


def _size_of(path: Path) -> tuple[int, int]:
    files = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]
    return len(files), sum(each.lstat().st_size for each in files if each.is_symlink() or each.exists())
