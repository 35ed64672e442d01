"""Signs of life of the ranks, and what counts as a silence."""

import os
import re
from collections.abc import Iterator
from contextlib import closing

import pytest

from motet.train.launch import rank_process
from motet.train.launch.rank_process import HeartbeatReceiver, start_heartbeats
from waiting import until

PIDS = {0: os.getpid(), 1: os.getpid()}


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(rank_process, "time", clock)
    return clock


@pytest.fixture
def receiver(clock: Clock) -> Iterator[HeartbeatReceiver]:
    with closing(HeartbeatReceiver(20.0)) as receiver:
        receiver.expect(0)
        receiver.expect(1)
        yield receiver


def pass_time(receiver: HeartbeatReceiver, clock: Clock, seconds: float, *lines: bytes) -> tuple[list[int], str]:
    """Let the supervisor poll every second, in which the ranks write these lines."""
    for _ in range(int(seconds)):
        clock.now += 1.0
        os.write(receiver.writer, b"".join(lines))
        receiver.poll()
    return receiver.describe_silence(PIDS)


def test_a_rank_that_writes_is_never_silent(receiver: HeartbeatReceiver, clock: Clock) -> None:
    assert pass_time(receiver, clock, 100, b"0 a (b.py:1)\n", b"1 c (d.py:2)\n") == ([], "")
    assert pass_time(receiver, clock, 20, b"0 a (b.py:1)\n") == ([], "")
    silent, sentence = pass_time(receiver, clock, 1, b"0 a (b.py:1)\n")
    assert silent == [1] and sentence == "rank 1 gave no sign of life for 20 s: rank 1 did not run in c (d.py:2)"
    receiver.expect(1)  # another process takes its place
    assert pass_time(receiver, clock, 19, b"0 a (b.py:1)\n") == ([], "")


def test_ranks_that_fell_silent_together_are_told_of_together(receiver: HeartbeatReceiver, clock: Clock) -> None:
    pass_time(receiver, clock, 1, b"1 c (d.py:2)\n")
    silent, sentence = pass_time(receiver, clock, 20)
    assert silent == [0, 1] and "rank 0 did not run in its start; rank 1 did not run in c (d.py:2)" in sentence


def test_lines_may_be_torn_and_strange(receiver: HeartbeatReceiver, clock: Clock) -> None:
    os.write(receiver.writer, b"\xff\n7 x\nno rank\n\n0 a")
    receiver.poll()
    assert pass_time(receiver, clock, 20, b" b\n1 c\n0") == ([], "")


def test_a_supervisor_that_did_not_run_has_seen_no_silence(receiver: HeartbeatReceiver, clock: Clock) -> None:
    clock.now += 3600.0
    receiver.poll()
    assert receiver.describe_silence(PIDS) == ([], "")
    assert pass_time(receiver, clock, 21)[0] == [0, 1]


def test_a_short_timeout_is_not_taken_for_a_silence(clock: Clock) -> None:
    with closing(HeartbeatReceiver(0.1)) as receiver:
        receiver.expect(0)
        receiver.expect(1)
        assert pass_time(receiver, clock, 10) == ([], "")


def test_a_rank_writes_where_it_is() -> None:
    with closing(HeartbeatReceiver(20.0)) as receiver:
        receiver.expect(3)
        start_heartbeats(3, os.dup(receiver.writer))
        until(lambda: receiver.poll() or re.fullmatch(r"until \(.*tests/waiting\.py:\d+\)", receiver._places[3]))
