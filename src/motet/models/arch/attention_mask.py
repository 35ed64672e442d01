"""Attention masks as values: causal, within a window, within a document, with learned biases.
A mask that is only causal stays a flag, which every fast kernel knows. A kernel of variable length takes the starts of
documents. Any other mask is made dense where a kernel needs it: a tensor that is added to the scores. Starts and dense
masks are made once per forward for all layers.
"""

from copy import copy
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from motet.models.kernels.variable_length import VariableLengthKernel


@dataclass(frozen=True, eq=False)
class AttentionTokens:
    """The queries of a mask, or its keys."""

    places: Tensor | None = None  # [T] int64: the place of each token in its row; None means 0..T-1, the whole row
    documents: Tensor | None = None  # [R, T] int64; None means that each row is one document

    def select(self, indices: Tensor) -> "AttentionTokens":
        """The tokens at these indices [t]."""
        places = indices if self.places is None else self.places[indices]
        return AttentionTokens(places, None if self.documents is None else self.documents[:, indices])


_LEAST_DOCUMENTS_BITS = 4


@dataclass(frozen=True, eq=False)
class DocumentSequence:
    """The documents of all rows, one after another, and the kernel that computes their attention."""

    starts: Tensor  # [documents + 1] int32: the first token of each, and the number of all tokens; the last are empty
    kernel: VariableLengthKernel


class AttentionMask:
    """The keys that each query sees, and a bias of their scores. It is not a dataclass, because FSDP2 copies the
    dataclasses that are arguments of a block, and each block would then make another dense form."""

    def __init__(
        self,
        queries: AttentionTokens | None = None,
        keys: AttentionTokens | None = None,
        *,
        causal: bool = False,
        window: int | None = None,
        sees_all: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        self.queries, self.keys = queries or AttentionTokens(), keys or AttentionTokens()
        self.causal = causal  # No query sees a key at a later place
        self.window = window  # A query sees at most `window - 1` places before its own
        self.sees_all = sees_all  # [R, T] bool: queries that see the keys of every document
        self.bias = bias  # [1, heads, T, S], learned: added to the scores of visible keys
        self._dense: dict[torch.dtype, Tensor | None] = {}
        self.sequence: DocumentSequence | None = None  # Set where a kernel takes it in place of a dense form

    @property
    def has_kernel_order(self) -> bool:
        """Whether queries and keys are whole rows, where a later place is a larger index, as kernels expect it."""
        return self.queries.places is None and self.keys.places is None

    def block(self, queries: Tensor, keys: Tensor) -> "AttentionMask":
        """The mask of the queries and keys at these indices: its dense form is that part of the dense form here.
        A query that sees no key of a block is normal: it has -inf for each key. Its softmax over the block is then NaN,
        or in some kernels zero with a log-sum-exp of zero. Code that joins blocks must skip it by the mask."""
        return AttentionMask(
            self.queries.select(queries),
            self.keys.select(keys),
            causal=self.causal,
            window=self.window,
            sees_all=None if self.sees_all is None else self.sees_all[:, queries],
            bias=None if self.bias is None else self.bias[:, :, queries][..., keys],
        )

    def with_bias(self, bias: Tensor) -> "AttentionMask":
        """The same mask with a learned bias."""
        mask = copy(self)
        mask.bias, mask._dense, mask.sequence = bias, {}, None
        return mask

    def use_kernel(
        self, kernel: VariableLengthKernel, rows: int, length: int, *, device: torch.device, count: int | None = None
    ) -> None:
        """Let a kernel compute attention of documents or windows, if it takes the mask: queries and keys are the same
        whole rows, and equal numbers of documents are neighbours. Without the number of documents in all rows the host
        waits for it, once for all layers."""
        documents = self.queries.documents
        has_other_rule = self.bias is not None or self.sees_all is not None or documents is not self.keys.documents
        if has_other_rule or not self.has_kernel_order:
            return
        if documents is not None:
            is_start = torch.ones_like(documents, dtype=torch.bool)
            is_start[:, 1:] = documents[:, 1:] != documents[:, :-1]
            count = int(is_start.count_nonzero()) if count is None else count
            number = is_start.flatten().cumsum(0) - 1  # The number of the document of each token
            # A power of two, so that compiled blocks see few shapes: empty documents follow.
            size = 1 << max(_LEAST_DOCUMENTS_BITS, (count - 1).bit_length())
            starts = torch.searchsorted(number, torch.arange(size + 1, device=device))
        elif self.window is not None and self.window < length:
            starts = torch.arange(0, rows * length + 1, length, device=device)
        else:
            return
        self.sequence = DocumentSequence(starts.to(torch.int32), kernel)

    def dense(self, length: int, key_length: int, *, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """[R or 1, heads or 1, T, S], added to the scores; -inf hides a key. Made in the first call with a dtype.
        None where a kernel needs no tensor: every key is visible, or rows are complete and `causal` hides the rest."""
        if dtype in self._dense:
            return self._dense[dtype]
        bias = self._make_dense(length, key_length, dtype=dtype, device=device)
        if not torch.compiler.is_compiling():  # Graphs of blocks would differ by the masks that they change
            self._dense[dtype] = bias
        return bias

    def _make_dense(self, length: int, key_length: int, *, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        is_visible, bias = self._is_visible(length, key_length, device), self.bias
        additive = None if is_visible is None else _additive_mask(is_visible, dtype)
        return additive if bias is None else bias if additive is None else bias + additive

    def _is_visible(self, length: int, key_length: int, device: torch.device) -> Tensor | None:
        """[T, S] or [R, 1, T, S]; None where no tensor is needed."""
        documents, key_documents = self.queries.documents, self.keys.documents
        window = None if self.has_kernel_order and self.window is not None and self.window >= length else self.window
        has_others = documents is not None or window is not None or self.bias is not None
        conditions = []
        if window is not None or (self.causal and (has_others or not self.has_kernel_order)):
            places = places_in_row(self.queries.places, length, device).unsqueeze(1)
            key_places = places_in_row(self.keys.places, key_length, device)
            conditions += [key_places <= places] if self.causal else []
            conditions += [] if window is None else [key_places > places - window]
        if documents is not None and key_documents is not None:
            is_same = _same_document(documents, key_documents)
            conditions.append(is_same if self.sees_all is None else is_same | self.sees_all[:, None, :, None])
        return reduce(torch.logical_and, conditions) if conditions else None


def causal_mask(
    documents: Tensor | None = None, places: Tensor | None = None, window: int | None = None
) -> AttentionMask:
    """Each query sees itself and at most `window - 1` places before it, of the same document. documents [R, T]."""
    tokens = AttentionTokens(places, documents)
    return AttentionMask(tokens, tokens, causal=True, window=window)


def bidirectional_mask(documents: Tensor | None, sources: Tensor | None) -> AttentionMask:
    """Queries see every key of the same document. documents [R, T], sources [R, S] of the whole row; both or neither.
    A query whose document has no key sees every key: it is padding of weight 0, but must not become NaN."""
    if documents is None or sources is None:
        return AttentionMask()
    sees_all = None if sources is documents else ~_same_document(documents, sources).any(-1).squeeze(1)
    return AttentionMask(AttentionTokens(None, documents), AttentionTokens(None, sources), sees_all=sees_all)


def places_in_row(places: Tensor | None, length: int, device: torch.device) -> Tensor:
    """The place of each token in its row: 0..length-1 where they are not given."""
    return torch.arange(length, device=device) if places is None else places


def _same_document(documents: Tensor, sources: Tensor) -> Tensor:
    """[R, 1, T, S]"""
    return (documents.unsqueeze(2) == sources.unsqueeze(1)).unsqueeze(1)


def _additive_mask(is_visible: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., T, S] with four dims."""
    bias = torch.zeros(is_visible.shape, dtype=dtype, device=is_visible.device).masked_fill_(~is_visible, float("-inf"))
    return bias if bias.ndim == 4 else bias[None, None]
