"""Listening to a run: one method that gets every event, or one method for each kind of event.
Console, files and trackers of motet are callbacks too. A callback that raises is reported once, then dropped, so that
a tracker cannot end a training run; one that raises a `MotetError` ends the run with that message."""

from motet.monitor import events


class Callback:
    """Subclass it and define the methods you need. Only rank 0 calls it, in the order of the events."""

    def on_event(self, event: events.Event) -> None:
        """Passes each event to the method of its kind; override it to get them all in one place."""
        getattr(self, _METHODS[type(event)])(event)

    def on_start(self, event: events.RunStarted) -> None: ...

    def on_step(self, event: events.StepDone) -> None:
        """Every `monitor.every` steps, and at the first, the last and any failing step."""

    def on_overflow(self, event: events.GradientsOverflowed) -> None: ...
    def on_recomputation(self, event: events.RecomputationChosen) -> None: ...
    def on_numerics(self, event: events.NumericsMeasured) -> None: ...
    def on_evaluation(self, event: events.EvaluationDone) -> None: ...
    def on_checkpoint(self, event: events.CheckpointSaved) -> None: ...
    def on_sample(self, event: events.TextSampled) -> None: ...
    def on_replica_check(self, event: events.ReplicaCheckDone) -> None: ...
    def on_profile(self, event: events.ProfileSaved) -> None: ...
    def on_warning(self, event: events.WarningIssued) -> None: ...
    def on_prediction(self, event: events.StepPredicted) -> None: ...
    def on_end(self, event: events.RunEnded) -> None: ...

    def close(self) -> None:
        """Called once at the very end, also if the run ends without `RunEnded`."""


_METHODS: dict[type[events.Event], str] = {
    events.RunStarted: "on_start",
    events.StepDone: "on_step",
    events.GradientsOverflowed: "on_overflow",
    events.RecomputationChosen: "on_recomputation",
    events.NumericsMeasured: "on_numerics",
    events.EvaluationDone: "on_evaluation",
    events.CheckpointSaved: "on_checkpoint",
    events.TextSampled: "on_sample",
    events.ReplicaCheckDone: "on_replica_check",
    events.ProfileSaved: "on_profile",
    events.WarningIssued: "on_warning",
    events.StepPredicted: "on_prediction",
    events.RunEnded: "on_end",
}
