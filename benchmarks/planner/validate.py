"""Scores of the planner on files of published measurements, with the columns of those who collected them.

    python benchmarks/planner/validate.py FILE.csv ... [--by source]

prints for each file the output of `motet plan validate` for files with motet's columns.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from planner.published_files import read_published_file

from motet.cli.output import print_lines
from motet.cli.plan.validate_report import log_skipped_rows, validation_lines, validation_report
from motet.plan.validation.predictions import predict_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", type=Path, nargs="+")
    parser.add_argument("--by", choices=["source", "device", "software"], default="source")
    options = parser.parse_args()
    for path in options.paths:
        file = read_published_file(path)
        log_skipped_rows(path, file.skipped)
        predicted = predict_rows(file.rows) if file.has_times else []
        report = validation_report(file.rows, predicted)
        if not file.has_times:
            report["fit"] = {"right": 0, "wrong": 0}
        print_lines(f"{path.name}:", *validation_lines(report, predicted, options.by))


if __name__ == "__main__":
    main()
