"""The process of one rank: do its work, leave a record, and never outlive the supervisor.
The work is any function `(rank_env, stop, *arguments) -> exit code`, named as `package.module:function`."""

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
from typing import Any

from motet.core.errors import CheckpointSaveError
from motet.parallel.process.launch_environment import RankEnvironment
from motet.train.launch.failures import RankExitRecord, run_and_record, stop_on_signals


def run_rank_function(rank_env: RankEnvironment, function: Callable[..., int], *arguments: str) -> RankExitRecord:
    """Call the function of this rank, which gets requests to stop as a flag."""
    with stop_on_signals() as stop:
        return run_and_record(rank_env.rank, lambda: function(rank_env, stop, *arguments))


def run_supervised_rank(rank_env: RankEnvironment, parent_pid: int, function_name: str, arguments: list[str]) -> int:
    """The main function of a supervised process. Returns its exit code, or ends the process."""
    exit_with_parent(parent_pid)

    def run_imported(*values: Any) -> int:  # imports torch, after the signals are in place
        module, _, name = function_name.partition(":")
        return int(getattr(import_module(module), name)(*values))

    record = run_rank_function(rank_env, run_imported, *arguments)
    folder = Path(rank_env.rendezvous.removeprefix("file://")).parent
    try:
        record.write(folder)
    except OSError as error:
        sentence = f"rank {rank_env.rank} cannot write {folder}: {error.strerror}; free some space there, or set TMPDIR"
        sys.stderr.write("".join(f"{text}\n" for text in (record.message, record.traceback, sentence) if text))
        hard_exit(CheckpointSaveError.exit_code)
    if record.error_message:
        hard_exit(record.exit_code)
    return record.exit_code


def hard_exit(exit_code: int) -> None:
    """End the process without any clean-up: after a failure, a group with lost ranks may wait for ever."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def exit_with_parent(parent_pid: int) -> None:
    """End this process when its parent ends, even if the parent was killed."""
    if sys.platform == "linux":
        if ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL) != 0:  # 1: PR_SET_PDEATHSIG
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    else:
        threading.Thread(target=_exit_when_orphaned, args=[parent_pid], daemon=True).start()
    if os.getppid() != parent_pid:  # it ended before
        os._exit(1)


def _exit_when_orphaned(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(0.5)
    os._exit(1)
