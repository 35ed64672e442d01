"""How a run is listened to: one method that gets every event, or one method per kind of event.

motet's own console, files and trackers are callbacks too. A callback that raises is told about once and left out from
then on, so that a tracker cannot end a training run; one that raises a `MotetError` does end it, with that sentence.
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
        """Hands each event to the method of its kind; define it instead of those to get them all in one place."""
        match event:
            case RunStarted():
                self.on_start(event)
            case StepDone():
                self.on_step(event)
            case EvaluationDone():
                self.on_evaluation(event)
            case CheckpointSaved():
                self.on_checkpoint(event)
            case TextSampled():
                self.on_sample(event)
            case ReplicaCheckDone():
                self.on_replica_check(event)
            case ProfileSaved():
                self.on_profile(event)
            case WarningIssued():
                self.on_warning(event)
            case RunEnded():
                self.on_end(event)

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
        """Called once, at the very end, also when the run ends without an event that says so."""
