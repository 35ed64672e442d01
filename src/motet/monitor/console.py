"""The one place that prints: results go to stdout, complaints to stderr, machine-readable answers as JSON.

rich is imported when something is printed for the first time, so that `motet --help` need not wait for it.
Markup and emoji codes are off, because job sections are written `[model]`: style with `style="bold"` or
`rich.text.Text`, or pass `markup=True` for a text of your own.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def console() -> Console:
    """The console on stdout."""
    return _console(sys.stdout.isatty(), False)


def errors() -> Console:
    """The console on stderr."""
    return _console(sys.stderr.isatty(), True)


def print_json(value: object) -> None:
    """One JSON document on stdout, the same bytes on a terminal and in a pipe."""
    console().out(json.dumps(finite(value), indent=2, allow_nan=False), highlight=False)


def finite(value: Any) -> Any:
    """`value` where a float that JSON cannot hold is text that `float` reads back: NaN, Infinity, -Infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


@functools.cache
def _console(terminal: bool, stderr: bool) -> Console:
    # rich asks for sys.stdout anew at each print, so a redirected stream is followed. In a pipe nothing is wrapped:
    # a path or a number that is cut at column 80 could not be searched for.
    from rich.console import Console

    return Console(stderr=stderr, soft_wrap=not terminal, markup=False, emoji=False)
