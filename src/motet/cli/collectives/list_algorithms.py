"""The output of `motet collectives list` and `motet collectives draw`."""

from pathlib import Path
from typing import Any

from motet.cli.collectives.program_arguments import load_or_build_program
from motet.cli.output import check_writable, highlight, print_lines, write_output_file
from motet.collectives.algorithms import algorithm_names, closed_form, collective_names, find_algorithm
from motet.collectives.algorithms.registry import Algorithm
from motet.collectives.draw.frames import align_columns, program_text
from motet.collectives.draw.program_drawing import program_html, program_svg
from motet.monitor.stdout_stderr import print_json, stdout_console

_NUMBER_KEYS = ("steps", "alpha_coefficient", "beta_coefficient", "gamma_coefficient")


def list_algorithms_of(collective: str | None, ranks: int, json: bool) -> None:
    """Print a table for each collective, or for one."""
    names = collective_names() if collective is None else (collective,)
    tables = {
        name: [_algorithm_row(find_algorithm(name, each), ranks) for each in algorithm_names(name)] for name in names
    }
    if json:
        print_json({"ranks": ranks, "algorithms": [row for rows in tables.values() for row in rows]})
        return
    for name, rows in tables.items():
        print_lines(f"{name} of {ranks} ranks", *_table_lines(rows), "")
        if collective:
            print_lines(*(f"{row['algorithm']}: {row['summary']}" for row in rows))


def _algorithm_row(algorithm: Algorithm, ranks: int) -> dict[str, Any]:
    supported_ranks = [count for count in range(2, 65) if algorithm.supports(count)]
    return {
        "collective": algorithm.collective,
        "algorithm": algorithm.name,
        "summary": algorithm.summary,
        "options": list(algorithm.options),
        "same_bits": algorithm.same_bits,
        "supports_any_ranks": len(supported_ranks) == 63,
        "supported_ranks_2_to_64": supported_ranks,
        "at_ranks": _program_counts(algorithm, ranks) if algorithm.supports(ranks) else None,
    }


def _program_counts(algorithm: Algorithm, ranks: int) -> dict[str, Any]:
    program, terms = algorithm.build(ranks), closed_form(algorithm.collective, algorithm.name, ranks)
    return {
        "steps": len(program.steps),
        "messages": program.message_count,
        "chunks": program.chunks,
        "max_sent_fraction": float(max(map(program.send_fraction, range(ranks)))),
        "alpha_coefficient": terms.alpha,
        "beta_coefficient": float(terms.beta),
        "gamma_coefficient": float(terms.gamma),
    }


def _table_lines(rows: list[dict[str, Any]]) -> list[str]:
    lines = [["algorithm", "steps", "alpha", "beta", "gamma", "ranks", "options"]]
    for row in rows:
        counts = row["at_ranks"]
        numbers = (f"{counts[key]:.4g}" if counts else "-" for key in _NUMBER_KEYS)
        supported = ["any"] if row["supports_any_ranks"] else [*map(str, row["supported_ranks_2_to_64"][:3]), "..."]
        lines.append([row["algorithm"], *numbers, ", ".join(supported), ", ".join(row["options"])])
    return align_columns(lines, right_aligned=range(1, 5))


def draw_program(words: list[str], ranks: int | None, svg: Path | None, *, html: Path | None, json: bool) -> None:
    """Draw a Program on the terminal or into files."""
    check_writable(svg, html)
    program = load_or_build_program(words, ranks, 4)
    for path, draw in ((svg, program_svg), (html, program_html)):
        if path is not None:
            write_output_file(path, draw(program))
            if not json:
                print_lines(f"{path} is written")
    if json:
        stdout_console().out(program.to_json(), end="", highlight=False)
    elif svg is None and html is None:
        stdout_console().print(highlight(program_text(program)), soft_wrap=True)
