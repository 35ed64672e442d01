"""A few steps of a job, recorded: on one device, which is the reference, and on the ranks of a layout."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from motet.collectives.codecs.wire import as_it_is
from motet.parallel.group import Group, start_group
from motet.parallel.place import Place
from motet.train.assemble import Parts, build_parts, evaluate_split, numerics
from motet.train.faults import StopFlag
from motet.train.folder import stored_job
from motet.train.job import Job, changed
from motet.train.schedule import learning_rate_factor
from motet.train.step import Stepper
from motet.verify.compare import Reference, compare, reference_of, varying
from motet.verify.layouts import laid_out
from motet.verify.record import Recorder, Seen, recorded
from motet.verify.uneven import Uneven

ALONE = Group(0, 1, None, torch.device("cpu"))
PERTURBED = 2
"""References that begin with parameters a rounding away."""
ALONE_FROM, FREE, AGAIN = "from the state of one device", "in a row", "from its own checkpoint"
"""How the steps of a layout begin: each from the state of the reference; one after another; and the last once more,
from the checkpoint that the layout itself wrote before it."""


@dataclass(frozen=True)
class Referred:
    """What the steps of a layout are held against."""

    single: Sequence[Reference]
    free: Sequence[Reference]
    """The same with the noise of all steps until then."""
    folder: Path
    """Of the states before each step, as checkpoints."""

    def of(self, phase: str, step: int) -> Reference:
        return (self.single if phase == ALONE_FROM else self.free)[step]


def phases(steps: int) -> list[tuple[str, int]]:
    """In the order in which a layout does them."""
    return [(phase, step) for phase in (ALONE_FROM, FREE) for step in range(steps)] + [(AGAIN, steps - 1)]


def refer(job: Job, folder: Path) -> Referred:
    """Do the steps on this process alone, each recorded, and again from parameters that are a rounding away."""
    with numerics(job), one_thread():
        parts = build_parts(job, ALONE, folder)
        single = []
        for number in range(parts.steps):
            parts.state.save(number)
            single.append(_reference(job, parts, number))
        parts.state.save(parts.steps)
        last = evaluation_of(job, parts)
        free = [replace(reference, noise={}, varying=set()) for reference in single]
        free[-1] = replace(free[-1], wholes={**free[-1].wholes, **reference_of(last)})
        for seed in range(PERTURBED):
            for number, reference in enumerate(single):
                _restart(parts, folder, number, seed)
                _add_noise(reference, _again(job, parts, number))
            _restart(parts, folder, 0, seed)
            for number, reference in enumerate(free):
                _add_noise(reference, _again(job, parts, number, number == len(free) - 1))
        _find_varying(job, folder, single, free)
    return Referred(single, free, folder)


@contextmanager
def one_thread() -> Iterator[None]:
    """As ranks have: beside others that wait for each other, more are slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _reference(job: Job, parts: Parts, number: int) -> Reference:
    recorder, counter = Recorder(folds=False), FlopCounterMode(display=False)
    rate = rate_of(job, number, parts.steps)
    with counter:
        recorder.operations = counter.get_total_flops
        recorded(stepper_of(job, parts), recorder, number, rate)
    return Reference(reference_of(recorder.seen), rate)


def _restart(parts: Parts, folder: Path, number: int, seed: int) -> None:
    """Move each master to one of its neighbours, up or down."""
    parts.state.restore(state_file(folder, number))
    generator = torch.Generator().manual_seed(seed)
    for master in parts.updater.spread.masters:
        up = torch.rand(master.shape, generator=generator) < 0.5
        towards = torch.where(up, torch.inf, -torch.inf).to(master.dtype)
        master.copy_(torch.nextafter(master, towards))
    parts.updater.publish()


def _again(job: Job, parts: Parts, number: int, judged: bool = False) -> list[Seen]:
    """A step, and the evaluation after it."""
    recorder = Recorder()
    recorded(stepper_of(job, parts), recorder, number, rate_of(job, number, parts.steps))
    return recorder.seen + (evaluation_of(job, parts) if judged else [])


def evaluation_of(job: Job, parts: Parts) -> list[Seen]:
    recorder = Recorder()
    if judged := evaluate_split(job, parts, "validation"):
        recorder.add_whole("evaluation", "evaluation targets", judged.targets)
        recorder.add_whole("evaluation", "evaluation loss", judged.loss)
    return recorder.seen


def _add_noise(reference: Reference, seen: list[Seen]) -> None:
    with as_it_is():
        found_all = compare(reference, [seen])
    for found in found_all:
        reference.noise[found.site] = max(found.relative, reference.noise.get(found.site, 0.0))


def _find_varying(job: Job, folder: Path, *each: Sequence[Reference]) -> None:
    """What another cut of the batch changes that has no rows."""
    rows = job.data.batch_sequences
    parts = next((n for n in range(2, rows + 1) if rows % n == 0), 1)
    cut_job = changed(job, [f"layout.microbatches={parts}"], "verify")
    cut = build_parts(cut_job, ALONE, folder)
    for number in range(cut.steps):
        cut.state.restore(state_file(folder, number))
        seen = _again(cut_job, cut, number)
        with as_it_is():
            for references in each:
                references[number].varying.update(varying(references[number], [seen]))


def rate_of(job: Job, number: int, steps: int) -> float:
    return job.optimizer.learning_rate * learning_rate_factor(job.optimizer.schedule, number, steps)


def state_file(folder: Path, number: int) -> Path:
    return folder / "checkpoints" / f"step-{number:08d}"


def stepper_of(job: Job, parts: Parts) -> Stepper:
    stepper = parts.stepper(job)
    return replace(stepper, samples=Uneven(stepper.samples))


# --- on the ranks of a layout ----------------------------------------------------------------------


def layout_rank(place: Place, stop: StopFlag, folder: str, *layouts: str) -> int:
    """What a rank does that verifies layouts, one after another; each leaves what it has seen of each step."""
    job = stored_job(Path(folder))
    torch.set_num_threads(1)
    with start_group(place, "cpu", job.run.timeout_s, job.run.cpu_backend) as group, numerics(job):
        for number, layout in enumerate(layouts):
            for phase, step, seen in walk(laid_out(job, layout).job, group, Path(folder), f"layout-{number}"):
                where = seen_file(Path(folder), number, (phase, step), group.rank)
                torch.save([tuple(each) for each in seen], where)
            done_file(Path(folder), number, group.rank).touch()
    return 0


def walk(job: Job, group: Group, folder: Path, own: str) -> Iterator[tuple[str, int, list[Seen]]]:
    """All phases of a layout. `own`: the folder inside of `folder` for its own checkpoints."""
    parts = build_parts(job, group, folder / own)
    last = parts.steps - 1
    for step in range(parts.steps):
        parts.state.restore(state_file(folder, step))
        yield ALONE_FROM, step, _again(job, parts, step)
    parts.state.restore(state_file(folder, 0))
    for step in range(parts.steps):
        if step == last:
            parts.state.save(step)
        yield FREE, step, _again(job, parts, step, step == last)
    parts = build_parts(job, group, folder / own)
    parts.state.restore(state_file(folder / own, last))
    yield AGAIN, last, _again(job, parts, last, True)


def seen_file(folder: Path, layout: int, at: tuple[str, int], rank: int) -> Path:
    return folder / f"layout-{layout}-{at[0].replace(' ', '-')}-{at[1]}-rank-{rank}.pt"


def done_file(folder: Path, layout: int, rank: int) -> Path:
    return folder / f"layout-{layout}-done-{rank}"


def read_seen(path: Path) -> list[Seen]:
    return [Seen(*each) for each in torch.load(path, weights_only=True)]
