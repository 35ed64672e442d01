"""The page of planted mistakes: each of tests/parity/planted_*.py on each of its layouts, and the verifier's answer."""

import re

from pages import commit, import_from_tests, markdown_table

HEAD = ["mistake", "layout", "first difference", "cause", "found", "place", "words"]


def measure(words: list[str]) -> tuple[str, bool]:
    """Plant the mistakes on ranks of this machine; it takes minutes."""
    import_from_tests()
    from parity.faults import FAULTS
    from parity.run_planted import verified_fault
    from ranks import Ranks

    assert not words, "all mistakes are planted; leave the words out"
    pool, rows, marks = Ranks(), [], []
    for name, fault in FAULTS.items():
        for layout in fault.layouts:
            verdict = verified_fault(pool, fault, layout)
            first, cause = verdict.first_difference or "", verdict.cause or ""
            is_place_right = bool(re.match(fault.first, first))
            is_cause_right = bool(cause and re.search(fault.cause, cause))
            marks.append((not verdict.ok, not verdict.ok and is_place_right, not verdict.ok and is_cause_right))
            rows.append([name, f"`{layout}`", first, cause, *("yes" if mark else "**no**" for mark in marks[-1])])
            print(" | ".join(rows[-1]), flush=True)
    pool.close()
    return _page(len(FAULTS), rows, marks), all(is_found for is_found, _, _ in marks)


def _page(fault_count: int, rows: list[list[str]], marks: list[tuple[bool, bool, bool]]) -> str:
    ratios = [f"{100 * sum(column) / len(marks):.0f} %" for column in zip(*marks, strict=True)]
    return f"""# Planted mistakes, and the reports about them

These are {fault_count} mistakes that cause no error message, on {len(marks)} pairs of a mistake and a layout. The
verifier found {ratios[0]} of them; it named the right first tensor in {ratios[1]}, and the right cause in {ratios[2]}.
Each mistake declares the right tensor and words (`tests/parity/planted_*.py`), and the verifier knows none of
them. Made by `python scripts/docs.py reference/planted-mistakes.md` at commit {commit()}.

{markdown_table(HEAD, rows)}"""
