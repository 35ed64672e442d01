"""Mistakes of ranks that share each row: positions, masks, merging of blocks, gradients of keys, and dropout."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from motet.core.batch import Batch
from motet.models.arch import layers
from motet.models.layout_invariant_dropout import AttentionDropout, TokenPart, token_part
from motet.parallel.context_parallel import context_step
from motet.parallel.context_parallel.attention_blocks import BlockwiseAttention, KeyBlock
from motet.parallel.context_parallel.attention_tiles import PlaceVisibility
from motet.parallel.context_parallel.head_exchange import HeadExchange
from motet.parallel.context_parallel.key_exchange import GatheredKeys, RingKeys
from motet.parallel.data_parallel.data_sharding import MicroBatchRows
from motet.train import step
from parity.faults import Patch, all_of, around, changed, fault, nothing, replaced

ONE_DOCUMENT = ("data.restart_documents=false",)
OUTPUT, KEY_GRADIENT = "activation blocks.0.attention.output", "activation gradient blocks.1.attention.qkv"
ROW_TOKENS = 32
RING = "dp=1 cp=2 cp_kind=ring"


# --- positions -----------------------------------------------------------------------------------------


def _part(change: Callable[[Batch, Batch], Batch]) -> Patch:
    """`change(part, complete rows)` is what a rank trains with. The proof before the first step cuts its own rows."""
    return changed(MicroBatchRows, "select", lambda part, _, rows: change(part, rows))


@fault("dp=1 cp=2", "dp=1 cp=3 cp_order=contiguous", first="sample positions", cause="positions begin at 0 in the part")
def positions_are_counted_in_the_part(rank: int) -> Patch:
    return _part(lambda part, _: replace(part, positions=torch.arange(part.tokens.shape[1]).expand_as(part.tokens)))


@fault("dp=1 cp=2 cp_order=contiguous", first="sample positions", cause="positions begin at 0 again at each cut")
def positions_of_documents_restart_at_the_cut(rank: int) -> Patch:
    def wrong(part: Batch, rows: Batch) -> Batch:
        assert part.positions is not None
        is_first = part.positions - part.positions[:, :1] == torch.arange(part.tokens.shape[1])
        is_first = is_first.cumprod(1).bool()
        return replace(part, positions=torch.where(is_first, part.positions - part.positions[:, :1], part.positions))

    return _part(wrong)


def _trains() -> bool:
    """Whether a part of a complete row runs: the proof before the first step has fewer tokens, and would refuse."""
    part = token_part.get()
    return part is not None and part.tokens == ROW_TOKENS


def _rotations(change: Callable[[Tensor], Tensor]) -> Patch:
    def wrong(own: Any, rotary: Any, positions: Tensor, *rest: Any) -> Any:
        return own(rotary, change(positions) if _trains() else positions, *rest)

    return around(layers.RotaryEmbedding, "rotations_at", wrong)


@fault("dp=1 cp=2", first=r"sample blocks.0\[2\]", cause="head and its tail exchanged")
def rotary_angles_are_those_of_the_other_half(rank: int) -> Patch:
    return _rotations(lambda positions: positions.roll(positions.shape[1] // 2, 1))


@fault("dp=1 cp=2", first=r"sample blocks.0\[2\]", cause="positions begin at 0", settings=ONE_DOCUMENT)
def rotary_angles_begin_at_zero(rank: int) -> Patch:
    return _rotations(lambda positions: torch.arange(len(positions.flatten()))) if rank == 1 else nothing()


@fault("dp=1 cp=2 cp_order=contiguous", first="sample tokens", cause="part of rank 0 of the ranks")
def a_rank_computes_the_part_of_its_neighbour(rank: int) -> Patch:
    return _part(lambda _, rows: rows.at_places([(0, 16)])) if rank else nothing()


# --- masks ---------------------------------------------------------------------------------------------


def _blockwise(change: Callable[..., BlockwiseAttention]) -> Patch:
    """`change(blockwise)` computes attention and its gradients."""
    return all_of(
        around(BlockwiseAttention, "attend", lambda own, self, *args: own(change(self), *args)),
        around(BlockwiseAttention, "gradients", lambda own, self, *args, **how: own(change(self), *args, **how)),
    )


def _counted_from_zero(own: Any, self: BlockwiseAttention, q: Tensor, v: Tensor, keys: Any) -> Iterator[Any]:
    local = replace(self, queries=((0, q.shape[2]),))
    return own(local, q, v, ((0, v.shape[2]),))


@fault(RING + " cp_order=contiguous", RING, first=OUTPUT, cause="compares the indices", settings=ONE_DOCUMENT)
def a_causal_flag_compares_indices_in_parts(rank: int) -> Patch:
    return all_of(
        around(BlockwiseAttention, "_tiles", _counted_from_zero),
        changed(PlaceVisibility, "seen", lambda seen, self, queries, keys: keys),
    )


def _documents(change: Callable[[Tensor, Any], Tensor]) -> Patch:
    def wrong(own: Any, group: Any, documents: Tensor | None) -> Any:
        return own(group, None if documents is None else change(documents, group.partition))

    return around(context_step, "ContextAttention", wrong)


@fault("dp=1 cp=2 cp_order=contiguous", RING, first=OUTPUT, cause="documents end at the cut")
def documents_end_at_the_cut(rank: int) -> Patch:
    def wrong(documents: Tensor, partition: Any) -> Tensor:
        starts = [first for spans in partition.spans_by_rank for first, _ in spans]
        place = torch.arange(documents.shape[1])
        return documents * 64 + torch.stack([place >= first for first in starts]).sum(0)

    return _documents(wrong)


@fault(RING, first=OUTPUT, cause="documents are compared within the part of a rank alone")
def documents_are_compared_within_the_part(rank: int) -> Patch:
    def wrong(own: Any, self: BlockwiseAttention, tile: Any, *rest: Any, **how: Any) -> Any:
        is_here = any(first <= tile.keys[0] and tile.keys[1] <= stop for first, stop in self.queries)
        return own(self if is_here else replace(self, documents=None), tile, *rest, **how)

    return all_of(
        around(BlockwiseAttention, "_mask", wrong),
        around(BlockwiseAttention, "_within_documents", lambda _, self, tiles, limits: tiles),
    )


@fault(
    "dp=1 cp=3 cp_kind=ring", first=OUTPUT,
    cause="keys of rank 0 are missing, on rank 2 alone", settings=("model.sliding_window=16",),
)  # fmt: skip
def a_block_that_a_window_still_sees_is_skipped(rank: int) -> Patch:
    def wrong(tiles: Iterator[Any], self: BlockwiseAttention, *_: Any) -> Iterator[Any]:
        window = self.visible.window or 0
        return (each for each in tiles if each[0].keys[1] > each[0].queries[1] - window)  # Seen by the last query

    return changed(BlockwiseAttention, "_tiles", wrong)


@fault(RING + " cp_order=contiguous", first=OUTPUT, cause="a hidden block is counted", settings=ONE_DOCUMENT)
def a_hidden_block_is_counted(rank: int) -> Patch:
    def seen(own: Any, self: PlaceVisibility, queries: Any, keys: Any) -> Any:
        return keys if keys[0] >= queries[1] else own(self, queries, keys)

    def sees_all(own: Any, self: PlaceVisibility, queries: Any, keys: Any) -> Any:
        return keys[0] >= queries[1] or own(self, queries, keys)

    return all_of(around(PlaceVisibility, "seen", seen), around(PlaceVisibility, "sees_all", sees_all))


# --- merging of blocks ---------------------------------------------------------------------------------


@fault(RING, "dp=1 cp=3 cp_kind=ring", first=OUTPUT, cause="a log-sum-exp of 0")
def a_query_without_keys_is_merged_with_a_sum_of_one(rank: int) -> Patch:
    def wrong(result: Any, *_: Any) -> Any:
        output, log_sum_exp = result
        return output, log_sum_exp.masked_fill(log_sum_exp == float("-inf"), 0)

    return changed(BlockwiseAttention, "_forward", wrong)


@fault("dp=1 cp=2", RING, first=OUTPUT, cause="scale of its scores is applied twice")
def the_scale_is_applied_twice(rank: int) -> Patch:
    def wrong(self: BlockwiseAttention) -> BlockwiseAttention:
        return replace(self, options=replace(self.options, scale=self.options.scale**2))

    return _blockwise(wrong)


def _blocks(change: Callable[[list[KeyBlock]], list[KeyBlock]]) -> Patch:
    def wrong(own: Any, self: Any, local: KeyBlock) -> Iterator[KeyBlock]:
        blocks = [block._replace(packed=block.packed.clone()) for block in own(self, local)]
        return iter(change(blocks))

    return around(RingKeys, "blocks", wrong)


@fault(
    "dp=1 cp=3 cp_kind=ring cp_order=contiguous", first=OUTPUT, cause="keys of rank 0 are missing, on rank 2 alone",
    settings=("model.hidden=96",),  # Rows of its outputs are compared by sketches
)  # fmt: skip
def the_last_block_of_a_ring_is_lost(rank: int) -> Patch:
    return _blocks(lambda blocks: blocks[:-1]) if rank == 2 else nothing()


@fault("dp=1 cp=3 cp_kind=ring", first=OUTPUT, cause="keys of rank 1 count twice, on rank 2 alone")
def a_block_of_a_ring_is_merged_twice(rank: int) -> Patch:
    return _blocks(lambda blocks: [*blocks, blocks[1]]) if rank == 2 else nothing()


@fault("dp=1 cp=4 cp_kind=all-to-all", first=OUTPUT, cause="rank r has key head r modulo")
def an_all_to_all_gives_key_heads_in_turn(rank: int) -> Patch:
    def wrong(spans: Any, exchange: HeadExchange) -> Any:
        keys = [spans[1][0], spans[1][-1]] * 2
        return spans[0], keys, keys

    return _input_heads(wrong)


@fault("dp=1 cp=4 cp_kind=all-to-all", first=OUTPUT, cause="query heads of rank 1 use key head 1")
def an_all_to_all_takes_the_key_head_of_a_neighbour(rank: int) -> Patch:
    def wrong(spans: Any, exchange: HeadExchange) -> Any:
        keys = [spans[1][0], spans[1][2], *spans[1][2:]]
        return spans[0], keys, keys

    return _input_heads(wrong)


def _input_heads(change: Callable[[Any, HeadExchange], Any]) -> Patch:
    def make(own: Any) -> Any:
        return property(lambda exchange: change(own.fget(exchange), exchange))

    return replaced(HeadExchange, "input_heads", make)


# --- gradients -----------------------------------------------------------------------------------------


@fault("dp=1 cp=2", first=KEY_GRADIENT, cause="not added over the ranks")
def gradients_of_gathered_keys_stay_local(rank: int) -> Patch:
    def wrong(own: Any, self: GatheredKeys, local: KeyBlock, compute: Any) -> Tensor:
        gradients = compute(self._gather(local, "backward"))
        return torch.cat([gradients[slice(*span)] for span in local.spans])

    return around(GatheredKeys, "gradients", wrong)


@fault("dp=1 cp=2", RING, first=KEY_GRADIENT, cause="are added 2 times")
def gradients_of_keys_are_added_twice(rank: int) -> Patch:
    owner = {"gradients": lambda total, *_: 2 * total}
    return all_of(*(changed(kind, name, wrong) for kind in (GatheredKeys, RingKeys) for name, wrong in owner.items()))


@fault("dp=1 cp=2 cp_kind=ring", first=KEY_GRADIENT, cause="from queries of rank 1|not added over")
def gradients_of_a_ring_do_not_come_home(rank: int) -> Patch:
    def wrong(own: Any, self: RingKeys, local: KeyBlock, compute: Any) -> Tensor:
        kept = list[Tensor]()

        def keep(block: KeyBlock) -> Tensor:
            kept.append(compute(block))
            return kept[-1]

        own(self, local, keep)
        return kept[0]

    return around(RingKeys, "gradients", wrong)


# --- dropout and counts ----------------------------------------------------------------------------------

DROPOUT = ("model.dropout=0.1",)


@fault(
    "dp=1 cp=2", RING, first="random mask block 0 dropout 1",
    cause="that of the first 16 tokens of the row", settings=DROPOUT,
)  # fmt: skip
def attention_drops_the_keys_of_the_first_queries(rank: int) -> Patch:
    def wrong(own: Any, self: AttentionDropout, heads: Any, queries: Any, keys: Any, **how: Any) -> Tensor:
        return own(self, heads, [(0, sum(stop - first for first, stop in queries))], keys, **how)

    return around(AttentionDropout, "keep", wrong)


@fault("dp=1 cp=2", first="random mask before the blocks dropout 1", cause="together leave out", settings=DROPOUT)
def dropout_is_that_of_the_first_places(rank: int) -> Patch:
    def wrong(own: Any, part: TokenPart, *rest: Any) -> Any:
        here = sum(stop - first for first, stop in part.spans)
        return own(part._replace(spans=[(0, here)]) if _trains() else part, *rest)

    return around(TokenPart, "in_rows", wrong)


@fault("dp=1 cp=2", "dp=2 cp=2 zero=1", first="target tokens", cause="multiplied by 2 = .*cp")
def every_rank_counts_the_targets_of_complete_rows(rank: int) -> Patch:
    counts = list[float]()

    def select(part: Batch, _: MicroBatchRows, rows: Batch) -> Batch:
        counts.append(float(rows.weights.sum() - part.weights.sum()))
        return part

    def read(batch: Batch, reader: Any, *_: Any) -> Batch:
        reader.targets += counts.pop()
        return batch

    return all_of(changed(MicroBatchRows, "select", select), changed(step._MicroBatchReader, "__call__", read))
