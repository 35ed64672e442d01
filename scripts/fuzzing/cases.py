"""A case of the fuzzer, its outcome, and the rules that hold for every target.

motet either accepts the input of a case, and the target compares the result with the truth, or refuses it with a
`MotetError` of one sentence. Everything else is a finding: another exception in any thread, a warning, a case that does
not end, code of the input that ran, or a result that differs from the truth.
"""

import os
import random
import re
import resource
import signal
import sys
import threading
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from motet.core.errors import MotetError

ROOT = Path(__file__).parents[2]
CASE_LIMIT_S = 10.0
MAX_SENTENCE = 20_000
MAX_EXTRA_BYTES = 1 << 30  # Address space that a case may take in addition to that of the process before it

OutcomeKind = Literal["accepted", "refused", "finding"]


class FindingError(AssertionError):
    """A forbidden reaction of motet."""


@dataclass
class FuzzCase:
    """One input. Everything random in it comes from `rng`, so that target, seed and number repeat it."""

    number: int
    rng: random.Random
    is_structured: bool  # Well-formed up to its changes
    changes: list[str] = field(default_factory=list)  # The changes, for the report of a finding

    def note(self, change: str) -> None:
        self.changes.append(change if len(change) <= 400 else f"{change[:400]}... ({len(change)} characters)")


@dataclass(frozen=True)
class Outcome:
    """The answer of motet to a case; `is_past_first_check` is None where the sentence of the refusal says it."""

    kind: OutcomeKind
    text: str = ""
    is_past_first_check: bool | None = None
    signature: str = ""  # Equal for findings of one cause


ACCEPTED = Outcome("accepted", is_past_first_check=True)


@dataclass(frozen=True)
class CaseResult:
    """The outcome of a case, as a worker process reports it."""

    number: int
    is_structured: bool
    kind: OutcomeKind
    is_past_first_check: bool
    text: str
    signature: str
    changes: list[str]


class FuzzTarget(ABC):
    """A kind of input. `run` makes the input of a case, hands it to motet and compares the result with the truth."""

    name: ClassVar[str]
    first_check: ClassVar[str]  # The first check in words, for the page
    extra_bytes: ClassVar[int] = MAX_EXTRA_BYTES
    first_refusals: ClassVar[str] = "(?!)"  # Pattern of the sentences with which the first check refuses

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.canary = folder / "canary"  # Code in an input would create it

    @abstractmethod
    def run(self, case: FuzzCase) -> Outcome | None:
        """Return None for input that was accepted and is right; let a `MotetError` pass that refuses it."""

    def close(self) -> None:  # noqa: B027 - most targets have nothing to end
        """End the processes and connections of the target."""


def make_case(target: str, seed: int, number: int) -> FuzzCase:
    """The case of a target; two thirds of all are well-formed up to their changes."""
    return FuzzCase(number, random.Random(f"{target}/{seed}/{number}"), number % 3 != 0)


def check_equal(name: str, actual: Any, expected: Any) -> None:
    """Raise a finding unless motet's value is the true one."""
    if actual != expected:
        raise FindingError(f"{name}: motet says {str(actual)[:300]}, the truth is {str(expected)[:300]}")


def run_case(target: FuzzTarget, case: FuzzCase) -> CaseResult:
    """Run one case and evaluate everything that it did."""
    with watched_threads() as stray:
        try:
            with case_time_limit():
                outcome = target.run(case) or ACCEPTED
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - also SystemExit, and panics of libraries
            outcome = outcome_of_error(error)
    if stray and outcome.kind != "finding":
        outcome = Outcome("finding", stray[0], signature=_signature(stray[0]))
    if target.canary.exists():
        target.canary.unlink()
        outcome = Outcome("finding", "code of the input ran", signature="canary")
    is_past = outcome.is_past_first_check
    if is_past is None:
        is_past = outcome.kind == "accepted" or not re.search(target.first_refusals, outcome.text)
    return CaseResult(
        case.number, case.is_structured, outcome.kind, is_past, outcome.text, outcome.signature, case.changes
    )


def outcome_of_error(error: BaseException) -> Outcome:
    """A refusal for a `MotetError` of one sentence, and a finding for everything else."""
    if not isinstance(error, MotetError):
        text = "".join(traceback.format_exception(error))
        return Outcome("finding", text, signature=_signature(text))
    problem = sentence_problem(str(error))
    return Outcome("finding", f"{problem}: {error}", signature=problem) if problem else Outcome("refused", str(error))


def sentence_problem(text: str) -> str:
    """The reason why a text is not a sentence for a user; empty if it is one."""
    problems = {
        "the sentence is empty": not text.strip(),
        "the sentence has a traceback": "Traceback" in text,
        "the sentence has a line break": "\n" in text.strip(),
        "the sentence has control characters": re.search(r"[\0-\x08\x0b-\x1f\x7f]", text),
        "the sentence shows an address of memory": re.search(r"\bat 0x[0-9a-f]{6,}", text),
        f"the sentence has more than {MAX_SENTENCE} characters": len(text) > MAX_SENTENCE,
    }
    return next((problem for problem, is_so in problems.items() if is_so), "")


def _signature(text: str) -> str:
    """The innermost line of motet in a traceback, and the type of the error."""
    frames = re.findall(r'File ".*?/(src/motet/[^"]+)", line (\d+)', text)
    kinds = re.findall(r"^([\w.]+)(?::|$)", text, re.MULTILINE)
    if frames and kinds:
        return f"{kinds[-1]} at {':'.join(frames[-1])}"
    return re.sub(r"\d+", "N", text.strip().splitlines()[-1])[:100]


@contextmanager
def watched_threads() -> Iterator[list[str]]:
    """The list collects exceptions of other threads, of destructors, and warnings."""
    stray: list[str] = []

    def record(error: Any) -> None:
        stray.append("".join(traceback.format_exception(error.exc_value)))

    earlier = threading.excepthook, sys.unraisablehook
    threading.excepthook, sys.unraisablehook = record, record
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield stray
    finally:
        threading.excepthook, sys.unraisablehook = earlier
    stray += [f"{warning.category.__name__} at {warning.filename}: {warning.message}" for warning in caught]


@contextmanager
def case_time_limit() -> Iterator[None]:
    """Raise in the main thread if the block takes too long; a worker that does not return to Python is killed."""

    def interrupt(*_: object) -> None:
        raise FindingError(f"the case took more than {CASE_LIMIT_S:.0f} s")

    earlier = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, CASE_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)


@contextmanager
def memory_limit(extra_bytes: int) -> Iterator[None]:
    """An allocation that takes the process beyond its address space of today plus `extra_bytes` raises MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    earlier = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + extra_bytes, earlier[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, earlier)
