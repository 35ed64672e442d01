"""`motet verify`: whether layouts compute the same numbers as one device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from motet.train.job import Job

RANKS = 4


def verify(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[JOB] [SECTION.KEY=VALUE]...",
            help="A TOML file or a built-in job (tiny when not given), and settings to replace.",
        ),
    ] = None,
    layout: Annotated[
        list[str] | None, typer.Option(help='A layout such as "dp=2 zero=1"; may be given several times.')
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All layouts for up to --ranks ranks.")] = False,
    ranks: Annotated[
        int | None, typer.Option(min=1, help=f"Ranks of layouts that do not say dp, and the most with --all; {RANKS}.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON; progress goes to stderr.")] = False,
) -> None:
    """Compare layouts with one device in float64, on a small version of the job; say where they begin to differ."""
    from motet.cli.environment import read_environment
    from motet.core.errors import InputError
    from motet.monitor.console import console, errors, print_json
    from motet.verify.layouts import layouts_for, with_ranks
    from motet.verify.verify import subject_of
    from motet.verify.verify import verify as verified

    if layout and everything:
        raise InputError("--all beside --layout: --all takes all layouts; leave one of the two out")
    job = _job(words or [])
    if everything:
        layouts = layouts_for(ranks or RANKS)
    else:
        layouts = [with_ranks(text, ranks or RANKS) for text in layout] if layout else [_own(job, ranks)]

    def tell(text: str) -> None:
        errors().print(text, highlight=False)

    verdicts = []
    for verdict in verified(subject_of(job, layouts, tell), read_environment(), tell):
        verdicts.append(verdict)
        if not json:
            console().print(str(verdict), highlight=False, soft_wrap=True)
    if json:
        print_json({"layouts": [verdict.as_json() for verdict in verdicts]})
    raise typer.Exit(0 if all(verdict.ok for verdict in verdicts) else 1)


def _job(words: list[str]) -> Job:
    from motet.train.job import is_file, load_job

    name = words[0] if words and ("=" not in words[0] or is_file(words[0])) else None
    return load_job(name or "tiny", words[name is not None :])


def _own(job: Job, ranks: int | None) -> str:
    """The layout of the job."""
    from motet.verify.layouts import described, with_ranks

    return with_ranks(described(job.layout), ranks or max(2, job.run.ranks))
