"""The walks of the architecture page: every function is where the page says, and no step goes back up."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src/motet"
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
WALKS = {
    name: re.findall(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", table, re.MULTILINE)
    for name, table in re.findall(r"<!-- walk: (.*?) -->\n(.*?)(?=\n<!-- walk|\n#|\Z)", PAGE, re.DOTALL)
}


def package_heights() -> dict[str, int]:
    """The line of each package in the order of imports, counted from below."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    contracts = tools["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["containers"] == ["motet"])
    lines = [re.findall(r"\w+", line) for line in layers]
    return {package: len(lines) - height for height, line in enumerate(lines) for package in line}


def defines(path: Path, qualified_name: str) -> bool:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    for name in qualified_name.split("."):
        node = next((node for node in body if getattr(node, "name", None) == name), None)
        if node is None:
            return False
        body = node.body
    return True


def test_the_table_of_packages_names_their_parts() -> None:
    """Words in inline code are modules or folders of the package of their row, or packages."""
    table = PAGE.partition("| package | holds |")[2].partition("\n\n")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", table, re.MULTILINE))
    assert set(rows) == {path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file()}
    for package, text in rows.items():
        parts = {path.stem for path in (SOURCE / package).iterdir()} | {*rows}
        assert {word for word in re.findall(r"`(\w+)`", text) if word not in parts} == set(), package


def test_values_of_the_model_plane_are_where_the_page_says() -> None:
    table = PAGE.partition("| value | file in `parallel/` |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| `([\w/.]+)` \|", table, re.MULTILINE)
    assert len(rows) == table.count("\n| `") > 5
    for name, file in rows:
        text = (SOURCE / "parallel" / file).read_text(encoding="utf-8")
        assert re.search(rf"^(class )?{name}\b", text, re.MULTILINE), (name, file)


def test_the_page_has_the_walks() -> None:
    assert len(WALKS) >= 12 and all(len(steps) >= 2 for steps in WALKS.values())


@pytest.mark.parametrize("walk", WALKS)
def test_functions_of_a_walk_exist(walk: str) -> None:
    assert [step for step in WALKS[walk] if not defines(SOURCE / step[0], step[1])] == []


@pytest.mark.parametrize("walk", WALKS)
def test_no_step_goes_back_up(walk: str) -> None:
    files = [file for file, _ in WALKS[walk]]
    left = [file for i, file in enumerate(files) if i and file in files[: i - 1] and file != files[i - 1]]
    assert left == [], "a walk returns to a file that it has left"
    heights = [package_heights()[file.partition("/")[0]] for file in files]
    assert heights == sorted(heights, reverse=True), "a walk goes to a package above"
