"""The cost of the replica check (`monitor.replica_check_every`): steps with and without it, in turn, on the same ranks.

Blocks of N steps, of which one is checked, take turns with blocks in which none is; a round gives one ratio, and
medians and quartiles over the rounds are printed. Nothing else differs: training is the same, bit for bit.

    python benchmarks/watch.py [--ranks 2 --threads 1] [--rounds 15] [--layouts zero=0 zero=2 zero=3] [--every 1 10]
                               [--length 64] [--page]

--page writes docs/benchmarks/watch.md.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from parts.arguments import parse_arguments
from parts.rank_processes import rank_group, rank_parser, run_on_ranks
from parts.report.pages import DOCS, fill, table
from parts.rounds import interleave, ratio_text

if TYPE_CHECKING:
    from motet.parallel.process.process_group import RankGroup

PAGE = DOCS / "watch.md"


def main() -> None:
    parser = rank_parser(__doc__, rounds=15)
    parser.add_argument("--layouts", nargs="+", default=["zero=0", "zero=2", "zero=3"])
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence of the job `tiny`")
    parser.add_argument("--every", nargs="+", type=int, default=[1, 10])
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name}")
    run_on_ranks(measure, parse_arguments(parser, rounds=1, layouts=["zero=0"], every=[1]))


def measure(options: argparse.Namespace) -> None:
    with rank_group(options.threads) as group:
        rows = [[f"`{layout}`", *one_layout(options, group, layout)] for layout in options.layouts]
        if group.rank == 0:
            where = (
                f"{group.world} ranks x {options.threads} threads, {options.length} tokens, {options.rounds} rounds."
            )
            told = table(["layout", *(f"every {every}" for every in options.every), "a step without"], rows)
            print(where, told, sep="\n\n")
            if options.page:
                fill(PAGE, [where, told])


def one_layout(options: argparse.Namespace, group: "RankGroup", layout: str) -> list[str]:
    """The cells of a layout: the ratio for each number of steps, and the time of a step that is not checked."""
    from motet.monitor.events import ReplicaCheckDone
    from motet.train.build import build_components, precision_context
    from motet.train.job import load_job

    job = load_job(
        "tiny",
        [
            *(f"layout.{word}" for word in layout.split()),
            "monitor.replica_check_every=1",
            f"data.sequence_length={options.length}",
        ],
    )
    with tempfile.TemporaryDirectory() as folder, precision_context(job):
        parts = build_components(job, group, Path(folder))
        watched = parts.make_train_step(job)
        plain = replace(watched, replica_checker=None)
        done = 0

        def block(length: int, watch: bool) -> float:
            nonlocal done
            start = time.perf_counter()
            for place in range(length):
                stepper = watched if watch and place == length - 1 else plain
                result = stepper.step(done % parts.total_steps, 1e-5)
                found: ReplicaCheckDone | None = result.replica_check
                assert found is None or not found.violations, found
                done += 1
            return time.perf_counter() - start

        block(3, watch=True)
        cells, steps = [], []
        for every in options.every:
            times = interleave({watch: partial(block, every, watch) for watch in (False, True)}, options.rounds)
            cells.append(ratio_text(times[True], times[False]))
            steps += [seconds / every for seconds in times[False]]
        return [*cells, f"{1e3 * statistics.median(steps):.0f} ms"]


if __name__ == "__main__":
    main()
