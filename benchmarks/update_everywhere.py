"""Is updating everywhere redundant? The whole AdamW update on each rank, or a share of it and a gather of the result.

Stage 0 all-reduces gradients and updates everything on every rank. Stage 1 reduce-scatters them, updates a share and
gathers the shares of the others. Both update flat tensors of millions of parameters, in buckets as in training, on the
backend `motet`, in the same rank processes, in turn; the first one changes from round to round. A round gives one
ratio; the output has medians with quartiles over the rounds. At the end both must have the same parameters.

The parts (sum, update, gather) are timed apart, with a barrier before each; the whole is timed without.

    python benchmarks/update_everywhere.py [--ranks 2] [--rounds 15] [--millions 1 8 64] [--recipes fp32 bf16] [--page]

--page writes docs/benchmarks/update-everywhere.md. 64 million parameters take about 2 GiB in each rank.
"""

import argparse
import statistics
from typing import TYPE_CHECKING

from parts.arguments import parse_arguments
from parts.rank_processes import rank_group, rank_parser, run_on_ranks
from parts.report.pages import DOCS, fill, table
from parts.rounds import ratio_text

if TYPE_CHECKING:
    from parts.optimizer_variants import Times

PAGE = DOCS / "update-everywhere.md"
MOVED_BYTES = {"fp32": 28, "bf16": 30}
"""Bytes of an update of AdamW for each parameter: it reads master, gradient and two moments, and writes master and
moments, all in float32; `bf16` writes a copy of two bytes."""
SENT_BYTES = {"fp32": 4, "bf16": 2}


def main() -> None:
    parser = rank_parser(__doc__, rounds=15)
    parser.add_argument("--millions", type=float, nargs="+", default=[1, 8, 64], help="of parameters")
    parser.add_argument("--recipes", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--bucket-mib", type=float, default=25.0)
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name}")
    run_on_ranks(measure, parse_arguments(parser, rounds=1, millions=[1], recipes=["fp32"]))


def measure(options: argparse.Namespace) -> None:
    from parts.optimizer_variants import take_turns

    with rank_group(options.threads) as group:
        elements = int(options.bucket_mib * 2**18)
        found = {
            (recipe, millions): take_turns(int(millions * 2**20), recipe, options.rounds, elements)
            for recipe in options.recipes
            for millions in options.millions
        }
        if group.rank == 0:
            where = (
                f"{options.ranks} ranks x {options.threads} threads, {options.rounds} rounds. "
                "Milliseconds are medians; a million is 2^20."
            )
            parts = [where, table_of_times(found), table_of_rates(found, options.ranks)]
            print(*parts, sep="\n\n", flush=True)
            if options.page:
                fill(PAGE, parts)


Found = dict[tuple[str, float], "Times"]
"""Times by recipe and millions of parameters."""


def table_of_times(found: Found) -> str:
    head = [
        "recipe", "millions", "all-reduce", "whole update", "reduce-scatter", "update of a share", "gather",
        "everywhere / sharded, all of it", "sums hidden",
    ]  # fmt: skip
    rows = []
    for (recipe, millions), times in found.items():
        parts = [
            times.everywhere["sum"], times.everywhere["update"],
            times.sharded["sum"], times.sharded["update"], times.sharded["gather"],
        ]  # fmt: skip
        cells = [f"{statistics.median(seconds) * 1e3:.2f}" for seconds in parts]
        rows.append(
            [f"`{recipe}`", f"{millions:g}", *cells, ratio_text(*times.whole()), ratio_text(*times.after_the_sum())]
        )
    return table(head, rows)


def table_of_rates(found: Found, ranks: int) -> str:
    """The rates of updates and gathers in bytes per second, and the times that they predict."""
    head = ["recipe", "millions", "update (GB/s)", "gather (GB/s)", "gather / update", "even at", "with sums hidden"]
    rows = []
    for (recipe, millions), times in found.items():
        count = millions * 2**20
        update = count * MOVED_BYTES[recipe] / statistics.median(times.everywhere["update"])
        gather = count * SENT_BYTES[recipe] * (ranks - 1) / ranks / statistics.median(times.sharded["gather"])
        even = SENT_BYTES[recipe] / MOVED_BYTES[recipe]
        wins = "share it" if gather / update > even else "update everywhere"
        rates = f"{update / 1e9:.2f}", f"{gather / 1e9:.2f}", f"{gather / update:.3f}", f"{even:.3f}"
        rows.append([f"`{recipe}`", f"{millions:g}", *rates, wins])
    return table(head, rows)


if __name__ == "__main__":
    main()
