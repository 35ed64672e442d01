"""Writes the picture and the errors of docs/benchmarks/vendor-collectives.md from a file of published times.

python benchmarks/collective_curves.py collectives.csv
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parts.report.pages import fill, table

from motet.collectives.cost.published_curves import GROUPS, curve_report, errors_by, read_published_curves
from motet.collectives.draw.cost_plot import curve_panels_svg

PAGE = Path(__file__).parents[1] / "docs/benchmarks/vendor-collectives.md"
_SIZES = {"large": "from 16 MiB", "middle": "1 to 16 MiB", "small": "below 1 MiB"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="published times, as for `motet collectives validate`")
    curves = read_published_curves(parser.parse_args().file)
    report = curve_report(curves)
    shown = [time for time in curves.times if time.quality == "A"]
    picture = curve_panels_svg(shown, "Published and predicted times of NCCL and RCCL")
    PAGE.with_suffix(".svg").write_text(picture, encoding="utf-8")
    rows = [_row(text, report[name]) for name, text in _SIZES.items()]
    for key in (key for key in GROUPS if key != "source"):
        rows += [_row(f"{key} {name}", errors) for name, errors in errors_by(curves, key).items()]
    near, all_peaks = report["peaks"]["within_8_percent"], report["peaks"]["curves"]
    peaks = f"The peak of the bus bandwidth is within 8 % on {near} of {all_peaks} curves."
    fill(PAGE, [table(["rows of quality A", "rows", "median error", "90th percentile"], rows), peaks])


def _row(name: str, errors: Mapping[str, Any]) -> list[str]:
    return [name, str(errors["rows"]), f"{errors['median']:.1%}", f"{errors['p90']:.1%}"]


if __name__ == "__main__":
    main()
