"""Inputs and targets from windows of tokens, as arrays: the next token, masked tokens, or a class."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from motet.data.corpus.tokenizer import Tokenizer
from motet.data.samples.packing import IntArray, TokenWindows
from motet.data.samples.shuffle_and_mix import UInt64Array, uniform_floats


@dataclass(frozen=True)
class BatchArrays:
    """The fields of a `core.batch.Batch` as arrays."""

    tokens: IntArray
    targets: IntArray
    weights: NDArray[np.bool_]
    documents: IntArray | None = None
    positions: IntArray | None = None
    source: IntArray | None = None
    source_documents: IntArray | None = None


def causal_objective(rows: TokenWindows, isolate_documents: bool) -> BatchArrays:
    """The next token; with `isolate_documents` the end of a document does not predict the start of another."""
    tokens, targets, weights = rows.tokens[:, :-1], rows.tokens[:, 1:], rows.eligible[:, 1:]
    if not isolate_documents:
        return BatchArrays(tokens, targets, weights)
    segment = rows.segment[:, :-1]
    weights = weights & (rows.segment[:, 1:] == segment)
    # Padding comes after all targets: causal attention needs no border before it.
    is_token = np.arange(tokens.shape[1]) < rows.size[:, None]
    documents = segment * (segment * is_token).any(axis=1, keepdims=True)
    if not documents.any():
        return BatchArrays(tokens, targets, weights)
    return BatchArrays(tokens, targets, weights, documents=documents, positions=positions_within_documents(documents))


def masked_objective(
    rows: TokenWindows, row_keys: UInt64Array, tokenizer: Tokenizer, *, fraction: float, isolate_documents: bool
) -> BatchArrays:
    """The originals of tokens that are chosen independently, by the row's key: 80 % are masked, 10 % replaced."""
    assert tokenizer.mask_id is not None, "checked by prepare"
    choice, replacement, random_token = (uniform_floats(row_keys, rows.tokens.shape[1], stream) for stream in range(3))
    unmasked = (tokenizer.end_id, tokenizer.pad_id, *tokenizer.begin_ids)
    is_chosen = rows.eligible & (choice < fraction) & ~np.isin(rows.tokens, unmasked)
    replaced = np.where(replacement < 0.8, tokenizer.mask_id, (random_token * tokenizer.vocab_size).astype(np.int64))
    tokens = np.where(is_chosen & (replacement < 0.9), replaced, rows.tokens)
    documents, positions = documents_and_positions(rows, isolate_documents)
    return BatchArrays(tokens, rows.tokens, is_chosen, documents, positions)


def classification_objective(rows: TokenWindows, first_id: int | None) -> BatchArrays:
    """The class of each row, predicted at its first token: `first_id`, unless the text starts with a special one."""
    tokens, size = rows.tokens, rows.size
    if first_id is not None:
        tokens = np.concatenate([np.full((len(tokens), 1), first_id), tokens], axis=1)
        size = size + 1
    padding = (np.arange(tokens.shape[1]) >= size[:, None]).astype(np.int64)
    return BatchArrays(tokens, rows.label, np.ones(len(tokens), np.bool_), documents=padding if padding.any() else None)


def documents_and_positions(rows: TokenWindows, isolate_documents: bool) -> tuple[IntArray | None, IntArray | None]:
    """Documents and positions for bidirectional attention, which must not see padding."""
    padding: IntArray = (np.arange(rows.segment.shape[1]) >= rows.size[:, None]).astype(np.int64)
    segment = rows.segment if isolate_documents else padding
    if not segment.any():
        return None, None
    return segment, positions_within_documents(segment) if isolate_documents else None


def positions_within_documents(segment: IntArray) -> IntArray:
    """Positions that restart at each document."""
    position = np.arange(segment.shape[1])
    start = np.where(np.diff(segment, axis=1, prepend=0) != 0, position, 0)
    return position - np.maximum.accumulate(start, axis=1)
