"""The only place that prints: results go to stdout, errors to stderr, machine-readable answers as JSON.
rich is imported by the first print, for quick help. Markup and emoji codes are off, because job sections are written
`[model]`. A closed stdout, as after `head`, is an `OutputClosedError`, whose exit code is the shell's for SIGPIPE; a
closed stderr is ignored, and other errors of a stream are reported. Characters
outside its encoding are printed as `\\xe9`."""

from __future__ import annotations

import functools
import json
import math
import os
import sys
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from motet.core.errors import CheckpointSaveError, OutputClosedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console


def stdout_console() -> Console:
    """The console on stdout."""
    if sys.stdout is None:
        raise CheckpointSaveError("cannot print: standard output is closed; send it to a file, or to /dev/null")
    return _make_console(_replace_unencodable(sys.stdout).isatty(), False)


def stderr_console() -> Console:
    """The console on stderr."""
    return _make_console(sys.stderr is not None and _replace_unencodable(sys.stderr).isatty(), True)


def print_json(value: object) -> None:
    """One JSON document on stdout, the same bytes on a terminal and in a pipe."""
    stdout_console().out(json.dumps(encode_nonfinite_floats(value), indent=2, allow_nan=False), highlight=False)


def encode_nonfinite_floats(value: Any) -> Any:
    """Replace floats that JSON cannot hold by text that `float` reads back: NaN, Infinity, -Infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: encode_nonfinite_floats(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode_nonfinite_floats(item) for item in value]
    return value


@functools.cache
def _make_console(terminal: bool, stderr: bool) -> Console:
    # rich looks up sys.stdout at each print, so a redirected stream is followed. In a pipe nothing is wrapped, so that
    # paths and numbers can be searched for.
    from rich.console import Console

    class BrokenPipeSafeConsole(Console):
        """Reports an error of its stream in one sentence."""

        def print(self, *args: Any, **options: Any) -> None:
            with _convert_print_errors(self.stderr):
                super().print(*args, **options)

        def out(self, *args: Any, **options: Any) -> None:
            with _convert_print_errors(self.stderr):
                super().out(*args, **options)

        def on_broken_pipe(self) -> None:
            _redirect_to_devnull(self.stderr)
            if not self.stderr:
                raise OutputClosedError("standard output is closed")

    return BrokenPipeSafeConsole(stderr=stderr, soft_wrap=not terminal, markup=False, emoji=False)


def _replace_unencodable(stream: TextIO) -> TextIO:
    if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
        stream.reconfigure(errors="backslashreplace")
    return stream


@contextmanager
def _convert_print_errors(stderr: bool) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        _redirect_to_devnull(stderr)
        if not stderr:
            remedy = "free some space, or send it elsewhere"
            raise CheckpointSaveError(f"cannot print: {error.strerror}; {remedy}") from None


def _redirect_to_devnull(stderr: bool) -> None:
    """Otherwise Python would write its buffer at exit, and rich at the next print."""
    _make_console.cache_clear()
    with suppress(OSError, ValueError), Path(os.devnull).open("wb") as devnull:
        os.dup2(devnull.fileno(), (sys.stderr if stderr else sys.stdout).fileno())
