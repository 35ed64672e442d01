"""A few steps, recorded: on one device, which is the reference, and on the ranks of a layout."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from motet.collectives.compression.byte_messages import codec_numerics
from motet.parallel.process.process_group import RankGroup
from motet.verify.compare import Difference, Reference, compare, reference_of, varying
from motet.verify.record import Recorder, Seen, recorded
from motet.verify.trial import Built, Trial

ALONE = RankGroup(0, 1, None, torch.device("cpu"))
PERTURBED = 2
"""References that begin with parameters a rounding away."""
ALONE_FROM, FREE, AGAIN = "from the state of one device", "in a row", "from its own checkpoint"
LATE = "in a row without a look between them"
"""How the steps of a layout begin: each from the state of the reference; one after another; the last once more, from
the checkpoint that the layout itself wrote before it; and after others of which some may be underway still."""


@dataclass(frozen=True)
class Referred:
    """What the steps of a layout are held against."""

    single: Sequence[Reference]
    free: Sequence[Reference]
    """The same with the noise of all steps until then."""
    folder: Path
    """Of the states before each step, as checkpoints."""
    differs: tuple[int, Difference] | None = None
    """A step that one device itself does not do again from its own checkpoint, and what is the first to differ."""

    def of(self, phase: str, step: int) -> Reference:
        found = (self.single if phase == ALONE_FROM else self.free)[step]
        if phase != LATE:
            return found
        wholes = {site: whole for site, whole in found.wholes.items() if site[0] != "starting parameter"}
        return replace(found, wholes=wholes)


def phases(steps: int) -> list[tuple[str, int]]:
    """In the order in which a layout does them; not all do the last."""
    last = steps - 1
    return [(phase, step) for phase in (ALONE_FROM, FREE) for step in range(steps)] + [(AGAIN, last), (LATE, last)]


def refer(trial: Trial, folder: Path) -> Referred:
    """Do the steps on this process alone, each recorded, and again from parameters that are a rounding away."""
    with trial.numerics(), one_thread():
        built = trial.cut(1).build(ALONE, folder)
        single = []
        for number in range(trial.steps):
            built.state.save(number)
            single.append(_reference(built, number))
        built.state.save(trial.steps)
        free = [replace(reference, noise={}, varying=set()) for reference in single]
        operations = max(whole.seen.operations for whole in single[-1].wholes.values())
        evaluated = reference_of(each._replace(operations=operations) for each in _evaluated(built))
        free[-1] = replace(free[-1], wholes={**free[-1].wholes, **evaluated})
        if differs := _differing(built, single[-1], trial.steps - 1, folder):
            return Referred(single, free, folder, differs)
        for seed in range(PERTURBED):
            for number, reference in enumerate(single):
                _restart(built, folder, number, seed)
                _add_noise(reference, again(built, number))
            _restart(built, folder, 0, seed)
            for number, reference in enumerate(free):
                _add_noise(reference, again(built, number, judged=number == trial.steps - 1))
        _find_varying(trial, folder, single, free)
    return Referred(single, free, folder)


def _differing(built: Built, reference: Reference, number: int, folder: Path) -> tuple[int, Difference] | None:
    """A reference that is not restored cannot be what others are restored from."""
    built.state.restore(state_file(folder, number))
    seen = again(built, number)
    with codec_numerics():
        found = next((each for each in compare(reference, [seen]) if not each.is_rounding), None)
    return found and (number, found)


@contextmanager
def one_thread() -> Iterator[None]:
    """As ranks have: beside others that wait for each other, more are slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _reference(built: Built, number: int) -> Reference:
    recorder, counter = Recorder(folds=False), FlopCounterMode(display=False)
    with counter:
        recorder.operations = counter.get_total_flops
        recorded(built.engine, recorder, lambda: built.step(number, recorder))
    return Reference(reference_of(recorder.seen), built.rate(number))


def _restart(built: Built, folder: Path, number: int, seed: int) -> None:
    """Move each master to one of its neighbours, up or down."""
    built.state.restore(state_file(folder, number))
    generator = torch.Generator().manual_seed(seed)
    updater = built.engine.optimizer
    for master in updater.sharded_parameters.local_masters:
        up = torch.rand(master.shape, generator=generator) < 0.5
        towards = torch.where(up, torch.inf, -torch.inf).to(master.dtype)
        master.copy_(torch.nextafter(master, towards))
    updater.sync_parameters()


def again(built: Built, number: int, folds: bool = True, judged: bool = False) -> list[Seen]:
    """A step that is recorded, and the evaluation after it."""
    recorder = Recorder(folds=folds)
    recorded(built.engine, recorder, lambda: built.step(number, recorder))
    return recorder.seen + (_evaluated(built) if judged else [])


def _evaluated(built: Built) -> list[Seen]:
    recorder = Recorder()
    for name, value in built.evaluation().items():
        recorder.add_whole("evaluation", name, value)
    return recorder.seen


def _add_noise(reference: Reference, seen: list[Seen]) -> None:
    with codec_numerics():
        found_all = compare(reference, [seen])
    for found in found_all:  # of what has another shape now, routed otherwise, nothing can be said
        off = math.inf if found.what else found.relative
        reference.noise[found.site] = max(off, reference.noise.get(found.site, 0.0))


def _find_varying(trial: Trial, folder: Path, *each: Sequence[Reference]) -> None:
    """What a cut into single rows changes that has no rows; told by the first step. Some models need two in each."""
    fewer = [parts for parts in range(trial.rows // 2, 1, -1) if trial.rows % parts == 0]
    for parts in (trial.rows, *fewer[:1]):
        cut = trial.cut(parts).build(ALONE, folder)
        cut.state.restore(state_file(folder, 0))
        try:
            seen = again(cut, 0)
        except Exception:  # noqa: BLE001  # models have their own ways to say so
            continue
        with codec_numerics():
            found = varying(each[0][0], [seen])
        for references in each:
            for reference in references:
                reference.varying.update(found)
        return


def state_file(folder: Path, number: int) -> Path:
    return folder / "checkpoints" / f"step-{number:08d}"


def walk(trial: Trial, group: RankGroup, folder: Path, own: str) -> Iterator[tuple[str, int, list[Seen]]]:
    """All phases of a layout. `own`: the folder inside of `folder` for its own checkpoints."""
    last = trial.steps - 1
    built = trial.build(group, folder / own)
    for step in range(trial.steps):
        built.state.restore(state_file(folder, step))
        yield ALONE_FROM, step, again(built, step)
    built = trial.build(group, folder / own)
    for step in range(trial.steps):  # from its own initial values, and evaluated between them as in training
        if step == last:
            built.state.save(step)
        elif step:
            built.evaluation()
        yield FREE, step, again(built, step, judged=step == last)
    built = trial.build(group, folder / own)
    built.state.restore(state_file(folder / own, last))
    yield AGAIN, last, again(built, last, judged=True)
    if built.engine.optimizer.sharded_parameters.updates_on_arrival:  # to look at parameters is to wait for them
        built = trial.build(group, folder / own)
        for step in range(last):
            built.step(step, Recorder())
        yield LATE, last, [each for each in again(built, last, judged=True) if each.kind != "starting parameter"]
