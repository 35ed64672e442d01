"""The display of a run: a live line at the bottom of a terminal, or plain lines in a pipe or a log file.
On a terminal one step of every twentieth of the run stays on the screen; in a pipe each reported step is one line."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from motet.core.units import format_bytes, format_count, format_duration
from motet.monitor import events
from motet.monitor.sinks import Callback
from motet.monitor.stdout_stderr import stdout_console
from motet.monitor.summary import EvaluationSummary, RunSummary, numerics_line, summarize

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.live import Live

_STEP_LINES_KEPT = 20  # Lines of steps that a run leaves on a terminal
_REFRESH_S = 0.1


class ConsoleSink(Callback):
    """Shows a run on `screen`, by default stdout."""

    def __init__(self, folder: Path, screen: Console | None = None) -> None:
        self._folder, self._screen = folder, screen or stdout_console()
        self._start: events.RunStarted | None = None
        self._first_step: events.StepDone | None = None  # The step from which the time left is extrapolated
        self._has_folder = False
        self._experts: events.ExpertsMeasured | None = None
        self._drawn_at, self._twentieths_done = -math.inf, 0
        self._live: Live | None = None
        self._exit_stack = ExitStack()

    def on_start(self, event: events.RunStarted) -> None:
        self._start, self._first_step, self._has_folder = event, None, False
        self._print("\n".join(start_lines(event)))
        if self._screen.is_interactive:
            self._live = self._exit_stack.enter_context(_live_display(self._screen))

    def on_step(self, event: events.StepDone) -> None:
        assert self._start is not None, "events begin with RunStarted"
        if self._first_step is None or self._first_step.compiled_graphs:
            self._first_step = event  # Steps that compile say nothing about the time of others
        if not self._has_folder:  # The folder of a start that is refused before is removed
            self._has_folder = True
            self._print(checkpoint_line(self._start, self._folder))
        last = self._start.last_step
        line = step_line(event, last, seconds_left(self._first_step, event, last))
        if self._experts is not None and self._experts.step == event.step:
            line = f"{line}  {experts_text(self._experts)}"
        if self._live is None:
            self._print(line)
            return
        due = event.time - self._drawn_at >= _REFRESH_S
        self._drawn_at = event.time if due else self._drawn_at
        self._live.update(_progress(event.step, last, line), refresh=due)
        # Counted from 1, so that the first step of an attempt is always kept.
        twentieths_done = 1 + event.step * _STEP_LINES_KEPT // last
        if twentieths_done > self._twentieths_done or event.skipped:
            self._twentieths_done = twentieths_done
            self._screen.print(line, no_wrap=True, overflow="ellipsis", highlight=False)

    def on_experts(self, event: events.ExpertsMeasured) -> None:
        self._experts = event  # A part of the line of its step

    def on_recomputation(self, event: events.RecomputationChosen) -> None:
        self._print(
            f"recomputation from step {event.step + 1}: {event.full} blocks in full, {event.selective} selective, "
            f"{event.kept} kept; {format_bytes(event.predicted_peak)} predicted of {format_bytes(event.budget)}"
        )

    def on_numerics(self, event: events.NumericsMeasured) -> None:
        wide = event.formats[0] in ("float32", "float64")  # Such a format loses next to nothing
        for dtype in event.formats[1:] if wide else event.formats:
            self._print(f"numerics of {numerics_line(event, dtype)}")

    def on_evaluation(self, event: events.EvaluationDone) -> None:
        self._print(f"{event.split} after step {event.step}: {evaluation_text(event)}")

    def on_checkpoint(self, event: events.CheckpointSaved) -> None:
        waited = f", training waited {format_duration(event.stall_s)}" if event.stall_s < event.duration_s else ""
        took = f"{format_bytes(event.size_bytes)} in {format_duration(event.duration_s)}{waited}"
        self._print(f"saved {event.path} ({took})")

    def on_sample(self, event: events.TextSampled) -> None:
        self._print(f"sample after step {event.step}:")
        self._print(f"{event.prompt}{event.text}", style="italic")

    def on_replica_check(self, event: events.ReplicaCheckDone) -> None:
        for text in event.violations:
            self._print(f"step {event.step}: {text}", style="yellow")

    def on_profile(self, event: events.ProfileSaved) -> None:
        self._print(f"profile of steps {event.first_step} to {event.last_step}: {event.path}")

    def on_warning(self, event: events.WarningIssued) -> None:
        self._print(f"warning: {event.text}", style="yellow")

    def on_end(self, event: events.RunEnded) -> None:
        self.close()
        if self._start and not event.steps and event.reason != "finished":
            self._print(f"warning: the run ends after 0 of {self._start.last_step} steps", style="yellow")
        if event.reason == "failed" and self._first_step is None:  # The folder of a start that is refused is removed
            return
        rows = summary_rows(summarize(events.read_events(self._folder / events.EVENTS_FILE)), self._folder)
        width = max(len(name) for name, _ in rows) + 3
        self._print("\n".join(["", *(f"{name:{width}}{value}" for name, value in rows)]))

    def close(self) -> None:
        self._exit_stack.close()
        self._live = None

    def _print(self, text: str, style: str | None = None) -> None:
        self._screen.print(text, style=style, highlight=False)


def start_lines(event: events.RunStarted) -> list[str]:
    """The lines of a run before its first step."""
    counts = (event.ranks, "rank"), (event.threads, "thread")
    ranks, threads = (f"{count} {noun}{'s' * (count > 1)}" for count, noun in counts)
    ranks += f" ({event.layout})" if event.layout and event.ranks > 1 else ""
    lines = [f"{event.name}: {format_count(event.parameters)} parameters on {ranks} x {threads}, {event.device}"]
    if event.num_classes:
        lines.append(f"a model that knows nothing has loss ln({event.num_classes}) = {math.log(event.num_classes):.4f}")
    lines.append(_extent_line(event))
    if event.resumed_from is not None:
        lines.append(f"resumed from {event.resumed_from}; next is step {event.first_step} of {event.last_step}")
    return lines


def checkpoint_line(event: events.RunStarted, folder: Path) -> str:
    """The times and the folder of checkpoints; shown with the first completed step."""
    every, minutes = event.checkpoint_every, event.checkpoint_every_minutes
    times = [f"every {every} steps"] if every else []
    times += [f"every {minutes:g} minutes"] if minutes else []
    when = " and ".join(times) or "only at the end"
    return f"checkpoints {when}, in {folder / 'checkpoints'}"


def _extent_line(event: events.RunStarted) -> str:
    parts = [f"{event.last_step:,} step{'s' * (event.last_step != 1)}"]
    if event.steps_per_epoch:
        epochs = event.last_step / event.steps_per_epoch
        parts.append(f"{event.steps_per_epoch:,.4g} an epoch, so {epochs:.3g} epochs")
    if event.validation_targets is not None:
        parts.append(f"validation on {event.validation_targets:,.0f} targets")
    return "; ".join(parts)


def step_line(event: events.StepDone, last_step: int, left_s: float) -> str:
    """A step in one line, without unknown values."""
    parts = [
        f"step {event.step:>{len(str(last_step))}}/{last_step}",
        f"loss {event.loss:.4f}" + (" (skipped)" if event.skipped else ""),
        f"{format_count(event.tokens_per_s)} tokens/s",
        "" if event.mfu is None else f"{event.mfu:.1%} of peak",
        format_bytes(event.memory_bytes) + _where(event.memory_rank, event.pipeline),
        f"{format_duration(left_s)} left" if event.step < last_step else "",
        "" if event.grad_norm is None else f"grad {event.grad_norm:.3g}",
        f"lr {event.learning_rate:.2e}",
        "" if event.loss_scale is None else f"scale {event.loss_scale}",
        f"compiled {event.compiled_graphs} graph{'s' * (event.compiled_graphs > 1)}" if event.compiled_graphs else "",
        "" if event.server is None else parameter_server_text(event.server),
    ]
    return "  ".join(part for part in parts if part)


def experts_text(event: events.ExpertsMeasured) -> str:
    """The layer of a mixture whose loads differ most, and the assignments that limits dropped."""
    worst, dropped = event.worst, sum(layer.dropped for layer in event.layers)
    lost = f", {dropped:,} dropped" if dropped else ""
    return f"fullest expert {worst.max_over_mean:.2f} x mean in {worst.name}{lost}"


def parameter_server_text(stats: events.ParameterServerStepStats) -> str:
    """The work of a parameter server in a step, in a few words."""
    counts, max_steps = stats.staleness_histogram, len(stats.steps_behind_histogram) - 1
    mean = sum(late * count for late, count in enumerate(counts)) / sum(counts) if sum(counts) else 0.0
    traffic = f"{format_bytes(stats.sent_bytes + stats.received_bytes)}, {format_bytes(stats.waiting_bytes)} queued"
    return f"stale {mean:.1f}, at most {len(counts) - 1} ({max_steps} steps)  servers {traffic}"


def seconds_left(first: events.StepDone, now: events.StepDone, last_step: int) -> float:
    """The time left at the pace since the first step of this attempt, including evaluations and checkpoints."""
    steps = now.step - first.step
    pace_s = (now.time - first.time) / steps if steps > 0 else now.step_time_s
    return max(0.0, pace_s * (last_step - now.step))


def evaluation_text(event: events.EvaluationDone | EvaluationSummary) -> str:
    """The metrics of an evaluation."""
    perplexity = "" if event.perplexity is None else f", perplexity {event.perplexity:.4g}"
    return f"loss {event.loss:.4f}{perplexity}" + ("" if event.accuracy is None else f", accuracy {event.accuracy:.1%}")


def summary_rows(summary: RunSummary, folder: Path) -> list[tuple[str, str]]:
    """The table at the end of a run."""
    rows = [(summary.exit_reason.replace("_", " "), f"{summary.steps} of {summary.last_step} steps")]
    if summary.first_loss is not None or summary.final_loss is not None:
        losses = [f"{loss:.4f}" for loss in (summary.first_loss, summary.final_loss) if loss is not None]
        uniform = "" if (u := summary.uniform_loss) is None else f"   (ln({math.exp(u):.0f}) = {u:.4f})"
        rows.append(("loss", " -> ".join(losses) + uniform))
    rows += [(split, evaluation_text(result)) for split, result in summary.evaluations.items()]
    if summary.tokens_per_s is not None:
        mfu = "" if summary.mfu is None else f", {summary.mfu:.1%} of peak"
        rows.append(("median", f"{format_count(summary.tokens_per_s)} tokens/s{mfu}"))
    if summary.tokens:
        rows.append(("tokens", format_count(summary.tokens)))
    if summary.peak_bytes is not None:
        where = _where(summary.peak_rank, summary.pipeline)
        rows.append(("peak memory", format_bytes(summary.peak_bytes) + where))
    if summary.predicted_live_bytes is not None:
        rows.append(("predicted", predicted_text(summary)))
    for usage in summary.pipeline:
        share = usage.compute_s / summary.step_time_s if summary.step_time_s else 0.0
        rows.append((stages_text(usage.stages), f"{format_bytes(usage.memory_bytes)}, computes {share:.0%} of a step"))
    return [*rows, ("run folder", str(folder))]


def predicted_text(summary: RunSummary) -> str:
    """The planner's prediction, next to the measured time."""
    tensors = f"{format_bytes(summary.predicted_live_bytes or 0)} of tensors"
    seconds, measured = summary.predicted_step_time_s, summary.step_time_s
    if seconds is None or not measured:
        return tensors
    return f"{format_duration(seconds)} a step (measured {format_duration(measured)}), {tensors}"


def stages_text(stages: tuple[int, ...]) -> str:
    """Stages of a pipeline, such as `stages 0, 3`."""
    return f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"


def _where(rank: int | None, pipeline: tuple[events.PipelineRankUsage, ...]) -> str:
    """The rank that holds the most memory of a pipeline, and its stages."""
    most = max(pipeline, key=attrgetter("memory_bytes"), default=None)
    return "" if most is None else f" on rank {rank} ({stages_text(most.stages)})"


def _progress(step: int, last_step: int, line: str) -> Group:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    return Group(Text(line, no_wrap=True, overflow="ellipsis"), ProgressBar(total=last_step, completed=step))


@contextmanager
def _live_display(screen: Console) -> Iterator[Live]:
    """A live display at the bottom; prints, warnings and logs of this process scroll above it."""
    from rich.live import Live

    streams = sys.stdout, sys.stderr
    with Live(console=screen, auto_refresh=False, transient=True) as live, ExitStack() as undo:
        # rich takes sys.stdout and sys.stderr over, but a log handler keeps the stream it was made with.
        loggers = [logging.root, *logging.root.manager.loggerDict.values()]
        handlers = [handler for logger in loggers if isinstance(logger, logging.Logger) for handler in logger.handlers]
        for handler in (handler for handler in handlers if isinstance(handler, logging.StreamHandler)):
            for stream, taken_over in zip(streams, (sys.stdout, sys.stderr), strict=True):
                if handler.stream is stream:
                    handler.setStream(taken_over)
                    undo.callback(handler.setStream, stream)
        yield live
