"""Stand-ins for training in the tests of the supervisor, and a program that supervises them.

`python -m standins RANKS RESTARTS LOGS WORK [ARGUMENT ...]` runs `standins:WORK` and prints what the supervisor tells.
"""

import os
import signal
import sys
import time
from pathlib import Path

from environment import uncounted
from motet.core.errors import TrainingDivergedError
from motet.parallel.process.launch_environment import RankEnvironment
from motet.train.launch.failures import StopFlag
from motet.train.launch.supervisor import LaunchSpec, launch_ranks

TESTS = Path(__file__).parent
PYTHONPATH = f"{TESTS}{os.pathsep}{TESTS.parent / 'src'}"


def launch_of(ranks: int, logs: Path, work: str, *words: str, restarts: int = 0) -> LaunchSpec:
    return LaunchSpec((f"standins:{work}", *words), ranks, {**uncounted(), "PYTHONPATH": PYTHONPATH}, logs, restarts)


def _all_are_here(place: RankEnvironment, folder: str) -> None:
    """Wait until every rank stands at this point of this attempt, and leave its process id behind."""
    (Path(folder) / f"pid-{place.attempt}-{place.rank}").write_text(str(os.getpid()))
    while len(list(Path(folder).glob(f"pid-{place.attempt}-*"))) < place.world:
        time.sleep(0.01)


def finish(place: RankEnvironment, stop: StopFlag, folder: str) -> int:
    _all_are_here(place, folder)
    sys.stdout.write(f"rank {place.rank} of {place.world}, attempt {place.attempt}\n")
    return 0


def write_token(place: RankEnvironment, stop: StopFlag, folder: str) -> int:
    Path(folder, f"token-{place.attempt}-{place.rank}").write_text(os.environ["MOTET_RUN_TOKEN"])
    return 3 if place.attempt == 0 else 0


def sleep(place: RankEnvironment, stop: StopFlag, folder: str) -> int:
    _all_are_here(place, folder)
    time.sleep(600)
    return 0


def steps(place: RankEnvironment, stop: StopFlag, folder: str) -> int:
    """Stops when asked, as the training loop does."""
    _all_are_here(place, folder)
    while not stop.requested:
        time.sleep(0.01)
    (Path(folder) / f"saved-{place.rank}").touch()
    return 130


def heed(place: RankEnvironment, stop: StopFlag, folder: str) -> int:
    """Is asked to stop when its work is done already."""
    _all_are_here(place, folder)
    while not stop.requested:
        time.sleep(0.01)
    return 0


def unready(place: RankEnvironment, stop: StopFlag, folder: str) -> int:
    """Behave as a rank that has not installed its signal handlers yet."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return sleep(place, stop, folder)


def asked_before(place: RankEnvironment, stop: StopFlag, folder: str) -> int:
    """Has nothing to save, and was asked to stop while it still imported what it needs."""
    _all_are_here(place, folder)
    while not stop.requested:
        time.sleep(0.01)
    stop.exit_on_sigterm()
    return sleep(place, stop, folder)


def deaf(place: RankEnvironment, stop: StopFlag, folder: str) -> int:
    """Never looks at the flag, and hangs in its own handler of SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: time.sleep(600))
    return sleep(place, stop, folder)


def raise_on_one(place: RankEnvironment, stop: StopFlag, folder: str) -> int:
    if place.rank == 1:
        _all_are_here(place, folder)
        raise KeyError("the reason")
    return sleep(place, stop, folder)


def raise_beside_deaf(place: RankEnvironment, stop: StopFlag, folder: str) -> int:
    return raise_on_one(place, stop, folder) if place.rank == 1 else deaf(place, stop, folder)


def diverge(place: RankEnvironment, stop: StopFlag, folder: str) -> int:
    _all_are_here(place, folder)
    raise TrainingDivergedError("the loss is nan")


def leave(place: RankEnvironment, stop: StopFlag, folder: str, how: str, code: str) -> int:
    if place.rank == 1:
        _all_are_here(place, folder)
        sys.stderr.write("one word more\n")
        sys.stderr.flush()
        (sys.exit if how == "sys" else os._exit)(int(code))
    return sleep(place, stop, folder)


def kill_self(place: RankEnvironment, stop: StopFlag, folder: str, number: str) -> int:
    if place.rank == 1:
        _all_are_here(place, folder)
        os.kill(os.getpid(), int(number))
    return sleep(place, stop, folder)


def fail_until(place: RankEnvironment, stop: StopFlag, folder: str, attempt: str) -> int:
    if place.attempt < int(attempt) and place.rank == 0:
        _all_are_here(place, folder)
        raise ValueError(f"attempt {place.attempt}")
    return finish(place, stop, folder) if place.attempt == int(attempt) else sleep(place, stop, folder)


def all_reduce(place: RankEnvironment, stop: StopFlag, folder: str) -> int:
    """Rank 1 is killed while the others wait for it in a real collective."""
    import torch
    import torch.distributed as dist

    from motet.parallel.process.process_group import start_process_group

    with start_process_group(place, "cpu", 60.0):
        dist.all_reduce(torch.ones(1))
        _all_are_here(place, folder)
        if place.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))
    return 0


def supervise() -> int:
    """Do what `motet train` does around a launch, without the training."""
    ranks, restarts, logs, work, *arguments = sys.argv[1:]
    start = launch_of(int(ranks), Path(logs), work, *arguments, restarts=int(restarts))
    ended = launch_ranks(start, lambda text: sys.stdout.write(f"{text}\n") and sys.stdout.flush())
    sys.stdout.write("\n".join([ended.message, ended.traceback]))
    return ended.exit_code


if __name__ == "__main__":
    sys.exit(supervise())
