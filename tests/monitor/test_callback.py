"""A callback gets each event in the method of its kind, or all of them in one."""

from typing import get_args

from example_events import ended, evaluated, started, step

from motet.monitor.callback import Callback
from motet.monitor.events import CheckpointSaved, Event, ProfileSaved, ReplicaCheckDone, TextSampled, WarningIssued

ONE_OF_EACH = {
    "on_start": started(),
    "on_step": step(1),
    "on_evaluation": evaluated(1),
    "on_checkpoint": CheckpointSaved(step=1, path="c", size_bytes=1, duration_s=0.1),
    "on_sample": TextSampled(step=1, prompt="a", text="b"),
    "on_replica_check": ReplicaCheckDone(step=1, ranks=2, same_machines=True, violations=(), duration_s=0.1),
    "on_profile": ProfileSaved(first_step=1, last_step=2, path="p"),
    "on_warning": WarningIssued(text="w"),
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
