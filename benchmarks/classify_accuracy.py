"""Held-out accuracy of the built-in job `bert-classify`, with its settings, for some seeds.

    python benchmarks/classify_accuracy.py [--seeds 0 1 2] [--ranks 2] [--threads 1] [--page]

--page writes docs/benchmarks/classify-accuracy.md.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from parts.arguments import parse_arguments
from parts.report.pages import DOCS, fill, table

PAGE = DOCS / "classify-accuracy.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="the steps of the job when not given")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="per rank")
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name}")
    options = parse_arguments(parser, seeds=[0], steps=4)
    found = {seed: evaluations(seed, options) for seed in options.seeds}
    steps = list(found[options.seeds[0]])
    rows = [[f"{step:,}", *(cell for seed in options.seeds for cell in found[seed][step])] for step in steps]
    heads = ["after step", *(f"{word}, seed {seed}" for seed in options.seeds for word in ("loss", "accuracy"))]
    where, told = f"{options.ranks} ranks x {options.threads} threads.", table(heads, rows)
    print(where, told, sep="\n\n")
    if options.page:
        fill(PAGE, [where, told])


def evaluations(seed: int, options: argparse.Namespace) -> dict[int, tuple[str, str]]:
    """Step -> loss and accuracy on the held-out samples."""
    from motet.monitor.events import EvaluationDone, read_events

    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        settings = [f"run.seed={seed}", f"run.threads={options.threads}", f"run.folder={run}", "checkpoint.every=10000"]
        settings += [f"run.steps={options.steps}"] if options.steps else []
        command = [sys.executable, "-m", "motet", "train", "bert-classify", "--ranks", str(options.ranks), *settings]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        done = [event for event in read_events(run / "events.jsonl") if isinstance(event, EvaluationDone)]
        return {event.step: (f"{event.loss:.4f}", f"{event.accuracy:.2%}") for event in done}


if __name__ == "__main__":
    main()
