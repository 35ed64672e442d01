"""Listening to a run: one method that gets every event, or one method for each kind of event.

Console, files and trackers of motet are callbacks too. A callback that raises is reported once, then dropped, so that
a tracker cannot end a training run; one that raises a `MotetError` ends the run with that message.
"""

from motet.monitor.events import (
    CheckpointSaved,
    EvaluationDone,
    Event,
    ProfileSaved,
    ReplicaCheckDone,
    RunEnded,
    RunStarted,
    StepDone,
    TextSampled,
    WarningIssued,
)


class Callback:
    """Subclass it and define the methods you need. Only rank 0 calls it, in the order of the events."""

    def on_event(self, event: Event) -> None:
        """Passes each event to the method of its kind; override it to get them all in one place."""
        getattr(self, _METHODS[type(event)])(event)

    def on_start(self, event: RunStarted) -> None: ...

    def on_step(self, event: StepDone) -> None:
        """Every `monitor.every` steps, and at the first, the last and any failing step."""

    def on_evaluation(self, event: EvaluationDone) -> None: ...

    def on_checkpoint(self, event: CheckpointSaved) -> None: ...

    def on_sample(self, event: TextSampled) -> None: ...

    def on_replica_check(self, event: ReplicaCheckDone) -> None: ...

    def on_profile(self, event: ProfileSaved) -> None: ...

    def on_warning(self, event: WarningIssued) -> None: ...

    def on_end(self, event: RunEnded) -> None: ...

    def close(self) -> None:
        """Called once at the very end, also if the run ends without `RunEnded`."""


_METHODS: dict[type[Event], str] = {
    RunStarted: "on_start",
    StepDone: "on_step",
    EvaluationDone: "on_evaluation",
    CheckpointSaved: "on_checkpoint",
    TextSampled: "on_sample",
    ReplicaCheckDone: "on_replica_check",
    ProfileSaved: "on_profile",
    WarningIssued: "on_warning",
    RunEnded: "on_end",
}
