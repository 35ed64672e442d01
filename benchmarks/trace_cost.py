"""The cost of a span and of a counter, without and with a collector that listens.

Prints nanoseconds per use, the median of rounds in which the cases take turns, with the cost of an empty loop and of an
empty `with` for comparison.

    python benchmarks/trace_cost.py [--page]

--page writes docs/benchmarks/trace-cost.md.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

from parts.arguments import parse_arguments
from parts.report.pages import DOCS, fill, table
from parts.rounds import interleave, quartiles

from motet.core import trace
from motet.monitor.event_dispatcher import SpanCollector

USES = 20_000
PAGE = DOCS / "trace-cost.md"


def empty_loop() -> None:
    for _ in range(USES):
        pass


def empty_with() -> None:
    nothing = nullcontext()
    for _ in range(USES):
        with nothing:
            pass


def spans() -> None:
    for _ in range(USES):
        with trace.span("forward"):
            pass


def counts() -> None:
    for _ in range(USES):
        trace.count("bytes", 1.0)


def listened(work: Callable[[], None]) -> Callable[[], None]:
    """`work` with a collector that keeps everything."""

    def run() -> None:
        with trace.install_sink(SpanCollector()):
            work()

    return run


CASES: dict[str, Callable[[], None]] = {
    "empty loop": empty_loop,
    "empty `with`": empty_with,
    "span, nobody listening": spans,
    "span, listening": listened(spans),
    "count, nobody listening": counts,
    "count, listening": listened(counts),
}


def timed_ns(work: Callable[[], None]) -> float:
    start_ns = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - start_ns) / USES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name}")
    options = parse_arguments(parser, rounds=3)
    times_ns = interleave({name: partial(timed_ns, work) for name, work in CASES.items()}, options.rounds)
    loop_ns = statistics.median(times_ns["empty loop"])
    spreads = {name: [value - loop_ns for value in quartiles(values)] for name, values in times_ns.items()}
    rows = [[name, f"{middle:,.0f}", f"{low:,.0f} to {high:,.0f}"] for name, (low, middle, high) in spreads.items()]
    where = f"Nanoseconds per use, less the {loop_ns:.1f} of the loop; {options.rounds} rounds of {USES:,} uses."
    told = table(["", "median", "quartiles"], rows)
    print(where, told, sep="\n\n")
    if options.page:
        fill(PAGE, [where, told])


if __name__ == "__main__":
    main()
