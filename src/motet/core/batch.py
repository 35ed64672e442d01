"""The tensors of one micro-batch. Torch is not imported at run time, so that pure code can name a `Batch`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Batch:
    """R rows of T tokens. A token has weight 1 if it is a target, else 0, as in rows that only fill up a batch.
    The loss of a step is the weighted sum over all rows of the *global* batch divided by the global sum of weights."""

    tokens: torch.Tensor  # [R, T] int64: the input (of the decoder in an encoder-decoder)
    targets: torch.Tensor  # [R, T] int64 for token targets, [R] int64 for a class of the whole row
    weights: torch.Tensor  # The shape of `targets`, float32
    # [R] int64, always on the host: index of each row in the step's global batch, on which random masks depend.
    rows: torch.Tensor
    positions: torch.Tensor | None = None  # [R, T] int64: the position within the document; None means 0..T-1
    # [R, T] int64: attention stays within equal numbers, which are neighbours; None means one document for each row.
    documents: torch.Tensor | None = None
    source: torch.Tensor | None = None  # [R, S] int64: the encoder's input
    # [R, S] int64: as `documents`, for `source`; also used by cross attention against `documents`.
    source_documents: torch.Tensor | None = None
    # [T] int64: the place of each token in its row; None means 0..T-1, which is the whole row.
    places: torch.Tensor | None = None
    # [R, T] int64: `documents` of the whole rows, where the batch is a part of each row
    row_documents: torch.Tensor | None = None
    row_tokens: int | None = None  # The number of tokens of each whole row, where the batch is a part of it
    # The number of weights that are not zero, if they were counted before the batch moved to a device.
    target_count: int | None = None
    # The number of documents in all rows, if they were counted before the batch moved to a device.
    document_count: int | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """The numbers of rows and tokens, from which shapes of activations follow."""
        sizes = {"rows": self.tokens.shape[0], "tokens": self.tokens.shape[1]}
        return sizes if self.source is None else {**sizes, "source tokens": self.source.shape[1]}

    def at_places(self, spans: Sequence[tuple[int, int]]) -> Batch:
        """The tokens at some places of each row, in the order of their spans (first, stop).
        The classes of rows and the source stay whole: queries from any place attend to the whole encoded source."""
        assert self.places is None, "a batch of whole rows is cut, and no part of it"
        places = self.tokens.new_tensor([place for first, stop in spans for place in range(first, stop)])
        by_place: dict[str, Any] = {
            name: getattr(self, name) for name in ("tokens", "targets", "weights", "positions", "documents")
        }
        cut: dict[str, Any] = {name: t[:, places] for name, t in by_place.items() if t is not None and t.ndim == 2}
        part = replace(self, places=places, target_count=None, document_count=None, row_tokens=self.tokens.shape[1])
        return replace(part, row_documents=self.documents, **cut)

    def first_tokens(self, rows: int, tokens: int, source_tokens: int) -> Batch:
        """The first tokens of the first rows; a row may have fewer."""
        tensors = {name: t[:rows] for name, t in self.tensors().items()}
        lengths = {name: source_tokens if name.startswith("source") else tokens for name in tensors}
        cut: dict[str, Any] = {name: t[:, : lengths[name]] if t.ndim == 2 else t for name, t in tensors.items()}
        return replace(self, target_count=None, document_count=None, **cut)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the batch by name."""
        counts = ("target_count", "document_count", "row_tokens")
        names = (field.name for field in fields(self) if field.name not in counts)
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    def pinned(self) -> Batch:
        """The same batch in pinned memory, from which a GPU copies while the host goes on; `rows` stays."""
        pinned: dict[str, Any] = {name: t.pin_memory() for name, t in self.tensors().items() if name != "rows"}
        return replace(self, **pinned)

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device, without its rows. Targets and documents are counted on the host, where
        nothing waits."""
        count = int(self.weights.count_nonzero()) if self.weights.device.type == "cpu" else self.target_count
        documents, document_count = self.documents, self.document_count
        if documents is not None and documents.device.type == "cpu":
            document_count = len(documents) + int((documents[:, 1:] != documents[:, :-1]).count_nonzero())
        moved: dict[str, Any] = {
            name: t.to(device, non_blocking=True) for name, t in self.tensors().items() if name != "rows"
        }
        return replace(self, target_count=count, document_count=document_count, **moved)


class BatchSource(Protocol):
    """The training data; `BatchLoader` is one."""

    def batch(self, step: int, rows: range) -> Batch: ...
