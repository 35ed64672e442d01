"""The spans of a rank are handed over step by step, on one clock."""

import threading

from motet.core import trace
from motet.monitor.event_dispatcher import SpanCollector


def test_nested_spans_come_in_order_of_start_and_keyed():
    collector = SpanCollector(rank=3)
    with trace.install_sink(collector):
        with trace.span("step"), trace.span("forward"):
            pass
        with trace.span("log"):
            pass
    spans, _ = collector.drain(7)
    assert [(span.step, span.rank, span.action, span.depth) for span in spans] == [
        (7, 3, "step", 0),
        (7, 3, "forward", 1),
        (7, 3, "log", 0),
    ]
    outer, inner, after = spans
    assert 0 <= outer.start_s <= inner.start_s
    assert inner.start_s + inner.duration_s <= outer.start_s + outer.duration_s <= after.start_s


def test_each_span_is_handed_over_once_and_an_open_one_with_the_next_step():
    collector = SpanCollector()
    with trace.install_sink(collector):
        with trace.span("forward"):
            pass
        with trace.span("log"):
            first, _ = collector.drain(1)
        second, _ = collector.drain(2)
    third, _ = collector.drain(3)
    assert [[span.action for span in spans] for spans in (first, second, third)] == [["forward"], ["log"], []]


def test_counters_add_up_within_a_step_and_start_anew():
    collector = SpanCollector()
    with trace.install_sink(collector):
        trace.count("bytes", 3)
        trace.count("bytes", 4)
        trace.count("samples", 1)
        assert collector.drain(1)[1] == {"bytes": 7, "samples": 1}
        trace.count("bytes", 5)
        assert collector.drain(2)[1] == {"bytes": 5}
    assert collector.drain(3)[1] == {}


def test_no_count_of_several_threads_is_lost():
    collector = SpanCollector()
    taken = []

    def work():
        for _ in range(2000):
            trace.count("samples", 1)

    with trace.install_sink(collector):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            taken.append(collector.drain(len(taken))[1])
        taken.append(collector.drain(len(taken))[1])
    assert sum(counters.get("samples", 0) for counters in taken) == 8000
