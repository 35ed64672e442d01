"""Markers: masks of one element that stand for a mask of pairs, which a part of a row cannot have.

The keys of a part are on other ranks, and no mask of [T, T] may exist. A module that motet did not write gets a marker
and hands it through to attention. Code that reads it as a mask of pairs computes other values, which the proof of a
layout finds.
"""

from functools import cache

import torch
from torch import Tensor

from motet.core.errors import InputError, check_input
from motet.models.arch.attention_core import ScoreOptions, attend
from motet.models.arch.attention_mask import AttentionMask
from motet.models.torch_private import storage_key

_markers = dict[int, AttentionMask]()  # Storage of a marker -> the mask that it stands for


@cache
def mask_marker(*, causal: bool, device: torch.device) -> Tensor:
    """A mask [1, 1, 1, 1] that stands for one by places, and for documents that the exchange knows. Code that gets it
    knows the window. It is of truth values, which FSDP does not cast."""
    marker = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device)
    _markers[storage_key(marker)] = AttentionMask(causal=causal)
    return marker


def is_marker(mask: Tensor) -> bool:
    """Whether a tensor stands for a mask, or is a view of one that does."""
    return mask.numel() == 1 and storage_key(mask) in _markers


def marked_mask(mask: Tensor) -> AttentionMask:
    """The mask that a marker, or a view of it, stands for. A mask of pairs is an InputError."""
    if not is_marker(mask):
        raise InputError(
            f"it gives attention a mask of shape {list(mask.shape)}, but only causal and bidirectional masks, windows "
            "and documents are known for a part of each row; let it give none, or is_causal=True"
        )
    return _markers[storage_key(mask)]


def attend_in_seam(q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask, options: ScoreOptions) -> Tensor:
    """Attention of q [R, h, T, D] with keys of the same tokens; any other attention is an InputError."""
    is_known = q.ndim == k.ndim == v.ndim == 4 and q.shape[2] == k.shape[2] == v.shape[2] and len(q) == len(k) == len(v)
    shapes = ", ".join(str(list(x.shape)) for x in (q, k, v))
    check_input(
        is_known and q.shape[1] % k.shape[1] == 0,
        f"its queries, keys and values are {shapes}; ranks exchange keys of the same tokens, [rows, heads, tokens, "
        "width]",
    )
    return attend(q, k, v, mask=mask, options=options)
