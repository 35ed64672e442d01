"""Small enough to read: no file over 400 lines, no function over 60. Exits with 1 and names what is larger."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "tests", "scripts", "benchmarks")
FILE_LINES = 400
FUNCTION_LINES = 60

# Kernels may be longer, each by its name: "src/motet/room/file.py:function".
EXEMPT: frozenset[str] = frozenset()


def too_large(path: Path, root: Path = ROOT) -> Iterator[str]:
    """One line for everything in a file that is too large."""
    name = path.relative_to(root).as_posix()
    text = path.read_text(encoding="utf-8")
    lines = text.count("\n") + (not text.endswith("\n") and text != "")
    if lines > FILE_LINES:
        yield f"{name}: {lines} lines, {FILE_LINES} at most"
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > FUNCTION_LINES and f"{name}:{node.name}" not in EXEMPT:
            yield f"{name}:{node.lineno} {node.name}: {length} lines, {FUNCTION_LINES} at most"


def main() -> int:
    files = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    found = [line for path in files for line in too_large(path)]
    print("\n".join(found) if found else f"{len(files)} files, none too large")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
