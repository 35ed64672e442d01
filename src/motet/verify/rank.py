"""What the ranks of layouts do that are verified, one layout after another, and the files that they leave of it."""

from pathlib import Path

import torch

from motet.parallel.group import Group, start_group
from motet.parallel.place import Place
from motet.train.faults import StopFlag
from motet.train.folder import stored_job
from motet.verify.layouts import laid_out
from motet.verify.native import native_step
from motet.verify.record import Seen
from motet.verify.runs import walk
from motet.verify.trial import JobTrial

NATIVE = ("in its own precision", 0)
"""After all phases in float64."""


def layout_rank(place: Place, stop: StopFlag, folder: str, *layouts: str) -> int:
    """What a rank does that verifies layouts, one after another; each leaves what it has seen of each step."""
    job, own = stored_job(Path(folder)), native_folder(Path(folder))
    native = stored_job(own) if own.exists() else None
    torch.set_num_threads(1)
    with start_group(place, "cpu", job.run.timeout_s, job.run.cpu_backend) as group:
        for number, layout in enumerate(layouts):
            _leave(JobTrial(laid_out(job, layout).job), group, Path(folder), number)
            if native is not None:
                seen = native_step(JobTrial(laid_out(native, layout).job), group, own)
                _save(seen, seen_file(Path(folder), number, NATIVE, group.rank))
            done_file(Path(folder), number, group.rank).touch()
    return 0


def _leave(trial: JobTrial, group: Group, folder: Path, number: int) -> None:
    """All phases of a layout, for whoever compares."""
    with trial.numerics():
        for phase, step, seen in walk(trial, group, folder, f"layout-{number}"):
            _save(seen, seen_file(folder, number, (phase, step), group.rank))


def native_folder(folder: Path) -> Path:
    """Of the job in its own precision, if it is to be judged in it."""
    return folder / "native"


def seen_file(folder: Path, layout: int, at: tuple[str, int], rank: int) -> Path:
    return folder / f"layout-{layout}-{at[0].replace(' ', '-')}-{at[1]}-rank-{rank}.pt"


def done_file(folder: Path, layout: int, rank: int) -> Path:
    return folder / f"layout-{layout}-done-{rank}"


def read_seen(path: Path) -> list[Seen]:
    return [Seen(*each) for each in torch.load(path, weights_only=True)]


def _save(seen: list[Seen], path: Path) -> None:
    torch.save([tuple(each) for each in seen], path)
