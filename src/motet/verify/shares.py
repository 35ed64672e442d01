"""What the reference gives for parts of the work: micro-batches of ranks by themselves, a step from other values."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from motet.parallel.layout import Layout
from motet.parallel.row_assignment import contributing_rows_of_rank
from motet.verify.compare import reference_of
from motet.verify.parts import Site, Whole
from motet.verify.record import Seen, instead
from motet.verify.runs import ALONE, Referred, again, state_file
from motet.verify.trial import Built, Trial


class Computed(NamedTuple):
    """By one micro-batch of one rank, alone."""

    rank: int
    part: int
    loss: Tensor
    targets: float
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class WhatIf:
    """One device, at one step of the reference."""

    trial: Trial
    layout: Layout
    """Whose shares of the work are asked for."""
    referred: Referred
    step: int

    @cached_property
    def built(self) -> Built:
        with self.trial.numerics():
            return self.trial.cut(1).build(ALONE, self.referred.folder)

    @property
    def module(self) -> nn.Module:
        return self.built.engine.module

    @cached_property
    def before(self) -> dict[str, Tensor]:
        """The state before the step, by name."""
        with self._at(self.step):
            return {name: tensor.detach().clone() for name, tensor in self.built.state.tensors().items()}

    @cached_property
    def computed(self) -> list[Computed]:
        """By each micro-batch of each rank."""
        with self._at(self.step):
            return [self._compute(rank, number, rows) for rank, number, rows in self._work()]

    @cached_property
    def evaluated(self) -> list[Computed]:
        """Of the evaluation after the last step, by each rank and micro-batch, of which each batch has as many."""
        with self._at(self.trial.steps), torch.no_grad():
            self.module.eval()
            found = [
                Computed(rank, batch * self.layout.microbatches + number, *judged, {})
                for rank, number, rows in self._work()
                for batch, judged in enumerate(self.built.judged(rows))
            ]
            self.module.train()
        return found

    def with_stale(
        self, older: int, prefix: str, fresh: Mapping[str, slice], backward: bool = False
    ) -> dict[Site, Whole]:
        """This step, with parameters whose names begin so as they were before an older step, but for some elements.

        `backward`: there alone.
        """
        with self._at(older):
            values = {n: p.detach().clone() for n, p in self.module.named_parameters()}

        def age() -> None:
            for name, parameter in self.module.named_parameters():
                if name.startswith(prefix):
                    flat, place = parameter.data.view(-1), fresh.get(name, slice(0, 0))
                    values[name].view(-1)[place] = flat[place]
                    parameter.data.copy_(values[name])

        with self._at(self.step):
            if not backward:
                age()
                return reference_of(again(self.built, self.step, folds=False))
            plain = self.built.engine.backward

            def late(*given: Any) -> None:
                age()
                plain(*given)

            with instead(self.built.engine, "backward", late):
                return reference_of(again(self.built, self.step, folds=False))

    @cached_property
    def cut_alike(self) -> dict[Site, list[Seen]]:
        """This step, with the batch cut into as many micro-batches as the layout has over all ranks."""
        with self.trial.numerics():
            parts = self.layout.reproducible_batch_size or self.layout.dp * self.layout.microbatches
            built = self.trial.cut(parts).build(ALONE, self.referred.folder)
            built.state.restore(state_file(self.referred.folder, self.step))
            seen = again(built, self.step)
        found: dict[Site, list[Seen]] = {}
        for each in seen:
            found.setdefault((each.kind, each.name), []).append(each)
        return found

    @contextmanager
    def _at(self, step: int) -> Iterator[None]:
        with self.trial.numerics():
            self.built.state.restore(state_file(self.referred.folder, step))
            yield

    def _work(self) -> Iterator[tuple[int, int, range]]:
        for rank in range(self.layout.dp):
            for number, rows in enumerate(contributing_rows_of_rank(self.layout, rank, self.trial.rows)):
                yield rank, number, rows

    def _compute(self, rank: int, number: int, rows: range) -> Computed:
        named = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        loss, targets = self.built.loss(self.step, rows)
        found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        gradients = {
            name: torch.zeros_like(p) if gradient is None else gradient.to_dense()
            for (name, p), gradient in zip(named.items(), found, strict=True)
        }
        return Computed(rank, number, loss.detach(), targets, gradients)
