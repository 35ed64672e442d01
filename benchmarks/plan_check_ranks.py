"""The time of the plan of a step and of its check, by the number of ranks: data parallelism alone, and dp x tp x pp.

Each case is a separate process. Splits over `tp` and `pp` are written down by name (parts/megatron_split.py), so the
times are those of the plan and the check alone, without the proof of a split. The last table has whole commands.

    python benchmarks/plan_check_ranks.py [--rounds 3] [--page]

--page writes docs/benchmarks/plan-check-ranks.md.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from parts.arguments import parse_arguments
from parts.report.pages import DOCS, fill, table

from motet.parallel.step_plan.check import prove_step_plan
from motet.train.job import load_job
from motet.train.job_step_plan import step_plan_of_job
from motet.train.launch.preflight import check_job

PAGE = DOCS / "plan-check-ranks.md"
MOTET = str(Path(sys.executable).with_name("motet"))
RANKS = (64, 256, 1024, 4096, 16384)
LAYOUTS = {
    **{f"`llama3-8b`, dp, stage {zero}": ("llama3-8b", f"zero={zero}", 1, 1) for zero in range(4)},
    "`llama3-8b`, dp, stage 3, shard groups of 64": ("llama3-8b", "zero=3 shard_group=64", 1, 1),
    "`llama3-405b`, dp x tp 8 x pp 8, stage 1": ("llama3-405b", "zero=1 tp=8 pp=8 microbatches=32", 64, 32),
}
COMMANDS = [
    ["show", "layout", "dp=2048 zero=3", "--job", "llama3-70b", "data.batch_sequences=2048"],
    *(
        ["show", "layout", f"dp=16384 zero={zero}", "--job", "llama3-8b", "data.batch_sequences=16384"]
        for zero in range(4)
    ),
    [
        *("show", "layout", "dp=16384 zero=1", "--job", "llama3-8b", "--cluster", "dgx-h100", "--json"),
        "data.batch_sequences=16384",
    ],
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--commands", type=int, default=len(COMMANDS), help="complete commands that are timed")
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name}")
    parser.add_argument("--case", nargs=2, metavar=("LAYOUT", "RANKS"), help=argparse.SUPPRESS)
    options = parse_arguments(parser, rounds=1, ranks=[64, 256], commands=1)
    if options.case:
        print(json.dumps(measure(options.case[0], int(options.case[1]))))
        return
    rows = [[name, *(_cell(name, ranks, options.rounds) for ranks in options.ranks)] for name in LAYOUTS]
    commands = [
        [f"`motet {_quoted(words)}`", *_command_cells(words, options.rounds)] for words in COMMANDS[: options.commands]
    ]
    where = f"Processor seconds to make the plan + to check it, median of {options.rounds} processes, and peak memory."
    parts = [
        where,
        table(["layout", *(f"{ranks:,} ranks" for ranks in options.ranks)], rows),
        "Whole commands:",
        table(["command", "processor time", "peak memory", "output"], commands),
    ]
    print(*parts, sep="\n\n")
    if options.page:
        fill(PAGE, parts)


def measure(name: str, ranks: int) -> dict[str, float]:
    """Processor seconds of the plan and of its check, and the peak memory of this process in MB."""
    from parts.megatron_split import megatron_split

    job_name, words, parts, microbatches = LAYOUTS[name]
    dp = ranks // parts
    overrides = [f"layout.{word}" for word in (f"dp={dp}", *words.split())]
    job = load_job(job_name, [*overrides, f"data.batch_sequences={dp * microbatches}"])
    layout = check_job(job, ranks)
    inventory, sharding = megatron_split(job, layout)
    start = time.process_time()
    plan = step_plan_of_job(job, layout, inventory, model_sharding=sharding)
    planned = time.process_time()
    assert prove_step_plan(plan).ranks == ranks
    stop = time.process_time()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return {"plan_s": planned - start, "check_s": stop - planned, "peak_mb": peak}


def _cell(name: str, ranks: int, rounds: int) -> str:
    command = [sys.executable, __file__, "--case", name, str(ranks)]
    results = [json.loads(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(rounds)]
    plan, check, peak = (median(each[key] for each in results) for key in ("plan_s", "check_s", "peak_mb"))
    return f"{plan:.2f} + {check:.2f} s, {peak:.0f} MB"


def _command_cells(words: list[str], rounds: int) -> list[str]:
    seconds, peaks, output = list[float](), list[float](), b""
    for _ in range(rounds):
        code = f"import resource, subprocess, sys; subprocess.run({[MOTET, *words]!r}, check=True)\n"
        code += "usage = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        code += "print(usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1e3, file=sys.stderr)"
        made = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        used, peak = map(float, made.stderr.split()[-2:])
        seconds.append(used)
        peaks.append(peak)
        output = made.stdout
    return [f"{median(seconds):.1f} s", f"{median(peaks):.0f} MB", f"{len(output) / 1e3:,.0f} kB"]


def _quoted(words: list[str]) -> str:
    return " ".join(f'"{word}"' if " " in word else word for word in words)


if __name__ == "__main__":
    main()
