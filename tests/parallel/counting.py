"""Bytes that a rank sends in steps of training, and those that it keeps between them, beside what was promised."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from motet.core.trace import install_sink
from motet.parallel.data import FlatSpread
from motet.parallel.full import FullSpread
from motet.parallel.group import Group
from motet.parallel.placement import memory, traffic
from motet.parallel.spread import Spread
from motet.precision.recipe import RECIPES
from motet.train.assemble import build_parts, numerics
from motet.train.job import Job
from motet.train.optimizer import Updater
from on_ranks import Counter


def count_bytes(group: Group, job: Job) -> tuple[int, int, int, int]:
    """Sent in two steps, and what was said; kept after them, and what was said."""
    with numerics(job), tempfile.TemporaryDirectory() as folder:
        parts = build_parts(job, group, Path(folder))
        spread = parts.updater.spread
        stepper, counter = parts.stepper(job), Counter()
        recipe = RECIPES[job.precision.recipe]
        with install_sink(counter):
            for step in range(2):
                stepper.step(step, 0.001)
            spread.settle()
        said = traffic(spread.portions, parts.layout, recipe, job.communication, group.rank)
        held = [*_computed_with(spread), *spread.masters, *spread.gradients(), *_moments(parts.updater)]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
        kept = memory(spread.portions, parts.layout, recipe, 2, group.rank)
    return int(counter.counts.get("sent_bytes", 0)), 2 * said.total, sum(storages.values()), kept.total


def _moments(updater: Updater) -> list[torch.Tensor]:
    """All tensors of the optimizer but the counts of steps."""
    return [t for state in updater._optimizer.state.values() for t in state.values() if t.ndim]


def _computed_with(spread: Spread) -> Iterator[torch.Tensor]:
    """What the model has of its parameters between steps."""
    if isinstance(spread, FlatSpread):
        yield spread.weights.compute
    if isinstance(spread, FullSpread):
        yield from (p.to_local() for p in spread.root.parameters() if isinstance(p, DTensor))
        if spread.rest:
            yield from _computed_with(spread.rest)
