"""Folders that a command makes: they have their name when everything in them is complete, or are not there."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from motet.core.direct_io import check_free_space
from motet.core.errors import CheckpointSaveError, check_input, convert_os_errors
from motet.core.locked_folders import locked_folder


@contextmanager
def new_folder(folder: Path, needed_bytes: int = 0, option: str = "folder") -> Iterator[Path]:
    """Yield the place in which the block makes the content of a folder, which gets its name at the end. A folder with
    files is refused, with the remedy to give another `option`; so is a disk without room for these bytes."""
    remedy, final = f"give another {option}", folder.absolute()
    with convert_os_errors(f"write {folder}", remedy):
        check_input(not folder.exists() or folder.is_dir(), f"{folder} is a file; {remedy}")
        has_files = folder.is_dir() and any(folder.iterdir())
        check_input(not has_files, f"{folder} is not empty; remove it or {remedy}")
        final.parent.mkdir(parents=True, exist_ok=True)
        check_input(os.access(final.parent, os.W_OK | os.X_OK), f"cannot write into {final.parent}; {remedy}")
    check_free_space(final.parent, needed_bytes, f"make room, or {remedy}")
    with (
        convert_os_errors(f"write {folder}", f"make room, or {remedy}", CheckpointSaveError),
        locked_folder(final.parent, f".{final.name}.partial-") as unfinished,
    ):
        yield unfinished
        mask = os.umask(0)
        os.umask(mask)
        unfinished.chmod(0o777 & ~mask)
        unfinished.rename(final)
