"""The page of planted mistakes: each of tests/parity/planted_*.py on each of its layouts, and the verifier's answer.

With names of files, such as `planted_experts`, their mistakes are planted alone, and other rows of the page stay.
"""

import re

from pages import DOCS, commit, import_from_tests, markdown_table

YES = "yes"
PAGE = DOCS / "reference/planted-mistakes.md"
HEAD = ["mistake", "layout", "first difference", "cause", "found", "place", "words"]


def measure(words: list[str]) -> tuple[str, bool]:
    """Plant the mistakes on ranks of this machine, those of some files or all; it takes minutes."""
    import_from_tests()
    from parity.faults import FAULTS
    from parity.run_planted import verified_fault
    from ranks import Ranks

    files = {fault.plant.__module__.rpartition(".")[2] for fault in FAULTS.values()}
    assert files >= {*words}, f"{words} are not all among {sorted(files)}"
    pool, rows, kept = Ranks(), [], _rows_of_page() if words else {}
    for name, fault in FAULTS.items():
        for layout in fault.layouts:
            if words and fault.plant.__module__.rpartition(".")[2] not in words:
                rows.append(kept[name, f"`{layout}`"])
                continue
            verdict = verified_fault(pool, fault, layout)
            first, cause = verdict.first_difference or "", verdict.cause or ""
            is_place_right = bool(re.match(fault.first, first))
            is_cause_right = bool(cause and re.search(fault.cause, cause))
            marks = (not verdict.ok, not verdict.ok and is_place_right, not verdict.ok and is_cause_right)
            rows.append([name, f"`{layout}`", first, cause, *(YES if mark else "**no**" for mark in marks)])
            print(" | ".join(rows[-1]), flush=True)
    pool.close()
    marks_of_rows = [tuple(mark == YES for mark in row[-3:]) for row in rows]
    return _page(len(FAULTS), rows, marks_of_rows, words), all(is_found for is_found, _, _ in marks_of_rows)


def _rows_of_page() -> dict[tuple[str, str], list[str]]:
    """The rows of the page now, by mistake and layout."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [line[2:-2].split(" | ") for line in lines if line.startswith("| ")][2:]
    return {(row[0], row[1]): row for row in rows}


def _page(fault_count: int, rows: list[list[str]], marks: list[tuple[bool, ...]], words: list[str]) -> str:
    ratios = [f"{100 * sum(column) / len(marks):.0f} %" for column in zip(*marks, strict=True)]
    text = PAGE.read_text(encoding="utf-8")
    earlier = re.search(r"rows of other files: (\w+)", text) or re.search(r"at commit (\w+)", text)
    assert earlier is not None
    kept = f", with `{' '.join(words)}`; rows of other files: {earlier[1]} or later" if words else ""
    return f"""# Planted mistakes, and the reports about them

These are {fault_count} mistakes that cause no error message, on {len(marks)} pairs of a mistake and a layout. The
verifier found {ratios[0]} of them; it named the right first tensor in {ratios[1]}, and the right cause in {ratios[2]}.
Each mistake declares the right tensor and words (`tests/parity/planted_*.py`), and the verifier knows none of
them. Made by `python scripts/docs.py reference/planted-mistakes.md` at commit {commit()}{kept}.

{markdown_table(HEAD, rows)}"""
