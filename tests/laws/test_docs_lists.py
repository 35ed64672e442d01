"""Lists on the pages for users are those of the code: exports, guides and commands."""

import re
from pathlib import Path

import motet

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
