"""A phase of a verification that takes long says what it does, and a short one nothing."""

from unittest.mock import patch

from motet.core import trace
from waiting import until


def test_a_slow_phase_says_what_it_does_while_it_runs() -> None:
    lines: list[str] = []
    with trace.log_if_slow(lines.append, "a short phase"):
        pass
    with patch.object(trace, "SLOW_S", 0.01), trace.log_if_slow(lines.append, "a slow phase"):
        until(lambda: lines == ["a slow phase"])


def test_progress_is_logged_after_three_seconds_and_then_every_ten() -> None:
    lines: list[str] = []
    seconds = iter([0.0, 1.0, 2.9, 3.1, 3.1, 5.0, 13.0, 13.2, 13.2])
    report = trace.progress_if_slow(lines.append, now=lambda: next(seconds))
    for done in range(1, 7):
        report("layouts", 1000 * done, 9000)
    assert lines == ["layouts: 3,000 of 9,000 ...", "layouts: 6,000 of 9,000 ..."]
