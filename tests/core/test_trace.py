"""Spans and counters: nothing without a listener, everything in order with one."""

import threading
from contextlib import contextmanager

import pytest

from motet.core import trace


class Heard:
    def __init__(self):
        self.spans, self.counts = [], []

    def on_span(self, action, start, stop, depth):
        self.spans.append((action, depth))
        assert stop >= start

    def on_count(self, name, value):
        self.counts.append((name, value))


def test_without_a_listener_every_span_is_one_shared_object_that_does_nothing():
    assert trace.span("forward") is trace.span("backward")
    with trace.span("forward"):
        trace.count("bytes", 1)
    with pytest.raises(KeyError), trace.span("forward"):
        raise KeyError


def test_spans_are_told_when_they_end_with_their_depth_also_if_they_fail():
    heard = Heard()
    with trace.install_sink(heard):
        with trace.span("step"):
            with trace.span("forward"):
                trace.count("bytes", 3)
            with trace.span("backward"), trace.span("communicate"):
                pass
        trace.count("bytes", 4)
    assert heard.spans == [("forward", 1), ("communicate", 2), ("backward", 1), ("step", 0)]
    assert heard.counts == [("bytes", 3), ("bytes", 4)]
    heard = Heard()
    with trace.install_sink(heard):
        with pytest.raises(KeyError), trace.span("step"), trace.span("forward"):
            raise KeyError
        with trace.span("step"):
            pass
    assert heard.spans == [("forward", 1), ("step", 0), ("step", 0)]


def test_the_listener_before_listens_again_and_a_late_span_is_lost_without_harm():
    outer, inner = Heard(), Heard()
    with trace.install_sink(outer):
        with pytest.raises(KeyError), trace.install_sink(inner), trace.span("inside"):
            raise KeyError
        with trace.span("outside"):
            pass
    assert (outer.spans, inner.spans) == ([("outside", 0)], [("inside", 0)])
    heard = Heard()
    with trace.install_sink(heard):
        late = trace.span("late")
        late.__enter__()
    late.__exit__(None, None, None)
    with trace.install_sink(heard), trace.span("next"):
        pass
    assert heard.spans == [("next", 0)]


def test_depth_is_counted_per_thread():
    heard = Heard()
    inside, told = threading.Event(), threading.Event()

    def load():
        inside.wait()
        with trace.span("read"):
            pass
        told.set()

    thread = threading.Thread(target=load)
    thread.start()
    with trace.install_sink(heard), trace.span("forward"):
        inside.set()
        told.wait()
    thread.join()
    assert heard.spans == [("read", 0), ("forward", 0)]


def test_a_mark_brackets_every_span_that_someone_listens_to():
    marked = []

    @contextmanager
    def mark(action):
        marked.append(f"<{action}")
        yield
        marked.append(f"{action}>")

    with trace.profiler_ranges(mark), trace.span("unheard"):
        pass
    with trace.install_sink(Heard()):
        with trace.profiler_ranges(mark), trace.span("step"), trace.span("forward"):
            pass
        with trace.span("after"):
            pass
    assert marked == ["<step", "<forward", "forward>", "step>"]
