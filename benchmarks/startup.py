"""The time of commands that a person waits for: `motet --help` and `motet show model`, next to Python's start.

Each is a separate process; they take turns, and the first round, which warms up the disk, is not counted.

    python benchmarks/startup.py [--rounds 15] [--page]

--page writes docs/benchmarks/startup.md.
"""

import argparse
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from parts.arguments import parse_arguments
from parts.report.pages import DOCS, fill, table
from parts.rounds import interleave, quartiles

PAGE = DOCS / "startup.md"
MOTET = str(Path(sys.executable).with_name("motet"))
COMMANDS = {
    "`python -c pass`": ([sys.executable, "-c", "pass"], ""),
    "`motet --help`": ([MOTET, "--help"], "0.2 s"),
    "`motet show model llama3-8b`": ([MOTET, "show", "model", "llama3-8b"], "0.5 s"),
    '`motet show layout "dp=8 zero=2"`': ([MOTET, "show", "layout", "dp=8 zero=2"], ""),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name}")
    options = parse_arguments(parser, rounds=1)
    calls = {name: partial(seconds, command) for name, (command, _) in COMMANDS.items()}
    times = interleave(calls, options.rounds + 1)
    rows = []
    for name, (_, target) in COMMANDS.items():
        low, middle, high = quartiles(times[name][1:])
        rows.append([name, f"{middle:.3f} s", f"{low:.3f} to {high:.3f}", target])
    where, told = f"{options.rounds} rounds, warm.", table(["command", "median", "quartiles", "target"], rows)
    print(where, told, sep="\n\n")
    if options.page:
        fill(PAGE, [where, told])


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
