"""The time that a step waits for its data, and the step's time, without and with the input queue (`data.prefetch`).

The built-in job `tiny` reads from a source that takes longer than its files: it sleeps for each row, or it computes
for each row in Python, which keeps a core busy. Blocks of steps without and with the queue take turns on the same
ranks, each after a step that is not timed; a round gives one ratio.

    python benchmarks/input_queue.py [--ranks 2 --threads 1] [--rounds 15] [--length 64] [--steps 10] [--page]

--page writes docs/benchmarks/input-queue.md.
"""

import argparse
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from parts.arguments import parse_arguments
from parts.rank_processes import rank_group, rank_parser, run_on_ranks
from parts.report.pages import DOCS, fill, load_of_machine, table
from parts.rounds import interleave, mean_over_ranks, ratio_text

if TYPE_CHECKING:
    from motet.core.batch import Batch, BatchSource
    from motet.parallel.process.process_group import RankGroup
    from motet.train.step import TrainStep

PAGE = DOCS / "input-queue.md"
WARM_UP_STEPS = 5
# Kind of the source, the time of its rows as a part of a step without it, and a cell
SOURCES: tuple[tuple[Literal["sleep", "compute"], float, str], ...] = (
    ("sleep", 0.0, "that of `tiny`"),
    ("sleep", 0.5, "sleeps half of a step"),
    ("sleep", 0.9, "sleeps nine tenths of a step"),
    ("sleep", 1.5, "sleeps one and a half steps"),
    ("compute", 0.5, "computes half of a step"),
)


@dataclass
class SlowSource:
    """A source that takes more seconds for each row."""

    inner: "BatchSource"
    kind: Literal["sleep", "compute"]
    row_s: float

    def batch(self, step: int, rows: range) -> "Batch":
        seconds = self.row_s * len(rows)
        if self.kind == "sleep":
            time.sleep(seconds)
        else:
            end_s = time.thread_time() + seconds
            while time.thread_time() < end_s:
                sum(range(1000))
        return self.inner.batch(step, rows)


@dataclass
class ReadTime:
    """A sink that adds up the spans in which the training thread reads, or waits for what is read."""

    seconds: float = 0.0
    thread: int = field(default_factory=threading.get_ident)

    def on_span(self, action: str, start: float, stop: float, depth: int) -> None:
        if action == "read" and threading.get_ident() == self.thread:
            self.seconds += stop - start

    def on_count(self, name: str, value: float) -> None: ...


class BlockTimes(NamedTuple):
    """Seconds of a step in a block, as a mean over ranks."""

    step_s: float
    read_s: float
    processor_s: float  # Of all threads of the process


def main() -> None:
    parser = rank_parser(__doc__, rounds=15)
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence of the job `tiny`")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a block")
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name}")
    run_on_ranks(measure, parse_arguments(parser, rounds=1, length=16, steps=2))


def measure(options: argparse.Namespace) -> None:
    load = load_of_machine()
    with rank_group(options.threads) as group:
        step_s, rows = measure_sources(options, group)
        if group.rank == 0:
            where = (
                f"{group.world} ranks x {options.threads} threads, 16 sequences of {options.length} tokens, "
                f"{options.rounds} rounds of {options.steps} steps. {load} "
                f"A step of `tiny` takes {1e3 * step_s:.0f} ms."
            )
            waits = [f"a step waits, `prefetch = {depth}`" for depth in (0, 2)]
            head = ["source", *waits, "step with the queue / without it", "processor time, the same"]
            results = table(head, rows)
            print(where, results, sep="\n\n")
            if options.page:
                fill(PAGE, [where, results])


def measure_sources(options: argparse.Namespace, group: "RankGroup") -> tuple[float, list[list[str]]]:
    """Seconds of a step with the source of the job, and the row of each source."""
    from motet.train.build import build_components, precision_context
    from motet.train.job import load_job

    job, rows = load_job("tiny", [f"data.sequence_length={options.length}"]), list[list[str]]()
    with tempfile.TemporaryDirectory() as folder, precision_context(job):
        parts = build_components(job, group, Path(folder))
        train_step = parts.make_train_step(job)
        timed_block(train_step, 0, WARM_UP_STEPS)
        step_s = timed_block(train_step, 0, options.steps).step_s
        for kind, share, name in SOURCES:
            source = SlowSource(parts.data, kind, share * step_s * group.world / job.data.batch_sequences)
            slow = replace(train_step, runner=replace(train_step.runner, batch_source=source))
            depths = {depth: partial(timed_block, slow, depth, options.steps) for depth in (0, 2)}
            times = interleave(depths, options.rounds)
            reads = [statistics.median(block.read_s for block in times[depth]) for depth in (0, 2)]
            direct, ahead = times[0], times[2]
            step = ratio_text([block.step_s for block in ahead], [block.step_s for block in direct])
            work = ratio_text([block.processor_s for block in ahead], [block.processor_s for block in direct])
            rows.append([name, *(f"{1e3 * seconds:.1f} ms" for seconds in reads), step, work])
    return step_s, rows


def timed_block(train_step: "TrainStep", depth: int, steps: int) -> BlockTimes:
    """The times of steps after one that is not timed. The queue may read beyond the block, as in a longer run."""
    from motet.core.trace import install_sink

    reads = ReadTime()
    with train_step.reading_ahead(depth, range(2 * steps + 3)) as block, install_sink(reads):
        block.step(0, 1e-5)
        start_s, processor_s, reads.seconds = time.perf_counter(), time.process_time(), 0.0
        for step in range(1, steps + 1):
            block.step(step, 1e-5)
        seconds = time.perf_counter() - start_s, reads.seconds, time.process_time() - processor_s
    return BlockTimes(*mean_over_ranks([each / steps for each in seconds]))


if __name__ == "__main__":
    main()
