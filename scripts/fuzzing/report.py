"""The table of a run of the fuzzer, on the screen and on docs/benchmarks/fuzzing.md."""

import sys
from collections.abc import Sequence

from fuzzing.cases import ROOT
from fuzzing.runner import TargetReport
from fuzzing.targets import target_class

HEAD = ["target", "cases", "well-formed up to the change", "past the first check", "accepted", "refused", "findings"]


def _row(name: str, reports: Sequence[TargetReport]) -> list[str]:
    cases = sum(report.cases for report in reports)
    shares = [sum(report.structured for report in reports), sum(report.past_first_check for report in reports)]
    counts = [sum(report.kinds[kind] for report in reports) for kind in ("accepted", "refused", "finding")]
    percent = [f"{100 * share / cases:.0f} %" if cases else "-" for share in shares]
    return [name, f"{cases:,}", *percent, *(f"{count:,}" for count in counts)]


def rows(reports: Sequence[TargetReport]) -> list[list[str]]:
    """A row for each target, and one for all."""
    return [*(_row(report.name, [report]) for report in reports), _row("all", reports)]


def print_reports(reports: Sequence[TargetReport]) -> None:
    """Print the table and the causes of findings."""
    lines = [HEAD, *rows(reports)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    for report in reports:
        for signature, count in report.finding_counts.most_common():
            print(f"{report.name}: {count} x {signature}, first in case {report.findings[signature].number}")


def write_page(reports: Sequence[TargetReport], seed: int) -> None:
    """Fill the results of docs/benchmarks/fuzzing.md."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from parts.report.pages import DOCS, fill, table  # type: ignore[import-not-found]  # found by the line above

    checks = [[report.name, target_class(report.name).first_check] for report in reports]
    causes = [
        f"- {report.name}: {count} x `{signature}`"
        for report in reports
        for signature, count in report.finding_counts.items()
    ]
    fill(
        DOCS / "fuzzing.md",
        [
            f"Seed {seed}. Findings: {sum(report.kinds['finding'] for report in reports)}.",
            table(HEAD, rows(reports)),
            *(["\n".join(causes)] if causes else []),
            table(["target", "first check"], checks),
        ],
    )
