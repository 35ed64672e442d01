"""The output of `motet collectives validate`: predicted and published times of vendor libraries."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from motet.cli.output import check_writable, print_lines, write_output_file
from motet.collectives.cost import published_curves
from motet.collectives.draw.curve_panels import curve_panels_svg
from motet.monitor.stdout_stderr import print_json


def print_errors_of_curves(path: Path, *, by: str, svg: Path | None, json: bool) -> None:
    """Print the errors of all curves of a file, and draw those of quality A."""
    check_writable(svg)
    curves = published_curves.read_published_curves(path)
    report = published_curves.curve_report(curves)
    if svg:
        shown = [time for time in curves.times if time.quality == "A"] or curves.times
        write_output_file(svg, curve_panels_svg(shown, "Published and predicted times of NCCL and RCCL"))
    if json:
        print_json(report)
        return
    print_lines(*_lines(report, published_curves.errors_by(curves, by), by))


def _lines(report: Mapping[str, Any], groups: Mapping[str, Mapping[str, Any]], by: str) -> Iterator[str]:
    sizes = (("large", "from 16 MiB"), ("middle", "1 to 16 MiB"), ("small", "below 1 MiB"))
    has_best = any(curve["quality"] == "A" for curve in report["curves"])
    rows = "quality A" if has_best else "no row of quality A, so all rows"
    yield f"{rows}: median error {report['median']:.1%}, p90 {report['p90']:.1%}"
    for name, text in sizes:
        yield f"  {text}:{_errors(report[name])}"
    peaks = report["peaks"]
    if peaks["curves"]:
        yield f"  peak bus bandwidth within 8 % on {peaks['within_8_percent']} of {peaks['curves']} curves"
    yield f"  by {by}:"
    yield from (f"    {name[:80]}:{_errors(errors)}" for name, errors in groups.items())
    yield f"all qualities:{_errors(report['all_qualities'])}"
    yield from (f"skipped {rows} rows: {reason}" for reason, rows in report["skipped"].items())
    yield "curves, with measured and predicted peaks of bus bandwidth in GB/s:"
    for curve in report["curves"]:
        peak = f"{curve['measured_peak_Bps'] / 1e9:.0f} / {curve['predicted_peak_Bps'] / 1e9:.0f}"
        facts = f"{curve['collective']} of {curve['ranks']} {curve['gpu']}, {curve['network']}"
        yield f"  {curve['id']} ({facts}, quality {curve['quality']}):{_errors(curve)}, peak {peak}"


def _errors(errors: Mapping[str, Any]) -> str:
    if not errors["rows"]:
        return " no rows"
    return f" {errors['rows']} rows, median error {errors['median']:.1%}, p90 {errors['p90']:.1%}"
