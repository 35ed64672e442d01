"""Mistakes that only borders of documents, a second batch of an evaluation or a second step show."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from motet.core.batch import Batch
from motet.data.samples.loader import BatchLoader
from motet.parallel.data_parallel.flat_parameters import GradientBuffer
from parity.faults import GRADIENT, Patch, around, changed, fault, nothing


@fault("dp=3 zero=1", "dp=2 zero=3 microbatches=2", first="sample positions", cause="each of its rows is like row")
def positions_go_on_behind_a_border(rank: int) -> Patch:
    def wrong(batch: Batch, *_: Any) -> Batch:
        return replace(batch, positions=torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens))

    return changed(BatchLoader, "batch", wrong) if rank else nothing()


@fault("dp=2 zero=0", first="sample tokens", cause="rows are right, but .* elements differ", model="bert")
def other_tokens_are_masked(rank: int) -> Patch:
    def wrong(own: Any, loader: BatchLoader, at: int, rows: range) -> Batch:
        batch, other = own(loader, at, rows), own(loader, at, range(len(rows))).tokens
        return replace(batch, tokens=torch.where(other == loader.tokenizer.mask_id, other, batch.tokens))

    return around(BatchLoader, "batch", wrong) if rank else nothing()


@fault("dp=2 zero=0", "dp=2 zero=2", first="evaluation targets", cause="leaves out")
def a_rank_leaves_out_the_last_batch_of_an_evaluation(rank: int) -> Patch:
    return changed(BatchLoader, "evaluation_batches", lambda count, *_: count - rank)


@fault(
    "dp=3 zero=0",
    "dp=2 zero=2",
    first=GRADIENT,
    cause="local gradient of rank 1 is wrong: it is its value in the step before",
)
def a_rank_adds_its_share_of_the_step_before(rank: int) -> Patch:
    kept: dict[int, Tensor] = {}

    def wrong(_: None, buffer: GradientBuffer, number: int) -> None:
        bucket = buffer.bucket(number)
        before, kept[number] = kept.get(number, bucket), bucket.clone()
        bucket.copy_(before)

    return changed(GradientBuffer, "zero_missing", wrong) if rank == 1 else nothing()
