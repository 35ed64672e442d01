"""What compressed, quantised and infrequent communication does to training: loss curves beside the exact run's.

Each variant trains the job `tiny` on two ranks with the same values, batches and learning rates as the exact run of its
seed; only the communication differs. A run that is finished leaves one small file in docs/benchmarks/curves, and is
not done again. Every run is made in a temporary folder; one that is interrupted begins anew.

    python benchmarks/compressed_training.py [--steps 500] [--seeds 0 1 2] [--only exact int4 ...] [--curves FOLDER]
                                             [--page | --no-page]

At the end docs/benchmarks/compressed-training.md and its pictures are made of the curves that are there; --page does
that alone, --no-page does not. Beside other work on the machine, the losses are the same.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from parts.curves import WINDOWS, Curve, curve_of, read_curve
from parts.pages import DOCS
from parts.variants import COMMON, RANKS, VARIANTS
from parts.variants_page import write_page

CURVES = DOCS / "curves"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--curves", type=Path, default=CURVES, help="where finished runs are kept")
    parser.add_argument("--threads", type=int, default=1, help="per rank")
    parser.add_argument("--page", action="store_true", help="write the page from what is there, and train nothing")
    parser.add_argument("--no-page", action="store_true")
    options = parser.parse_args()
    if options.steps > WINDOWS and options.steps % WINDOWS:
        raise SystemExit(f"--steps {options.steps} is no multiple of the {WINDOWS} windows of a curve")
    options.curves.mkdir(parents=True, exist_ok=True)
    if not options.page:
        for seed in options.seeds:  # so that whole seeds are there when it is interrupted
            for name in options.only:
                train_once(name, seed, options)
    if not options.no_page:
        write_page(dict(stored(options)), options.steps)


def stored(options: argparse.Namespace) -> Iterator[tuple[tuple[str, int], Curve]]:
    """(variant, seed) -> its curve, of all that are kept, as far as they were made with today's settings."""
    for name in VARIANTS:
        for path in sorted(options.curves.glob(f"{name}-{options.steps}-seed*.json")):
            seed = int(path.stem.rpartition("seed")[2])
            curve = read_curve(path, settings_of(name, seed, options.steps))
            if curve is not None:
                yield (name, seed), curve


def settings_of(name: str, seed: int, steps: int) -> list[str]:
    return [*COMMON, *VARIANTS[name].settings, f"run.seed={seed}", f"run.steps={steps}"]


def train_once(name: str, seed: int, options: argparse.Namespace) -> None:
    """Unless its file is there."""
    settings = settings_of(name, seed, options.steps)
    path = options.curves / f"{name}-{options.steps}-seed{seed}.json"
    if path.exists() and read_curve(path, settings) is not None:
        print(f"{path.stem}: is there", flush=True)
        return
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="motet-curves-") as folder:
        run, log = Path(folder) / "run", Path(folder) / "log"
        command = [sys.executable, "-m", "motet", "train", "tiny", "--ranks", str(RANKS), "--run-folder", str(run)]
        command += [*settings, f"run.threads={options.threads}"]
        with log.open("w") as told:
            subprocess.run(command, stdout=told, stderr=told, env=dict(os.environ), check=False)
        curve = curve_of(run / "events.jsonl", settings, options.steps)
        if curve is None:
            raise SystemExit(f"{path.stem} did not end:\n{log.read_text()[-3000:]}")
    waiting = path.with_suffix(".part")
    waiting.write_text(curve.to_json(), encoding="utf-8")
    waiting.replace(path)
    last = f"loss {fmean(curve.losses[-5:]):.4f}" if curve.losses else "no window is whole"
    took = time.perf_counter() - start
    print(f"{path.stem}: {curve.ended}, {last}, validation {json.dumps(curve.validation)}, {took:.0f} s", flush=True)


if __name__ == "__main__":
    main()
