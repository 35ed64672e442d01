"""Batches of a custom loop whose rows ranks share: their cut, and the proof that a module computes parts of rows."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from motet.core.batch import Batch
from motet.core.errors import check_input
from motet.parallel.context_parallel.attention_calls import AttentionCall
from motet.parallel.context_parallel.context_partition import ContextOrder, ContextPartition
from motet.parallel.proof.context_proof import ContextExample, prove_context
from motet.parallel.torch_private import tree_leaves, tree_map_only
from motet.train.pipeline.custom_batches import LossFunction, loss_and_count

# Tokens of rows in the proof, of which ranks get unequal parts
_CUTS: tuple[tuple[int, int, ContextOrder], ...] = ((29, 2, "head-tail"), (22, 3, "contiguous"))


def rows_of_batch(batch: Any) -> Batch:
    """The rows and tokens of a batch, without their values; each tensor of it has all tokens of each row."""
    tensors = [each for each in tree_leaves(batch) if isinstance(each, Tensor) and each.ndim > 1]
    shapes = ", ".join(str(list(each.shape)) for each in tensors)
    check_input(
        tensors and len({each.shape[:2] for each in tensors}) == 1,
        f"layout.cp cuts each tensor of a batch at the same tokens, but this one has tensors of the shapes {shapes}; "
        "give tensors [rows, tokens, ...] alone, of one number of tokens, or tensors with rows alone",
    )
    tokens = torch.zeros(tensors[0].shape[:2], dtype=torch.int64, device=tensors[0].device)
    return Batch(tokens, tokens, torch.ones_like(tokens), torch.arange(len(tokens)))


def tokens_at(batch: Any, places: Tensor | None) -> Any:
    """The tokens of a batch at some places of each row."""
    if places is None:
        return batch
    return tree_map_only(Tensor, lambda x: x.index_select(1, places.to(x.device)) if x.ndim > 1 else x, batch)


def prove_rows(module: nn.Module, loss: LossFunction, example: Any, *, ranks: int) -> tuple[AttentionCall, ...]:
    """The calls of attention of a module whose losses over parts of rows add up to that over the rows, and so do their
    counts."""
    batch, calls = example[0] if isinstance(example, list) else example, tuple[AttentionCall, ...]()
    for most, parts, order in _CUTS:
        shorter = tree_map_only(Tensor, partial(_first_tokens, most=most), batch)
        rows = rows_of_batch(shorter)
        tokens = rows.tokens.shape[1]
        check_input(
            tokens >= 2 * parts,
            f"layout.cp = {ranks} is proven with parts of example=..., whose rows have {tokens} tokens; give a batch "
            f"with {2 * parts} or more",
        )
        cut = ContextExample(rows, ContextPartition(tokens, parts, order))
        calls = prove_context(
            module, partial(_loss_and_count, module=module, loss=loss, batch=shorter), [cut], ranks=ranks
        )
    return calls


def _first_tokens(x: Tensor, most: int) -> Tensor:
    """The first two rows, as the proof computes them."""
    x = (x[:2, :most] if x.ndim > 1 else x[:2] if x.ndim else x).to("cpu")
    return x.double() if x.dtype == torch.float32 else x


def _loss_and_count(part: Batch, *, module: nn.Module, loss: LossFunction, batch: Any) -> list[Tensor]:
    value, count = loss_and_count(loss(module, tokens_at(batch, part.places)), "parallelize")
    return [value, torch.tensor(count, dtype=torch.float64)]
