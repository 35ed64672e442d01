"""The subfolder of a rank's run in `memory.folder`, which does not outlive the run."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from motet.core.errors import check_input, convert_os_errors
from motet.core.locked_folders import locked_folder

_PREFIX = "motet-state-"
_REMEDY = "set memory.folder to a writable folder on a fast disk"


@contextmanager
def run_subfolder(folder: Path) -> Iterator[Path]:
    """A new subfolder that this process locks, and that is removed when the block ends. Subfolders of runs that were
    killed are removed first."""
    with ExitStack() as stack:
        with convert_os_errors(f"make a subfolder of memory.folder {folder}", _REMEDY):
            check_folder(folder)
            subfolder = stack.enter_context(locked_folder(folder, _PREFIX))
        yield subfolder


def check_folder(folder: Path) -> None:
    """Refuse a folder in which no subfolder can be made."""
    check_input(folder.exists(), f"memory.folder {folder} does not exist; create it, or {_REMEDY}")
    check_input(folder.is_dir(), f"memory.folder {folder} is not a folder; {_REMEDY}")
    has_effective_ids = os.access in os.supports_effective_ids
    is_writable = os.access(folder, os.W_OK | os.X_OK, effective_ids=has_effective_ids)
    check_input(is_writable, f"memory.folder {folder} is not writable; change its permissions, or {_REMEDY}")
