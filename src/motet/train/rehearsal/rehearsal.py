"""`motet train --rehearse`: one rank of a job, or one of each kind, in one process."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from motet.core.errors import check_input
from motet.train.job import Job
from motet.train.rehearsal.phases import PhaseRecorder, RehearsalPhase
from motet.train.rehearsal.rank_kinds import ranks_of_each_kind
from motet.train.rehearsal.rank_rehearsal import RANKS_PER_HOST, RankRehearsal, prepare_rehearsal, rehearse_rank


@dataclass(frozen=True)
class Rehearsal:
    """The rehearsed ranks of a job."""

    job: str
    layout: str
    ranks: int
    ranks_per_host: int  # Assumed
    phases: list[RehearsalPhase]  # Before the ranks differ
    rehearsed: list[RankRehearsal]

    def as_json(self) -> dict[str, Any]:
        """The JSON of a rehearsal."""
        head = {name: getattr(self, name) for name in ("job", "layout", "ranks", "ranks_per_host")}
        phases = [asdict(phase) for phase in self.phases]
        return {**head, "phases": phases, "rehearsed": [_rank_as_json(each) for each in self.rehearsed]}


def rehearse(job: Job, ranks: int, rank: int | None, *, all_kinds: bool, log: Callable[[str], None]) -> Rehearsal:
    """Rehearse a rank of a job on as many ranks, or one of each kind. Raises as the rank would be refused."""
    check_input(
        rank is None or rank < ranks,
        f"--rank {rank} is beyond the last of {ranks} ranks; give one from 0 to {ranks - 1}, or more --ranks",
    )
    recorder, rehearsed = PhaseRecorder(log), list[RankRehearsal]()
    prepared = prepare_rehearsal(job, ranks, recorder)
    first, plan = rehearse_rank(prepared, rank or 0, PhaseRecorder(log))
    kinds = ranks_of_each_kind(plan, job) if all_kinds else [first.rank]
    for index, each in enumerate(kinds):
        if len(kinds) > 1:
            log(f"rehearsal: rank {each}, {index + 1} of {len(kinds)} kinds")
        rehearsed.append(first if each == first.rank else rehearse_rank(prepared, each, PhaseRecorder(log))[0])
    return Rehearsal(job.name, str(prepared.layout), ranks, min(ranks, RANKS_PER_HOST), recorder.phases, rehearsed)


def _rank_as_json(rehearsal: RankRehearsal) -> dict[str, Any]:
    comparisons = [asdict(each) | {"difference": each.difference} for each in rehearsal.memory.comparisons()]
    return {
        "rank": rehearsal.rank,
        "coordinates": rehearsal.coordinates,
        "peak_bytes": rehearsal.memory.shown.peak,
        "memory": comparisons,
        "collectives": [asdict(each) | {"is_as_planned": each.is_as_planned} for each in rehearsal.collectives],
        "phases": [asdict(phase) for phase in rehearsal.phases],
    }
