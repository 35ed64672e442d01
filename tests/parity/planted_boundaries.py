"""Mistakes at the ends of ranks' parts of a vocabulary, and in forwards without gradients."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from motet.core.batch import Batch
from motet.models.arch import decoder, layers, loss
from motet.parallel.data_parallel.data_sharding import MicroBatchRows
from motet.parallel.tensor_parallel import boundary_hooks, sharded_module
from motet.parallel.tensor_parallel.vocabulary.rank_vocabulary import RankVocabularyShard
from motet.train.pipeline.pipeline_step import PipelineEngine
from parity.faults import Patch, around, changed, fault, nothing

GENERATION, SHORTER = "scores of generated tokens", "loss of a shorter forward without gradients"
OF_A_LENGTH = "training is right: it is a forward without gradients, of a length that ranks do not divide"


@fault("tp=2", first="activation embedding", cause="tokens 129 and 259, the last entries of ranks 0")
def the_last_entry_of_a_rank_belongs_to_nobody(rank: int) -> Patch:
    def wrong(own: Any, module: nn.Module, entries: range) -> Callable[[], None]:
        return own(module, entries[:-1])

    return around(sharded_module, "shard_embedding", wrong)


@fault("tp=2", first="activation embedding", cause="token 130, the first entry of rank 1")
def the_first_entry_of_a_rank_is_its_second(rank: int) -> Patch:
    def wrong(own: Any, module: nn.Module, entries: range) -> Callable[[], None]:
        shard = own(module, entries)
        module.register_forward_pre_hook(lambda _, args: (args[0].masked_fill(args[0] == 0, 1),))
        return shard

    return around(sharded_module, "shard_embedding", wrong) if rank == 1 else nothing()


def _targets(is_here: Callable[[Tensor, int], Tensor]) -> Patch:
    def wrong(own: Any, targets: Tensor, vocabulary: RankVocabularyShard) -> tuple[Tensor, Tensor]:
        column, inside = own(targets, vocabulary)
        return column, inside & is_here(column, vocabulary.stop - vocabulary.start)

    return around(loss, "_local_targets", wrong)


@fault("tp=2", "tp=2 dp=2 zero=2", first="loss,", cause="without the logits of targets that are the last entry of a")
def a_target_in_the_last_entry_is_missed(rank: int) -> Patch:
    return _targets(lambda column, entries: column < entries - 1)


@fault("tp=2", first="loss,", cause="without the logit of target 130, the first entry of part 1")
def a_target_in_the_first_entry_is_missed(rank: int) -> Patch:
    return _targets(lambda column, entries: column > 0) if rank == 1 else nothing()


@fault("tp=2 sp=true", first=SHORTER, cause=OF_A_LENGTH)
def whole_sequences_are_summed_twice(rank: int) -> Patch:
    def wrong(product: Tensor, split: Any, layer: nn.Module, x: Tensor) -> Tensor:
        return product if torch.is_grad_enabled() or x.shape[-2] % 2 == 0 else 2 * product

    return changed(boundary_hooks, "row_product", wrong)


@fault("tp=2", "tp=2 sp=true", first=GENERATION, cause="training is right: it is the generation of tokens")
def logits_are_gathered_in_another_order(rank: int) -> Patch:
    def wrong(gathered: Tensor, shard: RankVocabularyShard, *_: Any) -> Tensor:
        return gathered.roll(shard.size // 2, -1)

    return changed(RankVocabularyShard, "gather_logits", wrong)


@fault("tp=3", first=GENERATION, cause="training is right: it is the generation of tokens")
def logits_of_padding_are_between_others(rank: int) -> Patch:
    def wrong(own: Any, shard: RankVocabularyShard, local: Tensor) -> Tensor:
        return own(shard, torch.cat([local[..., -1:], local[..., :-1]], -1))

    return around(RankVocabularyShard, "gather_logits", wrong)


@fault("pp=2", first=GENERATION, cause="training is right: it is the generation of tokens")
def a_pipeline_generates_from_rounded_logits(rank: int) -> Patch:
    return changed(PipelineEngine, "forward_on_all", lambda logits, *_: logits.bfloat16().double())


@fault("pp=2", first=SHORTER, cause=OF_A_LENGTH)
def a_stage_forgets_the_last_token_of_an_odd_row(rank: int) -> Patch:
    def wrong(own: Any, engine: PipelineEngine, stage: int, microbatch: Any, received: Any) -> Any:
        odd = [each.shape[1] % 2 for each in received if each.ndim > 2]
        if odd and odd[0] and not torch.is_grad_enabled():
            received = [each.index_fill(1, torch.tensor([each.shape[1] - 1]), 0.0) for each in received]
        return own(engine, stage, microbatch, received)

    return around(PipelineEngine, "run_stage", wrong)


def _batch_of_model(change: Callable[[Batch], Batch]) -> Patch:
    """The model gets other numbers than the loader gives."""
    return changed(MicroBatchRows, "select", lambda batch, *_: change(batch))


@fault("dp=2 zero=1", first="sample documents,", cause="of rows? ")
def a_model_gets_documents_of_other_rows(rank: int) -> Patch:
    def wrong(batch: Batch) -> Batch:
        return replace(batch, documents=None if batch.documents is None else batch.documents.flip(0))

    return _batch_of_model(wrong) if rank else nothing()


@fault("dp=2 zero=3", first="sample weights,", cause="its rows are right, but .* elements differ|of row")
def a_model_gets_weights_of_whole_rows(rank: int) -> Patch:
    return _batch_of_model(lambda batch: replace(batch, weights=torch.ones_like(batch.weights))) if rank else nothing()


@fault(
    "tp=2",
    "dp=2 zero=1",
    first=r"sample blocks.0\[1\]\[(keys|queries)\]\[documents\]",
    cause="each of its rows is like",
)
def a_block_sees_every_document(rank: int) -> Patch:
    def wrong(own: Any, documents: Tensor | None = None, *given: Any) -> Any:
        return own(None if documents is None else torch.zeros_like(documents), *given)

    return around(decoder, "causal_mask", wrong) if rank else nothing()


@fault("pp=2", first=r"sample blocks.1\[2\]", cause="the batch is right, and .* elements of this block.s part")
def a_later_stage_counts_positions_from_one(rank: int) -> Patch:
    def wrong(own: Any, embedding: Any, positions: Tensor, *given: Any) -> Any:
        return own(embedding, positions + 1, *given)

    return around(layers.RotaryEmbedding, "rotations_at", wrong) if rank else nothing()
