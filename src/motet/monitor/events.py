"""What a run tells about itself, as typed values, and `events.jsonl`, which keeps them one JSON object a line.

A line holds `event` (the kind), `time` (seconds since 1970) and the fields of that kind. JSON has no NaN and no
infinity, so these are the strings "NaN", "Infinity" and "-Infinity". A run that is resumed goes on in the same file;
each of its attempts opens with `run_started`, and the steps after the resumed checkpoint count once more.
docs/reference/events.md is made from this file by scripts/docs.py.
"""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from motet.core.errors import InputError
from motet.core.trace import TraceSpan

EVENTS_FILE = "events.jsonl"


class _RunEventBase(BaseModel):
    """What every event has."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings", use_attribute_docstrings=True)

    time: float = Field(default_factory=time.time)
    """Seconds since 1970."""

    def to_json(self) -> str:
        """One line, without its end."""
        return self.model_dump_json()


class RunStarted(_RunEventBase):
    """An attempt at the run begins; after it was resumed, a further one."""

    event: Literal["run_started"] = "run_started"
    name: str
    """The job's."""
    ranks: int
    threads: int
    """Per rank."""
    device: str
    """The kind or the full name of what a rank computes on."""
    parameters: int
    """Of the whole model."""
    data: str
    """Fingerprint of the corpus and how it is read."""
    first_step: int = 1
    """The first step that this attempt does: one more than was already done."""
    last_step: int
    """The step at which the run is finished."""
    resumed_from: str | None = None
    """The checkpoint, as a path within the run folder."""
    num_classes: int | None = Field(default=None, validation_alias=AliasChoices("num_classes", "outcomes"))
    """What each target is one of: the vocabulary, or the classes. A model that knows nothing has loss ln(outcomes)."""


class ParameterServerStepStats(BaseModel):
    """What a parameter server did in a step."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    staleness_histogram: tuple[int, ...] = Field(validation_alias=AliasChoices("staleness_histogram", "staleness"))
    """How many shares were computed with parameters that lacked 0, 1, 2 and so on of the updates before theirs."""
    steps_behind_histogram: tuple[int, ...] = Field(validation_alias=AliasChoices("steps_behind_histogram", "behind"))
    """How many shares were computed with all of the steps before theirs, all but the last one, and so on: it is this
    that `layout.server.staleness` bounds."""
    workers: int
    """That are there."""
    sent_bytes: int
    """By all servers since the step before was told, as far as they have told."""
    received_bytes: int
    waiting_bytes: int
    """In the queues of the servers, when they told last."""


class StepDone(_RunEventBase):
    """A step of the optimizer is done."""

    event: Literal["step_done"] = "step_done"
    step: int
    """How many steps the run has done, this one included."""
    loss: float
    """Mean over the target tokens of the whole step, all ranks and micro-batches."""
    target_tokens: float
    """How many that mean is over: the sum of their weights."""
    tokens: int
    """Read by the model in this step, by all ranks together."""
    learning_rate: float
    grad_norm: float | None = None
    """The global norm before clipping."""
    skipped: bool = False
    """The loss or a gradient was not finite and the update was left out."""
    step_time_s: float
    tokens_per_s: float
    """By all ranks together."""
    mfu: float | None = Field(default=None, validation_alias=AliasChoices("mfu", "flops_share"))
    """The model's arithmetic as a share of what the devices could do at their peak; 1 is all of it."""
    memory_bytes: int
    """The most that rank 0 has held so far: allocated on a CUDA device, resident on the CPU."""
    epoch: float = 0.0
    """Passes over the training split so far."""
    spans: tuple[TraceSpan, ...] = ()
    """What rank 0 did since the step before was told, in order of start."""
    server: ParameterServerStepStats | None = None
    """Of a run with a parameter server."""
    counters: dict[str, float] = Field(default_factory=dict)
    """What rank 0 counted meanwhile, such as bytes sent."""


class EvaluationDone(_RunEventBase):
    """The model was judged on text that it is not trained on."""

    event: Literal["evaluation_done"] = "evaluation_done"
    step: int
    """How many steps the model had been trained."""
    split: str
    loss: float
    targets: float
    """Target tokens (or samples) that the loss is a mean over."""
    perplexity: float | None = None
    accuracy: float | None = None
    """Share of the targets that the model puts first."""


class CheckpointSaved(_RunEventBase):
    """A whole checkpoint is on disk."""

    event: Literal["checkpoint_saved"] = "checkpoint_saved"
    step: int
    path: str
    """Within the run folder."""
    size_bytes: int
    duration_s: float


class TextSampled(_RunEventBase):
    """Text that the model wrote."""

    event: Literal["sample_text"] = "sample_text"
    step: int
    prompt: str
    text: str


class ReplicaCheckDone(_RunEventBase):
    """In a watched step ranks have compared what must be the same on them, or must add up."""

    event: Literal["ranks_compared"] = "ranks_compared"
    step: int
    ranks: int
    """That were compared: all, or with `[outer]` those of the first replica."""
    same_machines: bool
    """All compute with the same device, threads and torch. If not, losses are not compared, as their last bits may
    differ."""
    violations: tuple[str, ...] = Field(validation_alias=AliasChoices("violations", "broken"))
    """What does not hold, and what it may mean; empty when all holds."""
    duration_s: float


class ProfileSaved(_RunEventBase):
    """The window of torch.profiler is on disk."""

    event: Literal["profile_saved"] = "profile_saved"
    first_step: int
    last_step: int
    path: str
    """Within the run folder; chrome://tracing and ui.perfetto.dev open it."""


class WarningIssued(_RunEventBase):
    """Something that a person should know, and that does not end the run."""

    event: Literal["warned"] = "warned"
    text: str


RunEndReason = Literal["finished", "stopped", "diverged", "disagreed", "save_failed", "failed"]


class RunEnded(_RunEventBase):
    """The attempt ends. When it is missing, the attempt was killed or is still running."""

    event: Literal["run_ended"] = "run_ended"
    reason: RunEndReason
    """`finished` alone means that the run reached its last step; `stopped` is Ctrl-C or SIGTERM, `disagreed` what
    `monitor.replica_check_every` has found."""
    steps: int
    """How many steps the run has done, in all attempts."""
    message: str = ""
    """The error in its own words."""


Event = (
    RunStarted
    | StepDone
    | EvaluationDone
    | CheckpointSaved
    | TextSampled
    | ReplicaCheckDone
    | ProfileSaved
    | WarningIssued
    | RunEnded
)
_EVENT_ADAPTER: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="event")])


def parse_event(line: str | bytes) -> Event:
    """The event of one line of `events.jsonl`; a ValueError when it is none."""
    return _EVENT_ADAPTER.validate_json(line)


def read_events(path: Path) -> list[Event]:
    """All events of all attempts, as written. A last line without its end was torn by a kill and is left out."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; give an {EVENTS_FILE} of a run folder") from None
    events = []
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            events.append(parse_event(line))
        except ValidationError as error:
            what = error.errors(include_url=False)[0]["msg"]
            raise InputError(
                f"line {number} of {path} is no event that this version knows: {what}; mend it or move the file away"
            ) from None
    return events


def effective_events(events: Iterable[Event]) -> list[Event]:
    """The run without what a later attempt did again: the events of the steps after the resumed checkpoint go."""
    kept: list[Event] = []
    for event in events:
        if isinstance(event, RunStarted):
            kept = [old for old in kept if getattr(old, "step", 0) < event.first_step]
        kept.append(event)
    return kept


def read_steps(path: Path) -> list[StepDone]:
    """The curve of the run, each step once."""
    return [event for event in effective_events(read_events(path)) if isinstance(event, StepDone)]
