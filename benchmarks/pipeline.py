"""Pipelines of 2 and 4 ranks: motet's player compared with torch's schedules, and the idle time of real runs.

Both train the same decoder, cut into the same stages, on the same micro-batches, and do the forwards and backwards of a
step in the same rank processes, in turn; who comes first changes from round to round. Both run on Gloo and on the
backend `motet`. A round gives one ratio, torch's time over ours. After the first round, which warms up, all must have
the same loss and the same gradients.

Then the player plays every schedule on stages that sleep for as long as the schedule says, and its idle time, the
activations it holds and the bytes it sends are compared with those of the schedule.

    python benchmarks/pipeline.py [--ranks 2 4] [--rounds 15] [--blocks 8] [--hidden 256] [--length 64]
                                  [--microbatches 8] [--schedules gpipe 1f1b interleaved zb-interleaved zb-v] [--page]

--page writes docs/benchmarks/pipeline.md.
"""

import argparse
import os
import statistics
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from parts.arguments import parse_arguments
from parts.rank_processes import launch, rank_group
from parts.report.pages import DOCS, collected_results, fill, load_of_machine, store_result, table
from parts.rounds import interleave, mean_over_ranks, quartiles, ratios

if TYPE_CHECKING:
    from parts.pipeline_contenders import PipelineContender

    from motet.parallel.process.process_group import RankGroup

PAGE = DOCS / "pipeline.md"
BACKENDS = ("gloo", "motet")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-interleaved", "zb-v")
WITHOUT_PEER = ("breadth-first", "dualpipe-v")
TARGET = 1.0
LARGEST_DIFFERENCE = 1e-4  # Relative, of losses and gradients: float32 adds micro-batches in another order

Contender = tuple[str, str, str]  # (schedule, backend, motet or torch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--schedules", nargs="*", default=list(SCHEDULES), choices=SCHEDULES)
    parser.add_argument("--unit", type=float, default=0.02, help="seconds that a forward sleeps")
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name}")
    options = parse_arguments(parser, ranks=[2], rounds=1, schedules=["1f1b"], unit=0.002)
    if "RANK" in os.environ:
        measure(options)
        return
    parts = [conditions(options)]
    with collected_results() as sections:
        exit_codes = [launch(ranks, threads=1) for ranks in options.ranks]
    if any(exit_codes):
        sys.exit(1)
    parts += sections
    print(*parts, sep="\n\n", flush=True)
    if options.page:
        fill(PAGE, parts)


def conditions(options: argparse.Namespace) -> str:
    return (
        f"{options.blocks} blocks, hidden size {options.hidden}, {options.microbatches} micro-batches of one row of "
        f"{options.length} tokens, float32, one thread a rank; {options.rounds} rounds. Milliseconds are medians of "
        f"the forwards and backwards of a step. {load_of_machine()}"
    )


def measure(options: argparse.Namespace) -> None:
    warnings.filterwarnings("ignore")
    with rank_group(threads=1) as group:
        sections = [f"## {group.world} ranks"]
        if options.schedules:
            times = take_turns(options, group)
            sections += [table_of_ratios(times), fastest(times)]
        sections += [f"### Idle time, memory and bytes on {group.world} ranks", table_of_idle_time(options, group)]
        if group.rank == 0:
            for section in sections:
                store_result(section)


def take_turns(options: argparse.Namespace, group: "RankGroup") -> dict[Contender, list[float]]:
    """Seconds of a step in each round, as the mean over the ranks."""
    import torch.distributed as dist
    from parts.pipeline_contenders import PIPELINES, PipelineSize

    size = PipelineSize(options.blocks, options.hidden, options.length, options.microbatches)
    groups = {name: replace(group, process_group=dist.new_group(backend=f"cpu:{name}")) for name in BACKENDS}
    pipelines = {
        (schedule, backend, who): PIPELINES[who](schedule, size, groups[backend])
        for schedule in options.schedules
        for backend in BACKENDS
        for who in PIPELINES
    }
    check_same_results(pipelines)

    def one_round(pipeline: "PipelineContender") -> float:
        dist.barrier()
        start = time.perf_counter()
        pipeline.step()
        return mean_over_ranks([time.perf_counter() - start])[0]

    turns = {name: partial(one_round, pipeline) for name, pipeline in pipelines.items()}
    return {name: seconds[1:] for name, seconds in interleave(turns, options.rounds + 1, stride=5).items()}


def check_same_results(pipelines: "Mapping[Contender, PipelineContender]") -> None:
    """All of them have the same loss, and on each rank the same gradients as the other one with the same stages."""
    losses = {name: mean_over_ranks([pipeline.step()])[0] for name, pipeline in pipelines.items()}
    for name, pipeline in pipelines.items():
        if abs(losses[name] / losses[next(iter(losses))] - 1) > LARGEST_DIFFERENCE:
            raise SystemExit(f"not the same loss: {losses}")
        ours, theirs = pipelines[*name[:2], "motet"].gradients(), pipeline.gradients()
        if ours.keys() != theirs.keys():
            raise SystemExit(f"{name} has gradients of other parameters: {sorted(ours.keys() ^ theirs.keys())[:4]}")
        for parameter, gradient in theirs.items():
            difference = float((gradient.flatten() - ours[parameter]).norm() / gradient.norm())
            if not difference < LARGEST_DIFFERENCE:
                raise SystemExit(f"{name}: the gradient of {parameter} differs by {difference:.1e} of its norm")


def table_of_ratios(times: dict[Contender, list[float]]) -> str:
    head = ["schedule", "backend", "motet (ms)", "torch (ms)", "motet is (median)", "quartiles", f"target {TARGET:.1f}"]
    rows = []
    for schedule, backend in dict.fromkeys(name[:2] for name in times):
        ours, theirs = times[schedule, backend, "motet"], times[schedule, backend, "torch"]
        low, middle, high = quartiles(ratios(theirs, ours))
        cells = [f"{statistics.median(seconds) * 1e3:.1f}" for seconds in (ours, theirs)]
        verdict = "met" if middle >= TARGET else "missed"
        rows.append([f"`{schedule}`", backend, *cells, f"{middle:.2f}x", f"{low:.2f} to {high:.2f}", verdict])
    return table(head, rows)


def fastest(times: dict[Contender, list[float]]) -> str:
    """The order of motet's schedules by their times."""
    sentences = []
    for backend in BACKENDS:
        medians = {
            name[0]: statistics.median(seconds) for name, seconds in times.items() if name[1:] == (backend, "motet")
        }
        order = sorted(medians, key=medians.__getitem__)
        text = ", ".join(f"`{name}` {medians[name] / medians[order[0]]:.2f}" for name in order)
        sentences.append(f"Times of motet on {backend}, relative to the shortest: {text}.")
    return " ".join(sentences)


def table_of_idle_time(options: argparse.Namespace, group: "RankGroup") -> str:
    """The idle time of runs on stages that sleep, by the schedule and by the formula; and counts of the same runs."""
    import torch.distributed as dist
    from parts.pipeline_contenders import CHUNKS, DEFAULT_CHUNKS
    from parts.sleeping_stages import WIRE_BYTES, measured_bubble_share, play_asleep

    from motet.parallel.pipeline.schedule_timeline import ScheduleTimeline
    from motet.parallel.pipeline.schedules import make_schedule

    head = ["schedule", "idle, measured", "by the schedule", "(p-1)/(m+p-1)", "in flight by rank", "bound", "messages"]
    rows, count = [], options.microbatches
    for name in (*SCHEDULES, *WITHOUT_PEER):
        schedule = make_schedule(name, group.world, chunks=CHUNKS.get(name, DEFAULT_CHUNKS), microbatches=count)
        records: list[Any] = [None] * group.world
        dist.all_gather_object(records, play_asleep(schedule, group, options.unit))
        shares = [measured_bubble_share(records), ScheduleTimeline(schedule).bubble_share()]
        closed = f"{(group.world - 1) / (count + group.world - 1):.1%}" if name in CHUNKS else ""
        held = " ".join(str(each.in_flight) for each in records), " ".join(map(str, schedule.max_in_flight))
        messages = sum(each.sent_bytes for each in records) // WIRE_BYTES
        rows.append([f"`{name}`", *(f"{share:.1%}" for share in shares), closed, *held, str(messages)])
    return table(head, rows)


if __name__ == "__main__":
    main()
