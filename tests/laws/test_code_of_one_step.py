"""The page of the code of one step equals a new trace, and README's figures of its size are true."""

import importlib
import re
import sys
from pathlib import Path

import pytest
from pages import DOCS, ROOT, code_of_one_step
from pages.code_of_one_step import EnteredFile, Walk, Walks, lines_of_functions, source_files

from motet.core.errors import names_matching
from motet.core.seeds import derive_seed
from motet.core.trace import span
from ranks import Ranks


@pytest.fixture(scope="module")
def walks(ranks: Ranks) -> Walks:
    return code_of_one_step.trace_walks(ranks)


def test_the_page_is_a_new_trace(walks: Walks) -> None:
    page = (DOCS / code_of_one_step.PAGE).read_text(encoding="utf-8")
    assert page == code_of_one_step.page_of_walks(walks), f"run: python scripts/docs.py {code_of_one_step.PAGE}"


def test_the_readme_has_the_size_of_a_step(walks: Walks) -> None:
    """Within 5 %: not every commit changes the text."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    claim = re.search(
        r"enters (\d+) of (\d+) files, in functions of ([\d,]+) lines; all of `src` has\s+([\d,]+)", readme
    )
    assert claim is not None
    files = len(walks.step.files), len(source_files())
    lines = lines_of_functions(walks.step.functions), sum(map(number_of_lines, (ROOT / "src").rglob("*.py")))
    for words, number in zip(claim.groups(), (*files, *lines), strict=True):
        assert float(words.replace(",", "")) == pytest.approx(number, rel=0.05), f"README: {words} is {number}"


def number_of_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_a_walk_has_files_in_order_with_their_first_span_and_function() -> None:
    walk = Walk()
    with walk.trace():
        derive_seed("first")
        with span("read"):
            names_matching(["*_bias"], ["a_bias"], "")
            derive_seed("second")
    names = [file for file in walk.files.values() if file.path != "core/trace.py"]
    assert names == [
        EnteredFile("core/seeds.py", "", "derive_seed"),
        EnteredFile("core/errors.py", "read", "names_matching"),
    ]


def test_bodies_of_imported_modules_are_no_part_of_a_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "motet.parallel.pipeline.schedules"  # Its import enters bodies of classes
    module = importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    walk = Walk()
    with walk.trace():
        imported = importlib.import_module(name)
    monkeypatch.setattr(sys.modules["motet.parallel.pipeline"], "schedules", module)
    assert imported is not module and {*walk.files} <= {"core/trace.py"}


def test_lines_of_functions_count_each_line_once() -> None:
    path = "core/trace.py"
    outer, inner = lines_of_functions([(path, "install_sink")]), lines_of_functions([(path, "_OpenTraceSpan.__exit__")])
    both = [(path, "install_sink"), (path, "_OpenTraceSpan.__exit__"), (path, "install_sink")]
    assert min(outer, inner) > 3 and lines_of_functions(both) == outer + inner
