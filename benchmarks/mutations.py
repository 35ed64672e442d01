"""The mistakes that tests catch: mutants of the source, each run against the tests that reach the changed place.

    python benchmarks/mutations.py make            # mutants, drawn evenly: 60 from src/motet, 76 more from its planner
    python benchmarks/mutations.py record          # which test reaches which mutant (the time of make test)
    python benchmarks/mutations.py run             # resumable: a result is stored as soon as it is known
    python benchmarks/mutations.py run --label after --again-of before --also TEST ...
    python benchmarks/mutations.py page            # docs/benchmarks/mutations.md

Everything but the page lies in build/mutations. The second `run` repeats the mutants that the first has missed, with
tests that are newer than the record. The cheapest tests run first, and a mutant has three minutes.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from parts.mutation.mutants import Mutant, put_probes, sample
from parts.report.pages import DOCS, ROOT, commit, fill, table

BUILD = ROOT / "build/mutations"
PAGE = DOCS / "mutations.md"
DRAWN = {"src/motet": 60, "src/motet/plan": 76}
LIMIT_S = 180
TESTS_S = 100
"""The recorded time of the tests that are chosen for a mutant: a run that does not end within LIMIT_S then hangs."""
_PHASE = re.compile(r" \((setup|call|teardown)\)$")
LEFT_OUT = (".git", ".venv", "build", "*_cache", "runs", "site", "__pycache__")


def make(options: argparse.Namespace) -> None:
    BUILD.mkdir(parents=True, exist_ok=True)
    drawn = {mutant for folder, count in DRAWN.items() for mutant in sample(ROOT, folder, count, options.seed)}
    mutants = sorted(drawn, key=lambda one: (one.file, one.line, one.column))
    (BUILD / "mutants.json").write_text(json.dumps([mutant.as_json() for mutant in mutants], indent=1))
    print("\n".join(map(str, mutants)))


def record(_: argparse.Namespace) -> None:
    """Run every test on a copy of the tree that records the tests which reach the place of each mutant."""
    folder = BUILD / "reach"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with copied_tree() as copy:
        put_probes(copy, read_mutants(), folder)
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", "-p", "durations_plugin"]
        path = f"{copy}/src:{copy}/benchmarks/parts/mutation"
        environment = {**os.environ, "DURATIONS": str(BUILD / "durations.json"), "PYTHONPATH": path}
        subprocess.run(command, cwd=copy, env=environment, check=False)
    (BUILD / "recorded.txt").write_text(commit())


def run(options: argparse.Namespace) -> None:
    """Run the mutants that have no result under this label yet."""
    reach, before = Reach(), results(options.again_of) if options.again_of else {}

    def one(mutant: Mutant) -> None:
        name = str(mutant)
        if name in results(options.label):
            return
        is_known = before.get(name, {}).get("caught")
        result = before[name] if is_known else judge(mutant, [*options.also, *reach.tests_of(mutant)])
        with (BUILD / f"results-{options.label}.jsonl").open("a") as file:
            file.write(json.dumps({**result, "mutant": name}) + "\n")
        verdict = "caught" if result["caught"] else "MISSED"
        print(f"{verdict} {name}  [{result['by']}, {result['seconds']:.0f} s]", flush=True)

    with ThreadPoolExecutor(options.parallel) as pool:
        list(pool.map(one, read_mutants()))
    everything = results(options.label)
    print(f"{sum(result['caught'] for result in everything.values())} of {len(everything)} are caught")


def page(options: argparse.Namespace) -> None:
    """Every mutant, with the test that has caught it under each label."""
    found = {label: results(label) for label in options.labels}
    heads = ["mutant", *options.labels]
    rows = [
        [f"`{mutant}`".replace("|", "\\|"), *(verdict(found[label].get(str(mutant))) for label in options.labels)]
        for mutant in read_mutants()
    ]
    caught = [f"{sum(one['caught'] for one in each.values())} of {len(each)} {label}" for label, each in found.items()]
    where = f"Tests recorded at commit `{(BUILD / 'recorded.txt').read_text()}`. Caught: {', '.join(caught)}."
    fill(PAGE, [where, table(heads, rows)])
    print(where)


def verdict(result: dict[str, Any] | None) -> str:
    if result is None:
        return "not run"
    words = result["by"].split("::")[-1].replace("|", "\\|")
    return words if result["caught"] else f"**missed** ({words})"


class Reach:
    """The tests that reach a mutant, by the record."""

    def __init__(self) -> None:
        recorded, now = json.loads((BUILD / "durations.json").read_text()), tests_of_today()
        self.seconds: dict[str, float] = {name: recorded[name] for name in recorded if name in now}
        self.tests: dict[str, set[str]] = defaultdict(set)
        for file in (BUILD / "reach").iterdir():
            for row in file.read_text().splitlines():
                number, _, test = row.partition("\t")
                self.tests[str(read_mutants()[int(number)])].add(_PHASE.sub("", test))

    def tests_of(self, mutant: Mutant) -> list[str]:
        """The cheapest tests that reach the place, up to TESTS_S; where none does, those of the folder's name."""
        folder = Path(mutant.file).parts[2].removesuffix(".py")
        tests = self.tests[str(mutant)] & self.seconds.keys()
        tests = tests or {name for name in self.seconds if name.startswith(f"tests/{folder}/")}
        chosen, spent = [], 0.0
        for name in sorted(tests, key=lambda name: (self.seconds[name], name)):
            spent += self.seconds[name]
            if spent > TESTS_S:
                break
            chosen.append(name)
        return chosen


def tests_of_today() -> set[str]:
    """Tests that `make test` has now: some of the record may belong to `make proof` since."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return set(listed.splitlines())


@contextlib.contextmanager
def copied_tree() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="motet-mutant-") as folder:
        copy = Path(folder) / "motet"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_OUT))
        yield copy


def judge(mutant: Mutant, tests: list[str]) -> dict[str, Any]:
    """Run the tests on a copy of the tree with the mutant in it."""
    if not tests:
        return {"caught": False, "by": "no test reaches it", "seconds": 0.0}
    with copied_tree() as copy:
        output = copy.parent / "output.txt"
        mutant.apply(copy)
        by_file = defaultdict(list)
        for test in tests:
            by_file[test.split("::")[0]].append(test)
        (copy / "tests.txt").write_text("\n".join(test for names in by_file.values() for test in names))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "@tests.txt"]
        environment = {**os.environ, "PYTHONPATH": f"{copy}/src", "OMP_NUM_THREADS": "1", "TMPDIR": str(copy.parent)}
        started = time.monotonic()
        with output.open("w") as file:
            process = subprocess.Popen(
                command, cwd=copy, env=environment, stdout=file, stderr=file, start_new_session=True
            )
            try:
                code = process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                subprocess.run(["pkill", "-KILL", "-s", str(process.pid)], check=False)
                process.wait()
        seconds = round(time.monotonic() - started, 1)
        return {**outcome(code, output.read_text(errors="replace"), len(tests)), "seconds": seconds}


def outcome(code: int | None, output: str, tests: int) -> dict[str, Any]:
    lines = output.strip().splitlines()
    failed = [line.split()[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if code is None:
        return {"caught": True, "by": "a test does not end"}
    if code == 0:
        return {"caught": False, "by": f"{tests} tests pass"}
    return {"caught": True, "by": failed[0] if failed else lines[-1][:120]}


def read_mutants() -> list[Mutant]:
    return [Mutant(**one) for one in json.loads((BUILD / "mutants.json").read_text())]


def results(label: str) -> dict[str, dict[str, Any]]:
    path = BUILD / f"results-{label}.jsonl"
    rows = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {row["mutant"]: row for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    commands.add_parser("record").set_defaults(call=record)
    made = commands.add_parser("make")
    made.add_argument("--seed", type=int, default=18)
    made.set_defaults(call=make)
    ran = commands.add_parser("run")
    ran.add_argument("--label", default="before")
    ran.add_argument("--again-of", help="take over the mutants that this label has caught; run the rest")
    ran.add_argument("--also", nargs="*", default=[], help="tests that are newer than the record")
    ran.add_argument("--parallel", type=int, default=2, help="mutants at the same time")
    ran.set_defaults(call=run)
    told = commands.add_parser("page")
    told.add_argument("--labels", nargs="+", default=["before", "after"])
    told.set_defaults(call=page)
    options = parser.parse_args()
    options.call(options)


if __name__ == "__main__":
    main()
