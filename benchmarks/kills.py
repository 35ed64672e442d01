"""Runs that are killed with SIGKILL at random moments and resumed: do they equal the run that nobody killed?

A small decoder with dropout trains on two ranks over shared memory and saves every three steps, while it goes on. It
trains once without a kill. Then each kill meets a new run: the supervisor, one rank or all processes, at a random
instant of one of six moments. `--resume` trains that run to its end, and the script compares it with the first one.
Other runs are not killed: from some step on, the system refuses one rank a file as large as its part of a checkpoint.

    python benchmarks/kills.py [--kills 40] [--full-disks 4] [--seed 1] [--page]

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
from parts.killed_runs import (
    EVERY,
    FULL_DISK,
    KEEP,
    MOMENTS,
    STEPS,
    VICTIMS,
    Kill,
    KillOutcome,
    UndisturbedRun,
    fill_disk_and_resume,
    kill_and_resume,
)
from parts.report.pages import DOCS, fill, table

PAGE = DOCS / "kills.md"
RANKS = ("rank 0", "rank 1")
SHARED_MEMORY = Path("/dev/shm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--full-disks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name}")
    options = parse_arguments(parser, kills=2, full_disks=1)
    before = {path.name for path in SHARED_MEMORY.iterdir()}
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        undisturbed = UndisturbedRun.train(Path(folder, "undisturbed"))
        random = Random(options.seed)
        outcomes = list(kill_all(options.kills, random, undisturbed, Path(folder)))
        outcomes += fill_disks(options.full_disks, random, undisturbed, Path(folder))
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
        yield _say(number, outcome)


def fill_disks(count: int, random: Random, undisturbed: UndisturbedRun, folder: Path) -> Iterator[KillOutcome]:
    """The disk of each rank in turn is full from a random step on."""
    for number, victim in enumerate(islice(cycle(RANKS), count)):
        run, step = folder / f"full-{number:03d}", random.randint(1, STEPS - 2 * EVERY)
        outcome = fill_disk_and_resume(victim, step, run, undisturbed=undisturbed)
        shutil.rmtree(run)
        yield _say(number, outcome)


def _say(number: int, outcome: KillOutcome) -> KillOutcome:
    kill, problems = outcome.kill, "; ".join(_problems(outcome)) or "equal"
    cut = ", in a save" if outcome.has_cut_save else ""
    text = f"{number + 1:3d} {kill.moment}, {kill.victim}, step {kill.step}{cut}: {problems}"
    print(text, file=sys.stderr, flush=True)
    return outcome


def report(outcomes: Sequence[KillOutcome]) -> str:
    """The table."""
    rows = []
    for moment, victim in product((*MOMENTS, FULL_DISK), VICTIMS):
        cell = [each for each in outcomes if (each.kill.moment, each.kill.victim) == (moment, victim)]
        if cell:
            rows.append(_row(moment, victim, cell))
    rows.append(_row("all", "", outcomes))
    head = ["moment", "victim", "runs", "cut in a save", "resumed", "equal in bits", "processes left", "files left"]
    return table(head, rows)


def _row(moment: str, victim: str, cell: Sequence[KillOutcome]) -> list[str]:
    resumed = sum(not each.problem for each in cell)
    cut = sum(each.has_cut_save for each in cell)
    equal = sum(not each.differences for each in cell)
    processes, files = sum(each.processes for each in cell), sum(len(each.leftovers) for each in cell)
    return [moment, victim, *map(str, (len(cell), cut, resumed, equal, processes, files))]


def _problems(outcome: KillOutcome) -> list[str]:
    processes = [f"{outcome.processes} processes live"] if outcome.processes else []
    return [*filter(None, [outcome.problem]), *processes, *outcome.differences, *outcome.leftovers]


if __name__ == "__main__":
    main()
