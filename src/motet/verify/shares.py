"""What the reference gives for parts of the work: micro-batches of ranks by themselves, a step from other values."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from motet.parallel.layout import Layout
from motet.train.assemble import Parts, build_parts, numerics
from motet.train.job import Job
from motet.train.step import rows_of_rank
from motet.verify.compare import reference_of
from motet.verify.parts import Site, Whole
from motet.verify.record import Recorder, Seen, recorded
from motet.verify.runs import ALONE, Referred, rate_of, state_file, stepper_of
from motet.verify.uneven import Uneven


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

    job: Job
    layout: Layout
    referred: Referred
    step: int

    @cached_property
    def parts(self) -> Parts:
        return build_parts(self._alone, ALONE, self.referred.folder)

    @property
    def _alone(self) -> Job:
        return self.job.model_copy(update={"layout": type(self.job.layout)()})

    @cached_property
    def before(self) -> dict[str, Tensor]:
        """The state before the step, by name."""
        with numerics(self.job):
            self.parts.state.restore(state_file(self.referred.folder, self.step))
            return {name: tensor.detach().clone() for name, tensor in self.parts.state.tensors().items()}

    @cached_property
    def computed(self) -> list[Computed]:
        """By each micro-batch of each rank."""
        with numerics(self.job):
            self.parts.state.restore(state_file(self.referred.folder, self.step))
            return [
                self._compute(rank, number, rows)
                for rank in range(self.layout.dp)
                for number, rows in enumerate(rows_of_rank(self.layout, rank, self.job.data.batch_sequences))
            ]

    @cached_property
    def evaluated(self) -> list[Computed]:
        """Of the evaluation after the last step, by each rank and micro-batch."""
        parts, rows = self.parts, self.job.data.batch_sequences
        found = []
        with numerics(self.job), torch.no_grad():
            parts.state.restore(state_file(self.referred.folder, parts.steps))
            parts.model.module.eval()
            for rank in range(self.layout.dp):
                for number, of_rank in enumerate(rows_of_rank(self.layout, rank, rows)):
                    batch = parts.data.evaluation_batch("validation", 0, of_rank)
                    loss = parts.model.loss_sum(batch)
                    found.append(Computed(rank, number, loss, float(batch.weights.sum()), {}))
            parts.model.module.train()
        return found

    def _compute(self, rank: int, number: int, rows: range) -> Computed:
        parts = self.parts
        named = {name: p for name, p in parts.model.module.named_parameters() if p.requires_grad}
        batch = Uneven(parts.data).batch(self.step, rows)
        with parts.model.randomness(self.step, batch.rows):
            loss = parts.model.loss_sum(batch)
        found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        gradients = {
            name: torch.zeros_like(p) if gradient is None else gradient.to_dense()
            for (name, p), gradient in zip(named.items(), found, strict=True)
        }
        return Computed(rank, number, loss.detach(), float(batch.weights.sum()), gradients)

    def with_stale(self, older: int, prefix: str, fresh: Mapping[str, slice]) -> dict[Site, Whole]:
        """This step, with parameters whose names begin so as they were before an older step, but for some elements."""
        with numerics(self.job):
            self.parts.state.restore(state_file(self.referred.folder, older))
            values = {n: p.detach().clone() for n, p in self.parts.model.module.named_parameters()}
            self.parts.state.restore(state_file(self.referred.folder, self.step))
            for name, parameter in self.parts.model.module.named_parameters():
                if name.startswith(prefix):
                    flat, place = parameter.data.view(-1), fresh.get(name, slice(0, 0))
                    values[name].view(-1)[place] = flat[place]
                    parameter.data.copy_(values[name])
            recorder = Recorder(folds=False)
            rate = rate_of(self.job, self.step, self.parts.steps)
            recorded(stepper_of(self._alone, self.parts), recorder, self.step, rate)
            return reference_of(recorder.seen)

    @cached_property
    def cut_alike(self) -> dict[Site, list[Seen]]:
        """This step, with the batch cut into as many micro-batches as the layout has over all ranks."""
        parts = self.layout.dp * self.layout.microbatches
        job = self.job.model_copy(update={"layout": type(self.job.layout)(microbatches=parts)})
        recorder = Recorder()
        with numerics(job):
            built = build_parts(job, ALONE, self.referred.folder)
            built.state.restore(state_file(self.referred.folder, self.step))
            recorded(stepper_of(job, built), recorder, self.step, rate_of(job, self.step, built.steps))
        found: dict[Site, list[Seen]] = {}
        for each in recorder.seen:
            found.setdefault((each.kind, each.name), []).append(each)
        return found
