"""Generators of the pages and pictures in docs/, which `scripts/docs.py` lists, and their shared functions."""

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
sys.path.append(str(ROOT / "benchmarks"))  # Readers of published measurements


def import_from_tests() -> None:
    """Let modules of the tests be imported, here and on the ranks of their pool."""
    if (folder := str(ROOT / "tests")) not in sys.path:
        sys.path.insert(0, folder)


def fill_blocks(page: str, blocks: Mapping[str, str]) -> str:
    """The text of a page with new content between `<!-- NAME -->` and `<!-- end -->`."""
    text = (DOCS / page).read_text(encoding="utf-8")
    for name, content in blocks.items():
        filled = f"<!-- {name} -->\n\n{content.strip()}\n\n<!-- end -->"
        text, count = re.subn(f"<!-- {name} -->\n.*?<!-- end -->", lambda _, filled=filled: filled, text, flags=re.S)
        assert count == 1, f"{page} has {count} blocks {name!r}"
    return text


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose lines all end with a newline."""
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *rows))


def commit() -> str:
    """The short hash of the commit that is measured."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
