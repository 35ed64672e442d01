"""Attention of queries to one block of keys after another, and its gradient by blocks.

Each block gives an output and the log-sum-exp of its scores, which are merged into those over all blocks. Backward
computes probabilities again from the merged log-sum-exp, so that no matrix of scores is kept.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from motet.core import trace
from motet.models.arch.attention_core import ScoreOptions, by_key_head, capped_scores
from motet.models.arch.attention_mask import AttentionMask, AttentionTokens
from motet.models.arch.layers import accumulation_dtype
from motet.models.kernels.choice import kernel_device
from motet.models.layout_invariant_dropout import AttentionDropout
from motet.models.torch_private import flash_backward, flash_forward
from motet.parallel.context_parallel.attention_tiles import (
    TILE_ELEMENTS,
    AttentionTile,
    PlaceVisibility,
    Span,
    TileLimits,
)
from motet.parallel.context_parallel.context_partition import Spans, shared_slices

CUDA_HEAD_DIM = 256  # The largest one that the kernels of CUDA take


class KeyBlock(NamedTuple):
    """Keys and values of some places."""

    packed: Tensor  # [s, R, kv, D + Dv]: tokens first, so that spans of them are contiguous
    spans: Spans
    key_dim: int

    @property
    def keys_and_values(self) -> tuple[Tensor, Tensor]:
        """Views [R, kv, s, D] and [R, kv, s, Dv]."""
        k, v = self.packed.permute(1, 2, 0, 3).tensor_split([self.key_dim], dim=-1)
        return k, v


def pack_keys(k: Tensor, v: Tensor, spans: Spans) -> KeyBlock:
    """A block of keys and values [R, kv, s, D] of these places."""
    return KeyBlock(torch.cat((k, v), -1).permute(2, 0, 1, 3).contiguous(), spans, k.shape[-1])


def _positions(spans: Spans, part: Span) -> slice:
    """The positions of places within one of some spans, in a tensor of their tokens."""
    ((positions, _),) = shared_slices(spans, (part,))
    return positions


class AttendedPart(NamedTuple):
    """Queries of a rank, and the result over all keys."""

    q: Tensor  # [R, h, t, D]
    output: Tensor  # [R, h, t, Dv]
    log_sum_exp: Tensor  # [R, h, t] in float32 or float64; 0 where a query sees no key


@dataclass(frozen=True, eq=False)
class BlockwiseAttention:
    """Attention of the queries of these places to blocks of keys."""

    queries: Spans
    visible: PlaceVisibility
    documents: Tensor | None  # [R, T] of complete rows
    options: ScoreOptions
    dropout: AttentionDropout | None
    groups: Sequence[tuple[Span, Span]]  # Query heads and key heads that are computed together
    _ranges_by_span: dict[Span, list[tuple[int, int]]] = field(default_factory=dict, init=False)

    def attend(self, q: Tensor, blocks: Iterable[KeyBlock], value_dim: int) -> tuple[Tensor, Tensor]:
        """The output [R, h, t, Dv] and the log-sum-exp [R, h, t], both in float32 or float64."""
        dtype = accumulation_dtype(q)
        # As kernels lay it out: the layer after attention joins the heads of a token without a copy.
        output = q.new_zeros((q.shape[0], q.shape[2], q.shape[1], value_dim), dtype=dtype).transpose(1, 2)
        log_sum_exp = q.new_full(q.shape[:3], float("-inf"), dtype=dtype)
        for block in blocks:
            k, v = block.keys_and_values
            for tile, rows, columns in self._tiles(q, v, block.spans):
                for heads, key_heads in self.groups:
                    where = (slice(None), slice(*heads), rows)
                    inputs = q[where], *(x[:, slice(*key_heads), columns] for x in (k, v))
                    trace.count("attention_pairs", q.shape[0] * (heads[1] - heads[0]) * tile.pairs)
                    merge_block(output[where], log_sum_exp[where], self._forward(inputs, tile, heads))
        return output, log_sum_exp

    def gradients(self, grad: Tensor, part: AttendedPart, block: KeyBlock, *, grad_q: Tensor) -> Tensor:
        """The gradients of the keys and values of a block, packed alike, in float32 or float64. Those of queries are
        added to `grad_q`."""
        k, v = block.keys_and_values
        packed = torch.zeros_like(block.packed, dtype=grad_q.dtype)
        grad_k, grad_v = block._replace(packed=packed).keys_and_values
        for tile, rows, columns in self._tiles(part.q, v, block.spans):
            for heads, key_heads in self.groups:
                where, keys = (slice(None), slice(*heads), rows), (slice(None), slice(*key_heads), columns)
                tile_part = AttendedPart(part.q[where], part.output[where], part.log_sum_exp[where])
                trace.count("attention_pairs", part.q.shape[0] * (heads[1] - heads[0]) * tile.pairs)
                gradients = self._backward(grad[where], tile_part, (k[keys], v[keys]), tile=tile, heads=heads)
                for total, addend in zip((grad_q[where], grad_k[keys], grad_v[keys]), gradients, strict=True):
                    total.add_(addend)
                del gradients, addend  # Freed before those of the next tile are there
        return packed

    # --- tiles -------------------------------------------------------------------------------------------

    def _tiles(self, q: Tensor, v: Tensor, keys: Spans) -> Iterator[tuple[AttentionTile, slice, slice]]:
        """Tiles with the positions of their queries and keys. No tile has a dense mask that hides all of it."""
        limits = self._limits(q, v)
        for query_span in self.queries:
            for key_span in keys:
                tiles = self.visible.tiles(query_span, key_span, limits)
                for tile in tiles if q.device.type != "cpu" else self._within_documents(tiles, limits):
                    yield tile, _positions(self.queries, tile.queries), _positions(keys, tile.keys)

    def _within_documents(self, tiles: Iterator[AttentionTile], limits: TileLimits) -> Iterator[AttentionTile]:
        """The tiles without those of other documents; a tile within one document of each row has the mask of places."""
        for tile in tiles:
            if self.documents is None:
                yield tile
                continue
            rows = list(zip(self._document_ranges(tile.queries), self._document_ranges(tile.keys), strict=True))
            if all(queries == keys and keys[0] == keys[1] for queries, keys in rows):
                yield from self.visible.tiles(tile.queries, tile.keys, replace(limits, has_documents=False))
            elif any(queries[0] <= keys[1] and keys[0] <= queries[1] for queries, keys in rows):
                yield tile

    def _document_ranges(self, span: Span) -> list[tuple[int, int]]:
        """The first and the last document in a span of each row. Many tiles have the same span."""
        if span not in self._ranges_by_span:
            assert self.documents is not None
            low, high = self.documents[:, slice(*span)].aminmax(dim=1)
            self._ranges_by_span[span] = list(zip(low.tolist(), high.tolist(), strict=True))
        return self._ranges_by_span[span]

    def _limits(self, q: Tensor, v: Tensor) -> TileLimits:
        keeps_scores = not self._is_fused(q, v, has_mask=True)
        matrices = q.shape[0] * (q.shape[1] if keeps_scores else 1)
        has_documents = self.documents is not None
        return self.visible.limits(TILE_ELEMENTS // matrices, has_documents=has_documents, keeps_scores=keeps_scores)

    def _is_fused(self, q: Tensor, v: Tensor, *, has_mask: bool) -> bool:
        is_plain = self.options.softcap is not None or self.dropout is not None
        return not is_plain and has_flash_kernel(q, v, has_mask=has_mask)

    def _mask(self, tile: AttentionTile, q: Tensor, *, is_fused: bool) -> Tensor | None:
        """[R or 1, 1, t, s], added to the scores; None where a kernel needs no tensor."""
        if tile.mask == "none" or (tile.mask == "causal" and is_fused):
            return None
        tokens = AttentionTokens(None, self.documents)
        rows = AttentionMask(tokens, tokens, causal=self.visible.causal, window=self.visible.window)
        places = [torch.arange(*span, device=q.device) for span in (tile.queries, tile.keys)]
        dtype = q.dtype if is_fused else accumulation_dtype(q)
        return rows.block(*places).dense(*map(len, places), dtype=dtype, device=q.device)

    # --- one tile ----------------------------------------------------------------------------------------

    def _forward(self, inputs: tuple[Tensor, ...], tile: AttentionTile, heads: Span) -> tuple[Tensor, Tensor]:
        """The output of a tile and its log-sum-exp, which is -inf for a query that sees no key of it."""
        q, k, v = inputs
        is_fused = self._is_fused(q, v, has_mask=tile.mask == "dense")
        mask = self._mask(tile, q, is_fused=is_fused)
        if not is_fused:
            scores = self._scores(q, k, mask)
            log_sum_exp = scores.logsumexp(-1)
            probabilities = (scores - finite(log_sum_exp).unsqueeze(-1)).exp()
            keep = self._keep(tile, heads, scores)
            kept = probabilities if keep is None else probabilities * keep
            return by_key_head(kept.to(v.dtype), v), log_sum_exp
        output, log_sum_exp = flash_forward(
            q, k, v, mask=mask, is_causal=tile.mask == "causal", scale=self.options.scale
        )
        if mask is None:
            return output, log_sum_exp
        # A kernel's output and log-sum-exp for a query that sees no key are not usable.
        sees_none = mask.amax(-1) == float("-inf")
        return output.masked_fill(sees_none.unsqueeze(-1), 0), log_sum_exp.masked_fill(sees_none, float("-inf"))

    def _backward(
        self, grad: Tensor, part: AttendedPart, keys: tuple[Tensor, Tensor], *, tile: AttentionTile, heads: Span
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, (k, v) = part.q, keys
        is_fused = self._is_fused(q, v, has_mask=tile.mask == "dense")
        mask = self._mask(tile, q, is_fused=is_fused)
        if is_fused:
            is_causal, scale = tile.mask == "causal", self.options.scale
            results = part.output, part.log_sum_exp
            return flash_backward(grad, (q, k, v), results, mask=mask, is_causal=is_causal, scale=scale)
        scores = self._scores(q, k, mask)
        probabilities = (scores - part.log_sum_exp.unsqueeze(-1)).exp()
        keep = self._keep(tile, heads, scores)
        grad_probabilities = by_key_head(grad, v.mT).to(scores.dtype)
        if keep is not None:
            grad_probabilities = grad_probabilities * keep
        mean = (grad.to(scores.dtype) * part.output).sum(-1, keepdim=True)
        grad_scores = probabilities * (grad_probabilities - mean)
        if self.options.softcap is not None:
            is_visible = scores.isfinite()
            capped = scores.masked_fill(~is_visible, 0) / self.options.softcap
            grad_scores = grad_scores * (1 - capped.square())
        grad_scores = (grad_scores * self.options.scale).to(q.dtype)
        kept = (probabilities if keep is None else probabilities * keep).to(v.dtype)
        return by_key_head(grad_scores, k), _summed_by_key_head(grad_scores, q, k), _summed_by_key_head(kept, grad, k)

    def _scores(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        scores = capped_scores(q, k, self.options)
        return scores if mask is None else scores + mask

    def _keep(self, tile: AttentionTile, heads: Span, scores: Tensor) -> Tensor | None:
        """The factor of each probability: 0 where dropout drops it."""
        if self.dropout is None:
            return None
        keep = self.dropout.keep(heads, [tile.queries], tile.keys, device=scores.device)
        return keep.to(scores.dtype) * self.dropout.factor


def has_flash_kernel(q: Tensor, v: Tensor, *, has_mask: bool) -> bool:
    """Whether a kernel computes attention of q [R, h, t, D] and its gradient by blocks. The kernels of CUDA take no
    mask; what they take is assumed from their sources, and has not run."""
    if q.shape[-1] != v.shape[-1]:
        return False
    if q.is_cuda:
        is_low = q.dtype in (torch.float16, torch.bfloat16)
        return is_low and not has_mask and q.shape[-1] % 8 == 0 and q.shape[-1] <= CUDA_HEAD_DIM
    return kernel_device(q) == "cpu"


def finite(log_sum_exp: Tensor) -> Tensor:
    """The same log-sum-exp with 0 for -inf, so that exp(score - log-sum-exp) is 0 for scores of -inf."""
    return log_sum_exp.masked_fill(log_sum_exp == float("-inf"), 0)


def merge_block(output: Tensor, log_sum_exp: Tensor, block: tuple[Tensor, Tensor]) -> None:
    """Add a block to the output and the log-sum-exp over earlier blocks, in place."""
    block_output, block_sum = block
    total = torch.logaddexp(log_sum_exp, block_sum.to(log_sum_exp.dtype))
    shift = finite(total)
    output.mul_((log_sum_exp - shift).exp_().unsqueeze(-1))
    output.add_(block_output * (block_sum - shift).exp_().unsqueeze(-1))
    log_sum_exp.copy_(total)


def _summed_by_key_head(x: Tensor, y: Tensor, k: Tensor) -> Tensor:
    """The product of x^T [R, h, t, s] with y [R, h, t, N], added over the query heads of each key head of k."""
    rows, key_heads = k.shape[:2]
    x, y = (each.reshape(rows, key_heads, -1, each.shape[-1]) for each in (x, y))
    return x.mT @ y
