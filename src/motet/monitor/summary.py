"""`summary.json`: the outcome of a run in a few numbers, computed from its events, replaced completely or not at all.

It says `running` from the start of an attempt: the outcome of an earlier one is never taken for that of a killed one.

Counts of the numerics monitor, added up by kind of tensor: for the console, the summary and drawings.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Literal, get_args

from pydantic import Field, ValidationError

from motet.core.errors import CheckpointSaveError, InputError, check_input, convert_os_errors
from motet.core.text_files import write_file_atomically
from motet.monitor.events import (
    EvaluationDone,
    Event,
    GradientsOverflowed,
    LostInFormat,
    NumericsKind,
    NumericsMeasured,
    PipelineRankUsage,
    RunEnded,
    RunEndReason,
    RunStarted,
    StepDone,
    StepPredicted,
    StoredRecord,
    TensorNumerics,
    effective_events,
)

KINDS: tuple[NumericsKind, ...] = get_args(NumericsKind)


def total_of(kind: NumericsKind, tensors: Iterable[TensorNumerics]) -> TensorNumerics | None:
    """The counts of all tensors of one kind together, None without any."""
    members = [tensor for tensor in tensors if tensor.kind == kind]
    if not members:
        return None
    by_exponent = Counter[int]()
    for tensor in members:
        by_exponent.update(dict(enumerate(tensor.exponents, start=tensor.lowest_exponent)))
    lowest, highest = (min(by_exponent), max(by_exponent)) if by_exponent else (0, -1)
    return TensorNumerics(
        kind=kind,
        name=f"all {len(members)}",
        elements=sum(tensor.elements for tensor in members),
        zeros=sum(tensor.zeros for tensor in members),
        infinite=sum(tensor.infinite for tensor in members),
        nan=sum(tensor.nan for tensor in members),
        formats=tuple(map(_sum_losses, zip(*(tensor.formats for tensor in members), strict=True))),
        lowest_exponent=lowest,
        exponents=tuple(by_exponent[exponent] for exponent in range(lowest, highest + 1)),
    )


def _sum_losses(losses: Sequence[LostInFormat]) -> LostInFormat:
    counts = {key: sum(getattr(each, key) for each in losses) for key in ("vanished", "subnormal", "saturated")}
    return LostInFormat(dtype=losses[0].dtype, **counts)


def loss_in(tensor: TensorNumerics, dtype: str) -> LostInFormat:
    """The losses of one format."""
    return next(each for each in tensor.formats if each.dtype == dtype)


def percent(count: int, elements: int) -> str:
    """A share in per cent, which is 0 only for none and 100 only for all."""
    if count in (0, elements):
        return "0%" if count == 0 else "100%"
    share = 100 * count / elements
    return "<0.1%" if share < 0.1 else ">99.9%" if share > 99.9 else f"{share:.1f}%"


def numerics_line(event: NumericsMeasured, dtype: str) -> str:
    """A measurement in one line: the losses of a format for each kind of tensor."""
    parts = []
    for kind in KINDS:
        if total := total_of(kind, event.tensors):
            loss = loss_in(total, dtype)
            shares = {
                "zero": total.zeros,
                "underflow": loss.underflow,
                "overflow": loss.saturated + total.infinite,
                "NaN": total.nan,
            }
            words = [f"{percent(count, total.elements)} {word}" for word, count in shares.items() if count]
            parts.append(f"{kind.replace('_', ' ')} {', '.join(words) or 'all normal'}")
    scale = "" if event.backward_scale is None else f" (gradients x {event.backward_scale:g})"
    return f"step {event.step} in {dtype}{scale}: {'; '.join(parts)}"


def measurement_at(run: Iterable[Event], step: int | None, where: str) -> NumericsMeasured:
    """The measurement of a step, by default the last one."""
    measured = {event.step: event for event in effective_events(run) if isinstance(event, NumericsMeasured)}
    check_input(
        measured,
        f"{where} has no measurement of the numerics monitor; train with monitor.numerics_every=N to have one every N "
        "steps",
    )
    step = max(measured) if step is None else step
    shown = [*measured] if len(measured) <= 8 else [*list(measured)[:7], "...", max(measured)]
    check_input(
        step in measured,
        f"--step {step}: {where} has measurements of steps {', '.join(map(str, shown))}; give one of these",
    )
    return measured[step]


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
    """Median over the steps in which nothing was compiled."""
    step_time_s: float | None = None
    """Median over the steps in which nothing was compiled."""
    mfu: float | None
    """Median over the steps in which nothing was compiled."""
    ranks: int
    parameters: int
    peak_bytes: int | None
    """The most memory that a rank has held."""
    peak_rank: int | None = None
    """The rank that held it."""
    predicted_step_time_s: float | None = None
    """The planner's prediction of a step; null where a rate is not known."""
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
    timed = [step for step in steps if not step.compiled_graphs] or steps
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
        tokens_per_s=_median(step.tokens_per_s for step in timed),
        step_time_s=_median(step.step_time_s for step in timed),
        # Steps before the one that showed that the peak was wrong have a share of it.
        mfu=None if any(step.mfu is None for step in steps) else _median(step.mfu for step in timed),
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
        problem = str(error)
        if isinstance(error, ValidationError):
            detail = error.errors(include_url=False)[0]
            problem = ": ".join([*map(str, detail["loc"]), detail["msg"]])
        raise InputError(f"{path} is not the summary of a run ({problem}); remove it: a run writes it again") from None


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
