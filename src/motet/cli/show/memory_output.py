"""The output of `motet show memory`: the live bytes of a step by category, measured and predicted."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from motet.cli.environment_variables import read_environment
from motet.cli.job_arguments import load_job_or_config, parse_bytes
from motet.cli.output import OutputLine, check_writable, log, print_lines, show_progress, table_lines, write_output_file
from motet.core.errors import check_input
from motet.core.units import format_bytes
from motet.data.corpus.prepare import prepare_data
from motet.memory.memory_timeline import MemoryPanel, MemoryTimeline, draw_svg, draw_text
from motet.monitor.stdout_stderr import print_json
from motet.train.job import Job
from motet.train.launch.failures import STOP_SIGNALS, handle_signals, interrupt
from motet.train.launch.preflight import check_data, check_job
from motet.train.memory_check.measure_ranks import measure_step_memory, reason_to_predict
from motet.train.memory_check.predicted_ranks import predict_step_memory
from motet.train.memory_check.step_prediction import MemoryComparison, StepMemory

_SHOWN_PANELS, _SHOWN_OPERATORS, _JSON_COLUMNS = 4, 6, 200


def show_memory(
    source: str,
    overrides: list[str],
    ranks: int | None,
    *,
    predict: bool,
    budget: str | None,
    svg: Path | None,
    json: bool,
) -> None:
    """Measure a step of a job on CPU ranks, or predict it, and draw it on the terminal or into a file."""
    check_writable(svg)
    budget_bytes, job = None if budget is None else parse_bytes(budget), load_job_or_config(source, overrides)
    budget_bytes = job.memory.budget if budget_bytes is None else budget_bytes
    ranks = ranks or job.run.ranks
    check_input(
        not job.layout.uses_server_processes,
        f"layout.data = {job.layout.data!r}: motet show memory measures ranks that train together, not servers and "
        "their workers; leave layout.data out",
    )
    layout = check_job(job, ranks)
    remark = "" if predict else reason_to_predict(job, layout, ranks)
    if predict or remark:
        memories = predict_step_memory(job, layout)
        remark = remark or "the bytes are predicted, and nothing was measured"
    else:
        memories = _measure(job, ranks)
    shown = _ShownMemory(job, ranks, memories, remark=remark, budget=budget_bytes)
    if svg is not None:
        write_output_file(svg, shown.picture())
    if json:
        print_json(shown.report())
    elif svg is not None:
        print_lines(f"{svg} is written")
    else:
        print_lines(*shown.lines())


def _measure(job: Job, ranks: int) -> list[StepMemory]:
    with handle_signals(interrupt, *STOP_SIGNALS):
        with show_progress() as progress:
            check_data(job, prepare_data(job.data, progress))
        return measure_step_memory(job, ranks, read_environment(), log=log)


@dataclass(frozen=True)
class _ShownMemory:
    """A step of a job on all ranks, and how it is shown."""

    job: Job
    ranks: int
    memories: Sequence[StepMemory]
    remark: str  # Why nothing was measured
    budget: int | None

    @property
    def lines_at(self) -> dict[str, int]:
        """The lines that are drawn, with their bytes."""
        lines = {"budget": self.budget, "limit": self.job.memory.device_limit}
        return {name: size for name, size in lines.items() if size is not None}

    @property
    def title(self) -> str:
        job = self.job
        layout = f"layout '{job.layout_for(self.ranks)}'" if self.ranks > 1 else "one rank"
        recompute = f", memory.recompute = {job.memory.recompute}" * (job.memory.recompute != "none")
        return f"{job.name}, {layout}, {job.precision.recipe}{recompute}: live bytes of a step"

    @property
    def note(self) -> str:
        text, first = self.remark or "measured on CPU ranks", self.memories[0]
        if self.job.memory.recompute == "auto" and not first.measured:
            text += "; as if all blocks were recomputed, for a run chooses the policies in its first steps"
        if first.has_exact_activations:
            return text
        if first.measured:
            return f"{text}; saved activations have no exact prediction: only sizes of motet's modules are known"
        return f"{text}; saved activations are those of motet's modules of these sizes, and other modules keep more"

    def report(self) -> dict[str, Any]:
        """The JSON."""
        return {
            "job": self.job.name,
            "ranks": self.ranks,
            "recompute": self.job.memory.recompute,
            "budget": self.budget,
            "device_limit": self.job.memory.device_limit,
            "is_measured": self.memories[0].measured is not None,
            "remark": self.remark,
            "memory": [_rank_report(memory) for memory in self.memories],
        }

    @property
    def _kept_by_host(self) -> str:
        memory = self.job.memory
        places = {"parameters": memory.parameters, "the optimizer": memory.optimizer, "activations": memory.activations}
        *others, last = [name for name, place in places.items() if place != "device"]
        return " and ".join([", ".join(others), last]) if others else last

    def picture(self) -> str:
        """The first ranks as they were measured, and the prediction for the first of them."""
        memories = self.memories
        panels = [MemoryPanel(f"rank {each.rank}", each.shown) for each in memories[:_SHOWN_PANELS]]
        if memories[0].measured:
            panels = [replace(panel, title=f"{panel.title}, measured") for panel in panels]
            panels.insert(1, MemoryPanel("rank 0, predicted, without workspace", memories[0].predicted))
        return draw_svg(panels, title=self.title, note=self.note, lines=self.lines_at)

    def lines(self) -> Iterator[OutputLine]:
        """The text: the rank with the largest peak as a picture, and the comparison."""
        peaks = [each.shown.peak for each in self.memories]
        memory = self.memories[peaks.index(max(peaks))]
        yield from (self.title, f"{self.note}.", "", f"rank {memory.rank}; a column is a few allocations and frees")
        header = ("most live bytes of", "measured", "predicted", "difference")
        table = table_lines(map(_row, memory.comparisons()), header=header, right=range(1, 4))
        yield from (*draw_text(memory.shown, self.lines_at), "", *table, "")
        yield from _operator_sentences(memory)
        if len(set(peaks)) > 1:
            yield f"Peaks by rank: {', '.join(_peaks_by_rank(self.memories))}."
        phase = memory.shown.phase_at(memory.shown.peak_moment)
        yield f"The peak of rank {memory.rank} is {format_bytes(max(peaks))}{f', in {phase}' * bool(phase)}."
        if any(memory.elsewhere.values()):
            host, disk = (format_bytes(memory.elsewhere[place]) for place in ("host", "disk"))
            files = f", and {disk} in files" * bool(memory.elsewhere["disk"])
            yield f"Its host is predicted to keep {host} for {self._kept_by_host}{files}."
        for name, size in self.lines_at.items():
            left, text = size - max(peaks), f"the {name} of {format_bytes(size)}"
            is_within = f"That is within {text}, of which {format_bytes(left)} are left."
            yield is_within if left >= 0 else f"That is {format_bytes(-left)} more than {text}."


def _rank_report(memory: StepMemory) -> dict[str, Any]:
    timelines = {"measured": memory.measured, "predicted": memory.predicted}
    return {
        "rank": memory.rank,
        "elsewhere": memory.elsewhere,
        "comparison": [vars(each) | {"difference": each.difference} for each in memory.comparisons()],
        **{name: timeline and _timeline_report(timeline) for name, timeline in timelines.items()},
    }


def _timeline_report(timeline: MemoryTimeline) -> dict[str, Any]:
    columns = [*timeline.columns(_JSON_COLUMNS)]
    return {
        "peak_bytes": timeline.peak,
        "at_peak": timeline.at_peak(),
        "saved_activations_by_operator": timeline.by_operator("saved activations"),
        "saved_activations_by_block": timeline.by_block("saved activations"),
        "moments": timeline.moments,
        "phases": [vars(phase) for phase in timeline.phases],
        "timeline": [{"moment": moment, "bytes": sizes} for moment, sizes in columns],
    }


def _row(compared: MemoryComparison) -> tuple[str, str, str, str]:
    measured, predicted = ("" if size is None else f"{size:,}" for size in (compared.measured, compared.predicted))
    difference = "" if compared.difference is None else f"{compared.difference:+.2%}"
    return compared.name, measured, predicted, difference


def _peaks_by_rank(memories: Sequence[StepMemory]) -> Iterator[str]:
    """Texts such as `0-3: 2 GiB`, for neighbours with the same peak."""
    for peak, run in groupby(memories, lambda memory: format_bytes(memory.shown.peak)):
        ranks = [memory.rank for memory in run]
        yield f"{ranks[0]}{f'-{ranks[-1]}' * (len(ranks) > 1)}: {peak}"


def _operator_sentences(memory: StepMemory) -> Iterator[str]:
    operators = list(memory.shown.by_operator("saved activations").items())
    shown = ", ".join(f"{format_bytes(size)} of {name}" for name, size in operators[:_SHOWN_OPERATORS])
    if operators:
        kind = "by the operators that make them" if memory.measured else "by name"
        yield f"Saved activations {kind}: {shown}{' and others' * (len(operators) > _SHOWN_OPERATORS)}."
