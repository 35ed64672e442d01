"""`motet collectives prove`: whether Programs do what they promise, and whether the proof would see it if not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from motet.cli.collectives_limits import whole

if TYPE_CHECKING:
    from collections.abc import Callable

    from motet.collectives.algorithms import Algorithm
    from motet.collectives.cases import ProgramCase
    from motet.collectives.program import Program
    from motet.collectives.prove.program_checker import SendMode, UnprovenCollectiveError

    Progress = Callable[[str, int, int], None]

_WITH_ALL = 300


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
    corruptions: Annotated[
        int | None,
        typer.Option(
            callback=whole("--corruptions", 0),
            help="Change so many Programs in one place, and see that the proof rejects them; with --all 300, else 0.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON; progress goes to stderr.")] = False,
) -> None:
    """Prove that Programs do what their collective promises, for every input; where one does not, the step is drawn."""
    from motet.cli.collectives import say
    from motet.cli.progress import shown_progress
    from motet.core.errors import InputError, MotetError
    from motet.monitor.console import print_json, stdout_console

    if words and everything:
        raise InputError(f"--all beside {words[0]!r}: --all proves every collective; leave one of the two out")
    if not words and not everything:
        raise InputError("what is to be proven? Give --all, or a collective (and an algorithm), or a file")
    cases = list(_cases(words or [], ranks))
    with shown_progress() as progress:
        proven, rows, first = _prove(cases, sends, progress)
        planted = _plant(cases, (_WITH_ALL if everything else 0) if corruptions is None else corruptions, progress)
    remarks = _remarks(proven)
    if json:
        print_json({"sends": sends, "proven": proven, "wrong": rows, "corruptions": planted, "remarks": remarks})
    else:
        say(*_told(proven, planted), *remarks, *(row["message"] for row in rows[1:]))
        if first:
            stdout_console().print(_drawn(first), soft_wrap=True)
    if first:
        raise first.error
    if planted["missed"]:
        raise MotetError(f"the proof let pass what is wrong: {planted['missed'][0]}; that is a defect of motet")


def _cases(words: list[str], ranks: str | None) -> list[ProgramCase]:
    """What is asked for, at those numbers of ranks that it takes."""
    from functools import partial

    from motet.cli.amounts import is_file, parse_counts, read_program, split_words, the_file
    from motet.collectives.algorithms import algorithm_names, find_algorithm
    from motet.collectives.cases import all_cases, make_case
    from motet.core.errors import InputError

    if is_file(words):
        if ranks is not None:
            raise InputError(f"--ranks {ranks}, but {words[0]} is a file, which says its ranks; leave --ranks out")
        return [partial(read_program, the_file(words))]
    counts = parse_counts("2..16" if ranks is None else ranks)
    if not words:
        return all_cases(counts)
    collective, name, options = split_words(words)
    found = [find_algorithm(collective, name) for name in (algorithm_names(collective) if name is None else (name,))]
    if name is None and options:
        found = _having(found, options)
    if name is not None and not any(map(found[0].supports, counts)):
        found[0].check_ranks(counts[0])
    return [
        make_case(algorithm, count, options) for algorithm in found for count in counts if algorithm.supports(count)
    ]


def _having(among: list[Algorithm], options: dict[str, object]) -> list[Algorithm]:
    """Those that have all of these options."""
    from motet.core.errors import InputError

    for option in options:
        if not any(option in algorithm.options for algorithm in among):
            known = sorted({name for algorithm in among for name in algorithm.options})
            remedy = f"there are {', '.join(known)}" if known else "leave it out"
            raise InputError(f"no algorithm of {among[0].collective} has the option {option!r}; {remedy}")
    found = [algorithm for algorithm in among if set(options) <= set(algorithm.options)]
    if not found:
        raise InputError(f"no algorithm of {among[0].collective} has all the options {', '.join(options)}; give fewer")
    return found


class Wrong(NamedTuple):
    """A Program that is not what it should be."""

    program: Program
    error: UnprovenCollectiveError


def _prove(
    cases: list[ProgramCase], sends: SendMode, progress: Progress
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], Wrong | None]:
    """What is proven, what is wrong, and the first that is: all wrong Programs at once might fill the memory."""
    from dataclasses import asdict

    from motet.collectives.prove.program_checker import UnprovenCollectiveError
    from motet.collectives.prove.program_checker import prove_program as proof_of

    proven: list[dict[str, Any]] = []
    wrong: list[dict[str, Any]] = []
    first: Wrong | None = None
    for number, case in enumerate(cases, start=1):
        program = case()
        name = {"collective": program.collective, "algorithm": program.algorithm, "options": case.keywords}
        try:
            proven.append({**name, **asdict(proof_of(program, sends))})
        except UnprovenCollectiveError as error:
            wrong.append({**name, "ranks": program.ranks, "step": error.step, "message": str(error)})
            first = first or Wrong(program, error)
        progress("proving", number, len(cases))
    return proven, wrong, first


def _plant(cases: list[ProgramCase], count: int, progress: Progress) -> dict[str, Any]:
    from dataclasses import asdict

    from motet.collectives.cases import check_mutations

    judged = []
    for planted in check_mutations(cases, count):
        judged.append(asdict(planted))
        progress("judging corruptions", len(judged), count)
    named = {verdict: [row for row in judged if row["verdict"] == verdict] for verdict in ("equivalent", "missed")}
    return {"made": len(judged), "rejected": len(judged) - sum(map(len, named.values())), **named}


def _remarks(proven: list[dict[str, Any]]) -> list[str]:
    """Names that promise nothing: of these `final` alone is proven."""
    from motet.collectives.algorithms import collective_names
    from motet.collectives.algorithms.registry import nearest_collective_hint

    unknown = sorted({row["collective"] for row in proven} - set(collective_names()))
    return [
        f"{name} is no collective that is known{nearest_collective_hint(name)}: its `final` is proven, but not held to a name"
        for name in unknown
    ]


def _told(proven: list[dict[str, Any]], planted: dict[str, Any]) -> list[str]:
    """A line for each algorithm."""
    from motet.collectives.draw.frames import align_columns, format_ranges

    by_name: dict[str, list[dict[str, Any]]] = {}
    for row in proven:
        by_name.setdefault(f"{row['collective']}/{row['algorithm']}", []).append(row)
    table = [["proven", "ranks", "Programs", "same bits", "blocking sends"]]
    for name, rows in by_name.items():
        kept = (_all_or_some(rows, key) for key in ("same_bits", "blocking"))
        table.append([name, format_ranges({row["ranks"] for row in rows}), str(len(rows)), *kept])
    lines = align_columns(table, right_aligned=[2]) if proven else []
    if planted["made"]:
        equivalent = planted["equivalent"]
        lines.append(f"{planted['made']} corruptions: {planted['rejected']} rejected, {len(equivalent)} equivalent")
        lines += [f"  equivalent: {row['program']}, {row['what']}" for row in equivalent]
    return lines


def _all_or_some(rows: list[dict[str, Any]], key: str) -> str:
    having = [row["ranks"] for row in rows if row[key]]
    return "yes" if len(having) == len(rows) else "no" if not having else "some"


def _drawn(wrong: Wrong) -> Any:
    """The step that is wrong; what is wrong only at the end is seen in the last one."""
    from motet.cli.collectives import marked
    from motet.collectives.draw.frames import program_text

    last = len(wrong.program.steps) - 1
    return marked(program_text(wrong.program, last if wrong.error.step is None else wrong.error.step))
