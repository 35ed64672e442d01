"""The output of `motet train --rehearse`."""

from collections.abc import Iterator

from motet.cli.environment_variables import read_environment
from motet.cli.output import log, print_lines
from motet.core.errors import check_input
from motet.core.units import format_bytes
from motet.monitor.stdout_stderr import print_json
from motet.train.job import Job
from motet.train.rehearsal.rehearsal import CollectiveCount, RankRehearsal, Rehearsal, RehearsalPhase, rehearse

_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "SLURM_PROCID", "MOTET_RANK")


def run_rehearsal(job: Job, rank: int | None, *, all_kinds: bool, json: bool) -> int:
    """Rehearse a job and print what its ranks would hold and start. Returns the exit code."""
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


def _lines(rehearsal: Rehearsal) -> Iterator[str]:
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


def _rank_lines(rehearsal: RankRehearsal) -> Iterator[str]:
    places = ", ".join(f"{name} {index}" for name, index in rehearsal.coordinates.items())
    yield f"rank {rehearsal.rank}{f' ({places})' * bool(places)}: peak {format_bytes(rehearsal.memory.shown.peak)}"
    yield f"  {'memory':<34}{'rehearsed':>12}{'planned':>12}{'difference':>12}"
    for each in rehearsal.memory.comparisons():
        planned = "not planned" if each.predicted is None else format_bytes(each.predicted)
        difference = "" if each.difference is None else f"{each.difference:+.1%}"
        yield f"  {each.name:<34}{format_bytes(each.measured or 0):>12}{planned:>12}{difference:>12}"
    yield f"  {'collectives of a step':<23}{'over':<14}{'ranks':>7}{'count':>8}{'bytes':>12}{'planned':>12}"
    yield from map(_collective_line, rehearsal.collectives)
    yield from _phase_lines(rehearsal.phases)


def _collective_line(count: CollectiveCount) -> str:
    planned = "" if count.planned_bytes is None else format_bytes(count.planned_bytes)
    remark = "" if count.is_as_planned else "  not as planned"
    size = format_bytes(count.bytes)
    return f"  {count.collective:<23}{count.over:<14}{count.ranks:>7}{count.count:>8}{size:>12}{planned:>12}{remark}"


def _phase_lines(phases: list[RehearsalPhase]) -> Iterator[str]:
    for phase in phases:
        yield f"  {phase.name:<54}{phase.seconds:>8.1f} s, peak of this host {format_bytes(phase.peak_host_bytes)}"
