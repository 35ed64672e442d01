"""Runs that are killed with SIGKILL at random moments and resumed: do they equal the run that nobody killed?

A small decoder with dropout trains on two ranks over shared memory and saves every three steps. It trains once without
a kill. Then each kill meets a new run: the supervisor, one rank or all processes, at a random instant of one of five
moments. `--resume` trains that run to its end, and the script compares it with the first one.

    python benchmarks/kills.py [--kills 40] [--seed 1] [--page]

--page writes docs/benchmarks/kills.md.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import cycle, islice, product
from pathlib import Path
from random import Random

from parts.arguments import parse_arguments
from parts.killed_runs import EVERY, KEEP, MOMENTS, STEPS, VICTIMS, Kill, KillOutcome, UndisturbedRun, kill_and_resume
from parts.report.pages import DOCS, fill, table

PAGE = DOCS / "kills.md"
SHARED_MEMORY = Path("/dev/shm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name}")
    options = parse_arguments(parser, kills=2)
    before = {path.name for path in SHARED_MEMORY.iterdir()}
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        undisturbed = UndisturbedRun.train(Path(folder, "undisturbed"))
        outcomes = list(kill_all(options.kills, Random(options.seed), undisturbed, Path(folder)))
    new = sorted({path.name for path in SHARED_MEMORY.iterdir()} - before)
    parts = [report(outcomes), f"New in {SHARED_MEMORY} after all runs: {', '.join(new) or 'nothing'}."]
    print("\n\n".join(parts))
    if options.page:
        fill(PAGE, parts)
    sys.exit(any(map(_problems, outcomes)))


def kill_all(kills: int, random: Random, undisturbed: UndisturbedRun, folder: Path) -> Iterator[KillOutcome]:
    """Each moment meets each victim in turn. A run that ends before its kill is replaced by another one."""
    for number, (victim, moment) in enumerate(islice(cycle(product(VICTIMS, MOMENTS)), kills)):
        outcome, run = None, folder / f"{number:03d}"
        while outcome is None:
            first = EVERY * (KEEP + 1) if moment == "deleting" else 1
            kill = Kill(moment, victim, random.random(), random.randint(first, STEPS))
            outcome = kill_and_resume(kill, run, undisturbed)
            shutil.rmtree(run)
        problems = "; ".join(_problems(outcome)) or "equal"
        print(f"{number + 1:3d} {moment}, {victim}, step {kill.step}: {problems}", file=sys.stderr, flush=True)
        yield outcome


def report(outcomes: Sequence[KillOutcome]) -> str:
    """The table."""
    rows = []
    for moment, victim in product(MOMENTS, VICTIMS):
        cell = [each for each in outcomes if (each.kill.moment, each.kill.victim) == (moment, victim)]
        if cell:
            rows.append(_row(moment, victim, cell))
    rows.append(_row("all", "", outcomes))
    head = ["moment", "victim", "kills", "resumed", "equal in bits", "processes left", "files left"]
    return table(head, rows)


def _row(moment: str, victim: str, cell: Sequence[KillOutcome]) -> list[str]:
    resumed = sum(not each.problem for each in cell)
    equal = sum(not each.differences for each in cell)
    processes, files = sum(each.processes for each in cell), sum(len(each.leftovers) for each in cell)
    return [moment, victim, *map(str, (len(cell), resumed, equal, processes, files))]


def _problems(outcome: KillOutcome) -> list[str]:
    processes = [f"{outcome.processes} processes live"] if outcome.processes else []
    return [*filter(None, [outcome.problem]), *processes, *outcome.differences, *outcome.leftovers]


if __name__ == "__main__":
    main()
