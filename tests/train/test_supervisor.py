"""The supervisor of local ranks, on functions that stand in for training (tests/standins.py)."""

import errno
import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread

import psutil
import pytest

from motet.parallel.process.launch_environment import RankEnvironment
from motet.train.launch.failures import RankExitRecord
from motet.train.launch.rank_process import HeartbeatReceiver, run_supervised_rank
from motet.train.launch.supervisor import LaunchExitStatus, launch_ranks
from standins import PYTHONPATH, launch_of
from waiting import until


def run(folder: Path, work: str, *words: str, ranks: int = 2, restarts: int = 0) -> tuple[LaunchExitStatus, list[str]]:
    told: list[str] = []
    return launch_ranks(launch_of(ranks, folder, work, str(folder), *words, restarts=restarts), told.append), told


def pids(folder: Path, ranks: int = 2, attempt: int = 0) -> list[int]:
    return [int((folder / f"pid-{attempt}-{rank}").read_text()) for rank in range(ranks)]


def test_ranks_finish_and_only_rank_0_is_heard(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "finish", ranks=3) == (LaunchExitStatus(0), [])
    assert capfd.readouterr().out == "rank 0 of 3, attempt 0\n"
    assert [(tmp_path / f"rank-{rank}.txt").exists() for rank in range(3)] == [False, True, True]
    assert (tmp_path / "rank-2.txt").read_text() == "rank 2 of 3, attempt 0\n"


@pytest.mark.parametrize("work", ["raise_on_one", "raise_beside_deaf"])
def test_an_exception_is_told_once_and_ends_all(tmp_path: Path, work: str, capfd: pytest.CaptureFixture[str]) -> None:
    ended, told = run(tmp_path, work)
    assert (ended.exit_code, told) == (3, []) and ended.message == "rank 1 failed: KeyError: 'the reason'"
    assert ended.traceback.count("Traceback") == 1 and "in raise_on_one" in ended.traceback
    assert "failures.py" not in ended.traceback and capfd.readouterr() == ("", "")
    assert not any(psutil.pid_exists(pid) for pid in pids(tmp_path))


def test_an_end_that_all_agree_on_has_its_own_code_and_blames_no_rank(tmp_path: Path) -> None:
    ended, told = run(tmp_path, "diverge", restarts=3)
    assert (ended.exit_code, ended.traceback, told) == (4, "", []) and ended.message == "the loss is nan"


@pytest.mark.parametrize("code", ["0", "7"])
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("sys", "rank 1 failed: the code of this rank called sys.exit({}) before its work was done"),
        ("os", "rank 1 ended with exit code {} in the middle of its work"),
    ],
)
def test_leaving_early_is_a_failure(tmp_path: Path, how: str, code: str, message: str) -> None:
    ended, _ = run(tmp_path, "leave", how, code)
    assert (ended.exit_code, ended.message) == (3, message.format(code))
    assert "in leave" in ended.traceback if how == "sys" else ended.traceback == "its last words:\none word more"


@pytest.mark.parametrize(
    ("number", "words"),
    [(9, "signal 9 (SIGKILL); if nobody did that, the machine ran out of memory"), (11, "signal 11 (SIGSEGV)")],
)
def test_a_signal_is_named(tmp_path: Path, number: int, words: str) -> None:
    ended, _ = run(tmp_path, "kill_self", str(number))
    assert (ended.exit_code, ended.message) == (3, f"rank 1 was killed by {words}")
    assert ("in kill_self" in ended.traceback) == (number == signal.SIGSEGV)  # what faulthandler wrote


def test_the_killed_rank_is_the_cause_not_those_who_lost_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ended, _ = run(tmp_path, "all_reduce", ranks=3)
    assert ended.message.startswith("rank 1 was killed by signal 9 (SIGKILL)") and capfd.readouterr() == ("", "")


def test_all_ranks_of_a_run_have_its_token_and_every_run_another(tmp_path: Path) -> None:
    tokens: list[set[str]] = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        run(tmp_path / name, "write_token", restarts=1)
        tokens.append({path.read_text() for path in (tmp_path / name).glob("token-*")})
    assert [len(run_tokens) for run_tokens in tokens] == [1, 1] and len(tokens[0] | tokens[1]) == 2


def test_a_token_of_the_user_is_handed_on(tmp_path: Path) -> None:
    spec = launch_of(1, tmp_path, "write_token", str(tmp_path))
    launch_ranks(replace(spec, environment={**spec.environment, "MOTET_RUN_TOKEN": "the user's own token"}), print)
    assert (tmp_path / "token-0-0").read_text() == "the user's own token"


def test_restarts_begin_a_fresh_attempt(tmp_path: Path) -> None:
    ended, told = run(tmp_path, "fail_until", "2", restarts=2)
    assert ended == LaunchExitStatus(0)
    assert told == [
        f"rank 0 failed: ValueError: attempt {attempt}; starting again from the last checkpoint ({attempt + 1} of 2)"
        for attempt in (0, 1)
    ]
    assert (tmp_path / "rank-1.txt").read_text() == "rank 1 of 2, attempt 2\n"


def test_restarts_run_out(tmp_path: Path) -> None:
    ended, told = run(tmp_path, "fail_until", "9", restarts=1)
    assert (ended.exit_code, ended.message, len(told)) == (3, "rank 0 failed: ValueError: attempt 1", 1)


class Supervisor:
    def __init__(self, folder: Path, work: str, restarts: int = 0) -> None:
        command = [sys.executable, "-m", "standins", "2", str(restarts), str(folder), work, str(folder)]
        environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "TMPDIR": str(folder)}
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.folder = folder
        until(lambda: len([f for f in folder.glob("pid-0-*") if f.read_text()]) == 2)

    def output(self) -> str:
        out, _ = self.process.communicate(timeout=30)
        return out.decode()

    def ranks_are_gone(self) -> bool:
        return not any(psutil.pid_exists(pid) for pid in pids(self.folder))


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Callable[..., Supervisor]]:
    started: list[Supervisor] = []

    def start(work: str, restarts: int = 0) -> Supervisor:
        started.append(Supervisor(tmp_path, work, restarts))
        return started[-1]

    yield start
    for supervisor in started:
        supervisor.process.kill()
        supervisor.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1])
def test_a_request_to_stop_reaches_all_ranks(tmp_path: Path, supervise: Callable[..., Supervisor], number: int) -> None:
    supervisor = supervise("steps", restarts=2)
    supervisor.process.send_signal(number)
    supervisor.process.send_signal(number)  # an echo of the first
    assert supervisor.output().strip() == "stopping after this step and saving; Ctrl-C once more stops immediately"
    assert supervisor.process.returncode == 130 and all((tmp_path / f"saved-{rank}").exists() for rank in range(2))


@pytest.mark.parametrize("work", ["unready", "asked_before"])
def test_ranks_that_are_only_starting_have_nothing_to_save(supervise: Callable[..., Supervisor], work: str) -> None:
    supervisor = supervise(work, restarts=2)
    supervisor.process.send_signal(signal.SIGINT)
    assert supervisor.output().splitlines()[-1] == "stopped while the ranks were starting"
    assert supervisor.process.returncode == 130


def test_a_request_is_known_even_if_all_ranks_came_to_their_end(tmp_path: Path) -> None:
    def ask() -> None:
        until(lambda: len(list(tmp_path.glob("pid-0-*"))) == 2)
        os.kill(os.getpid(), signal.SIGINT)

    thread = Thread(target=ask)
    thread.start()
    ended, _ = run(tmp_path, "heed")
    thread.join()
    assert (ended.exit_code, ended.stop_requested) == (0, True)
    with pytest.raises(KeyboardInterrupt):
        ended.raise_if_stopped()
    LaunchExitStatus(0).raise_if_stopped()


def test_a_second_request_stops_at_once(supervise: Callable[..., Supervisor]) -> None:
    supervisor = supervise("deaf", restarts=2)
    supervisor.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert supervisor.process.poll() is None
    supervisor.process.send_signal(signal.SIGINT)
    assert "stopped immediately" in supervisor.output() and supervisor.process.returncode == 137
    assert supervisor.ranks_are_gone()


def test_a_rank_that_dies_while_stopping_is_a_failure_without_restart(supervise: Callable[..., Supervisor]) -> None:
    supervisor = supervise("deaf", restarts=2)
    supervisor.process.send_signal(signal.SIGTERM)
    assert supervisor.process.stdout is not None
    assert supervisor.process.stdout.readline().startswith(b"stopping after this step")
    os.kill(pids(supervisor.folder)[1], signal.SIGKILL)
    output = supervisor.output()
    assert supervisor.process.returncode == 3 and "rank 1 was killed by signal 9" in output
    assert "starting again" not in output


@pytest.mark.parametrize("work", ["sleep", "deaf"])
def test_ranks_do_not_outlive_a_killed_supervisor(supervise: Callable[..., Supervisor], work: str) -> None:
    supervisor = supervise(work)
    supervisor.process.kill()
    until(supervisor.ranks_are_gone)


def test_a_signal_to_a_rank_alone_is_a_request_to_it(tmp_path: Path, supervise: Callable[..., Supervisor]) -> None:
    supervisor = supervise("steps")
    for pid in pids(tmp_path):
        os.kill(pid, signal.SIGTERM)
    assert supervisor.output().strip() == "" and supervisor.process.returncode == 130


def test_ranks_that_all_stopped_are_ended_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    receivers: list[HeartbeatReceiver] = []

    def receive(limit_s: float) -> HeartbeatReceiver:
        receivers.append(HeartbeatReceiver(limit_s))
        return receivers[0]

    monkeypatch.setattr("motet.train.launch.supervisor.HeartbeatReceiver", receive)

    def stop() -> None:
        until(lambda: len([f for f in tmp_path.glob("pid-0-*") if f.read_text()]) == 2)
        time.sleep(0.1)  # both sleep now
        for pid in pids(tmp_path):
            os.kill(pid, signal.SIGSTOP)
        until(lambda: all(psutil.Process(pid).status() == psutil.STATUS_STOPPED for pid in pids(tmp_path)))
        receivers[0].limit_s = 0.2

    thread = Thread(target=stop)
    thread.start()
    ended, _ = run(tmp_path, "sleep")
    thread.join()
    assert ended.exit_code == 3
    assert re.fullmatch(
        r"ranks 0, 1 gave no sign of life for 0\.2 s: rank 0 was stopped \(SIGSTOP\) in .+; rank 1 was stopped .+",
        ended.message,
    )
    assert not any(psutil.pid_exists(pid) for pid in pids(tmp_path))


def test_a_problem_of_the_run_ends_all_ranks(tmp_path: Path) -> None:
    def problem() -> str:
        return "the folder is gone" if len(list(tmp_path.glob("pid-0-*"))) == 2 else ""

    launch = replace(launch_of(2, tmp_path, "deaf", str(tmp_path), restarts=2), problem=problem)
    assert launch_ranks(launch, print) == LaunchExitStatus(5, "the folder is gone")
    assert not any(psutil.pid_exists(pid) for pid in pids(tmp_path))


def test_a_rank_that_cannot_record_its_end_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(record: RankExitRecord, folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RankExitRecord, "write", write)
    codes, parent = list[int](), os.getppid()
    monkeypatch.setattr("motet.train.launch.rank_process.hard_exit", codes.append)
    monkeypatch.setattr("motet.train.launch.rank_process.exit_with_parent", lambda pid: None)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    place = RankEnvironment(1, 2, 1, 2, 0, f"file://{tmp_path}/store")
    (tmp_path / "pid-0-0").touch()
    run_supervised_rank(place, parent, "standins:finish", [str(tmp_path)])
    assert codes == [5] and sys.stderr.getvalue() == (
        f"rank 1 cannot write {tmp_path}: No space left on device; free some space there, or set TMPDIR\n"
    )
