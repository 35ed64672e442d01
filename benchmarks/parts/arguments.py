"""The arguments of a benchmark, with `--quick` for a run that only shows that the benchmark works."""

import argparse
from typing import Any


def parse_arguments(parser: argparse.ArgumentParser, **quick: Any) -> argparse.Namespace:
    """Parse the command line; with `--quick`, arguments that are not given have the values of `quick`."""
    unknown = set(quick) - {action.dest for action in parser._actions}
    assert not unknown, f"--quick sets {', '.join(unknown)}, which are not arguments"
    about = "small sizes and one round, in under two minutes; its figures say nothing, and are not written to a page"
    parser.add_argument("--quick", action="store_true", help=about)
    options = parser.parse_args()
    if options.quick:
        parser.set_defaults(**quick)
        options = parser.parse_args()
        if getattr(options, "page", False):
            parser.error("--quick and --page: a page has measured figures; leave one of the two out")
    return options
