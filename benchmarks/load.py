"""Starts each kind of run beside busy processes: does it finish on a machine that has no time for it?

Eight processes that only compute share two cores with the run. Runs of `tiny` start one after another: with a parameter
server, data parallelism, tensor parallelism and a pipeline.

    python benchmarks/load.py [--busy 8] [--steps 3] [--quick] [--page]

--quick trains one step of a smaller model beside one busy process, without dp 2. --page writes
docs/benchmarks/load.md. The exit code is 1 if a run fails.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from parts.report.pages import DOCS, fill, table

PAGE = DOCS / "load.md"
MOTET = str(Path(sys.executable).with_name("motet"))
CORES = 2
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(10**6))"
LIMIT_S = 900.0
RUNS = {
    "parameter server": ["layout.data=parameter_server"],
    "dp 2": [],
    "tp 2": ["layout.tp=2"],
    "pp 2": ["layout.pp=2", "layout.microbatches=2"],
}
ALL = ["run.ranks=2", "run.threads=1", "monitor.sample_tokens=0", "monitor.tensorboard=false", "checkpoint.every=1000"]
SMALL = ["model.layers=2", "model.hidden=64", "model.ffn_hidden=128", "data.batch_sequences=4", "data.samples=200"]
HEADER = ["run", "outcome", "time to the first step", "time in all"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, default=8, help="processes that only compute")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one step of a smaller model, 1 busy process")
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name}")
    options = parser.parse_args()
    steps, busy = (1, 1) if options.quick else (options.steps, options.busy)
    settings = [*ALL, f"run.steps={steps}", *SMALL * options.quick]
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])  # All processes that start here inherit it
    rows = []
    with busy_processes(busy):
        for name, layout in RUNS.items():
            if options.quick and name == "dp 2":  # The others take longer to start
                continue
            rows.append([name, *start(layout, settings)])
            print(", ".join(rows[-1]), flush=True)
    where = f"{busy} busy processes on {CORES} cores; {steps} steps of `tiny` with two ranks or workers."
    if options.page:
        fill(PAGE, [where, table(HEADER, rows)])
    sys.exit(any(outcome != "finished" for _, outcome, *_ in rows))


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def start(layout: list[str], settings: list[str]) -> list[str]:
    """The outcome of a run, and the seconds until its first step and in all."""
    with tempfile.TemporaryDirectory(prefix="load-") as folder:
        command = [MOTET, "train", "tiny", f"run.folder={folder}/run", *layout, *settings]
        begin_s = time.time()
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        seconds = time.time() - begin_s
        file = Path(folder, "run", "events.jsonl")
        events = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
        steps = [event["time"] - begin_s for event in events if event["event"] == "step_done"]
    outcome = "finished" if ended.returncode == 0 else f"exit code {ended.returncode}: {ended.stderr.strip()[-500:]}"
    return [outcome, f"{steps[0]:.1f} s" if steps else "none", f"{seconds:.1f} s"]


if __name__ == "__main__":
    main()
