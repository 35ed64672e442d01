"""Checks of input, and the errors that motet reports in one sentence with the value, the limit and the remedy.
A `MotetError` is for the user; a defect of motet stays an `AssertionError` with its traceback.
Patterns of names, such as `*.up_proj`, must match something.
"""

import difflib
import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase

EXIT_CODES: dict[int, str] = {
    0: "the command has done its work",
    1: "an unexpected error outside of the ranks: a defect of motet, with its traceback",
    2: "bad input: a setting, a file or a combination that cannot work; nothing was trained",
    3: "a rank failed or was killed; the first cause is named",
    4: "training diverged: the loss or a gradient is not finite, and the job says to stop",
    5: "could not save, or keep the state of the optimizer on disk: disk full, failing or not writable; earlier "
    "checkpoints are whole",
    6: "numbers differ: ranks disagree on numbers that must be equal or add up (`monitor.replica_check_every`), a "
    "layout does not compute the numbers of one device (`motet verify`), or tensors of two checkpoints are not equal "
    "(`motet checkpoint diff`)",
    130: "stopped by Ctrl-C, SIGTERM, a signal of a scheduler or a closed standard output after saving; `--resume` "
    "continues (commands other than `motet train` have nothing to save, and end so when they are stopped)",
    137: "stopped immediately by a second Ctrl-C or SIGTERM; `--resume` continues from the last checkpoint",
    141: "standard output was closed, as by `| head`, for a command other than `motet train`; no message is printed",
}


class MotetError(Exception):
    """A mistake that the user can fix. The text is shown without a traceback; characters that would change a terminal
    instead of being shown, which names in a file may have, are written as escapes."""

    exit_code = 1

    def __str__(self) -> str:
        text = super().__str__()
        if text.isprintable():
            return text
        return "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)


class InputError(MotetError, ValueError):
    """A setting, a file or a combination of them cannot work."""

    exit_code = 2


def check_input(is_valid: object, message: str) -> None:
    """Raise an `InputError` unless the input is valid."""
    if not is_valid:
        raise InputError(message)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, in Python or in torch, which raises a RuntimeError on a CPU."""
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)


# Remedies where a limit of the process is met, rather than one of the disk.
LIMIT_REMEDIES = {
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit on open files (ulimit -n)"),
    errno.ELOOP: "remove the symbolic link",
    errno.ENAMETOOLONG: "give a shorter name",
}


@contextmanager
def convert_os_errors(action: str, remedy: str, kind: type[MotetError] = InputError) -> Iterator[None]:
    """Raise an `OSError` of the block as one sentence, such as `cannot read a.txt: REASON; give another file`."""
    try:
        yield
    except OSError as error:
        remedy = LIMIT_REMEDIES.get(error.errno or 0, remedy)
        raise kind(f"cannot {action}: {error.strerror}; {remedy}") from error


class RankFailedError(MotetError):
    """A rank failed or was killed."""

    exit_code = 3


DEVICE_MEMORY_REMEDIES = (
    "recompute activations (memory.recompute), use smaller micro-batches (layout.microbatches), shard more "
    '(layout.zero, layout.tp), or keep the optimizer or activations on the host (memory.optimizer = "host", '
    'memory.activations = "host"), and at stage 3 parameters (memory.parameters = "host")'
)


class DeviceMemoryError(RankFailedError):
    """A rank needs more memory of its device than the device has, or than `memory.device_limit` allows."""


class PeerFailedError(RankFailedError):
    """This rank ends only because another rank failed."""


class TrainingDivergedError(MotetError):
    """The loss or a gradient is not finite."""

    exit_code = 4


class CheckpointSaveError(MotetError):
    """A checkpoint could not be written."""

    exit_code = 5


class StateFileError(MotetError):
    """A file with state of the optimizer could not be read or written while the job trains."""

    exit_code = 5


class OutputClosedError(MotetError):
    """Nobody reads standard output any more."""

    exit_code = 141


class ReplicaMismatchError(MotetError):
    """Numbers that must be equal on ranks, or must add up, are not."""

    exit_code = 6


def names_matching(patterns: Iterable[str], names: Iterable[str], problem: str) -> list[str]:
    """The names that a pattern matches. Refuse a pattern that matches none, which stands for `{!r}` in `problem`."""
    names, patterns = list(names), list(patterns)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
            hint = f"the nearest names are {', '.join(near)}" if near else "the model has none"
            raise InputError(f"{problem.format(pattern)}; {hint}")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
