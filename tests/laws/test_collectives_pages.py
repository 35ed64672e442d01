"""What the docs show of collectives is what the code does: pictures, tables, and the formulas that people read."""

import re
import runpy
from pathlib import Path

import pytest

from motet.collectives import algorithm_names, closed_form, collective_names
from motet.collectives.algorithms import AlphaBetaGammaCost, find_algorithm

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts/write_collectives_page.py"))
NAMES = [f"{collective}/{name}" for collective in collective_names() for name in algorithm_names(collective)]


def test_every_algorithm_has_a_formula() -> None:
    assert set(SCRIPT["FORMULAS"]) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_formulas_are_the_closed_forms(name: str) -> None:
    collective, algorithm = name.split("/")
    formula = SCRIPT["FORMULAS"][name]
    for ranks in range(2, 65):
        if find_algorithm(collective, algorithm).supports(ranks):
            known = SCRIPT["letters"](name, ranks)
            terms = closed_form(collective, algorithm, ranks)
            assert AlphaBetaGammaCost(*(SCRIPT["value"](part, known) for part in formula[:3])) == terms, (ranks, known)


def test_every_letter_is_explained() -> None:
    page = (ROOT / "docs/reference/collective-costs.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"^\| `(\w)` \|", page, re.MULTILINE))
    used = {
        letter for formula in SCRIPT["FORMULAS"].values() for letter in re.findall("[A-Za-z]", "".join(formula[:3]))
    }
    assert explained == used


def test_the_pictures_are_up_to_date() -> None:
    now = dict(SCRIPT["pictures"]())
    others = "step-*.svg"  # test_pages.py
    paths = [path for path in SCRIPT["PICTURES"].iterdir() if not path.match(others)]
    kept = {path.name: path.read_text(encoding="utf-8") for path in paths}
    assert set(kept) == set(now)
    assert [name for name in now if kept[name] != now[name]] == [], "run scripts/write_collectives_page.py"


@pytest.mark.parametrize("page", list(SCRIPT["BLOCKS"]))
def test_the_tables_are_up_to_date(page: str) -> None:
    assert (ROOT / "docs" / page).read_text(encoding="utf-8") == SCRIPT["filled"](page), (
        "run scripts/write_collectives_page.py"
    )


def test_every_picture_is_shown_somewhere() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md"))
    assert [path.name for path in SCRIPT["PICTURES"].iterdir() if f"pictures/{path.name}" not in text] == []
