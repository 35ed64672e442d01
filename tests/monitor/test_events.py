"""Every event survives its line, whatever it holds; a file is read as far as it is whole."""

import json
import math
from typing import get_args

import pytest
from example_events import ended, evaluated, started, step, whole_run
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from motet.core.trace import TraceSpan
from motet.monitor.events import Event, effective_events, parse_event, read_events, read_steps
from refusals import refused

KINDS = get_args(Event)


def any_event(kind):
    fields = {name: st.from_type(f.annotation) for name, f in kind.model_fields.items() if name != "event"}
    return st.builds(kind, **fields)


def write(path, events, torn=""):
    path.write_text("".join(event.model_dump_json() + "\n" for event in events) + torn)
    return path


@given(st.one_of([any_event(kind) for kind in KINDS]))
def test_every_event_is_one_line_of_strict_json_and_comes_back(event):
    line = event.model_dump_json()
    assert "\n" not in line

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    assert json.loads(line, parse_constant=refuse)["event"] == event.event
    # By repr, because a NaN is not equal to itself.
    assert repr(parse_event(line)) == repr(event)


def test_numbers_that_json_lacks_are_strings():
    line = json.loads(step(1, loss=math.nan, grad_norm=math.inf, counters={"x": -math.inf}).model_dump_json())
    assert (line["loss"], line["grad_norm"], line["counters"]) == ("NaN", "Infinity", {"x": "-Infinity"})


def test_a_span_is_keyed_by_step_rank_and_action():
    line = json.loads(step(3, spans=(TraceSpan(3, 0, "forward", 0.25, 0.5, 1),)).model_dump_json())
    names = ("step", "rank", "action", "start_s", "duration_s", "depth")
    assert line["spans"] == [dict(zip(names, (3, 0, "forward", 0.25, 0.5, 1), strict=True))]


def test_an_event_is_frozen_and_refuses_what_it_does_not_know():
    event = step(1)
    with pytest.raises(ValidationError):
        event.step = 2
    with pytest.raises(ValidationError, match="los"):
        step(1, los=3.0)


def test_a_torn_last_line_is_left_out(tmp_path):
    events = whole_run()
    assert read_events(write(tmp_path / "whole", events)) == events
    line = events[-1].model_dump_json()
    for length in (1, len(line) // 2, len(line)):
        assert read_events(write(tmp_path / "torn", events[:-1], torn=line[:length])) == events[:-1]
    assert read_events(write(tmp_path / "empty", [])) == []


def test_a_missing_file_and_a_line_that_is_no_event_are_told(tmp_path):
    refused(r"cannot read .*events\.jsonl: No such file", read_events, tmp_path / "events.jsonl")
    path = write(tmp_path / "events.jsonl", [started()])
    for damage, what in (('{"event": "step_do', "JSON"), ('{"event": "danced"}', "danced"), ("", "JSON")):
        with path.open("a") as file:
            file.write(damage + "\n")
        refused(rf"line 2 of .*{path.name}.*{what}", read_events, path)
        write(path, [started()])


def test_a_later_attempt_replaces_the_steps_it_does_again(tmp_path):
    first = [started(), step(1), step(2), evaluated(2), step(3, loss=99.0), evaluated(3)]
    second = [started(first_step=3), step(3), ended(reason="stopped", steps=3)]
    third = [started(first_step=3), step(3, loss=1.0), step(4), ended()]
    path = write(tmp_path / "events.jsonl", [*first, *second, *third])
    curve = read_steps(path)
    assert [(event.step, event.loss) for event in curve] == [(1, 7.5), (2, 6.5), (3, 1.0), (4, 4.5)]
    kept = effective_events(read_events(path))
    assert [event.step for event in kept if event.event == "evaluation_done"] == [2]
    assert [event.event for event in kept].count("run_started") == 3


def test_an_attempt_from_the_start_replaces_everything(tmp_path):
    path = write(tmp_path / "events.jsonl", [started(), step(1), step(2), started(), step(1, loss=3.0)])
    assert [(event.step, event.loss) for event in read_steps(path)] == [(1, 3.0)]
