"""The formulas of collectives that people read are the closed forms of the code."""

import re

import pytest
from pages import DOCS, collectives

from motet.collectives import algorithm_names, closed_form, collective_names
from motet.collectives.algorithms.registry import AlphaBetaGammaCost, find_algorithm

NAMES = [f"{collective}/{name}" for collective in collective_names() for name in algorithm_names(collective)]


def test_every_algorithm_has_a_formula() -> None:
    assert set(collectives.FORMULAS) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_formulas_are_the_closed_forms(name: str) -> None:
    collective, algorithm = name.split("/")
    formula = collectives.FORMULAS[name]
    for ranks in range(2, 65):
        if find_algorithm(collective, algorithm).supports(ranks):
            known = collectives.letters(name, ranks)
            terms = closed_form(collective, algorithm, ranks)
            computed = AlphaBetaGammaCost(*(collectives.value(part, known) for part in formula[:3]))
            assert computed == terms, (ranks, known)


def test_every_letter_is_explained() -> None:
    page = (DOCS / "reference/collective-costs.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"^\| `(\w)` \|", page, re.MULTILINE))
    used = {name for terms in collectives.FORMULAS.values() for name in re.findall("[A-Za-z]", "".join(terms[:3]))}
    assert explained == used
