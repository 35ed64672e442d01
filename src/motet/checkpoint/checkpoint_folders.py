"""The names of the folders of checkpoints. `step-00000020/` holds one complete checkpoint: it gets that name only when
everything is on disk. Nothing here imports torch.
"""

import re
from pathlib import Path

from motet.core.errors import check_input

# A folder that an interrupted save or deletion leaves, and that is never read.
PARTIAL_SUFFIX = ".partial"
# A complete checkpoint while the same step is saved again; it is read if the new one did not get its name.
REPLACED_SUFFIX = ".old"
_CHECKPOINT_NAME = re.compile(rf"step-([0-9]{{8}}|[1-9][0-9]{{8,}})({re.escape(REPLACED_SUFFIX)})?")


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of_name(name: str) -> int | None:
    """The step of a complete checkpoint by the name of its folder; None for another name."""
    match = _CHECKPOINT_NAME.fullmatch(name)
    return int(match[1]) if match else None


def checkpoints_folder(run: Path) -> Path:
    """The folder of the checkpoints of a run, or the folder itself."""
    return run / "checkpoints" if (run / "checkpoints").is_dir() else run


def find_checkpoint(path: Path) -> Path:
    """The newest checkpoint of a run or of a folder of checkpoints, or the checkpoint that the path names."""
    if is_checkpoint(path):
        return path
    checkpoints = complete_checkpoints(checkpoints_folder(path))
    check_input(checkpoints, f"{path} holds no checkpoint; give a run, its folder of checkpoints or one checkpoint")
    return checkpoints[-1][1]


def is_checkpoint(path: Path) -> bool:
    """Whether a path names one checkpoint, which may be damaged."""
    return (path / "manifest.json").is_file() or step_of_name(path.absolute().name) is not None


def complete_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of all complete checkpoints, oldest first, one for each step."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    by_step: dict[int, Path] = {}
    for path in paths:  # `.old` comes after the name without it
        if (step := step_of_name(path.name)) is not None:
            by_step.setdefault(step, path)
    return sorted(by_step.items())
