"""What the data room hands to a model: the tensors of one micro-batch.

It names no torch at run time, so that pure code can speak of it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Batch:
    """R rows of T tokens. Every target has a weight: 0 for what is not a target, 1 for what is.

    The loss of a step is the weighted sum over all rows of the *global* batch divided by the global sum of
    weights; rows that only fill up an incomplete batch have weight 0 throughout.
    """

    tokens: torch.Tensor  # [R, T] int64: what the model reads (the decoder's input in an encoder-decoder)
    targets: torch.Tensor  # [R, T] int64 for token targets, [R] int64 for a class of the whole row
    weights: torch.Tensor  # The shape of `targets`, float32
    rows: torch.Tensor  # [R] int64: the place of each row in the global batch of its step. Random masks depend on it.
    positions: torch.Tensor | None = None  # [R, T] int64: the position within the document; None means 0..T-1
    # [R, T] int64: attention stays within equal numbers; None means that each row is one document.
    documents: torch.Tensor | None = None
    source: torch.Tensor | None = None  # [R, S] int64: what the encoder of an encoder-decoder reads
    # [R, S] int64: as `documents`, for `source`; also used by cross attention against `documents`.
    source_documents: torch.Tensor | None = None

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        moved = {
            f.name: value.to(device, non_blocking=True)
            for f in fields(self)
            if (value := getattr(self, f.name)) is not None
        }
        return replace(self, **moved)
