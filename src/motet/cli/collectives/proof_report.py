"""The output of `motet collectives prove`: which Programs are proven, and the step where one is wrong."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from motet.cli.collectives import program_arguments
from motet.cli.output import ProgressReporter, highlight, print_lines, show_progress
from motet.cli.parse_sizes import parse_rank_counts
from motet.collectives.algorithms import algorithm_names, build, collective_names, find_algorithm
from motet.collectives.algorithms.registry import Algorithm, nearest_name_hint
from motet.collectives.draw.frames import align_columns, format_ranges, program_text
from motet.collectives.program import Program
from motet.collectives.prove.program_cases import ProgramCase, all_cases
from motet.collectives.prove.program_checker import CollectiveProofError, SendMode, prove_program
from motet.core.errors import InputError, check_input
from motet.monitor.stdout_stderr import print_json, stdout_console


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
    remarks = [f"{name} is no collective that is known{nearest_name_hint(name, known)}: {fact}" for name in unknown]
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
    if program_arguments.names_program_file(words):
        if ranks is not None:
            raise InputError(f"--ranks {ranks}, but {words[0]} is a file, which says its ranks; leave --ranks out")
        return [partial(program_arguments.read_program, program_arguments.only_program_file(words))]
    counts = parse_rank_counts("2..16" if ranks is None else ranks)
    if not words:
        return list(all_cases(counts))
    collective, name, options = program_arguments.split_algorithm_words(words)
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
    """Rows of what is proven and what is not; only the first wrong Program is kept, to spare the memory."""
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


def _proof_lines(verified: list[dict[str, Any]]) -> list[str]:
    rows_by_name: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in verified:
        rows_by_name[f"{row['collective']}/{row['algorithm']}"].append(row)
    table = [["proven", "ranks", "Programs", "same bits", "blocking sends"]]
    for name, rows in rows_by_name.items():
        answers = (_all_or_some([row[key] for row in rows]) for key in ("same_bits", "supports_blocking_sends"))
        table.append([name, format_ranges({row["ranks"] for row in rows}), str(len(rows)), *answers])
    return align_columns(table, right_aligned=[2]) if verified else []


def _all_or_some(answers: list[bool]) -> str:
    if all(answers):
        return "yes"
    return "some" if any(answers) else "no"
