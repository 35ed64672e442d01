"""The pages of the commands and of the exit codes, from the typer app and from `core.errors.EXIT_CODES`."""

import inspect
from collections.abc import Iterator
from typing import Any

import typer

from motet.cli.main import app
from motet.core.errors import EXIT_CODES

INTRODUCTION = """# Commands

Every command explains itself with `--help`. Results go to stdout; complaints, and progress where `--json` is given, go
to stderr. Commands end with one of the [exit codes](exit-codes.md). `python -m motet` is the same as `motet`.
"""

CODES = """# Exit codes

A script may rely on them. An error is one sentence on stderr; for codes 1 and 3 a traceback follows where
there is one.

| code | |
|---|---|
"""


def commands_page() -> str:
    return "\n".join([INTRODUCTION, *_command(typer.main.get_command(app), "motet")]).rstrip() + "\n"


def exit_codes_page() -> str:
    return CODES + "".join(f"| {code} | {text} |\n" for code, text in EXIT_CODES.items())


def _command(command: Any, path: str) -> Iterator[str]:
    """A command with its parameters, and those inside it."""
    inner = getattr(command, "commands", {})
    if not inner or path == "motet":
        words = "".join(f" {p.metavar or p.name.upper()}" for p in command.params if p.param_type_name == "argument")
        yield from [f"## `{path}`", "", " ".join((command.help or "").split()), ""]
        if words:
            yield from [f"`{path}{words} [OPTIONS]`", ""]
        yield from ["| | default | |", "|---|---|---|", *(_row(p, command.callback) for p in command.params), ""]
    for name, subcommand in inner.items():
        yield from _command(subcommand, f"{path} {name}")


def _row(parameter: Any, function: Any) -> str:
    option = parameter.param_type_name == "option"
    value = parameter.metavar or parameter.name.upper()
    name = " ".join(parameter.opts) + ("" if parameter.is_flag else f" {value}") if option else value
    default = inspect.signature(function).parameters[parameter.name].default
    if default is inspect.Parameter.empty:
        shown = "**needed**"
    else:
        shown = "" if default is None or default is False else f"`{default}`"
    return f"| `{name}` | {shown} | {' '.join((parameter.help or '').split())} |"
