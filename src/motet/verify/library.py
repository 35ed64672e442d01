"""`motet.verify(model_fn, layouts, batch_fn)`: layouts of a module of the caller's own, and parallel code of theirs."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

from motet.core.config_loading import settings_from_dict
from motet.core.errors import InputError
from motet.models.layout_invariant_dropout import has_dropout
from motet.parallel.layout import Layout, resolve_layout
from motet.parallel.process.process_group import RankGroup
from motet.train.optimizer.optimizer_settings import OptimizerSettings
from motet.verify.explain import verdict_on
from motet.verify.given import GivenBatch, GivenTrial, Loss, default_loss
from motet.verify.layouts import with_ranks
from motet.verify.owned import OwnedWhatIf, Step, owned_reference, record_owned
from motet.verify.pool import Pool, started
from motet.verify.rank import leave_seen, read_seen, seen_file, walked_by
from motet.verify.record import Seen
from motet.verify.runs import FREE, Referred, one_thread, refer, walk
from motet.verify.shares import WhatIf
from motet.verify.verdict import Verdict, of_one_device

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
    how = settings_from_dict(OptimizerSettings, dict(optimizer or {}), "optimizer")
    if isinstance(layouts, str) or not layouts:
        raise InputError(f"verify: layouts = {layouts!r}; give a list of at least one")
    for name, value in (("ranks", ranks), ("steps", steps)):
        if value < 1:
            raise InputError(f"verify: {name} = {value}; give 1 or more")
    with tempfile.TemporaryDirectory(prefix="motet-verify-") as place, one_thread(), torch.random.fork_rng(devices=[]):
        trial, folder = GivenTrial(model_fn, batch_fn, loss, how, steps), Path(place)
        cases = [_case(trial, layout, ranks, number) for number, layout in enumerate(layouts)]
        works = {str(case.number): partial(case.work, folder=folder) for case in cases}
        with started(max(case.world for case in cases), works) as pool:
            referred = refer(trial, folder)
            return Report(tuple(case.verdict(pool, referred) for case in cases))


@dataclass(frozen=True)
class _Case:
    """A layout, or somebody's function."""

    number: int
    name: str
    trial: GivenTrial
    world: int
    layout: Layout
    own: Parallel | None = None

    def work(self, group: RankGroup, folder: Path) -> None:
        """On a rank: leave what it has seen."""
        with self.trial.numerics():
            for phase, step, seen in self._walk(group, folder):
                leave_seen(seen, seen_file(folder, self.number, (phase, step), group.rank))

    def _walk(self, group: RankGroup, folder: Path) -> Iterator[tuple[str, int, list[Seen]]]:
        if self.own is None:
            yield from walk(self.trial, group, folder, f"layout-{self.number}")
            return
        if has_dropout(module := self.trial.module()):
            raise InputError("verify: the module has dropout, whose masks your function draws by itself; set it to 0")
        for step, seen in enumerate(record_owned(self.trial, self.own(module))):
            yield FREE, step, seen

    def verdict(self, pool: Pool, referred: Referred) -> Verdict:
        if referred.differs is not None:
            return of_one_device(self.name, *referred.differs)
        start_s = perf_counter()
        pool.run(self.world, str(self.number))
        at = partial(read_seen, referred.folder, self.number, self.world)
        walked, kind = walked_by(referred.folder, self.number, self.trial.steps), WhatIf
        if self.own is not None:
            kind = OwnedWhatIf
            referred = owned_reference(referred, [at(*each) for each in walked])
        what_if = partial(kind, self.trial, self.layout, referred)
        return replace(verdict_on(self.name, what_if, referred, walked, at), seconds=perf_counter() - start_s)


def _case(trial: GivenTrial, layout: str | Parallel | tuple[str, Parallel], ranks: int, number: int) -> _Case:
    text, own = layout if isinstance(layout, tuple) else (layout, None) if isinstance(layout, str) else ("", layout)
    inside = trial.in_layout(with_ranks(text, ranks))
    if inside.layout.uses_server_processes:
        raise InputError(f"layout {text!r}: servers are processes of a job; use `motet verify JOB --layout ...`")
    world = inside.layout.dp or ranks
    name = text if own is None else f"{getattr(own, '__name__', type(own).__name__)} on {world} ranks"
    return _Case(number, name, inside, world, resolve_layout(inside.layout, world, trial.rows), own)
