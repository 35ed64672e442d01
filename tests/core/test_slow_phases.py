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
