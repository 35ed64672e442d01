"""From windows of tokens to what a model reads and predicts: the next token, masked tokens, or a class.

Arrays only, so that it can be read and tested without torch; the loader turns them into tensors.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from motet.data.draws import Words, uniforms
from motet.data.packing import Ints, Rows


@dataclass(frozen=True)
class Arrays:
    """The fields of a `core.batch.Batch`, whose meaning they share."""

    tokens: Ints
    targets: Ints
    weights: NDArray[np.bool_]
    documents: Ints | None = None
    positions: Ints | None = None
    source: Ints | None = None
    source_documents: Ints | None = None


def causal(rows: Rows, restart: bool) -> Arrays:
    """The next token. With `restart` the end of a document does not predict the start of another one."""
    tokens, targets, weights = rows.tokens[:, :-1], rows.tokens[:, 1:], rows.eligible[:, 1:]
    if not restart:
        return Arrays(tokens, targets, weights)
    segment = rows.segment
    weights = weights & (segment[:, 1:] == segment[:, :-1])
    # What fills up a row comes after all targets: causal attention needs no border before it.
    there = np.arange(tokens.shape[1]) < rows.size[:, None]
    bordered = (segment[:, :-1] * there).any(axis=1, keepdims=True)
    if not bordered.any():
        return Arrays(tokens, targets, weights)
    read = segment[:, :-1] * bordered
    return Arrays(tokens, targets, weights, documents=read, positions=restarted(read))


@dataclass(frozen=True)
class Masking:
    """How masked-token training alters a row: of the chosen tokens 80 % are masked, 10 % replaced, 10 % kept."""

    fraction: float
    mask_id: int
    vocab_size: int
    never: tuple[int, ...]
    """Special tokens, which are not chosen."""


def masked(rows: Rows, row_keys: Words, masking: Masking, restart: bool) -> Arrays:
    """The original of some tokens, chosen one by one; which ones depends on the row's key alone."""
    width = rows.tokens.shape[1]
    choice, kind, other = (uniforms(row_keys, width, stream) for stream in range(3))
    chosen = rows.eligible & (choice < masking.fraction) & ~np.isin(rows.tokens, masking.never)
    replaced = np.where(kind < 0.8, masking.mask_id, (other * masking.vocab_size).astype(np.int64))
    tokens = np.where(chosen & (kind < 0.9), replaced, rows.tokens)
    documents, positions = borders(rows, restart)
    return Arrays(tokens, rows.tokens, chosen, documents, positions)


def classify(rows: Rows, first_id: int | None) -> Arrays:
    """The class of each row, to be read from its first token: `first_id`, unless the text starts with a special one."""
    tokens, size = rows.tokens, rows.size
    if first_id is not None:
        tokens = np.concatenate([np.full((len(tokens), 1), first_id), tokens], axis=1)
        size = size + 1
    behind = (np.arange(tokens.shape[1]) >= size[:, None]).astype(np.int64)
    return Arrays(tokens, rows.label, np.ones(len(tokens), np.bool_), documents=behind if behind.any() else None)


def borders(rows: Rows, restart: bool) -> tuple[Ints | None, Ints | None]:
    """Documents and positions for attention in both directions, where what fills up a row must not be seen."""
    segment: Any = rows.segment
    if not restart:
        segment = (np.arange(segment.shape[1]) >= rows.size[:, None]).astype(np.int64)
    if not segment.any():
        return None, None
    return segment, restarted(segment) if restart else None


def restarted(segment: Ints) -> Ints:
    """Places counted anew wherever the number changes."""
    place = np.broadcast_to(np.arange(segment.shape[1]), segment.shape)
    start = np.zeros(segment.shape, np.int64)
    start[:, 1:] = np.where(segment[:, 1:] != segment[:, :-1], place[:, 1:], 0)
    return place - np.maximum.accumulate(start, axis=1)
