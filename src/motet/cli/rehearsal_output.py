"""The output of `motet train --rehearse`."""

from collections.abc import Iterator

from motet.cli.environment_variables import read_environment
from motet.cli.output import OutputLine, log, print_lines, table_lines
from motet.core.errors import check_input
from motet.core.units import format_bytes
from motet.monitor.stdout_stderr import print_json
from motet.train.job import Job
from motet.train.rehearsal.rehearsal import CollectiveCount, RankRehearsal, Rehearsal, RehearsalPhase, rehearse

_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "SLURM_PROCID", "MOTET_RANK")


def run_rehearsal(job: Job, rank: int | None, *, all_kinds: bool, json: bool) -> int:
    """Rehearse a job and print the memory and the collectives of its ranks. Returns the exit code."""
    check_input(rank is None or not all_kinds, "--rank and --all-kinds: give one of them")
    ignored = [name for name in _LAUNCHER_VARIABLES if name in read_environment()]
    if ignored:
        log(f"--rehearse runs one process and ignores {', '.join(ignored)}")
    rehearsal = rehearse(job, job.run.ranks, rank, all_kinds=all_kinds, log=log)
    if json:
        print_json(rehearsal.as_json())
    else:
        print_lines(*_lines(rehearsal))
    return int(any(_is_unplanned(each) for each in rehearsal.rehearsed))


def _lines(rehearsal: Rehearsal) -> Iterator[OutputLine]:
    yield f"{rehearsal.job}, layout '{rehearsal.layout}': a rehearsal of {rehearsal.ranks} ranks"
    yield f"on the meta device, without data; {rehearsal.ranks_per_host} ranks a host are assumed."
    yield from ("", "common to all ranks", *_phase_lines(rehearsal.phases))
    for each in rehearsal.rehearsed:
        yield from ("", *_rank_lines(each))
    yield ""
    names = ", ".join(str(each.rank) for each in rehearsal.rehearsed)
    unplanned = [each.rank for each in rehearsal.rehearsed if _is_unplanned(each)]
    if unplanned:
        yield f"Rank {unplanned[0]} starts other collectives than its plan: a fault of motet, please report it."
    elif len(rehearsal.rehearsed) == 1:
        yield f"Rank {names} would start and take its first step."
    else:
        yield f"Ranks {names}, one of each kind, would start and take their first step."


def _is_unplanned(rehearsal: RankRehearsal) -> bool:
    return not all(count.is_as_planned for count in rehearsal.collectives)


def _rank_lines(rehearsal: RankRehearsal) -> Iterator[OutputLine]:
    places = ", ".join(f"{name} {index}" for name, index in rehearsal.coordinates.items())
    yield f"rank {rehearsal.rank}{f' ({places})' * bool(places)}: peak {format_bytes(rehearsal.memory.shown.peak)}"
    rows = []
    for each in rehearsal.memory.comparisons():
        planned = "not planned" if each.predicted is None else format_bytes(each.predicted)
        difference = "" if each.difference is None else f"{each.difference:+.1%}"
        rows.append((each.name, format_bytes(each.measured or 0), planned, difference))
    yield from table_lines(rows, header=("memory", "rehearsed", "planned", "difference"), right=range(1, 4), indent=2)
    header = ("collectives of a step", "over", "ranks", "count", "bytes", "planned", "")
    yield from table_lines(map(_collective_row, rehearsal.collectives), header=header, right=range(2, 6), indent=2)
    yield from _phase_lines(rehearsal.phases)


def _collective_row(count: CollectiveCount) -> tuple[str, ...]:
    planned = "" if count.planned_bytes is None else format_bytes(count.planned_bytes)
    remark = "" if count.is_as_planned else "not as planned"
    return count.collective, count.over, str(count.ranks), str(count.count), format_bytes(count.bytes), planned, remark


def _phase_lines(phases: list[RehearsalPhase]) -> Iterator[OutputLine]:
    rows = (
        (each.name, f"{each.seconds:.1f} s", f"peak of this host {format_bytes(each.peak_host_bytes)}")
        for each in phases
    )
    yield from table_lines(rows, right=[1], indent=2)
