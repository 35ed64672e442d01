"""Rows and cuts of them with which a job's model is proven to have tokens that meet in attention alone."""

from dataclasses import replace

import torch
from torch import Tensor

from motet.core.batch import Batch
from motet.parallel.context_parallel.attention_calls import AttentionCall
from motet.parallel.context_parallel.context_partition import ContextPartition
from motet.parallel.proof.context_proof import ContextExample

TWIN_WINDOW = 17  # Tokens that a sliding window of a twin shows: more than a trace has, fewer than a row below
_LONG, _SHORT = 29, 22  # Tokens of a row, of which ranks get unequal parts
_AFTER_WINDOW = 12


def context_examples(batch: Batch, *, packs: bool, last_position: int, knows_documents: bool) -> list[ContextExample]:
    """Two batches, cut in both orders, from the first tokens of a longer one.

    The first one packs documents if the job does. The second one has the first and the last positions of the job's
    rows, since some models compute their rotary angles from the largest position that they see.
    """
    long, short = (_first_tokens(batch, tokens) for tokens in (_LONG, _SHORT))
    long = _packed(long) if packs else replace(long, positions=None, documents=None)
    tokens = short.tokens.shape[1]
    positions = torch.arange(tokens)
    positions[tokens // 2 :] += max(0, last_position + 1 - tokens)
    documents = torch.zeros_like(short.tokens) if knows_documents else None
    spread = replace(short, positions=positions.expand_as(short.tokens).contiguous(), documents=documents)
    return [
        ContextExample(long, ContextPartition(long.tokens.shape[1], 2, "head-tail")),
        ContextExample(spread, ContextPartition(tokens, 3, "contiguous")),
    ]


def window_examples(batch: Batch, calls: tuple[AttentionCall, ...], *, packs: bool) -> list[ContextExample]:
    """A row that is longer than the longest window, if the examples above do not reach it and rows of the job do."""
    longest = max((call.window for call in calls if call.window is not None), default=0)
    length = min(longest + _AFTER_WINDOW, batch.tokens.shape[1])
    if not _LONG <= longest < length:
        return []
    row = _first_tokens(batch, length, rows=1)
    row = _packed(row) if packs else replace(row, positions=None, documents=None)
    return [ContextExample(row, ContextPartition(length, 2, "contiguous"))]


def _first_tokens(batch: Batch, tokens: int, *, rows: int | None = None) -> Batch:
    """The first tokens of rows, each of which is a target."""
    short = batch.first_tokens(len(batch.tokens) if rows is None else rows, tokens, tokens)
    return replace(short, weights=torch.ones_like(short.weights))


def _packed(batch: Batch) -> Batch:
    """The same tokens as two documents in each row, whose positions restart, at borders that differ between rows."""
    rows, tokens = batch.tokens.shape
    places, borders = torch.arange(tokens), torch.tensor([[tokens * (2 + row % 2) // 5] for row in range(rows)])
    documents: Tensor = (places >= borders).long()
    return replace(batch, documents=documents, positions=places - borders * documents)
