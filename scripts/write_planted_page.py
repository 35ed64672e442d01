"""Plant every mistake of tests/parity/planted_*.py on each of its layouts, and write what the verifier says of it.

python scripts/write_planted_page.py     # takes minutes
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from parity.faults import FAULTS  # noqa: E402
from parity.run_planted import subject, verified  # noqa: E402
from ranks import Ranks  # noqa: E402  # of the tests

PAGE = ROOT / "docs" / "reference" / "planted-mistakes.md"
YES, NO = "yes", "**no**"


def main() -> int:
    """Write the page; the exit code is 1 if a mistake was not found."""
    pool, rows, marks = Ranks(), [], []
    for name, fault in FAULTS.items():
        for layout in fault.layouts:
            verdict = verified(pool, subject(fault.model, fault.settings), layout, name)
            first, cause = verdict.first_difference or "", verdict.cause or ""
            found = not verdict.ok
            place, right = bool(re.match(fault.first, first)), bool(cause and re.search(fault.cause, cause))
            marks.append((found, found and place, found and right))
            told = " | ".join(YES if mark else NO for mark in marks[-1])
            rows.append(f"| {name} | `{layout}` | {first} | {cause} | {told} |")
            print(rows[-1], flush=True)
    pool.close()
    PAGE.write_text(_page(rows, marks))
    return 0 if all(found for found, _, _ in marks) else 1


def _page(rows: list[str], marks: list[tuple[bool, bool, bool]]) -> str:
    shares = [f"{100 * sum(column) / len(marks):.0f} %" for column in zip(*marks, strict=True)]
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [
        "# Planted mistakes, and what is said of them",
        "",
        f"{len(FAULTS)} mistakes that train on without a word, on {len(marks)} pairs of a mistake and a layout. Found:",
        f"{shares[0]}; the first tensor named rightly: {shares[1]}; the cause in words right: {shares[2]}. Each says",
        "beforehand which tensor and words are right (`tests/parity/planted_*.py`), and the verifier knows none of",
        f"them. Made by `python scripts/write_planted_page.py` at commit {head.stdout.strip()}.",
        "",
        "| mistake | layout | first difference | cause | found | place | words |",
        "|---|---|---|---|---|---|---|",
        *rows,
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
