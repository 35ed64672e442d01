"""Stop flags, records of failures, and which of several failures is the cause."""

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from motet.core.errors import InputError, PeerFailedError, TrainingDivergedError
from motet.parallel.process.launch_environment import RankEnvironment
from motet.parallel.process.process_group import CpuBackend, start_process_group
from motet.train.launch import failures
from motet.train.launch.failures import RankExitRecord, StopFlag, is_caused_by_peer, root_cause, run_and_record
from ranks import Ranks


def test_the_first_request_counts_and_its_echo_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(failures.time, "monotonic", lambda: now)
    flag = StopFlag()
    assert not flag.requested
    for later_s, is_immediate in ((0.0, False), (0.1, False), (0.9, True), (0.0, True)):
        now += later_s
        flag.request()
        assert (flag.requested, flag.is_immediate) == (True, is_immediate)


NOTICES = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)


@pytest.mark.parametrize("number", NOTICES)
def test_a_notice_of_a_scheduler_is_no_second_request(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    now = 100.0
    monkeypatch.setattr(failures.time, "monotonic", lambda: now)
    flag = StopFlag()
    for sent in (number, number, signal.SIGTERM, number, signal.SIGTERM):
        assert not flag.is_immediate
        now += 1.0
        flag.request(sent)
        assert flag.is_requested()
    assert flag.is_immediate


def test_a_hangup_that_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with failures.stop_on_signals() as flag:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not flag.requested
            os.kill(os.getpid(), signal.SIGUSR1)
            assert flag.requested
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP])
def test_signals_set_the_flag_and_a_second_one_ends_at_once(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    before = signal.getsignal(number)
    with failures.stop_on_signals() as flag:
        os.kill(os.getpid(), number)
        assert flag.requested
        os.kill(os.getpid(), number)
        assert codes == []
        flag.first_request_s = time.monotonic() - 1.0
        os.kill(os.getpid(), number)
        assert codes == [137]
    assert signal.getsignal(number) == before


def test_work_that_is_done() -> None:
    record = run_and_record(3, lambda: 130)
    assert (record.rank, record.exit_code, record.error_message, record.traceback) == (3, 130, "", "")


def fail() -> int:
    raise ValueError("first line\nsecond line")


def fail_because() -> int:
    try:
        return fail()
    except ValueError as error:
        raise KeyError("what followed") from error


def leave() -> int:
    raise SystemExit("gone")


def interrupt() -> int:
    raise KeyboardInterrupt


def diverge() -> int:
    raise TrainingDivergedError("nan")


@pytest.mark.parametrize(
    ("work", "code", "sentence", "tracebacks"),
    [
        (fail, 3, "ValueError: first line\nsecond line", 1),
        (fail_because, 3, "KeyError: 'what followed'", 2),  # Python tells a chain of two with both
        (leave, 3, "the code of this rank called sys.exit('gone') before its work was done", 1),
        (interrupt, 3, "KeyboardInterrupt", 1),
        (diverge, 4, "nan", 0),
    ],
)
def test_whatever_ends_a_rank_is_recorded(tmp_path: Path, work: Any, code: int, sentence: str, tracebacks: int) -> None:
    record = run_and_record(1, work)
    assert (record.exit_code, record.error_message, record.caused_by_peer) == (code, sentence, False)
    assert record.traceback.count("Traceback") == tracebacks
    assert (f"in {work.__name__}" in record.traceback) == bool(tracebacks) and "run_and_record" not in record.traceback
    record.write(tmp_path)
    assert (failures.read_exit_record(tmp_path, 1), failures.read_exit_record(tmp_path, 0)) == (record, None)
    assert [path.name for path in tmp_path.iterdir()] == ["rank-1.json"]


def record(rank: int, time_s: float, secondary: bool = False) -> RankExitRecord:
    return RankExitRecord(rank, time_s, 3, "x", caused_by_peer=secondary)


def test_the_cause_is_the_earliest_that_is_not_secondary() -> None:
    assert root_cause([record(0, 1.0, True), record(1, 3.0), record(2, 2.0)]).rank == 2
    assert root_cause([record(0, 2.0, True), record(1, 1.0, True)]).rank == 1


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4242"), True),
        (RuntimeError("Timed out waiting 600000ms for recv operation to complete"), True),
        (dist.DistBackendError("NCCL error: remote process exited or there was a network error"), True),
        (dist.DistNetworkError("The client socket has failed to connect"), True),
        (PeerFailedError("rank 0 failed"), True),
        (InputError("connection closed by peer"), False),
        (RuntimeError("shape mismatch"), False),
        (ConnectionResetError("by somebody's own server"), False),
        (ValueError("timed out waiting"), False),
        (None, False),
    ],
)
def test_what_only_follows_from_another_rank(error: BaseException | None, expected: bool) -> None:
    assert is_caused_by_peer(error) == expected


def test_what_was_raised_from_a_lost_connection_follows_too() -> None:
    def work() -> int:
        try:
            raise RuntimeError("Connection reset by peer")
        except RuntimeError as error:
            raise InputError("could not save") from error

    assert run_and_record(0, work).caused_by_peer


BACKENDS: tuple[CpuBackend, ...] = ("motet", "gloo")


class LeaveError(Exception):
    pass


def collective(how: str, world: int) -> int:
    tensor, parts = torch.ones(3), [torch.ones(3) for _ in range(world)]
    match how:
        case "all_reduce":
            dist.all_reduce(tensor)
        case "all_gather":
            dist.all_gather(parts, tensor)
        case "broadcast":
            dist.broadcast(tensor, src=1)
        case "object":
            dist.broadcast_object_list([None], src=1)
        case "barrier":
            dist.barrier()
    return 0


def lose_rank_1(place: RankEnvironment, how: str, backend: CpuBackend, late_s: float = 0.0) -> Any:
    """Rank 1 leaves the group while the others are in a collective with it, or does not come to it in time."""
    record, limit_s = None, late_s / 2 or 30.0
    with contextlib.suppress(LeaveError), start_process_group(place, "cpu", limit_s, cpu_backend=backend) as group:
        if not late_s:
            dist.barrier()  # nobody leaves before the others have met
        if place.rank != 1:
            record = run_and_record(place.rank, lambda: collective(how, group.world))
        else:
            time.sleep(late_s)
        raise LeaveError
    return record and (record.error_message, record.caused_by_peer)


@pytest.mark.parametrize("how", ["all_reduce", "all_gather", "broadcast", "object", "barrier"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_said_when_a_rank_is_gone(ranks: Ranks, how: str, backend: CpuBackend) -> None:
    first, gone, last = ranks.run_places(3, lose_rank_1, how, backend)
    assert gone is None
    assert all(sentence and secondary for sentence, secondary in (first, last)), (first, last)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_said_when_a_rank_is_late(ranks: Ranks, backend: CpuBackend) -> None:
    waited, late = ranks.run_places(2, lose_rank_1, "all_reduce", backend, 1.0)
    assert late is None
    assert waited[0] and waited[1], waited
