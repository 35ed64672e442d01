"""A step in the job's own precision: as far from one device as the same additions in other orders are, and no further.

What only rounds too often, a sum kept in bfloat16, is the same in float64. It is judged by the spread of steps on one
device that add up the same micro-batches in other orders.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from motet.parallel.process.process_group import RankGroup
from motet.precision.recipe import RECIPES
from motet.verify.compare import EPSILON, Difference, Reference, compare, reference_of
from motet.verify.parts import Site, Whole
from motet.verify.record import Recorder, Seen
from motet.verify.runs import ALONE, again, one_thread, state_file
from motet.verify.trial import JobBuilt, JobTrial
from motet.verify.verdict import Verdict, named

ORDERS = 4
"""Steps that tell how far apart they may be."""
UNLIKELY = 8.0
"""So many standard deviations above their mean is no accident: they are few, and their tails are not normal."""
FEW = 4
"""So many numbers may be rounded the other way, by a kernel that goes another path."""
SCALINGS = 8
"""So often a float32 sum may be multiplied by what is itself rounded, the norm, say: no order of sums shows that."""
MASTER = "master/"
EXACT = ("norm", "state")
LEAST = 0.1
"""The standard deviation of a logarithm of distances is not believed to be less."""


class Unlikely(NamedTuple):
    """How far a tensor is from one device, and how far others are."""

    difference: Difference
    z: float
    usual: float
    """The distance that other orders have, in the mean."""

    @property
    def is_rounding(self) -> bool:
        return not self.difference.what and self.z <= UNLIKELY

    @property
    def cause(self) -> str:
        found = self.difference
        return found.what or (
            f"it is {found.relative / self.usual:.1f} times as far from one device as other orders of the same sums "
            f"(z = {self.z:.0f}), while it is the same in float64: something is rounded that should not be"
        )


@dataclass(frozen=True)
class Spread:
    """A step of one device, and how far the same step with micro-batches in other orders is from it."""

    reference: Reference
    logs: Mapping[Site, Tensor]
    """Of distances."""
    pooled: Mapping[str, float]
    """Kind -> the standard deviation of these, over all tensors of it."""
    compute: torch.dtype

    def unlikely(self, difference: Difference) -> Unlikely:
        if difference.what:
            return Unlikely(difference, math.inf, 0.0)
        logs, whole = self.logs[difference.site], self.reference.wholes[difference.site]
        spread = max(float(logs.std()), self.pooled[whole.site[0]], math.sqrt(0.5 / max(1, whole.value.numel())), LEAST)
        off = _log(difference, whole, self.compute) - float(logs.mean())
        return Unlikely(difference, off / (spread * math.sqrt(1 + 1 / len(logs))), math.exp(float(logs.mean())))


@dataclass(frozen=True)
class Native:
    """Of a job in its own precision."""

    trial: JobTrial
    folder: Path
    """Of the state before the step."""
    varying: set[Site]
    """Not compared."""
    at_once: Mapping[Site, Whole]
    """What one device has that takes the batch at once."""
    exact: Reference | None
    """What every layout has to the bit, where the job promises that."""
    known: dict[int, Spread] = field(default_factory=dict)

    def judge(self, parts: int, ranks: Sequence[Sequence[Seen]]) -> tuple[Unlikely | None, Unlikely | None]:
        """The most unlikely of all tensors, and the first that is none of rounding; of a batch cut into `parts`."""
        found: list[Unlikely] = []
        if RECIPES[self.trial.job.precision.recipe].compute != "float64":  # that has been judged by more
            spread = self._spread_of(parts)
            differences = (each for each in compare(spread.reference, ranks) if self._is_judged(each.site))
            found = [spread.unlikely(each) for each in differences]
        if self.exact is not None:
            found += [_of_bits(each) for each in compare(self.exact, ranks) if each.site[0] in EXACT and each.relative]
        worst = max(found, key=lambda each: each.z, default=None)
        return worst, next((each for each in found if not each.is_rounding), None)

    def _spread_of(self, parts: int) -> Spread:
        if parts not in self.known:
            with self.trial.numerics(), one_thread():
                self.known[parts] = self._spread(parts)
        return self.known[parts]

    def _is_judged(self, site: Site) -> bool:
        """Where there are masters they are; stage 3 has no other parameters."""
        recipe = RECIPES[self.trial.job.precision.recipe]
        is_own = site[0] in ("parameter", "starting parameter") and not site[1].startswith(MASTER)
        return recipe.compute == recipe.master or not is_own

    def _spread(self, parts: int) -> Spread:
        built, last = self.trial.cut(parts).build(ALONE, self.folder), self.trial.steps - 1
        first_values = {folds: _first_values(built, folds) for folds in (False, True)}

        def done(order: Sequence[int] | None, folds: bool = True) -> list[Seen]:
            return first_values[folds] + _last_step(built.in_order(order), self.folder, last, folds)

        of_step = reference_of(each for each in done(None, folds=False) if each.part < 0)
        new = {site: whole for site, whole in of_step.items() if site not in self.at_once}
        reference = Reference({**new, **self.at_once, **of_step}, built.rate(last), varying=self.varying)
        others = [done(order) for order in _orders(self.trial.rows, parts)]
        return spread_of(reference, others, getattr(torch, RECIPES[self.trial.job.precision.recipe].compute))


def refer_native(trial: JobTrial, folder: Path, varying: set[Site]) -> Native:
    """Do the steps on one device, up to the one that is judged."""
    last = trial.steps - 1
    with trial.numerics(), one_thread():
        built = trial.cut(1).build(ALONE, folder)
        for number in range(last):
            again(built, number)
        built.state.save(last)
        at_once = reference_of(again(built, last, folds=False))
        exact = None
        if trial.job.run.reproducible:
            promised = _last_step(trial.build(ALONE, folder), folder, last, folds=False)
            exact = Reference(reference_of(promised), built.rate(last), varying=varying)
        return Native(trial, folder, varying, at_once, exact)


def _first_values(built: JobBuilt, folds: bool = True) -> list[Seen]:
    """Masters as they are made, which no order of sums changes."""
    recorder = Recorder(folds=folds)
    for name, piece in built.engine.optimizer.state().items():
        if name.startswith(MASTER):
            recorder.add_piece("starting parameter", name, piece)
    return recorder.seen


def _last_step(built: JobBuilt, folder: Path, last: int, folds: bool = True) -> list[Seen]:
    built.state.restore(state_file(folder, last))
    return again(built, last, folds)


def _of_bits(difference: Difference) -> Unlikely:
    said = difference.what or 'it has not the bits that one device has, as run.reproducible = "layout" promises'
    return Unlikely(difference._replace(what=said), math.inf, 0.0)


def _log(difference: Difference, whole: Whole, compute: torch.dtype) -> float:
    """A rounding of each of its numbers, and of some of what they are computed from, is as good as nothing."""
    kind, dtype = whole.site[0], getattr(torch, whole.seen.dtype)
    if kind in ("starting parameter", "sample", "random mask") or not dtype.is_floating_point:
        return math.log(max(difference.relative, EPSILON))
    if kind in ("sum", "norm"):  # of what is summed in float32, whatever they are told in
        dtype = torch.float32
    some = torch.finfo(compute).eps * math.sqrt(FEW / max(1, whole.value.numel()))
    own = torch.finfo(dtype).eps * (SCALINGS if dtype.itemsize >= 4 else 1)
    return math.log(max(difference.relative, some, own))


def spread_of(reference: Reference, others: Sequence[list[Seen]], compute: torch.dtype) -> Spread:
    found: dict[Site, list[float]] = {}
    for seen in others:
        for each in compare(reference, [seen]):
            found.setdefault(each.site, []).append(_log(each, reference.wholes[each.site], compute))
    logs = {site: torch.tensor(each, dtype=torch.float64) for site, each in found.items()}
    kinds: dict[str, list[Tensor]] = {
        site[0]: [each for other, each in logs.items() if other[0] == site[0]] for site in logs
    }
    pooled = {kind: math.sqrt(sum(float(e.var()) for e in each) / len(each)) for kind, each in kinds.items()}
    return Spread(reference, logs, pooled, compute)


def _orders(rows: int, parts: int) -> list[list[int]]:
    """Of rows, in which micro-batches stay what they are."""
    batches = torch.arange(rows).view(parts, -1)
    generators = (torch.Generator().manual_seed(seed) for seed in range(ORDERS))
    return [batches[torch.randperm(parts, generator=generator)].flatten().tolist() for generator in generators]


def native_step(trial: JobTrial, group: RankGroup, folder: Path) -> list[Seen]:
    """What a rank of a layout has seen in the step."""
    with trial.numerics():
        built = trial.build(group, folder)
        return _first_values(built) + _last_step(built, folder, trial.steps - 1)


def in_own_precision(same: Verdict, worst: Unlikely | None, first: Unlikely | None) -> Verdict:
    """What is the same in float64 may be wrong all the same."""
    if worst is None:
        return same
    found = replace(same, worst_z=worst.z, worst_z_tensor=named(worst.difference.site))
    if first is None:
        return found
    where = f"{named(first.difference.site)}, a step in the job's own precision"
    return replace(found, ok=False, first_difference=where, rank=first.difference.rank, cause=first.cause)
