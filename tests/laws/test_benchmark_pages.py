"""Every page of docs/benchmarks is written by its script, and says by which command, commit and machine."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs/benchmarks").glob("*.md"))
PROVENANCE = re.compile(
    r"<!-- results -->\n\nWritten by `python (?P<script>(?:benchmarks|scripts)/\w+\.py)(?P<options>[^`]*)` "
    r"at commit `(?P<commit>[0-9a-f]{7,40})\+?` on (?P<machine>\S.*)\.\n"
)


def _problems(text: str, is_commit: bool | None = None) -> list[str]:
    """The faults of a page; `is_commit`: whether the repository knows its commit, None to look."""
    found = PROVENANCE.search(text)
    if found is None:
        return ["it does not say, first of its results, by which script, at which commit, on which machine"]
    results, _, _ = text[found.end() :].partition("<!-- end -->")
    outside = text[: found.start()] + text.partition("<!-- end -->")[2]
    script = ROOT / found["script"]
    is_known = _known(found["commit"]) if is_commit is None else is_commit
    has_other_table = re.search(r"^\| .*\d[.,]\d+ (ms|s|x|us) ", outside, re.MULTILINE) is not None
    problems = {
        "the machine has no cores or no version of torch": not re.search(r"\d+ cores.*torch \d", found["machine"]),
        f"{found['script']} is not there": not script.exists(),
        f"{found['script']} does not write it": script.exists() and not _writes(script),
        "it has no results": "|" not in results,
        "a table of figures stands outside of the results": has_other_table,
        f"commit {found['commit']} is not of this repository": not is_known,
    }
    return [problem for problem, is_so in problems.items() if is_so]


def _writes(script: Path) -> bool:
    return bool(re.search(r"^\s*(fill|write_page)\(", script.read_text(encoding="utf-8"), re.M))


def _known(commit: str) -> bool:
    git = ["git", "-C", str(ROOT)]
    shallow = subprocess.run(
        [*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True, check=False
    )
    if shallow.stdout.strip() != "false":
        return True
    # A commit of another branch would be missing where this one alone is cloned.
    known = subprocess.run([*git, "merge-base", "--is-ancestor", commit, "HEAD"], capture_output=True, check=False)
    return known.returncode == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_say_where_their_figures_come_from(page: Path) -> None:
    assert _problems(page.read_text(encoding="utf-8")) == []


GOOD = """# A page

<!-- results -->

Written by `python benchmarks/watch.py --page` at commit `1234567` on 2 cores, AMD EPYC, 24 GiB, Linux, torch 2.13.0.

| layout | every step |
| --- | --- |
| `zero=0` | 1.59x |

<!-- end -->
"""


def test_a_page_that_is_typed_in_is_refused() -> None:
    assert _problems(GOOD, True) == [] and _problems(GOOD, False) == ["commit 1234567 is not of this repository"]
    machine = " on 2 cores, AMD EPYC, 24 GiB, Linux, torch 2.13.0"
    wrong = {
        "it does not say": ["at commit `1234567` ", machine, "<!-- results -->\n\n"],
        "the machine has no cores": ["2 cores, ", ", torch 2.13.0"],
        "it has no results": [GOOD[GOOD.index("| layout") : GOOD.index("<!-- end")]],
    }
    for says, parts in wrong.items():
        for part in parts:
            assert [problem.startswith(says) for problem in _problems(GOOD.replace(part, ""), True)] == [True], part
    assert _problems(GOOD.replace("watch.py", "watched.py"), True) == ["benchmarks/watched.py is not there"]
    assert _problems(GOOD.replace("watch.py", "trace_cost.py"), True) == []
    bare = GOOD.replace("# A page", "# A page\n\n| ring | 90.4 ms |")
    assert _problems(bare, True)[0].startswith("a table of figures")


def test_the_page_of_mutants_names_tests_that_exist() -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    page = (ROOT / "docs/benchmarks/mutations.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\btest_\w+", page))
    assert len(named) > 50 and {name for name in named if f"def {name}(" not in tests} == set()
