"""Runs of the variants of a study: each leaves one small file when it is finished, and is not done again."""

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

from parts.curves import WINDOWS, Curve, curve_of, read_curve
from parts.pages import DOCS
from parts.variants import Study
from parts.variants_page import Curves

CURVES = DOCS / "curves"


def make(study: Study, words: str, steps: int, write: Callable[[Curves, int], None]) -> None:
    """What the command line asks for; `words` is its help."""
    options = options_of(study, words, steps)
    if options.steps > WINDOWS and options.steps % WINDOWS:
        raise SystemExit(f"--steps {options.steps} is no multiple of the {WINDOWS} windows of a curve")
    options.curves.mkdir(parents=True, exist_ok=True)
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
    parser.add_argument("--curves", type=Path, default=CURVES, help="where finished runs are kept")
    parser.add_argument("--threads", type=int, default=1, help="per rank")
    parser.add_argument("--page", action="store_true", help="write the page from what is there, and train nothing")
    parser.add_argument("--no-page", action="store_true")
    return parser.parse_args()


def stored(study: Study, options: argparse.Namespace) -> Iterator[tuple[tuple[str, int], Curve]]:
    """(variant, seed) -> its curve, of all that are kept, as far as they were made with today's settings."""
    for name in study.variants:
        for path in sorted(options.curves.glob(f"{study.stem(name, '*', options.steps)}.json")):
            seed = int(path.stem.rpartition("seed")[2])
            curve = read_curve(path, study.settings(name, seed, options.steps))
            if curve is not None:
                yield (name, seed), curve


def train_once(study: Study, name: str, seed: int, options: argparse.Namespace) -> None:
    """Unless its file is there."""
    settings = study.settings(name, seed, options.steps)
    path = options.curves / f"{study.stem(name, seed, options.steps)}.json"
    if path.exists() and read_curve(path, settings) is not None:
        print(f"{path.stem}: is there", flush=True)
        return
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="motet-curves-") as folder:
        run, log = Path(folder) / "run", Path(folder) / "log"
        command = [sys.executable, "-m", "motet", "train", "tiny", "--ranks", str(study.ranks)]
        command += ["--run-folder", str(run), *settings, f"run.threads={options.threads}"]
        with log.open("w") as told:
            subprocess.run(command, stdout=told, stderr=told, env=dict(os.environ), check=False)
        curve = curve_of(run / "events.jsonl", settings, options.steps, study.variants[name].bound)
        if curve is None:
            raise SystemExit(f"{path.stem} did not end:\n{log.read_text()[-3000:]}")
    waiting = path.with_suffix(".part")
    waiting.write_text(curve.to_json(), encoding="utf-8")
    waiting.replace(path)
    last = f"loss {fmean(curve.losses[-5:]):.4f}" if curve.losses else "no window is whole"
    took = time.perf_counter() - start
    print(f"{path.stem}: {curve.ended}, {last}, validation {json.dumps(curve.validation)}, {took:.0f} s", flush=True)
