"""The core of attention as an attention function of transformers, in the copies of a model's configs.

No mask function is registered, so that transformers makes no mask of pairs and hands that of the caller through.
"""

from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from importlib import import_module
from math import sqrt
from typing import Any

from torch import Tensor, nn

from motet.core.errors import check_input
from motet.models.arch.attention_core import ScoreOptions
from motet.models.arch.attention_marker import attend_in_seam, marked_mask
from motet.models.arch.attention_mask import AttentionMask

_NAME = "motet"
_TENSORS = ("query", "key", "value", "attention_mask")
_WITHOUT_EFFECT = {"position_ids", "cache_position", "use_cache"}  # They are about packed rows and caches


@cache
def _register() -> None:
    interface: Any = import_module("transformers").AttentionInterface
    interface.register(_NAME, attend_for_transformers)


def configs_with_core(parts: Sequence[nn.Module]) -> list[tuple[dict[str, Any], Any, Any]]:
    """(Attributes of a module, its config, a copy with the attention function) for each module of a model that
    chooses its attention by the config."""
    base: Any = import_module("transformers").PreTrainedModel
    models = [part for part in parts if isinstance(part, base)]
    if not all(getattr(model, "_supports_attention_backend", False) for model in models):
        return []
    _register()
    holders = [vars(part) for part in parts if hasattr(vars(part).get("config"), "_attn_implementation")]
    copies = deepcopy([holder["config"] for holder in holders])  # Together, since configs hold one another
    for changed in copies:
        changed._attn_implementation = _NAME
    return [(holder, holder["config"], changed) for holder, changed in zip(holders, copies, strict=True)]


def attend_for_transformers(
    module: nn.Module,
    *tensors: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [R, h, T, D], key and value in their own heads, and a mask -> [R, T, h, Dv]."""
    named = {**dict(zip(_TENSORS, tensors, strict=False)), **others}
    query, key, value, marker = (named.pop(name, None) for name in _TENSORS)
    unknown = [name for name, x in named.items() if x is not None and x is not False and name not in _WITHOUT_EFFECT]
    check_input(
        not unknown,
        f"it gives attention {', '.join(unknown)}, which motet's attention does not know; turn this off in "
        "model.arguments",
    )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    mask = AttentionMask(causal=causal) if marker is None else marked_mask(marker)
    if sliding_window is not None:
        mask = AttentionMask(causal=mask.causal, window=sliding_window)
    scale = 1 / sqrt(query.shape[-1]) if scaling is None else scaling
    options = ScoreOptions(scale, softcap, s_aux, dropout)
    output = attend_in_seam(query, key, value, mask=mask, options=options)
    return output.transpose(1, 2).contiguous(), None
