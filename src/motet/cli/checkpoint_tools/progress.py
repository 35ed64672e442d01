"""The progress of commands that read or write many bytes."""

from collections.abc import Callable

from motet.cli.output import log
from motet.core.trace import progress_if_slow

_MIB = 2**20


def byte_progress(task: str, total_bytes: int) -> Callable[[int], None]:
    """A function that gets the bytes of each piece of work, and logs the MiB so far if the work is slow."""
    report, done_bytes = progress_if_slow(log), 0

    def advance(count: int) -> None:
        nonlocal done_bytes
        done_bytes += count
        report(f"{task}, MiB", done_bytes // _MIB, -(-total_bytes // _MIB))

    return advance
