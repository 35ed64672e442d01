"""`motet collectives`: what there is, what it costs, whether it is right, how it looks, and how fast it runs here."""

from __future__ import annotations

from contextlib import contextmanager
from errno import EISDIR
from os import strerror
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from motet.cli.collectives.cost import cost
from motet.cli.collectives.option_limits import MAX_RANKS, integer_option
from motet.cli.collectives.prove import prove
from motet.cli.collectives.run import run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from motet.collectives.algorithms import Algorithm
    from motet.collectives.program import Program

app = typer.Typer(no_args_is_help=True, help="Collectives: list, draw, prove, cost and run them.")


@app.callback()
def collectives_callback() -> None:
    """Collectives: list, draw, prove, cost and run them."""


@app.command(name="list")
def show_list(
    collective: Annotated[
        str | None, typer.Argument(metavar="[COLLECTIVE]", help="Only this collective; else all.")
    ] = None,
    ranks: Annotated[
        int,
        typer.Option(
            callback=integer_option("--ranks", 2, MAX_RANKS), help="For which rounds and traffic are counted."
        ),
    ] = 8,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """The algorithms of each collective, what they take, and their closed forms.

    Times are of a network where every rank has one full-duplex port: `start-ups` times alpha, plus `sent` times S bytes
    over the bandwidth, plus `added` times S bytes in the adder.
    """
    from motet.collectives.algorithms import algorithm_names, collective_names, find_algorithm
    from motet.monitor.console import print_json

    names = collective_names() if collective is None else (collective,)
    rows = [
        _algorithm_row(find_algorithm(name, algorithm), ranks) for name in names for algorithm in algorithm_names(name)
    ]
    if json:
        print_json({"ranks": ranks, "algorithms": rows})
        return
    for name in names:
        collective_rows = [row for row in rows if row["collective"] == name]
        print_lines(f"{name} of {ranks} ranks", *_table_lines(collective_rows), "")
        if collective:
            print_lines(*(f"{row['algorithm']}: {row['summary']}" for row in collective_rows))


def _algorithm_row(algorithm: Algorithm, ranks: int) -> dict[str, Any]:
    supported_ranks = [count for count in range(2, 65) if algorithm.supports(count)]
    row = {
        "collective": algorithm.collective,
        "algorithm": algorithm.name,
        "summary": algorithm.summary,
        "options": list(algorithm.options),
        "same_bits": algorithm.same_bits,
        "takes_any": len(supported_ranks) == 63,
        "takes_of_2_to_64": supported_ranks,
    }
    return {**row, "at_these_ranks": _program_counts(algorithm, ranks) if algorithm.supports(ranks) else None}


def _program_counts(algorithm: Algorithm, ranks: int) -> dict[str, Any]:
    """What one Program does. Shares are parts of S."""
    from motet.collectives.algorithms import closed_form

    program, terms = algorithm.build(ranks), closed_form(algorithm.collective, algorithm.name, ranks)
    return {
        "steps": len(program.steps),
        "messages": program.message_count,
        "chunks": program.chunks,
        "most_sent_share": float(max(map(program.send_fraction, range(ranks)))),
        "start_ups": terms.alpha,
        "sent_in_turn_share": float(terms.beta),
        "added_in_turn_share": float(terms.gamma),
    }


def _table_lines(rows: list[dict[str, Any]]) -> list[str]:
    from motet.collectives.draw.frames import align_columns

    lines = [["algorithm", "steps", "start-ups", "sent / S", "added / S", "ranks", "options"]]
    for row in rows:
        counted = row["at_these_ranks"]
        numbers = (f"{counted[key]:.4g}" if counted else "-" for key in _NUMBER_KEYS)
        takes = "any" if row["takes_any"] else ", ".join([*map(str, row["takes_of_2_to_64"][:3]), "..."])
        lines.append([row["algorithm"], *numbers, takes, ", ".join(row["options"])])
    return align_columns(lines, right_aligned=range(1, 5))


_NUMBER_KEYS = ("steps", "start_ups", "sent_in_turn_share", "added_in_turn_share")


@app.command()
def draw(
    words: Annotated[
        list[str],
        typer.Argument(metavar="COLLECTIVE ALGORITHM [NAME=VALUE]... or FILE.json", help="What to draw."),
    ],
    ranks: Annotated[
        int | None, typer.Option(callback=integer_option("--ranks", 2, MAX_RANKS), help="How many; 4 when not given.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Write a picture of all steps to this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write an animated page to this file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the Program as JSON: docs/reference/program.md.")] = False,
) -> None:
    """Who sends which chunk to whom in each step, and what each rank then holds."""
    from motet.cli.parse_sizes import load_or_build_program
    from motet.collectives.draw.frames import program_text
    from motet.monitor.console import stdout_console

    check_writable(svg, html)
    program = load_or_build_program(words, ranks, 4)
    for path, drawn in ((svg, _svg), (html, _html)):
        if path is not None:
            write_output_file(path, drawn(program))
            if not json:
                print_lines(f"{path} is written")
    if json:
        stdout_console().out(program.to_json(), end="", highlight=False)
    elif svg is None and html is None:
        stdout_console().print(highlight(program_text(program)), soft_wrap=True)


def _svg(program: Program) -> str:
    from motet.collectives.draw.svg import program_svg

    return program_svg(program)


def _html(program: Program) -> str:
    from motet.collectives.draw.html_animation import program_html

    return program_html(program)


def check_writable(*paths: Path | None) -> None:
    """Tell before the work what cannot be written after it."""
    import tempfile

    for path in filter(None, paths):
        with _report_write_errors(path):
            if path.is_dir():
                raise IsADirectoryError(EISDIR, strerror(EISDIR))
            if path.exists():
                path.open("ab").close()
            if path.is_file() or not path.exists():
                tempfile.TemporaryFile(dir=path.resolve().parent).close()


def write_output_file(path: Path, text: str) -> None:
    """Write a file, whole or not at all."""
    from motet.train.launch.run_folder import write_file_atomically

    with _report_write_errors(path):
        if path.is_file() or not path.exists():
            write_file_atomically(path.resolve(), text.encode())
        else:  # a device or a pipe stays what it is
            path.write_text(text, encoding="utf-8")


@contextmanager
def _report_write_errors(path: Path) -> Iterator[None]:
    from motet.core.errors import InputError

    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; give another file") from None


def print_lines(*lines: str) -> None:
    """Print lines as they are, however wide the terminal is: columns stay under each other."""
    from motet.monitor.console import stdout_console

    for line in lines:
        stdout_console().print(line, highlight=False, soft_wrap=True)


def highlight(text: str) -> Any:
    """With what a step has written in colour."""
    from rich.text import Text

    highlighted = Text(text)
    highlighted.highlight_regex(r"\[[0-9,\-x]+\]", "bold green")
    highlighted.highlight_regex(r"(?m)^(start|step \d+)$", "bold")
    return highlighted


for _command in (prove, cost, run):
    app.command()(_command)
