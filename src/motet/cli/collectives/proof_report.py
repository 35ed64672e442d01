"""The output of `motet collectives prove`: the proven Programs, and the step where one is wrong.

The output of `motet collectives list` and `motet collectives draw`.

The words of a command that stand for a Program: `COLLECTIVE ALGORITHM [NAME=VALUE]...` or `FILE.json`.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from motet.cli.job_arguments import MAX_RANKS, parse_dims, parse_integer, parse_rank_counts
from motet.cli.output import (
    OutputLine,
    ProgressReporter,
    check_writable,
    highlight,
    print_lines,
    show_progress,
    table_lines,
    write_output_file,
)
from motet.collectives.algorithms import algorithm_names, build, closed_form, collective_names, find_algorithm
from motet.collectives.algorithms.registry import Algorithm, nearest_name_hint
from motet.collectives.draw.frames import format_ranges, program_text
from motet.collectives.draw.program_drawing import program_animation, program_html, program_svg
from motet.collectives.program import Program
from motet.collectives.prove.program_checker import (
    CollectiveProofError,
    ProgramCase,
    SendMode,
    all_cases,
    prove_program,
)
from motet.core.errors import InputError, check_input
from motet.monitor.stdout_stderr import print_json, stdout_console


def parse_options(words: list[str]) -> dict[str, object]:
    """Parse options of an algorithm: `pieces=4 dims=4x4`."""
    options: dict[str, object] = {}
    for word in words:
        name, equals, value = word.partition("=")
        check_input(equals and name, f"option {word!r} is not of the form NAME=VALUE, as in pieces=4 or dims=4x4")
        check_input(name not in options, f"option {name} is given twice, the second time as {word!r}; give it once")
        options[name] = parse_dims(value) if name == "dims" else parse_integer(name, value)
    return options


def names_program_file(words: list[str]) -> bool:
    """Whether the words name a file with a Program, not an algorithm."""
    return bool(words) and (words[0].endswith(".json") or "/" in words[0] or Path(words[0]).is_file())


def read_program(path: str) -> Program:
    """Read a Program from a JSON file."""
    try:
        text = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"cannot read {path}: {reason}; give a file that holds a Program") from None
    return Program.from_json(text, path)


def only_program_file(words: list[str]) -> str:
    """Return the file, which no option may follow."""
    if len(words) > 1:
        raise InputError(f"{words[1]!r} after {words[0]}, which is a file: its Program takes no options; leave it out")
    return words[0]


def load_or_build_program(words: list[str], ranks: int | None, default_ranks: int) -> Program:
    """Make the Program that the words stand for."""
    if names_program_file(words):
        loaded = read_program(only_program_file(words))
        message = f"--ranks {ranks}, but {words[0]} is a Program of {loaded.ranks} ranks; leave --ranks out"
        check_input(ranks in (None, loaded.ranks), message)
        return loaded
    collective, algorithm, options = split_algorithm_words(words)
    if algorithm is None:
        raise InputError(f"which algorithm of {collective}? There are {', '.join(algorithm_names(collective))}")
    count = default_ranks if ranks is None else ranks
    check_input(count <= MAX_RANKS, f"ranks {count}: give 2 to {MAX_RANKS}")
    return build(collective, algorithm, count, **options)


def split_algorithm_words(words: list[str]) -> tuple[str, str | None, dict[str, object]]:
    """The collective, the algorithm if the words name it, and its options."""
    names = [word for word in words if "=" not in word]
    if len(names) > 2:
        raise InputError(f"{names[2]!r} is one word too many; give COLLECTIVE ALGORITHM and options as in pieces=4")
    if not names:
        raise InputError(f"which collective? Give COLLECTIVE ALGORITHM before {words[0]!r}")
    return names[0], names[1] if len(names) > 1 else None, parse_options([word for word in words if "=" in word])


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


def _table_lines(rows: list[dict[str, Any]]) -> Iterator[OutputLine]:
    header, lines = ["algorithm", "steps", "alpha", "beta", "gamma", "ranks", "options"], []
    for row in rows:
        counts = row["at_ranks"]
        numbers = (f"{counts[key]:.4g}" if counts else "-" for key in _NUMBER_KEYS)
        supported = ["any"] if row["supports_any_ranks"] else [*map(str, row["supported_ranks_2_to_64"][:3]), "..."]
        lines.append([row["algorithm"], *numbers, ", ".join(supported), ", ".join(row["options"])])
    return table_lines(lines, header=header, right=range(1, 5), indent=2)


def draw_program(
    words: list[str],
    ranks: int | None,
    *,
    svg: Path | None,
    animation: Path | None,
    html: Path | None,
    json: bool,
) -> None:
    """Draw a Program on the terminal or into files."""
    files = ((svg, program_svg), (animation, program_animation), (html, program_html))
    check_writable(svg, animation, html)
    program = load_or_build_program(words, ranks, 4)
    for path, draw in files:
        if path is not None:
            write_output_file(path, draw(program))
            if not json:
                print_lines(f"{path} is written")
    if json:
        stdout_console().out(program.to_json(), end="", highlight=False)
    elif not any(path for path, _ in files):
        stdout_console().print(highlight(program_text(program)), soft_wrap=True)


def prove_programs(words: list[str], ranks: str | None, sends: SendMode, *, everything: bool, json: bool) -> None:
    """Prove the Programs that the words stand for; raise the first error after all are reported."""
    if words and everything:
        raise InputError(f"--all and {words[0]!r}: --all proves every collective; leave one of the two out")
    check_input(words or everything, "what is to be proven? Give --all, or a collective (and an algorithm), or a file")
    cases = _cases(words, ranks)
    with show_progress() as progress:
        verified, failed, first_failure = _prove_cases(cases, sends, progress)
    known = collective_names()
    unknown = sorted({row["collective"] for row in verified} - set(known))
    fact = "its `final` is proven, but not held to a name"
    remarks = [f"{name} is not a known collective{nearest_name_hint(name, known)}: {fact}" for name in unknown]
    if json:
        print_json({"sends": sends, "verified": verified, "failed": failed, "remarks": remarks})
    else:
        print_lines(*_proof_lines(verified), *remarks, *(row["message"] for row in failed[1:]))
        if first_failure:
            program, error = first_failure
            step = len(program.steps) - 1 if error.step is None else error.step  # The last one if the result is wrong
            stdout_console().print(highlight(program_text(program, step)), soft_wrap=True)
    if first_failure:
        raise first_failure[1]


def _cases(words: list[str], ranks: str | None) -> list[ProgramCase]:
    if names_program_file(words):
        if ranks is not None:
            raise InputError(f"--ranks {ranks}, but {words[0]} is a file, which says its ranks; leave --ranks out")
        return [partial(read_program, only_program_file(words))]
    counts = parse_rank_counts("2..16" if ranks is None else ranks)
    if not words:
        return list(all_cases(counts))
    collective, name, options = split_algorithm_words(words)
    selected = [find_algorithm(collective, each) for each in (algorithm_names(collective) if name is None else (name,))]
    if name is None and options:
        selected = _with_options(selected, options)
    if name is not None and not any(map(selected[0].supports, counts)):
        selected[0].check_ranks(counts[0])
    supported = ((each, count) for each in selected for count in counts if each.supports(count))
    return [partial(build, collective, each.name, count, **options) for each, count in supported]


def _with_options(candidates: list[Algorithm], options: dict[str, object]) -> list[Algorithm]:
    collective = candidates[0].collective
    known = sorted({name for algorithm in candidates for name in algorithm.options})
    remedy = f"there are {', '.join(known)}" if known else "leave it out"
    for option in options:
        check_input(option in known, f"no algorithm of {collective} has the option {option!r}; {remedy}")
    matching = [algorithm for algorithm in candidates if set(options) <= set(algorithm.options)]
    check_input(matching, f"no algorithm of {collective} has all the options {', '.join(options)}; give fewer")
    return matching


def _prove_cases(
    cases: Sequence[ProgramCase], sends: SendMode, progress: ProgressReporter
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], tuple[Program, CollectiveProofError] | None]:
    """Rows of proven and wrong Programs; only the first wrong Program is kept, to spare the memory."""
    verified: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    first_failure: tuple[Program, CollectiveProofError] | None = None
    for index, case in enumerate(cases, start=1):
        program = case()
        row = {"collective": program.collective, "algorithm": program.algorithm, "options": case.keywords}
        try:
            verified.append(row | asdict(prove_program(program, sends)))
        except CollectiveProofError as error:
            failed.append(row | {"ranks": program.ranks, "step": error.step, "message": str(error)})
            first_failure = first_failure or (program, error)
        progress("proving", index, len(cases))
    return verified, failed, first_failure


def _proof_lines(verified: list[dict[str, Any]]) -> Iterator[OutputLine]:
    rows_by_name: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in verified:
        rows_by_name[f"{row['collective']}/{row['algorithm']}"].append(row)
    header, table = ["proven", "ranks", "Programs", "same bits", "blocking sends"], []
    for name, rows in rows_by_name.items():
        answers = (_all_or_some([row[key] for row in rows]) for key in ("same_bits", "supports_blocking_sends"))
        table.append([name, format_ranges({row["ranks"] for row in rows}), str(len(rows)), *answers])
    return table_lines(table, header=header, right=[2], indent=2) if verified else iter(())


def _all_or_some(answers: list[bool]) -> str:
    if all(answers):
        return "yes"
    return "some" if any(answers) else "no"
