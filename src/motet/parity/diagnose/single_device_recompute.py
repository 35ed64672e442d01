"""Micro-batches of ranks, computed on one device."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from motet.parallel.layout import Layout, contributing_rows_of_rank
from motet.parallel.model_sharding import CONTEXT_DIMENSION, LOSS
from motet.parallel.sync_groups import reports
from motet.parity.compare.align_with_reference import PlannedRecords
from motet.parity.compare.reference_runs import ReferenceRuns
from motet.parity.record import record_verification_steps as recording
from motet.parity.record.tensor_recorder import BALANCE_LOSS, TensorKey


class MicroBatchResult(NamedTuple):
    """Loss and gradients of one micro-batch of one rank."""

    rank: int
    microbatch: int
    loss_sum: Tensor
    target_count: float
    gradients: dict[str, Tensor]
    balance_terms: tuple[float, ...] = ()  # Sums of the terms that balance the experts of each layer


@dataclass(frozen=True)
class SingleDeviceRecompute:
    """One device that computes the tensors that ranks of a layout should have, at one step of the reference."""

    subject: recording.VerificationSubject
    layout: Layout
    reference_runs: ReferenceRuns
    planned: PlannedRecords | None = None  # None: the plan of parallel code of the caller is not known
    step: int = 0

    @cached_property
    def rank_subject(self) -> recording.VerificationSubjectOnRank:
        with self.subject.numerics():
            subject = self.subject.with_microbatches(1)
            return subject.build(recording.SINGLE_RANK_GROUP, self.reference_runs.folder)

    @property
    def module(self) -> nn.Module:
        return self.rank_subject.engine.module

    @cached_property
    def all_microbatches(self) -> int:
        """Micro-batches of all ranks."""
        return (
            self.layout.sharding.reproducible_batch_size or self.layout.data_ranks * self.layout.sharding.microbatches
        )

    @cached_property
    def state_before_step(self) -> dict[str, Tensor]:
        with self.restored_to(self.step):
            return {name: shard.values.clone() for name, shard in self.rank_subject.state.tensors().items()}

    @cached_property
    def microbatch_results(self) -> list[MicroBatchResult]:
        with self.restored_to(self.step):
            results = [self._compute(rank, index, rows) for rank, index, rows in self._rows_by_microbatch()]
        if not self.reference_runs.has_mean_gradients:
            return results
        count = sum(r.target_count for r in results)
        return [r._replace(gradients={name: g / count for name, g in r.gradients.items()}) for r in results]

    @cached_property
    def evaluation_results(self) -> list[MicroBatchResult]:
        """Losses of the evaluation after the last step; each batch of it has as many micro-batches."""
        with self.restored_to(self.subject.steps), torch.no_grad():
            self.module.eval()
            results = [
                MicroBatchResult(rank, batch * self.layout.sharding.microbatches + index, *loss_and_count, {})
                for rank, index, rows in self._rows_by_microbatch()
                for batch, loss_and_count in enumerate(self.rank_subject.evaluation_losses(rows))
            ]
            self.module.train()
        return results

    def results_of(self, key: TensorKey) -> list[MicroBatchResult]:
        """The results that a number is the sum or the mean of; the mean loss has the terms that balance experts."""
        if key.kind != "sum":
            return self.evaluation_results if key.kind == "evaluation" else self.microbatch_results
        losses = [(r.loss_sum if key.name != BALANCE_LOSS else r.loss_sum * 0) for r in self.microbatch_results]
        pairs = zip(self.microbatch_results, losses, strict=True)
        return [result._replace(loss_sum=loss.double() + sum(result.balance_terms)) for result, loss in pairs]

    def losses_of_wrong_vocabularies(self, rank: int, microbatch: int) -> dict[str, Tensor]:
        """The loss of a micro-batch with mistakes in its split vocabulary, in words; empty if ranks do not split it."""
        comms = self.planned.plan.model_sharding.boundary_comms if self.planned else ()
        shards = next((self.layout.dims.size(comm.over) for comm in comms if comm.argument == LOSS), 1)
        rows = next(rows for *place, rows in self._rows_by_microbatch() if place == [rank, microbatch])
        if shards == 1:
            return {}
        with self.restored_to(self.step), torch.no_grad():
            return wrong_vocabulary_losses(*self.rank_subject.logits_of_rows(self.step, rows), shards=shards)

    def run_rows(self, rows: range, *, with_backward: bool) -> None:
        """Compute the losses of some rows, for hooks that look at tensors; the module has been restored."""
        engine = self.rank_subject.engine
        engine.begin_step()
        with torch.set_grad_enabled(with_backward), self.rank_subject.loss_of_rows(self.step, rows) as (loss, _):
            if with_backward:
                engine.backward(loss)

    @contextmanager
    def restored_to(self, step: int) -> Iterator[None]:
        """Inside, the module has the parameters before a step."""
        with self.subject.numerics():
            self.rank_subject.state.restore(recording.step_checkpoint_path(self.reference_runs.folder, step))
            yield

    def _rows_by_microbatch(self) -> Iterator[tuple[int, int, range]]:
        """Rows of the ranks that report targets, each row once; other ranks compute parts of the same rows."""
        dims = self.layout.dims
        places = {rank: dims.coordinates(rank) for rank in range(dims.ranks)}
        reporting = (rank for rank, place in places.items() if reports("targets", place, dims))
        for rank in (rank for rank in reporting if not places[rank].get(CONTEXT_DIMENSION, 0)):
            for microbatch, rows in enumerate(contributing_rows_of_rank(self.layout, rank, self.subject.batch_rows)):
                yield rank, microbatch, rows

    def _compute(self, rank: int, microbatch: int, rows: range) -> MicroBatchResult:
        engine, parameters = self.rank_subject.engine, self.rank_subject.engine.optimizer.sharded_parameters
        engine.begin_step()
        with self.rank_subject.loss_of_rows(self.step, rows) as (loss, targets):
            engine.backward(loss)
        gradients = parameters.local_shards(parameters.local_gradients()).items()
        dense = {name: gradient.values.view(gradient.shape).clone() for name, gradient in gradients}
        numbers = engine.balance.local_numbers().tolist() if engine.balance else []
        terms = engine.balance.loads_of(numbers)[1] if engine.balance else ()
        return MicroBatchResult(rank, microbatch, loss.detach(), targets, dense, tuple(terms))


def wrong_vocabulary_losses(logits: Tensor, targets: Tensor, weights: Tensor, *, shards: int) -> dict[str, Tensor]:
    """Weighted sums of losses as ranks with equal shards of the vocabulary might compute them by mistake."""
    entries, width = logits.shape[-1], -(-logits.shape[-1] // shards)
    starts, column = range(0, entries, width), targets.unsqueeze(-1)
    total, target = logits.logsumexp(-1), logits.gather(-1, column).squeeze(-1)
    nearest = [column.clamp(start, min(start + width, entries) - 1) for start in starts]
    padded = torch.nn.functional.pad(logits, (0, shards * width - entries)).logsumexp(-1)
    parts = [part.logsumexp(-1) for part in logits.split(width, -1)]
    losses = {
        "the loss with the padding of its vocabulary in it": padded - target,
        "the loss with a target on each rank, where only one rank has it": total
        - sum(logits.gather(-1, index).squeeze(-1) for index in nearest),
        **{f"the loss over the entries of part {n} alone": part - target for n, part in enumerate(parts)},
    }
    for which, ends in (("first", starts), ("last", [min(start + width, entries) - 1 for start in starts])):
        words = {f"target {end}, the {which} entry of part {n}": [end] for n, end in enumerate(ends)}
        for text, ids in {**words, f"targets that are the {which} entry of a part": ends}.items():
            is_missed = torch.isin(targets, torch.tensor(list(ids)))
            losses[f"the loss without the logit{'s' * (len(ids) > 1)} of {text}"] = total - target.masked_fill(
                is_missed, 0
            )
    return {words: (weights * loss).sum() for words, loss in losses.items()}


def recompute_layout(
    subject: recording.VerificationSubject, world: int, reference_runs: ReferenceRuns
) -> SingleDeviceRecompute:
    """One device that computes the tensors that ranks of a layout should have by its plan."""
    plan = subject.step_plan(reference_runs.inventory, world)
    first = reference_runs.step_references[0]
    planned = PlannedRecords(plan, first.activation_order, first.row_tokens)
    return SingleDeviceRecompute(subject, subject.layout_for(world), reference_runs, planned)
