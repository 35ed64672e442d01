"""`motet collectives prove`: whether Programs do what their collective promises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from motet.collectives.algorithms import Algorithm
    from motet.collectives.program import Program
    from motet.collectives.prove.all_cases import ProgramCase
    from motet.collectives.prove.program_checker import SendMode, UnprovenCollectiveError

    ProgressReporter = Callable[[str, int, int], None]


def prove(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[COLLECTIVE [ALGORITHM] [NAME=VALUE]... or FILE.json]", help="What to prove."),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="All algorithms, with the hosts and dimensions that they may have.")
    ] = False,
    ranks: Annotated[str | None, typer.Option(help="Numbers of ranks: 2..64, 4,8 or 7; 2..16 if not given.")] = None,
    sends: Annotated[
        Literal["grouped", "blocking"],
        typer.Option(help="A rank sends and receives at once, or each send waits for its receiver."),
    ] = "grouped",
    json: Annotated[bool, typer.Option("--json", help="Print JSON; progress goes to stderr.")] = False,
) -> None:
    """Prove that Programs do what their collective promises, for every input; where one does not, the step is drawn."""
    from motet.cli.collectives.list_algorithms import print_lines
    from motet.cli.progress_bars import show_progress
    from motet.core.errors import InputError
    from motet.monitor.console import print_json, stdout_console

    if words and everything:
        raise InputError(f"--all beside {words[0]!r}: --all proves every collective; leave one of the two out")
    if not words and not everything:
        raise InputError("what is to be proven? Give --all, or a collective (and an algorithm), or a file")
    cases = list(_cases(words or [], ranks))
    with show_progress() as progress:
        proven, failures, first_failure = _prove_cases(cases, sends, progress)
    remarks = _remarks(proven)
    if json:
        print_json({"sends": sends, "proven": proven, "wrong": failures, "remarks": remarks})
    else:
        print_lines(*_proof_lines(proven), *remarks, *(row["message"] for row in failures[1:]))
        if first_failure:
            stdout_console().print(_draw_failure(first_failure), soft_wrap=True)
    if first_failure:
        raise first_failure.error


def _cases(words: list[str], ranks: str | None) -> list[ProgramCase]:
    """What is asked for, at those numbers of ranks that it takes."""
    from functools import partial

    from motet.cli.parse_sizes import (
        names_program_file,
        only_program_file,
        parse_rank_counts,
        read_program,
        split_algorithm_words,
    )
    from motet.collectives.algorithms import algorithm_names, find_algorithm
    from motet.collectives.prove.all_cases import all_cases, make_case
    from motet.core.errors import InputError

    if names_program_file(words):
        if ranks is not None:
            raise InputError(f"--ranks {ranks}, but {words[0]} is a file, which says its ranks; leave --ranks out")
        return [partial(read_program, only_program_file(words))]
    counts = parse_rank_counts("2..16" if ranks is None else ranks)
    if not words:
        return all_cases(counts)
    collective, name, options = split_algorithm_words(words)
    selected = [find_algorithm(collective, name) for name in (algorithm_names(collective) if name is None else (name,))]
    if name is None and options:
        selected = _with_options(selected, options)
    if name is not None and not any(map(selected[0].supports, counts)):
        selected[0].check_ranks(counts[0])
    return [
        make_case(algorithm, count, options) for algorithm in selected for count in counts if algorithm.supports(count)
    ]


def _with_options(candidates: list[Algorithm], options: dict[str, object]) -> list[Algorithm]:
    """Those that have all of these options."""
    from motet.core.errors import InputError

    for option in options:
        if not any(option in algorithm.options for algorithm in candidates):
            known = sorted({name for algorithm in candidates for name in algorithm.options})
            remedy = f"there are {', '.join(known)}" if known else "leave it out"
            raise InputError(f"no algorithm of {candidates[0].collective} has the option {option!r}; {remedy}")
    matching = [algorithm for algorithm in candidates if set(options) <= set(algorithm.options)]
    if not matching:
        raise InputError(
            f"no algorithm of {candidates[0].collective} has all the options {', '.join(options)}; give fewer"
        )
    return matching


class FailedProof(NamedTuple):
    """A Program that is not what it should be."""

    program: Program
    error: UnprovenCollectiveError


def _prove_cases(
    cases: list[ProgramCase], sends: SendMode, progress: ProgressReporter
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], FailedProof | None]:
    """What is proven, what is wrong, and the first that is: all wrong Programs at once might fill the memory."""
    from dataclasses import asdict

    from motet.collectives.prove.program_checker import UnprovenCollectiveError, prove_program

    proven: list[dict[str, Any]] = []
    failures: list[dict[str, Any]] = []
    first_failure: FailedProof | None = None
    for index, case in enumerate(cases, start=1):
        program = case()
        name = {"collective": program.collective, "algorithm": program.algorithm, "options": case.keywords}
        try:
            proof = asdict(prove_program(program, sends))
            proof["blocking"] = proof.pop("supports_blocking_sends")
            proven.append({**name, **proof})
        except UnprovenCollectiveError as error:
            failures.append({**name, "ranks": program.ranks, "step": error.step, "message": str(error)})
            first_failure = first_failure or FailedProof(program, error)
        progress("proving", index, len(cases))
    return proven, failures, first_failure


def _remarks(proven: list[dict[str, Any]]) -> list[str]:
    """Names that promise nothing: of these `final` alone is proven."""
    from motet.collectives.algorithms import collective_names
    from motet.collectives.algorithms.registry import nearest_collective_hint

    unknown = sorted({row["collective"] for row in proven} - set(collective_names()))
    return [
        f"{name} is no collective that is known{nearest_collective_hint(name)}: its `final` is proven, but not held to a name"
        for name in unknown
    ]


def _proof_lines(proven: list[dict[str, Any]]) -> list[str]:
    """A line for each algorithm."""
    from motet.collectives.draw.frames import align_columns, format_ranges

    by_name: dict[str, list[dict[str, Any]]] = {}
    for row in proven:
        by_name.setdefault(f"{row['collective']}/{row['algorithm']}", []).append(row)
    table = [["proven", "ranks", "Programs", "same bits", "blocking sends"]]
    for name, rows in by_name.items():
        kept = (_all_or_some(rows, key) for key in ("same_bits", "supports_blocking_sends"))
        table.append([name, format_ranges({row["ranks"] for row in rows}), str(len(rows)), *kept])
    return align_columns(table, right_aligned=[2]) if proven else []


def _all_or_some(rows: list[dict[str, Any]], key: str) -> str:
    ranks_with_key = [row["ranks"] for row in rows if row[key]]
    return "yes" if len(ranks_with_key) == len(rows) else "no" if not ranks_with_key else "some"


def _draw_failure(failure: FailedProof) -> Any:
    """The step that is wrong; what is wrong only at the end is seen in the last one."""
    from motet.cli.collectives.list_algorithms import highlight
    from motet.collectives.draw.frames import program_text

    last = len(failure.program.steps) - 1
    return highlight(program_text(failure.program, last if failure.error.step is None else failure.error.step))
