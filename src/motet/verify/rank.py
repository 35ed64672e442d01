"""What the ranks of layouts do that are verified, one layout after another, and the files that they leave of it.

The same processes do them all, in groups of as many as a layout has: to start some takes seconds.
"""

import time
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import torch

from motet.parallel.process.launch_environment import RankEnvironment
from motet.parallel.process.process_group import RankGroup, start_process_group
from motet.train.launch.failures import StopFlag
from motet.train.launch.run_folder import read_stored_job
from motet.verify.layouts import Candidate, laid_out
from motet.verify.native import native_step
from motet.verify.record import Seen
from motet.verify.runs import phases, walk
from motet.verify.trial import JobTrial

POLL_S = 0.1
NATIVE = ("in its own precision", 0)
"""After all phases in float64."""


def layout_rank(place: RankEnvironment, stop: StopFlag, folder: str, *layouts: str) -> int:
    """What a rank does that verifies layouts, one after another; each leaves what it has seen of each step."""
    stop.exit_on_sigterm()
    torch.set_num_threads(1)
    job = read_stored_job(Path(folder))
    candidates = [laid_out(job, layout) for layout in layouts]
    for world, same in groupby(enumerate(candidates), lambda each: each[1].world):
        if place.rank >= world:  # it waits for the next ones, or is done
            continue
        mine = list(same)
        first = mine[0][0]
        while first and not done_file(Path(folder), first - 1, 0).exists():  # longer than a group has patience
            time.sleep(POLL_S)
        here = replace(place, world=world, local_world=world, rendezvous=f"{place.rendezvous}-{world}")
        with start_process_group(here, "cpu", job.run.timeout_s, job.run.cpu_backend) as group:
            for number, candidate in mine:
                _verify(candidate, group, Path(folder), number)
    return 0


def _verify(candidate: Candidate, group: RankGroup, folder: Path, number: int) -> None:
    _leave(JobTrial(candidate.job), group, folder, number)
    if (own := native_folder(folder)).exists():
        seen = native_step(JobTrial(laid_out(read_stored_job(own), candidate.text).job), group, own)
        leave_seen(seen, seen_file(folder, number, NATIVE, group.rank))
    done_file(folder, number, group.rank).touch()


def _leave(trial: JobTrial, group: RankGroup, folder: Path, number: int) -> None:
    """All phases of a layout, for whoever compares."""
    with trial.numerics():
        for phase, step, seen in walk(trial, group, folder, f"layout-{number}"):
            leave_seen(seen, seen_file(folder, number, (phase, step), group.rank))


def native_folder(folder: Path) -> Path:
    """Of the job in its own precision, if it is to be judged in it."""
    return folder / "native"


def seen_file(folder: Path, layout: int, at: tuple[str, int], rank: int) -> Path:
    return folder / f"layout-{layout}-{at[0].replace(' ', '-')}-{at[1]}-rank-{rank}.pt"


def walked_by(folder: Path, layout: int, steps: int) -> list[tuple[str, int]]:
    """The phases that a layout has done."""
    return [at for at in phases(steps) if seen_file(folder, layout, at, 0).exists()]


def done_file(folder: Path, layout: int, rank: int) -> Path:
    return folder / f"layout-{layout}-done-{rank}"


def read_seen(folder: Path, layout: int, world: int, phase: str, step: int) -> list[list[Seen]]:
    """By each rank."""
    files = (seen_file(folder, layout, (phase, step), rank) for rank in range(world))
    return [[Seen(*each) for each in torch.load(file, weights_only=True)] for file in files]


def leave_seen(seen: list[Seen], path: Path) -> None:
    torch.save([tuple(each) for each in seen], path)
