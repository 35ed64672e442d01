"""The events of a run as typed values, and `events.jsonl`, which holds one JSON object a line.
A line holds `event` (the kind), `time` (seconds since 1970) and the fields of that kind. JSON has no NaN and no
infinity, so these are the strings "NaN", "Infinity" and "-Infinity". A resumed run continues in the same file: each
attempt opens with `run_started`, and repeats the steps after its checkpoint. scripts/docs.py writes
docs/reference/events.md from this file."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from motet.core import errors
from motet.core.trace import TraceSpan

EVENTS_FILE = "events.jsonl"


class StoredRecord(BaseModel):
    """A part of a run folder as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings", use_attribute_docstrings=True)


class _RunEventBase(StoredRecord):
    time: float = Field(default_factory=time.time)
    """Seconds since 1970."""


class RunStarted(_RunEventBase):
    """An attempt begins: the first one, or one that resumes the run."""

    event: Literal["run_started"] = "run_started"
    name: str
    """The name of the job."""
    ranks: int
    layout: str | None = None
    """The layout of the ranks, with the ranks of each dimension."""
    threads: int
    """Threads of each rank."""
    device: str
    """The kind or the full name of the device of a rank."""
    parameters: int
    """Parameters of the model."""
    data: str
    """Fingerprint of the corpus and of the settings with which it is read."""
    first_step: int = 1
    """The first step of this attempt, counted from 1."""
    last_step: int
    """The step at which the run is finished."""
    resumed_from: str | None = None
    """The checkpoint, as a path in the run folder."""
    num_classes: int | None = None
    """The size of the vocabulary, or the number of classes. A model that knows nothing has loss ln(num_classes)."""
    steps_per_epoch: float | None = None
    """Steps in one pass over the training split."""
    validation_targets: float | None = None
    """Target tokens, or rows, of an evaluation on the validation split; beyond 4,096 rows it is extrapolated."""
    checkpoint_every: int | None = None
    """Steps between checkpoints."""
    checkpoint_every_minutes: float | None = None
    """Minutes between checkpoints, where steps are not given. Without both only the end is saved."""


class ParameterServerStepStats(StoredRecord):
    """The work of a parameter server in a step."""

    staleness_histogram: tuple[int, ...]
    """Numbers of work items computed with parameters that missed 0, 1, 2 and so on of the earlier updates."""
    steps_behind_histogram: tuple[int, ...]
    """Numbers of work items computed with all earlier steps, all but the last one, and so on.
    `layout.server.staleness` bounds this."""
    workers: int
    """Connected workers."""
    sent_bytes: int
    """Bytes sent by all servers since the last reported step, as far as they have reported."""
    received_bytes: int
    waiting_bytes: int
    """Bytes in the queues of the servers at their last report."""


class PipelineRankUsage(StoredRecord):
    """The memory and the computation of the ranks at one place of a pipeline."""

    stages: tuple[int, ...]
    """The stages of the model that they hold, counted from 0."""
    memory_bytes: int
    """The most memory that one of them has held so far."""
    compute_s: float
    """The time in which they compute forwards and backwards, on average; in the rest of the step they mostly wait."""


class StepDone(_RunEventBase):
    """A step of the optimizer is done."""

    event: Literal["step_done"] = "step_done"
    step: int
    """Steps that the run has done, including this one."""
    loss: float
    """Mean over the target tokens of the whole step, all ranks and micro-batches."""
    target_tokens: float
    """The sum of the weights of the targets that the mean is taken over."""
    tokens: int
    """Tokens that the model has read in this step, on all ranks."""
    learning_rate: float
    balance_loss: float | None = None
    """The part of `loss` that balances the experts of a mixture."""
    grad_norm: float | None = None
    """The global norm before clipping."""
    skipped: bool = False
    """The loss or a gradient was not finite, and the update was skipped."""
    loss_scale: int | None = None
    """With fp16, the factor of the mean loss in backward. `loss` and `grad_norm` are divided by it."""
    step_time_s: float
    tokens_per_s: float
    """Tokens per second of all ranks."""
    mfu: float | None = None
    """Model FLOPs utilization: FLOPs of the model as a fraction of the peak of all devices."""
    compiled_graphs: int = 0
    """Graphs that rank 0 compiled in this step, whose time no median of the run counts."""
    memory_bytes: int
    """The most memory that a rank has held so far: allocated on a CUDA device, resident on the CPU. With
    independent replicas it is that of the first, and with a parameter server that of the coordinator."""
    memory_rank: int = 0
    """The rank that held it."""
    pipeline: tuple[PipelineRankUsage, ...] = ()
    """The ranks of a pipeline in their order, where there is one."""
    epoch: float = 0.0
    """Passes over the training split so far."""
    spans: tuple[TraceSpan, ...] = ()
    """Spans of rank 0 since the last reported step, in order of start."""
    server: ParameterServerStepStats | None = None
    """Set in a run with a parameter server."""
    counters: dict[str, float] = Field(default_factory=dict)
    """Counters of rank 0 over the same time, such as bytes sent."""


class GradientsOverflowed(_RunEventBase):
    """A gradient was not finite in fp16, and the loss was, so the step updated nothing. This is not a divergence."""

    event: Literal["gradients_overflowed"] = "gradients_overflowed"
    step: int
    loss_scale: int
    """The factor of the mean loss in backward."""
    next_loss_scale: int
    """The scale of the next step: half, or the same if it is static or 1."""


class RecomputationChosen(_RunEventBase):
    """The blocks have the policies of `memory.recompute = "auto"`, from the step after this one."""

    event: Literal["recomputation_chosen"] = "recomputation_chosen"
    step: int
    budget: int
    """`memory.budget`, in bytes."""
    kept: int
    """Blocks whose saved tensors are all kept."""
    selective: int
    full: int
    predicted_peak: int
    """Live bytes of the rank that needs most."""
    seconds_per_microbatch: float
    """The time of recomputation, on the rank where it takes longest."""


NumericsKind = Literal["weights", "gradients", "activations", "activation_gradients"]


class LostInFormat(StoredRecord):
    """The finite values other than zero that a number format does not hold as normal numbers."""

    dtype: str
    vanished: int
    """Rounded to zero."""
    subnormal: int
    """Below the smallest normal number, with fewer digits than others."""
    saturated: int
    """Beyond the largest number."""

    @property
    def underflow(self) -> int:
        """Values below the normal numbers."""
        return self.vanished + self.subnormal


class TensorNumerics(StoredRecord):
    """The values of one tensor in a step, on all ranks, each element counted once."""

    kind: NumericsKind
    name: str
    """The name of a parameter, or of the module whose output it is."""
    elements: int
    """Elements; those of an activation in all micro-batches."""
    zeros: int
    infinite: int
    nan: int
    formats: tuple[LostInFormat, ...]
    """Losses in the order of `formats` of the event."""
    lowest_exponent: int
    exponents: tuple[int, ...]
    """Numbers of values that are at least 2^e and less than 2^(e+1), for e from `lowest_exponent` on."""


class NumericsMeasured(_RunEventBase):
    """The numerics monitor has counted the values of a step before its update, by tensor and exponent."""

    event: Literal["numerics_measured"] = "numerics_measured"
    step: int
    formats: tuple[str, ...]
    """The formats in which losses are counted: the one that the run computes in first, and float16."""
    backward_scale: float | None = None
    """With fp16, the first gradient in the backward of a sum of losses: `loss_scale` / targets, as a power of two. Both
    kinds of gradients are counted with this factor."""
    tensors: tuple[TensorNumerics, ...]


class RoutedLayerLoads(StoredRecord):
    """The routing of one layer of a mixture of experts in a step, on all ranks."""

    name: str
    """The name of the module that has the experts and their router."""
    loads: tuple[int, ...]
    """Assignments of tokens to each expert, before any is dropped."""
    max_over_mean: float
    """The largest load over the mean; 1 where all are equal."""
    dropped: int = 0
    """Assignments that a limit of each expert dropped."""
    entropy: float
    """The mean over tokens of the entropy of their scores, in nats; ln(experts) where a router prefers none."""


class ExpertsMeasured(_RunEventBase):
    """The loads of the experts of a mixture in a reported step, before its update."""

    event: Literal["experts_measured"] = "experts_measured"
    step: int
    layers: tuple[RoutedLayerLoads, ...]

    @property
    def worst(self) -> RoutedLayerLoads:
        """The layer whose loads differ most."""
        return max(self.layers, key=lambda layer: layer.max_over_mean)


class EvaluationDone(_RunEventBase):
    """The model was evaluated on held-out data."""

    event: Literal["evaluation_done"] = "evaluation_done"
    step: int
    """Steps that the model had been trained for."""
    split: str
    loss: float
    targets: float
    """Target tokens or samples that the loss is a mean over."""
    perplexity: float | None = None
    accuracy: float | None = None
    """Fraction of the targets that the model ranks first."""


class CheckpointStarted(_RunEventBase):
    """Ranks begin to write a checkpoint while they go on training."""

    event: Literal["checkpoint_started"] = "checkpoint_started"
    step: int
    path: str
    """The path in the run folder that the checkpoint gets when it is complete."""


class CheckpointSaved(_RunEventBase):
    """A complete checkpoint is on disk."""

    event: Literal["checkpoint_saved"] = "checkpoint_saved"
    step: int
    path: str
    """A path in the run folder."""
    size_bytes: int
    """Bytes of the tensors of the model and its optimizer, whatever the layout."""
    duration_s: float
    """From the end of the step until the checkpoint had its name."""
    stall_s: float = 0.0
    """Seconds of it in which training waited: all of them with `checkpoint.mode = "sync"`."""
    copied_bytes: int = 0
    """Bytes that ranks copied first, because an update was about to change values that were not written yet."""


class TextSampled(_RunEventBase):
    """Text that the model wrote."""

    event: Literal["sample_text"] = "sample_text"
    step: int
    prompt: str
    text: str


class ReplicaCheckDone(_RunEventBase):
    """Ranks have compared numbers that must be equal on them, or must add up."""

    event: Literal["ranks_compared"] = "ranks_compared"
    step: int
    ranks: int
    """Ranks that were compared: all, or with `[outer]` the ranks of the first replica."""
    same_machines: bool
    """All use the same device, threads and torch. If not, losses are not compared, since their last bits may differ."""
    violations: tuple[str, ...]
    """Invariants that do not hold, with a possible cause; empty when all hold."""
    duration_s: float


class ProfileSaved(_RunEventBase):
    """The window of torch.profiler is on disk."""

    event: Literal["profile_saved"] = "profile_saved"
    first_step: int
    last_step: int
    path: str
    """A path in the run folder; chrome://tracing and ui.perfetto.dev open the file."""


class WarningIssued(_RunEventBase):
    """A remark for the user; the run continues."""

    event: Literal["warned"] = "warned"
    text: str


RunEndReason = Literal["finished", "stopped", "diverged", "disagreed", "save_failed", "failed"]
# Exit code -> reason; any other is "failed".
RUN_END_REASONS: dict[int, RunEndReason] = {
    130: "stopped",
    137: "stopped",
    errors.TrainingDivergedError.exit_code: "diverged",
    errors.ReplicaMismatchError.exit_code: "disagreed",
    errors.CheckpointSaveError.exit_code: "save_failed",
}


class StepPredicted(_RunEventBase):
    """The planner's prediction of a step of this run, after the last one."""

    event: Literal["step_predicted"] = "step_predicted"
    step_time_s: float | None
    """None if nothing describes the links between the ranks."""
    live_bytes: int
    """The most bytes of tensors of the rank that needs most."""


class RunEnded(_RunEventBase):
    """The attempt ends. Without this event it was killed or is still running."""

    event: Literal["run_ended"] = "run_ended"
    reason: RunEndReason
    """Only `finished` means that the run reached its last step. `stopped` is Ctrl-C or SIGTERM, `disagreed` a failed
    replica check."""
    steps: int
    """Steps that the run has done, in all attempts."""
    message: str = ""
    """The error message."""


_EventInStep = (
    StepDone
    | GradientsOverflowed
    | RecomputationChosen
    | NumericsMeasured
    | ExpertsMeasured
    | EvaluationDone
    | CheckpointStarted
    | CheckpointSaved
    | TextSampled
    | ReplicaCheckDone
    | ProfileSaved
)
Event = RunStarted | _EventInStep | WarningIssued | StepPredicted | RunEnded
_EVENT_ADAPTER: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="event")])


def parse_event(line: str | bytes) -> Event:
    """The event of one line of `events.jsonl`; raises ValueError if the line is not an event."""
    return _EVENT_ADAPTER.validate_json(line)


def read_events(path: Path) -> list[Event]:
    """All events of all attempts. An incomplete last line, left by a kill, is skipped."""
    with errors.convert_os_errors(f"read {path}", f"give an {EVENTS_FILE} of a run folder"):
        content = path.read_bytes()
    events = []
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            events.append(parse_event(line))
        except ValidationError as error:
            problem = f"is not an event that this version knows: {error.errors(include_url=False)[0]['msg']}"
            raise errors.InputError(f"line {number} of {path} {problem}; repair or move the file") from None
    return events


def effective_events(events: Iterable[Event]) -> list[Event]:
    """The events without steps that a later attempt has repeated."""
    kept: list[Event] = []
    for event in events:
        if isinstance(event, RunStarted):
            kept = [old for old in kept if getattr(old, "step", 0) < event.first_step]
        kept.append(event)
    return kept


def read_steps(path: Path) -> list[StepDone]:
    """Each step of the run once."""
    return [event for event in effective_events(read_events(path)) if isinstance(event, StepDone)]
