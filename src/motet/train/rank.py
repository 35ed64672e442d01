"""The process of one rank: do its work, leave a record, and never outlive the supervisor.

Work is any function `(place, stop, *arguments) -> exit code`, named as `package.module:function`.
"""

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from motet.parallel.process.launch_environment import RankEnvironment
from motet.train.faults import Record, guarded, stop_on_signals

Work = Callable[..., int]


def run_work(place: RankEnvironment, work: Work, *arguments: str) -> Record:
    """Do the work of this rank; a request to stop reaches it as a flag."""
    with stop_on_signals() as stop:
        return guarded(place.rank, lambda: work(place, stop, *arguments))


def named_work(name: str) -> Work:
    """`package.module:function` as the function."""
    module, _, function = name.partition(":")
    work: Work = getattr(import_module(module), function)
    return work


def serve_supervisor(place: RankEnvironment, supervisor: int, name: str, arguments: list[str]) -> int:
    """Everything that a process started by our supervisor does. Returns its exit code, or ends the process."""
    die_with(supervisor)

    record = run_work(place, lambda *given: named_work(name)(*given), *arguments)
    record.write(Path(place.rendezvous.removeprefix("file://")).parent)
    if record.sentence:
        leave_now(record.exit_code)
    return record.exit_code


def leave_now(exit_code: int) -> None:
    """End the process without taking anything apart: after a failure, a group that is half gone may wait for ever."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def die_with(parent: int) -> None:
    """End this process when `parent` is gone, even if that was killed."""
    if sys.platform == "linux":
        set_death_signal = 1  # PR_SET_PDEATHSIG
        if ctypes.CDLL(None, use_errno=True).prctl(set_death_signal, signal.SIGKILL) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    else:
        threading.Thread(target=_watch, args=[parent], daemon=True).start()
    if os.getppid() != parent:  # it was gone before we asked
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
