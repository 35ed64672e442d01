"""The output of `motet show memory`: the live bytes of a step by category, measured and predicted."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from motet.cli.environment_variables import read_environment
from motet.cli.output import check_writable, log, print_lines, show_progress, write_output_file
from motet.core.errors import check_input
from motet.core.units import format_bytes
from motet.data.corpus.prepare import prepare_data
from motet.memory.memory_drawing import MemoryPanel, draw_svg, draw_text
from motet.memory.memory_timeline import MemoryTimeline
from motet.monitor.stdout_stderr import print_json
from motet.train.job import Job, load_job
from motet.train.launch.failures import STOP_SIGNALS, handle_signals, interrupt
from motet.train.launch.preflight import check_data, check_job
from motet.train.memory_check.measure_ranks import measure_step_memory, predict_step_memory, reason_to_predict
from motet.train.memory_check.step_prediction import MemoryComparison, StepMemory

_SHOWN_PANELS, _SHOWN_OPERATORS, _SHOWN_RANKS, _JSON_COLUMNS = 4, 6, 16, 200


def show_memory(
    source: str, overrides: list[str], ranks: int | None, *, predict: bool, svg: Path | None, json: bool
) -> None:
    """Measure a step of a job on CPU ranks, or predict it, and draw it on the terminal or into a file."""
    check_writable(svg)
    job = load_job(source, overrides)
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
    report = _report(job, ranks, memories, remark=remark)
    if svg is not None:
        write_output_file(svg, _picture(job, ranks, memories, remark=remark))
    if json:
        print_json(report)
    elif svg is not None:
        print_lines(f"{svg} is written")
    else:
        _print(job, ranks, memories, remark=remark)


def _measure(job: Job, ranks: int) -> list[StepMemory]:
    with handle_signals(interrupt, *STOP_SIGNALS):
        with show_progress() as progress:
            check_data(job, prepare_data(job.data, progress))
        return measure_step_memory(job, ranks, read_environment(), log=log)


def _title(job: Job, ranks: int) -> str:
    layout = f"layout '{job.layout_for(ranks)}'" if ranks > 1 else "one rank"
    recompute = f", memory.recompute = {job.memory.recompute}" * (job.memory.recompute != "none")
    return f"{job.name}, {layout}, {job.precision.recipe}{recompute}: live bytes of a step"


def _note(memories: Sequence[StepMemory], remark: str) -> str:
    text = remark or "measured on CPU ranks"
    if memories[0].has_exact_activations:
        return text
    if memories[0].measured:
        return f"{text}; saved activations have no exact prediction, for their sizes are known of motet's modules alone"
    return f"{text}; saved activations are those of motet's modules of these sizes, and other modules keep more"


def _largest(memories: Sequence[StepMemory]) -> int:
    """The rank with the largest peak."""
    peaks = [each.shown.peak for each in memories]
    return peaks.index(max(peaks))


def _report(job: Job, ranks: int, memories: Sequence[StepMemory], *, remark: str) -> dict[str, Any]:
    return {
        "job": job.name,
        "ranks": ranks,
        "recompute": job.memory.recompute,
        "budget": job.memory.budget,
        "is_measured": memories[0].measured is not None,
        "remark": remark,
        "memory": [_rank_report(rank, memory) for rank, memory in enumerate(memories)],
    }


def _rank_report(rank: int, memory: StepMemory) -> dict[str, Any]:
    timelines = {"measured": memory.measured, "predicted": memory.predicted}
    return {
        "rank": rank,
        "comparison": [vars(each) | {"difference": each.difference} for each in memory.comparisons()],
        **{name: timeline and _timeline_report(timeline) for name, timeline in timelines.items()},
    }


def _timeline_report(timeline: MemoryTimeline) -> dict[str, Any]:
    columns = [*timeline.columns(_JSON_COLUMNS)]
    return {
        "peak_bytes": timeline.peak,
        "at_peak": timeline.at_peak(),
        "saved_activations_by_operator": timeline.by_operator("saved activations"),
        "moments": timeline.moments,
        "phases": [vars(phase) for phase in timeline.phases],
        "timeline": [{"moment": moment, "bytes": sizes} for moment, sizes in columns],
    }


def _picture(job: Job, ranks: int, memories: Sequence[StepMemory], *, remark: str) -> str:
    """The first ranks as they were measured, and the prediction for the first of them."""
    panels = [MemoryPanel(f"rank {rank}", each.shown) for rank, each in enumerate(memories[:_SHOWN_PANELS])]
    if memories[0].measured:
        panels = [replace(panel, title=f"{panel.title}, measured") for panel in panels]
        panels.insert(1, MemoryPanel("rank 0, predicted", memories[0].predicted))
    return draw_svg(panels, title=_title(job, ranks), note=_note(memories, remark), budget=job.memory.budget)


def _print(job: Job, ranks: int, memories: Sequence[StepMemory], *, remark: str) -> None:
    largest = _largest(memories)
    memory, budget = memories[largest], job.memory.budget
    print_lines(_title(job, ranks), f"{_note(memories, remark)}.", "")
    print_lines(f"rank {largest}, moments in which memory is allocated or freed", *draw_text(memory.shown, budget), "")
    print_lines(*_table_lines(memory), "", *_sentences(memories, budget))


def _table_lines(memory: StepMemory) -> Iterator[str]:
    rows = [("most live bytes of", "measured", "predicted", "difference")]
    rows += [_row(each) for each in memory.comparisons()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        numbers = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        yield "  ".join([name.ljust(widths[0]), *numbers]).rstrip()


def _row(compared: MemoryComparison) -> tuple[str, str, str, str]:
    measured, predicted = ("" if size is None else f"{size:,}" for size in (compared.measured, compared.predicted))
    difference = "" if compared.difference is None else f"{compared.difference:+.2%}"
    return compared.name, measured, predicted, difference


def _sentences(memories: Sequence[StepMemory], budget: int | None) -> Iterator[str]:
    largest = _largest(memories)
    timeline, peaks = memories[largest].shown, [each.shown.peak for each in memories]
    operators = list(timeline.by_operator("saved activations").items())
    shown = ", ".join(f"{format_bytes(size)} of {name}" for name, size in operators[:_SHOWN_OPERATORS])
    if operators:
        kind = "the operators that make them" if memories[largest].measured else "what they are"
        yield f"Saved activations by {kind}: {shown}{', ...' * (len(operators) > _SHOWN_OPERATORS)}."
    phase = timeline.phase_at(timeline.peak_moment)
    yield f"The peak of rank {largest} is {format_bytes(timeline.peak)}{f', in {phase}' * bool(phase)}."
    if len(set(peaks)) > 1:
        shown = ", ".join(f"{rank}: {format_bytes(peak)}" for rank, peak in enumerate(peaks[:_SHOWN_RANKS]))
        yield f"Peaks by rank: {shown}{', ...' * (len(peaks) > _SHOWN_RANKS)}."
    if budget is not None:
        over = timeline.peak - budget
        verdict = f"{format_bytes(over)} more than" if over > 0 else f"within, with {format_bytes(-over)} left of,"
        yield f"It is {verdict} the budget of {format_bytes(budget)} (memory.budget)."
