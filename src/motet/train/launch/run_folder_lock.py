"""The lock of a run folder, which one run holds. As long as it does, a thread looks whether the folder can still take
checkpoints: a run whose folder was removed, renamed, made read-only or taken over by another would train in vain."""

import errno
import fcntl
import os
import secrets
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from motet.core.errors import InputError, check_input, convert_os_errors

LOCK_FILE = "run.lock"
CHECKPOINTS_FOLDER = "checkpoints"

CHECK_S = 0.5
FAILED_CHECKS = 3  # In a row: a network file system may fail once, and a folder may be moved there and back
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)  # Of some network file systems
_MAX_OWNER_BYTES = 512
_REMEDY = "earlier checkpoints are as they were left; repair the folder, then --resume-from it"


@contextmanager
def lock_run_folder(path: Path, on_problem: Callable[[str], None]) -> Iterator[None]:
    """No other process trains in this folder while the block runs. `on_problem` gets a sentence, from another thread,
    when the run cannot go on there."""
    path = path.absolute()
    descriptor, block_ended = _open_lock(path), threading.Event()
    try:
        _take_lock(path, descriptor)
        owner = f"process {os.getpid()} on {socket.gethostname()}, {secrets.token_hex(8)}\n".encode()
        with convert_os_errors(f"write run folder {path}", "free some space or repair it"):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, owner, 0)

        def watch() -> None:
            problem, failed_checks = "", 0
            while failed_checks < FAILED_CHECKS and not block_ended.wait(CHECK_S):
                problem = find_problem(path, descriptor, owner)
                failed_checks = failed_checks + 1 if problem else 0
            if problem and not block_ended.is_set():
                on_problem(f"{problem}; {_REMEDY}")

        threading.Thread(target=watch, name="run folder", daemon=True).start()
        try:
            yield
        finally:
            block_ended.set()
            with suppress(OSError):
                if os.pread(descriptor, _MAX_OWNER_BYTES, 0) == owner:
                    os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _open_lock(path: Path) -> int:
    file = path / LOCK_FILE
    check_input(not file.is_symlink(), f"{file} is a symbolic link, which motet does not follow; remove it")
    with convert_os_errors(f"lock run folder {path}", f"remove {LOCK_FILE} or give another folder"):
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InputError(f"{file} is not a regular file; remove it")
    return descriptor


def _take_lock(path: Path, descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(descriptor, _MAX_OWNER_BYTES, 0).decode(errors="replace").partition(",")[0]
        by = f" ({owner})" if owner.startswith("process ") else ""
        raise InputError(f"run folder {path} is in use by another motet{by}; wait for it, or stop it") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise InputError(f"cannot lock run folder {path}: {error.strerror}; give another folder") from None


def find_problem(path: Path, descriptor: int, owner: bytes) -> str:
    """Why a run cannot go on in its folder, or an empty text."""
    try:
        is_same = os.path.samestat((path / LOCK_FILE).lstat(), os.fstat(descriptor))
        if not is_same or os.pread(descriptor, _MAX_OWNER_BYTES, 0) != owner:
            return f"run folder {path} is no longer that of this run: another one took its place"
    except (FileNotFoundError, NotADirectoryError):
        return f"run folder {path} is gone: it, or its {LOCK_FILE}, was removed or renamed while the run was training"
    except OSError as error:
        return f"run folder {path} cannot be read any more: {error.strerror}"
    for folder in (path, path / CHECKPOINTS_FOLDER):
        has_effective_ids = os.access in os.supports_effective_ids
        if folder.exists() and not os.access(folder, os.W_OK | os.X_OK, effective_ids=has_effective_ids):
            return f"{folder} cannot be written any more: it was made read-only while the run was training"
    return ""
