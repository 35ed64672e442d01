"""The keys that a mask or a module lets each query see."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from motet.models.trace.records import VisibleKeys

_HIDDEN = -1e3  # What is added to scores of hidden keys is below this


def visible_keys(mask: Tensor) -> VisibleKeys | None:
    """Whether a mask with values hides later keys and those before a window; None if it is no mask of pairs.
    A mask of truth values may name the visible pairs or the hidden ones."""
    if mask.ndim < 2 or mask.shape[-2] != mask.shape[-1] or mask.shape[-1] < 2:
        return None
    pairs = mask[(0,) * (mask.ndim - 2)]
    if mask.dtype != torch.bool:
        if not mask.is_floating_point() or bool((pairs.min() > _HIDDEN).item()):
            return None
        pairs = pairs > _HIDDEN
    visible = pairs if bool(pairs.diagonal().all()) else ~pairs
    distances = torch.arange(len(visible))[:, None] - torch.arange(len(visible))
    is_causal = bool((distances[visible] >= 0).all())
    if not is_causal:
        return VisibleKeys(False)
    window = int(distances[visible].max()) + 1
    is_band = bool((visible == ((distances >= 0) & (distances < window))).all())
    return VisibleKeys(True, window if is_band and window < len(visible) else None)


def declared_window(modules: Sequence[nn.Module]) -> int | None:
    """The window of attention that the innermost module declares: a trace is shorter than most windows."""
    for module in reversed(modules):
        attributes = vars(module)
        if "sliding_window" in attributes:
            window = attributes["sliding_window"]
            return window if isinstance(window, int) and window > 0 else None
        config: Any = attributes.get("config")
        kinds, index = getattr(config, "layer_types", None), attributes.get("layer_idx")
        window = getattr(config, "sliding_window", None)
        if isinstance(window, int) and getattr(config, "use_sliding_window", True):
            is_sliding = not kinds or (isinstance(index, int) and kinds[index] == "sliding_attention")
            return window if is_sliding else None
    return None
