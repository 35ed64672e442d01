"""The sink of `core.trace` that collects the spans and counters of one rank, step by step."""

import threading
import time
from collections import defaultdict

from motet.core.trace import TraceSpan


class SpanCollector:
    """The spans and counters since the last `drain`. Spans of other threads overlap those of the main thread."""

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._zero_s = time.perf_counter()
        self._spans: list[tuple[str, float, float, int]] = []
        self._counters: defaultdict[str, float] = defaultdict(float)
        self._counters_lock = threading.Lock()  # += is two operations; a loader thread may count too

    def on_span(self, action: str, start_s: float, duration_s: float, depth: int) -> None:
        self._spans.append((action, start_s, duration_s, depth))

    def on_count(self, name: str, value: float) -> None:
        with self._counters_lock:
            self._counters[name] += value

    def drain(self, step: int) -> tuple[tuple[TraceSpan, ...], dict[str, float]]:
        """The spans that ended since the last call, in order of start; times count from that call.

        A span that is still open belongs to the next step, such as the writing of the report of this one.
        """
        spans, self._spans = self._spans, []
        with self._counters_lock:
            counters, self._counters = self._counters, defaultdict(float)
        zero_s, self._zero_s = self._zero_s, time.perf_counter()
        ordered = sorted(spans, key=lambda span: (span[1], span[3]))
        step_spans = (
            TraceSpan(step, self._rank, action, start_s - zero_s, duration_s, depth)
            for action, start_s, duration_s, depth in ordered
        )
        return tuple(step_spans), dict(counters)
