"""`summary.json`: the outcome of a run in a few numbers, computed from its events, replaced completely or not at all.

It says `running` from the start of an attempt: the outcome of an earlier one is never taken for that of a killed one.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from motet.core.atomic_file import write_file_atomically
from motet.core.errors import CheckpointSaveError, InputError, check_input, convert_os_errors
from motet.monitor.events import (
    EvaluationDone,
    Event,
    GradientsOverflowed,
    NumericsKind,
    NumericsMeasured,
    PipelineRankUsage,
    RunEnded,
    RunEndReason,
    RunStarted,
    StepDone,
    StepPredicted,
    StoredRecord,
    effective_events,
)
from motet.monitor.numerics_report import KINDS, total_of

SUMMARY_FILE = "summary.json"


class EvaluationSummary(StoredRecord):
    """The last evaluation on one split."""

    step: int
    loss: float
    targets: float
    perplexity: float | None
    accuracy: float | None


class NumericsSummary(StoredRecord):
    """All tensors of one kind in the last measurement of the numerics monitor, as fractions of their values."""

    zeros: float
    not_finite: float
    underflow: dict[str, float]
    """By format: values that become zero or subnormal in it."""
    overflow: dict[str, float]
    """By format: finite values beyond its largest number."""


class RunSummary(StoredRecord):
    """The outcome of a run over all its attempts."""

    name: str
    finished: bool
    """The last step was reached."""
    exit_reason: RunEndReason | Literal["running"]
    message: str
    steps: int
    last_step: int
    """The step at which the run is finished."""
    first_loss: float | None
    final_loss: float | None
    uniform_loss: float | None
    """ln(num_classes): the loss of a model that gives all classes the same probability."""
    tokens: int
    """Tokens read by the model. A step without an event counts as many as the next step with one."""
    tokens_per_s: float | None
    """Median over the steps."""
    step_time_s: float | None = None
    """Median over the steps."""
    mfu: float | None
    """Median over the steps."""
    ranks: int
    parameters: int
    peak_bytes: int | None
    """The most memory that a rank has held."""
    peak_rank: int | None = None
    """The rank that held it."""
    predicted_step_time_s: float | None = None
    """The planner's prediction of a step; null where something is not known."""
    predicted_live_bytes: int | None = None
    """The planner's prediction of the most bytes of tensors that a rank holds."""
    pipeline: tuple[PipelineRankUsage, ...] = ()
    """The ranks of a pipeline in their order: the most memory, and the median time of computing."""
    loss_scale: int | None = None
    """With fp16, the scale of the loss in the last step."""
    overflows: int = 0
    """With fp16, the steps that updated nothing because a gradient was not finite."""
    numerics: dict[NumericsKind, NumericsSummary] = Field(default_factory=dict)
    """By kind of tensor; empty without `monitor.numerics_every`."""
    attempts: int
    evaluations: dict[str, EvaluationSummary]
    """By split."""


def summarize(events: Iterable[Event]) -> RunSummary:
    """The outcome of a run from all its events."""
    run = effective_events(events)
    starts = [event for event in run if isinstance(event, RunStarted)]
    steps = [event for event in run if isinstance(event, StepDone)]
    check_input(starts, "no run_started among the events; give the events of a whole run")
    start, last = starts[-1], next(event for event in reversed(run) if isinstance(event, RunStarted | RunEnded))
    end = last if isinstance(last, RunEnded) else None
    last_reported_step = steps[-1].step if steps else start.first_step - 1
    peak = max(steps, key=attrgetter("memory_bytes"), default=None)
    predicted = next((event for event in reversed(run) if isinstance(event, StepPredicted)), None)
    evaluations, fields = (e for e in run if isinstance(e, EvaluationDone)), set(EvaluationSummary.model_fields)
    return RunSummary(
        name=start.name,
        finished=end is not None and end.reason == "finished",
        exit_reason=end.reason if end else "running",
        message=end.message if end else "",
        steps=end.steps if end else last_reported_step,
        last_step=start.last_step,
        first_loss=steps[0].loss if steps and steps[0].step == 1 else None,
        final_loss=steps[-1].loss if steps else None,
        uniform_loss=math.log(start.num_classes) if start.num_classes else None,
        tokens=_count_tokens(steps),
        tokens_per_s=_median(step.tokens_per_s for step in steps),
        step_time_s=_median(step.step_time_s for step in steps),
        mfu=_median(step.mfu for step in steps),
        ranks=start.ranks,
        parameters=start.parameters,
        peak_bytes=peak.memory_bytes if peak else None,
        peak_rank=peak.memory_rank if peak else None,
        predicted_step_time_s=predicted.step_time_s if predicted else None,
        predicted_live_bytes=predicted.live_bytes if predicted else None,
        pipeline=_pipeline_usage([step.pipeline for step in steps if step.pipeline]),
        loss_scale=steps[-1].loss_scale if steps else None,
        overflows=sum(isinstance(event, GradientsOverflowed) for event in run),
        numerics=_numerics([event for event in run if isinstance(event, NumericsMeasured)]),
        attempts=len(starts),
        evaluations={event.split: EvaluationSummary(**event.model_dump(include=fields)) for event in evaluations},
    )


def _numerics(measured: Sequence[NumericsMeasured]) -> dict[NumericsKind, NumericsSummary]:
    totals = (total_of(kind, measured[-1].tensors) for kind in KINDS) if measured else ()
    return {
        total.kind: NumericsSummary(
            zeros=total.zeros / total.elements,
            not_finite=(total.infinite + total.nan) / total.elements,
            underflow={loss.dtype: loss.underflow / total.elements for loss in total.formats},
            overflow={loss.dtype: loss.saturated / total.elements for loss in total.formats},
        )
        for total in totals
        if total is not None
    }


def write_summary(summary: RunSummary, folder: Path) -> None:
    """Replace `summary.json` atomically, or raise and leave the old one."""
    path, remedy = folder / SUMMARY_FILE, "free some space or repair the folder"
    with convert_os_errors(f"write {path}", remedy, CheckpointSaveError):
        write_file_atomically(path, (summary.model_dump_json(indent=2) + "\n").encode())


def read_summary(folder: Path) -> RunSummary:
    """The summary of a run folder."""
    path = folder / SUMMARY_FILE
    try:
        return RunSummary.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        what = str(error)
        if isinstance(error, ValidationError):
            detail = error.errors(include_url=False)[0]
            what = ": ".join([*map(str, detail["loc"]), detail["msg"]])
        raise InputError(f"{path} is not the summary of a run ({what}); remove it, for a run writes it anew") from None


def _count_tokens(steps: list[StepDone]) -> int:
    first = steps[0].tokens * steps[0].step if steps else 0
    return first + sum(after.tokens * (after.step - before.step) for before, after in pairwise(steps))


def _pipeline_usage(steps: Sequence[tuple[PipelineRankUsage, ...]]) -> tuple[PipelineRankUsage, ...]:
    """Each rank of a pipeline over all steps of the last layout."""
    alike = [usages for usages in steps if [u.stages for u in usages] == [u.stages for u in steps[-1]]]
    return tuple(
        PipelineRankUsage(
            stages=usages[0].stages,
            memory_bytes=max(usage.memory_bytes for usage in usages),
            compute_s=statistics.median(usage.compute_s for usage in usages),
        )
        for usages in zip(*alike, strict=True)
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
