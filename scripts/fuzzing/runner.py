"""Runs targets in worker processes, which may be killed, and collects their reports.

A worker writes a line before each case and one with its outcome. A worker that ends or is silent for a while has met a
finding in the case that it began; the next worker continues after that case.
"""

import faulthandler
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fuzzing.cases import ROOT, CaseResult, make_case, memory_limit, run_case
from fuzzing.targets import target_class

SILENCE_LIMIT_S = 90.0
SHOWN_CHARACTERS = 3000
WORKER_LIMIT = 20  # Workers of one target that may be killed


@dataclass
class TargetReport:
    """Counts and findings of one target."""

    name: str
    cases: int = 0
    structured: int = 0
    past_first_check: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    findings: dict[str, CaseResult] = field(default_factory=dict)  # The first one of each signature
    finding_counts: Counter[str] = field(default_factory=Counter)

    def add(self, result: CaseResult) -> bool:
        """Count a result; whether it is the first finding of its signature."""
        self.cases += 1
        self.structured += result.is_structured
        self.past_first_check += result.is_past_first_check
        self.kinds[result.kind] += 1
        if result.kind != "finding":
            return False
        self.finding_counts[result.signature] += 1
        return self.findings.setdefault(result.signature, result) is result


@dataclass(frozen=True)
class FuzzRequest:
    """The requested cases of a target: from `first` on, until `cases` or `seconds` are used up."""

    target: str
    seed: int
    first: int
    cases: int
    seconds: float


def run_here(request: FuzzRequest, folder: Path) -> Iterator[CaseResult | int]:
    """The number of each case, and then its result, in this process."""
    end = time.monotonic() + request.seconds
    target = target_class(request.target)(folder)
    with memory_limit(target.extra_bytes), closing(target):
        for number in range(request.first, request.first + request.cases):
            if time.monotonic() > end:
                return
            yield number
            yield run_case(target, make_case(request.target, request.seed, number))


def worker_main(request: FuzzRequest) -> None:
    """Be a worker: lines of JSON go to the original standard output; the output of motet goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    faulthandler.enable()
    with tempfile.TemporaryDirectory(prefix="motet-fuzz-", dir=_scratch_folder()) as folder:
        for line in run_here(request, Path(folder)):
            value = line if isinstance(line, int) else asdict(line)
            answers.write(json.dumps(value) + "\n")
            answers.flush()


def _scratch_folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def run_targets(requests: Sequence[FuzzRequest], processes: int) -> list[TargetReport]:
    """Run targets in `processes` workers, and print each new finding when it is met."""
    with ThreadPoolExecutor(processes) as pool:
        return list(pool.map(_run_target, requests))


def _run_target(request: FuzzRequest) -> TargetReport:
    report, end, first = TargetReport(request.target), time.monotonic() + request.seconds, request.first
    for _ in range(WORKER_LIMIT):
        last_case, problem = first - 1, ""
        rest = request.first + request.cases - first
        for line in _worker_lines(FuzzRequest(request.target, request.seed, first, rest, end - time.monotonic())):
            if isinstance(line, int):
                last_case = line
            elif isinstance(line, str):
                problem = line
            elif report.add(line):
                print(describe_finding(request, line), flush=True)
        if not problem:
            break
        lost = make_case(request.target, request.seed, last_case)
        kind = problem.splitlines()[0]
        result = CaseResult(last_case, lost.is_structured, "finding", False, problem, kind, [])
        if report.add(result):
            print(describe_finding(request, result), flush=True)
        first = last_case + 1
        if last_case < request.first or time.monotonic() > end:
            break
    return report


def _worker_lines(request: FuzzRequest) -> Iterator[CaseResult | int | str]:
    """The lines of a worker; a text as the last one is the reason why the worker ended badly."""
    command = [sys.executable, str(ROOT / "scripts/fuzz.py"), "--worker", json.dumps(asdict(request))]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, start_new_session=True)
        assert process.stdout is not None
        buffer, problem = b"", ""
        while True:
            if not select.select([process.stdout], [], [], SILENCE_LIMIT_S)[0]:
                problem = f"the worker said nothing for {SILENCE_LIMIT_S:.0f} s"
                process.send_signal(signal.SIGABRT)  # Its threads are written to standard error
                process.wait(10)
                break
            block = os.read(process.stdout.fileno(), 1 << 16)
            *lines, buffer = (buffer + block).split(b"\n")
            for line in lines:
                value = json.loads(line)
                yield value if isinstance(value, int) else CaseResult(**value)
            if not block:
                break
        process.stdout.close()
        code = process.wait()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        errors.seek(0)
        printed = errors.read().decode(errors="replace")
        if code and not problem:
            problem = f"the worker ended with code {code}"
        elif "Traceback" in printed and not problem:
            problem = "a traceback was printed"
        if problem:
            yield f"{problem}\n{printed[-6000:]}"


def describe_finding(request: FuzzRequest, result: CaseResult) -> str:
    """A finding with the command that repeats it alone."""
    command = f"make fuzz TARGET={request.target} SEED={request.seed} CASE={result.number}"
    head = f"FINDING in {request.target}, case {result.number}; repeat it with: {command}"
    return "\n".join(
        [head, *(f"  changed: {change}" for change in result.changes), result.text[-SHOWN_CHARACTERS:], ""]
    )
