"""Runs of the variants of a study: a finished run is a line of a CSV file, and is not repeated."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean

from parts.arguments import parse_arguments
from parts.loss_curves import WINDOWS, Curve, curve_of, read_curves, write_curves
from parts.report.pages import DOCS
from parts.report.study_page import Curves
from parts.study import Study

CURVES = DOCS / "training-curves.csv"


def make(study: Study, words: str, steps: int, write: Callable[[Curves, int], None]) -> None:
    """Run the request of the command line; `words` is its help."""
    options = options_of(study, words, steps)
    if options.steps > WINDOWS and options.steps % WINDOWS:
        raise SystemExit(f"--steps {options.steps} is not a multiple of the {WINDOWS} windows of a curve")
    if not options.page:
        for seed in options.seeds:  # so that whole seeds are there when it is interrupted
            for name in options.only:
                train_once(study, name, seed, options)
    curves = {} if options.no_page else dict(stored(study, options))
    if curves:
        write(curves, options.steps)
    elif not options.no_page:
        print("no run is there, so the page stays as it is")


def options_of(study: Study, words: str, steps: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=words, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=list(study.variants), choices=list(study.variants))
    parser.add_argument("--curves", type=Path, default=CURVES, help="the table of finished runs")
    parser.add_argument("--threads", type=int, default=1, help="per rank")
    parser.add_argument("--page", action="store_true", help="write the page from finished runs, and train nothing")
    parser.add_argument("--no-page", action="store_true")
    quick = {"steps": 10, "seeds": [0], "only": list(study.variants)[:2], "no_page": True}
    curves = Path(tempfile.gettempdir(), f"curves-{os.getpid()}.csv")
    return parse_arguments(parser, **quick, curves=curves)


def stored(study: Study, options: argparse.Namespace) -> Iterator[tuple[tuple[str, int], Curve]]:
    """(variant, seed) -> its curve, of all runs with today's settings."""
    curves = read_curves(options.curves)
    for name in study.variants:
        for run, curve in curves.items():
            seed = int(run.rpartition("seed")[2])
            is_of_variant = run == study.run_name(name, seed, options.steps)
            if is_of_variant and curve.settings == study.settings(name, seed, options.steps):
                yield (name, seed), curve


def train_once(study: Study, name: str, seed: int, options: argparse.Namespace) -> None:
    """Train, unless the run is in the table."""
    settings = study.settings(name, seed, options.steps)
    run_name = study.run_name(name, seed, options.steps)
    curves = read_curves(options.curves)
    if run_name in curves and curves[run_name].settings == settings:
        print(f"{run_name}: is in {options.curves.name}", flush=True)
        return
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="motet-curves-") as folder:
        run, log = Path(folder) / "run", Path(folder) / "log"
        command = [sys.executable, "-m", "motet", "train", "tiny", "--ranks", str(study.ranks)]
        command += ["--run-folder", str(run), *settings, f"run.threads={options.threads}"]
        with log.open("w") as output:
            subprocess.run(command, stdout=output, stderr=output, env=dict(os.environ), check=False)
        curve = curve_of(run / "events.jsonl", settings, options.steps, study.variants[name].bound)
        if curve is None:
            raise SystemExit(f"{run_name} did not end:\n{log.read_text()[-3000:]}")
    write_curves(options.curves, {**read_curves(options.curves), run_name: curve})
    last = f"loss {fmean(curve.losses[-5:]):.4f}" if curve.losses else "no window is whole"
    took = time.perf_counter() - start
    print(f"{run_name}: {curve.ended}, {last}, validation {json.dumps(curve.validation)}, {took:.0f} s", flush=True)
