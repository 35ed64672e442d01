"""Gives motet changed input, and reports everything that is neither right nor refused in one sentence.

    python scripts/fuzz.py --minutes 2                                # all targets, with a new seed each time
    python scripts/fuzz.py --target jobs corpora --seed 7 --cases 500
    python scripts/fuzz.py --target jobs --seed 7 --case 123          # repeats one case, and shows it
    python scripts/fuzz.py --minutes 30 --page                        # also writes docs/benchmarks/fuzzing.md

`make fuzz MINUTES=2 TARGET=jobs SEED=7 CASE=123` does the same. The exit code is 1 if there are findings.
"""

import argparse
import json
import os
import random
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from fuzzing.report import print_reports, write_page
from fuzzing.runner import FuzzRequest, describe_finding, run_here, run_targets, worker_main
from fuzzing.targets import TARGETS

ALL_CASES = 10**9


def main() -> int:
    """Run the targets that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0, help="time for all targets together")
    parser.add_argument("--target", nargs="*", choices=[*TARGETS, ""], default=[], help="all if none is named")
    parser.add_argument("--seed", type=int, help="a new one if not given")
    parser.add_argument("--cases", type=int, default=ALL_CASES, help="at most this number of cases of each target")
    parser.add_argument("--case", type=int, help="repeat this case of one target in this process")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1), help="workers that run together")
    parser.add_argument("--page", action="store_true", help="write docs/benchmarks/fuzzing.md")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker_main(FuzzRequest(**json.loads(options.worker)))
        return 0
    names = [name for name in options.target if name] or list(TARGETS)
    seed = random.randrange(10**6) if options.seed is None else options.seed
    if options.case is not None:
        if len(names) != 1:
            parser.error("--case repeats a case of one target; name it with --target")
        return _repeat(FuzzRequest(names[0], seed, options.case, 1, ALL_CASES))
    processes = min(options.processes, len(names))
    seconds = 60 * options.minutes * processes / len(names)
    print(f"seed {seed}, {len(names)} targets in {processes} processes, {seconds:.0f} s each", flush=True)
    requests = [FuzzRequest(name, seed, 0, options.cases, seconds) for name in names]
    reports = run_targets(requests, processes)
    print_reports(reports)
    if options.page:
        write_page(reports, seed)
    return int(any(report.findings for report in reports))


def _repeat(request: FuzzRequest) -> int:
    with tempfile.TemporaryDirectory(prefix="motet-fuzz-") as folder:
        for result in run_here(request, Path(folder)):
            if isinstance(result, int):
                continue
            if result.kind == "finding":
                print(describe_finding(request, result))
                return 1
            print(json.dumps(asdict(result), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
