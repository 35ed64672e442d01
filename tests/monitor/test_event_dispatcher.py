"""Events reach everyone who listens, in order and by their kind; nobody who breaks takes the run along."""

import math
import threading
from typing import get_args
from unittest.mock import Mock

import pytest
from example_events import ended, evaluated, measured, started, step

from motet.core import trace
from motet.core.errors import CheckpointSaveError, InputError, OutputClosedError, TrainingDivergedError
from motet.monitor.event_dispatcher import EventDispatcher, SpanCollector, open_event_dispatcher
from motet.monitor.events import (
    CheckpointSaved,
    CheckpointStarted,
    Event,
    GradientsOverflowed,
    NumericsMeasured,
    ProfileSaved,
    RecomputationChosen,
    ReplicaCheckDone,
    StepPredicted,
    TextSampled,
    WarningIssued,
    read_events,
)
from motet.monitor.settings import MonitorSettings
from motet.monitor.sinks import Callback
from motet.monitor.summary import read_summary

QUIET = MonitorSettings(tensorboard=False)


class Heard(Callback):
    def __init__(self):
        self.events, self.closed = [], 0

    def on_event(self, event):
        self.events.append(event)

    def close(self):
        self.closed += 1


class Broken(Callback):
    def __init__(self, error, on=("step_done",)):
        self.error, self.on, self.called, self.closed = error, on, 0, 0

    def on_event(self, event):
        self.called += 1
        if event.event in self.on:
            raise self.error

    def close(self):
        self.closed += 1
        if "close" in self.on:
            raise self.error


def tell(monitor, *events):
    for event in events:
        monitor.on_event(event)


def told_steps(every, steps, last_step=None):
    heard = Heard()
    with EventDispatcher([heard], every) as monitor:
        tell(monitor, started(last_step=last_step or len(steps)), *steps, ended())
    return [event.step for event in heard.events if event.event == "step_done"]


def test_every_so_many_steps_the_first_the_last_and_those_that_fail_are_told():
    assert told_steps(1, [step(n) for n in range(1, 6)]) == [1, 2, 3, 4, 5]
    assert told_steps(3, [step(n) for n in range(1, 9)]) == [1, 3, 6, 8]
    steps = [step(1), step(2), step(3, skipped=True), step(4, loss=math.nan), step(5), step(6)]
    assert told_steps(100, steps) == [1, 3, 4, 6]
    # The last step before a stop is told before the end.
    assert told_steps(10, [step(n) for n in range(1, 8)], last_step=100) == [1, 7]


def test_spans_and_counters_come_with_their_step_alone():
    heard = Heard()
    with EventDispatcher([heard], collector=SpanCollector()) as monitor:
        with trace.span("setup"):
            pass
        monitor.on_event(started())
        for number in (1, 2):
            with trace.span("forward"):
                trace.count("bytes", 10 * number)
            with trace.span("log"):
                monitor.on_event(step(number))
    found = [event for event in heard.events if event.event == "step_done"]
    spans = [[(span.step, span.action) for span in event.spans] for event in found]
    assert spans == [[(1, "forward")], [(2, "log"), (2, "forward")]]
    assert [event.counters for event in found] == [{"bytes": 10}, {"bytes": 20}]
    assert trace.span("nobody listens") is trace.span("any more")


def test_a_callback_that_raises_is_told_once_and_left_out():
    heard, broken = Heard(), Broken(ValueError("no such board"))
    with EventDispatcher([heard, broken]) as monitor:
        tell(monitor, started(), step(1), step(2), ended())
    assert [event.event for event in heard.events] == ["run_started", "step_done", "warned", "step_done", "run_ended"]
    assert "Broken is left out from here on: ValueError: no such board (" in heard.events[2].text
    assert (broken.called, broken.closed, heard.closed) == (2, 1, 1)


def test_one_that_breaks_over_the_warning_about_another_is_left_out_too():
    heard = Heard()
    with EventDispatcher([Broken(ValueError("a")), Broken(KeyError("b"), on=("warned",)), heard]) as monitor:
        tell(monitor, started(), step(1))
    texts = [event.text.split(" (")[0].split(": ", 1)[1] for event in heard.events if event.event == "warned"]
    assert texts == ["ValueError: a", "KeyError: 'b'"]


def test_an_error_for_the_user_ends_the_run_after_all_were_told():
    heard, broken = Heard(), Broken(CheckpointSaveError("disk full"))
    with EventDispatcher([broken, heard]) as monitor:
        monitor.on_event(started())
        with pytest.raises(CheckpointSaveError, match="disk full"):
            monitor.on_event(step(1))
        monitor.on_event(ended(reason="save_failed"))
    assert [event.event for event in heard.events] == ["run_started", "step_done", "run_ended"] and broken.called == 2


def test_a_callback_that_does_not_close_is_told_to_those_still_open():
    heard = Heard()
    with EventDispatcher([heard, Broken(OSError("gone"), on=("close",))]) as monitor:
        monitor.on_event(started())
    assert "Broken did not close: OSError: gone" in heard.events[-1].text and heard.closed == 1


def test_an_error_of_the_run_passes_and_everyone_is_closed():
    heard, broken = Heard(), Broken(ValueError("x"), on=("run_started", "close"))
    with pytest.raises(TrainingDivergedError), EventDispatcher([heard, broken]) as monitor:
        monitor.on_event(started())
        raise TrainingDivergedError("loss is nan")
    assert (heard.closed, broken.closed) == (1, 1)


def test_a_monitor_for_nobody_does_nothing():
    with EventDispatcher() as monitor:
        tell(monitor, step(1), started(), ended())


def test_a_profiler_that_breaks_is_left_out():
    heard, broken = Heard(), Mock(spec=["step"], step=Mock(side_effect=RuntimeError("no profiler here")))
    with EventDispatcher([heard], profiler=broken) as monitor:
        tell(monitor, started(), step(1), ended())
    assert [event.event for event in heard.events] == ["run_started", "warned", "step_done", "run_ended"]


def test_an_opened_monitor_keeps_events_and_outcome_and_prints(tmp_path, capsys):
    heard = Heard()
    with open_event_dispatcher(QUIET, tmp_path, callbacks=[heard]) as monitor:
        tell(monitor, started(), *(step(n) for n in range(1, 5)), evaluated(4), ended())
    assert [event.event for event in read_events(tmp_path / "events.jsonl")] == [e.event for e in heard.events]
    assert read_summary(tmp_path).finished and "finished      4 of 4 steps" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "summary.json"]


def test_settings_choose_the_rest(tmp_path, capsys):
    settings = MonitorSettings(spans=False, profile_from=2, profile_steps=1, every=10)
    with open_event_dispatcher(settings, tmp_path) as monitor:
        tell(monitor, started(), *(step(n) for n in range(1, 5)), ended())
    told = read_events(tmp_path / "events.jsonl")
    assert [event.step for event in told if event.event == "step_done"] == [1, 4]
    assert [event.path for event in told if event.event == "profile_saved"] == ["profile-steps-2-2.json"]
    assert [event.spans for event in told if event.event == "step_done"] == [(), ()]
    assert (tmp_path / "tensorboard").is_dir()


def test_wandb_that_is_not_there_is_told_before_anything_is_written(tmp_path):
    with pytest.raises(InputError, match=r"monitor\.wandb = 'offline' needs the package wandb.*pip install"):
        open_event_dispatcher(MonitorSettings(wandb="offline", tensorboard=False), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_warning_is_part_of_the_record(tmp_path, capsys):
    with open_event_dispatcher(QUIET, tmp_path, callbacks=[Broken(ValueError("x"), on=("run_ended",))]) as monitor:
        tell(monitor, started(), step(1), ended(steps=1))
    assert isinstance(read_events(tmp_path / "events.jsonl")[-1], WarningIssued)
    assert read_summary(tmp_path).exit_reason == "finished"


# --- spans and counters of a step
def test_nested_spans_come_in_order_of_start_and_keyed():
    collector = SpanCollector()
    with trace.install_sink(collector):
        with trace.span("step"), trace.span("forward"):
            pass
        with trace.span("log"):
            pass
    spans, _ = collector.drain(7)
    found = [(span.step, span.rank, span.action, span.depth) for span in spans]
    assert found == [(7, 0, "step", 0), (7, 0, "forward", 1), (7, 0, "log", 0)]
    outer, inner, after = spans
    assert 0 <= outer.start_s <= inner.start_s
    assert inner.start_s + inner.duration_s <= outer.start_s + outer.duration_s <= after.start_s


class QueuedDevice:
    """A device clock whose marks are places in the work of a device that is late: each piece of work takes a second of
    the device, and no time of the host."""

    def __init__(self):
        self.queued_s, self.marks = 0.0, 0

    def now(self):
        self.marks += 1
        return ("mark", self.queued_s)

    def wait(self, mark):
        pass

    def seconds(self, start, stop):
        assert start[1] <= stop[1], "CUDA does not say what it answers then"
        return stop[1] - start[1]

    def compute(self):
        self.queued_s += 1.0


def test_drawn_steps_have_the_times_of_the_device_and_others_those_of_the_host():
    heard, device = Heard(), QueuedDevice()
    marks = list[int]()
    with EventDispatcher([heard], 3, collector=SpanCollector(device)) as monitor:
        monitor.on_event(started(last_step=9))
        for number in range(1, 8):
            before = device.marks
            with trace.span("step"):
                with trace.span("forward"):
                    device.compute()
                with trace.span("backward"):
                    device.compute()
                    device.compute()
            marks.append(device.marks - before)
            with trace.span("log"):
                monitor.on_event(step(number, skipped=number == 5))
    assert marks == [6, 0, 6, 0, 0, 6, 0]  # No event is recorded in a step that is not due
    seconds = {event.step: {span.action: span.duration_s for span in event.spans} for event in heard.events[1:]}
    for number in (1, 3, 6):
        assert seconds[number]["forward"] == pytest.approx(1, abs=0.01)
        assert seconds[number]["backward"] == pytest.approx(2, abs=0.01)
        assert seconds[number]["step"] == pytest.approx(3, abs=0.01)
    assert seconds[5]["step"] < 0.5  # It is reported only because it was skipped
    spans = {event.step: event.spans for event in heard.events[1:]}
    starts = {span.action: span.start_s for span in spans[6]}
    assert starts["backward"] - starts["forward"] == pytest.approx(1, abs=0.01)


def test_a_span_that_ends_after_its_step_is_timed_by_one_clock():
    heard, device = Heard(), QueuedDevice()
    with EventDispatcher([heard], collector=SpanCollector(device)) as monitor:
        monitor.on_event(started(last_step=3))
        for number in (1, 2, 3):
            with trace.span("log"):
                device.compute()
                monitor.on_event(step(number))
    spans = [{span.action: span for span in event.spans} for event in heard.events[1:]]
    assert [list(each) for each in spans] == [[], ["log"], ["log"]]
    for each in spans[1:]:
        assert each["log"].duration_s == pytest.approx(1, abs=0.05) and -1.05 < each["log"].start_s < 0


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
    collector, taken = SpanCollector(), []

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


ONE_OF_EACH = {
    "on_start": started(),
    "on_step": step(1),
    "on_overflow": GradientsOverflowed(step=2, loss_scale=8, next_loss_scale=4),
    "on_recomputation": RecomputationChosen(
        step=13, budget=9, kept=1, selective=0, full=2, predicted_peak=8, seconds_per_microbatch=0.1
    ),
    "on_numerics": NumericsMeasured(step=1, formats=("float16",), tensors=()),
    "on_experts": measured(1),
    "on_evaluation": evaluated(1),
    "on_checkpoint_started": CheckpointStarted(step=1, path="c"),
    "on_checkpoint": CheckpointSaved(step=1, path="c", size_bytes=1, duration_s=0.1),
    "on_sample": TextSampled(step=1, prompt="a", text="b"),
    "on_replica_check": ReplicaCheckDone(step=1, ranks=2, same_machines=True, violations=(), duration_s=0.1),
    "on_profile": ProfileSaved(first_step=1, last_step=2, path="p"),
    "on_warning": WarningIssued(text="w"),
    "on_prediction": StepPredicted(step_time_s=0.5, live_bytes=7),
    "on_end": ended(),
}


def test_each_event_reaches_its_method_and_no_other():
    assert {type(event) for event in ONE_OF_EACH.values()} == set(get_args(Event))
    heard = []
    kind = type("Heard", (Callback,), {name: lambda self, e, n=name: heard.append((n, e)) for name in ONE_OF_EACH})
    for event in ONE_OF_EACH.values():
        kind().on_event(event)
    assert heard == list(ONE_OF_EACH.items())


def test_what_is_not_defined_is_ignored():
    for event in ONE_OF_EACH.values():
        Callback().on_event(event)
    Callback().close()


def test_a_closed_output_asks_for_a_stop_and_ends_nothing(capsys):
    heard, closed = Heard(), Broken(OutputClosedError("closed"))
    with EventDispatcher([heard, closed]) as monitor:
        tell(monitor, started())
        assert not monitor.is_output_closed
        tell(monitor, step(1), step(2), ended())
        assert monitor.is_output_closed
    assert capsys.readouterr().err.count("standard output is closed: the run stops after the next step and saves") == 1
    assert [event.event for event in heard.events] == ["run_started", "step_done", "warned", "step_done", "run_ended"]
    assert (closed.called, closed.closed) == (2, 1)


def test_an_output_that_closes_at_the_end_changes_nothing(capsys):
    heard = Heard()
    with EventDispatcher([heard, Broken(OutputClosedError("closed"), on=["run_ended"])]) as monitor:
        tell(monitor, started(), ended())
    assert capsys.readouterr().err == "" and heard.events[-1].event == "run_ended"
