"""The fuzzer finds what it is there to find, and some cases of each target with a fixed seed find nothing."""

from collections import Counter
from pathlib import Path

import pytest
from fuzzing import cases, mutations
from fuzzing.cases import CaseResult
from fuzzing.report import rows
from fuzzing.runner import FuzzRequest, TargetReport, run_here, run_targets
from fuzzing.targets import TARGETS

from fuzzer import planted
from motet.core.token_authentication import TOKEN_VARIABLE

# The seed and the number of cases of each target in `make test`.
QUICK_CASES = {
    "checkpoint-manifests": (1, 100),
    "checkpoint-files": (1, 100),
    "dcp-folders": (1, 60),
    "server-strangers": (1, 60),
    "server-peers": (1, 30),
    "backend-strangers": (1, 40),
    "backend-peers": (1, 100),
    "run-files": (1, 100),
    "jobs": (23, 30),
    "corpora": (35, 60),
}


def _results(name: str, folder: Path, count: int, seed: int = 1) -> list[CaseResult]:
    request = FuzzRequest(name, seed, 0, count, seconds=600)
    return [result for result in run_here(request, folder) if isinstance(result, CaseResult)]


@pytest.mark.parametrize("name", TARGETS)
def test_targets_find_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "of one target")  # What a target sets is undone after the test
    seed, count = QUICK_CASES[name]
    results = _results(name, tmp_path, count, seed)
    assert [f"case {result.number}: {result.text}" for result in results if result.kind == "finding"] == []
    kinds = Counter(result.kind for result in results)
    assert len(results) == count and kinds["refused"] and (kinds["accepted"] or name.endswith("strangers"))
    structured = [result for result in results if result.is_structured]
    assert 3 * len(structured) >= len(results)
    assert any(result.is_past_first_check for result in structured if result.kind == "refused")


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("Raising", "ValueError: not for users"),
        ("Thread", "IndexError"),
        ("Warning", "RuntimeWarning"),
        ("Canary", "code of the input ran"),
        ("Wrong", "a tensor: motet says"),
        ("Prose", "the sentence has a traceback"),
        ("Endless", "took more than"),
        ("Greedy", "MemoryError"),
        ("Quitting", "SystemExit"),
    ],
)
def test_a_fault_is_a_finding(fault: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "CASE_LIMIT_S", 0.5)
    results = _results(f"fuzzer.planted:{fault}Target", tmp_path, 8)
    assert [result.kind for result in results] == ["refused", "accepted"] * 2 + ["refused", "finding"] + [
        "refused",
        "accepted",
    ]
    assert says in results[5].text and results[5].changes == ["number 5"]
    assert [result.is_past_first_check for result in results[:4]] == [False, True, False, True]


def test_a_worker_that_ends_is_a_finding_and_the_next_one_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{Path(planted.__file__).parents[1]}:{Path(cases.__file__).parents[2] / 'src'}")
    name = "fuzzer.planted:ExitTarget"
    (report,) = run_targets([FuzzRequest(name, 1, 0, 9, seconds=60)], 1)
    assert (report.cases, report.kinds["accepted"], report.kinds["finding"]) == (9, 3, 1)
    assert report.findings["the worker ended with code 3"].number == 5
    assert f"make fuzz TARGET={name} SEED=1 CASE=5" in capsys.readouterr().out


def test_a_case_is_the_same_whenever_it_is_made() -> None:
    def changes(number: int) -> str:
        case = cases.make_case("jobs", 7, number)
        return f"{mutations.change_bytes(case.rng, bytes(100))} {mutations.change_tree(case.rng, {'a': [1, 'b']})!r}"

    assert [changes(number) for number in range(50)] == [changes(number) for number in range(50)]
    assert len({changes(number) for number in range(50)}) > 40


def test_a_report_counts_cases_and_causes() -> None:
    report = TargetReport("jobs")
    for number in range(4):
        kind = "finding" if number > 1 else "refused"
        report.add(CaseResult(number, number != 0, kind, number > 0, "text", f"cause {number // 4}", []))
    assert rows([report])[0] == ["jobs", "4", "75 %", "75 %", "0", "2", "2"]
    assert report.finding_counts == {"cause 0": 2} and report.findings["cause 0"].number == 2
