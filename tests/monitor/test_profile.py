"""A window of the profiler covers the steps it was asked for, with our spans in it."""

import json

import torch

from motet.core import trace
from motet.monitor.event_dispatcher import SpanCollector
from motet.monitor.events import ProfileSaved, WarningIssued
from motet.monitor.profile import TorchProfilerWindow


def run(profiler, steps):
    said = []
    with trace.install_sink(SpanCollector()):
        for number in steps:
            said.append(profiler.step(number))
            with trace.span(f"work {number}"):
                torch.mm(torch.ones(4, 4), torch.ones(4, 4))
        said += [profiler.step(steps[-1] + 1), profiler.close()]
    return [event for event in said if event is not None]


def names(path):
    return {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}


def test_the_window_holds_its_steps_and_no_other(tmp_path):
    (event,) = run(TorchProfilerWindow(tmp_path, 2, 2), range(1, 6))
    assert isinstance(event, ProfileSaved)
    assert (event.first_step, event.last_step, event.path) == (2, 3, "profile-steps-2-3.json")
    found = names(tmp_path / event.path)
    assert {"work 2", "work 3", "aten::mm"} <= found and not {"work 1", "work 4"} & found


def test_a_window_at_the_end_or_entered_by_a_resume_is_kept_as_far_as_it_goes(tmp_path):
    (event,) = run(TorchProfilerWindow(tmp_path, 3, 10), range(1, 5))
    assert (event.first_step, event.last_step) == (3, 4)
    (event,) = run(TorchProfilerWindow(tmp_path, 3, 4), range(5, 9))
    assert (event.first_step, event.last_step) == (5, 6) and {"work 5", "work 6"} <= names(tmp_path / event.path)


def test_a_window_that_was_not_reached_is_told(tmp_path):
    for steps in (range(1, 3), range(20, 22)):
        (event,) = run(TorchProfilerWindow(tmp_path, 10, 3), steps)
        assert isinstance(event, WarningIssued)
        assert "monitor.profile_from = 10, and no step from there to 12 was done" in event.text
    assert list(tmp_path.iterdir()) == []
