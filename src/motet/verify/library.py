"""`motet.verify(model_fn, layouts, batch_fn)`: layouts of a module of the caller's own, and parallel code of theirs."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from torch import nn

from motet.core.errors import InputError
from motet.core.reading import settings_from_tree
from motet.parallel.group import Group
from motet.parallel.layout import Layout, resolve_layout
from motet.train.settings import OptimizerSettings
from motet.verify.explain import explain
from motet.verify.given import GivenBatch, GivenTrial, Loss, default_loss
from motet.verify.layouts import with_ranks
from motet.verify.owned import OwnedWhatIf, Step, owned_reference, record_owned
from motet.verify.pool import Pool, started
from motet.verify.record import Seen
from motet.verify.runs import FREE, Referred, one_thread, phases, refer, walk
from motet.verify.shares import WhatIf
from motet.verify.verdict import Verdict, judge, of_one_device, wrong

Parallel = Callable[[nn.Module], Step]
"""Called on each rank with the module, in a process group; gives what does a step."""


@dataclass(frozen=True)
class Report:
    """What is found out about some layouts."""

    verdicts: tuple[Verdict, ...]

    @property
    def ok(self) -> bool:
        """All of them compute what one device does."""
        return all(verdict.ok for verdict in self.verdicts)

    def __str__(self) -> str:
        return "\n".join(map(str, self.verdicts))

    def as_json(self) -> dict[str, Any]:
        return {"layouts": [verdict.as_json() for verdict in self.verdicts]}


def verify(  # noqa: PLR0913  # what a training step is made of, by name
    model_fn: Callable[[], nn.Module],
    layouts: Sequence[str | Parallel | tuple[str, Parallel]],
    batch_fn: Callable[[int], GivenBatch],
    *,
    loss: Loss = default_loss,
    optimizer: Mapping[str, Any] | None = None,
    ranks: int = 2,
    steps: int = 3,
) -> Report:
    """Whether a module computes the same numbers in these layouts as on one device, in float64.

    A layout is text, such as "dp=2 zero=3", or parallel code of your own: a function that is called on each of `ranks`
    ranks with the module, in a process group, and gives a function that does a step: with the batch of all ranks, it
    gives full tensors by name: loss, norm, gradient.NAME, parameter.NAME or activation.NAME. With a pair of text and
    function, the text says how the function cuts the work, which causes are told by.
    """
    how = settings_from_tree(OptimizerSettings, dict(optimizer or {}), "optimizer")
    trial = GivenTrial(model_fn, batch_fn, loss, how, steps)
    cases = [_case(trial, layout, ranks) for layout in layouts]
    with tempfile.TemporaryDirectory(prefix="motet-verify-") as name, one_thread():
        folder = Path(name)
        works = {str(number): partial(case.work, folder=folder) for number, case in enumerate(cases)}
        with started(max(case.world for case in cases), works) as pool:
            referred = refer(trial, folder)
            return Report(tuple(_verdict(case, str(number), pool, referred) for number, case in enumerate(cases)))


@dataclass(frozen=True)
class _Case:
    """A layout, or somebody's function."""

    name: str
    trial: GivenTrial
    world: int
    layout: Layout
    own: Parallel | None = None

    def work(self, group: Group, folder: Path) -> dict[tuple[str, int], list[Seen]]:
        """On a rank: (phase, step) -> what it has seen."""
        with self.trial.numerics():
            if self.own is not None:
                made = record_owned(self.trial, self.own(self.trial.module()))
                return {(FREE, step): seen for step, seen in enumerate(made)}
            own = f"own-{abs(hash(self.name))}"
            return {(phase, step): seen for phase, step, seen in walk(self.trial, group, folder, own)}


def _case(trial: GivenTrial, layout: str | Parallel | tuple[str, Parallel], ranks: int) -> _Case:
    text, own = layout if isinstance(layout, tuple) else (layout, None) if isinstance(layout, str) else ("", layout)
    inside = trial.in_layout(with_ranks(text, ranks))
    if inside.layout.has_desk:
        raise InputError(f"layout {text!r}: servers are processes of a job; use `motet verify JOB --layout ...`")
    world = inside.layout.dp or ranks
    name = text if own is None else f"{getattr(own, '__name__', type(own).__name__)} on {world} ranks"
    return _Case(name, inside, world, resolve_layout(inside.layout, world, trial.rows), own)


def _verdict(case: _Case, number: str, pool: Pool, referred: Referred) -> Verdict:
    if (broken := of_one_device(case.name, referred)) is not None:
        return broken
    start_s = perf_counter()
    seen = pool.run(case.world, number)

    def at(phase: str, step: int) -> list[list[Seen]]:
        return [rank[phase, step] for rank in seen]

    walked, kind = phases(case.trial.steps), WhatIf
    if case.own is not None:
        given = {(each.kind, each.name) for each in at(FREE, 0)[0]}
        referred, kind, walked = owned_reference(referred, given), OwnedWhatIf, [p for p in walked if p[0] == FREE]
    worst, first = judge(referred, walked, at)
    verdict = Verdict(case.name, True, worst.difference.relative, str(worst))
    if first is not None:
        cause = explain(kind(case.trial, case.layout, referred, first.step), at(first.phase, first.step), first)
        verdict = wrong(case.name, worst, first, cause)
    return replace(verdict, seconds=perf_counter() - start_s)
