"""Golden text files: compared with a readable difference, written anew by `pytest tests/laws --regenerate`."""

import difflib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def compare(name: str, now: str, regenerate: bool) -> None:
    """Fail with the difference when the file `name` does not say what is so now."""
    path = FOLDER / name
    if regenerate:
        path.write_text(now, encoding="utf-8")
    kept = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = kept.splitlines(), now.splitlines()
    difference = "\n".join(difflib.unified_diff(*lines, f"kept {name}", "now", lineterm="", n=1))
    if difference:
        pytest.fail(f"{name} changed. If that is meant: pytest tests/laws --regenerate\n{difference}", pytrace=False)
