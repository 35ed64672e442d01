"""Generated pages, pictures, lists and formulas in docs/ are those that the code gives."""

import re
from pathlib import Path

import docs
import pytest
from docs import PAGES, is_current
from golden import FOLDER
from pages import DOCS, code_of_one_step, collectives

import motet
from motet.collectives import algorithm_names, closed_form, collective_names
from motet.collectives.algorithms.registry import AlphaBetaGammaCost, find_algorithm


@pytest.mark.parametrize("page", [page for page in PAGES if page != code_of_one_step.PAGE])
def test_a_page_is_up_to_date(page: str) -> None:
    assert is_current(page), f"run: python scripts/docs.py {page}"


def test_every_setting_is_on_the_page_of_the_job() -> None:
    """The generator draws tables; the list of settings is the frozen one."""
    page = (DOCS / "reference/job.md").read_text(encoding="utf-8")
    frozen = (FOLDER / "job_fields.txt").read_text(encoding="utf-8").splitlines()
    settings = [line.partition(":")[0] for line in frozen]
    keys = {setting.rpartition(".")[2] for setting in settings if "." in setting} - {"family"}
    assert {key for key in keys if f"| `{key}` |" not in page} == set()


def test_every_picture_is_generated_and_shown() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md"))
    pictures = [f"pictures/{path.name}" for path in (DOCS / "pictures").iterdir()]
    assert [name for name in pictures if name not in PAGES or name not in text] == []


def test_an_unknown_page_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert docs.main(["reference/nothing.md"]) == 2
    assert "'reference/nothing.md' is none of the pages" in capsys.readouterr().out


ROOT = Path(__file__).parents[2]


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def linked_guides(page: str) -> set[str]:
    return set(re.findall(r"guide/([a-z-]+\.md)", read(page)))


GUIDES = {path.name for path in (ROOT / "docs/guide").glob("*.md")}
COMMANDS = {line.strip() for line in read("tests/laws/cli.txt").splitlines() if line.startswith("motet ")}


def test_the_python_guide_lists_every_export() -> None:
    table = read("docs/guide/python.md").partition("## Jobs")[0]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(motet.__all__) - {"__version__"}


def test_the_readme_the_home_page_and_the_menu_list_every_guide() -> None:
    for page in ("README.md", "docs/index.md", "mkdocs.yml"):
        assert linked_guides(page) == GUIDES, page


def test_every_command_is_shown_in_a_guide_or_the_readme() -> None:
    assert COMMANDS, "tests/laws/cli.txt lists the commands"
    text = "".join(read(f"docs/guide/{name}") for name in GUIDES) + read("README.md")
    assert {command for command in COMMANDS if command not in text} == set()


def test_commands_on_pages_exist() -> None:
    groups = {" ".join(command.split()[:2]) for command in COMMANDS}
    for page in [path for path in (*(ROOT / "docs").rglob("*.md"), ROOT / "README.md") if path.name != "log.md"]:
        blocks = re.findall(r"```\w*\n(.*?)```|`(motet [^`]+)`", page.read_text(encoding="utf-8"), re.DOTALL)
        for line in re.findall(r"^(?:\$ )?(motet [a-z].*)$", "\n".join(map("".join, blocks)), re.MULTILINE):
            words = line.split()
            assert f"motet {words[1]}" in groups, (page.name, line)


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
