"""Dropout that does not depend on the layout: a mask depends on (seed, step, site, row), whoever computes the row.
A mode replaces every dropout of a module while it runs. A site is the index of a dropout within one forward; code
that runs a part of a forward again, such as recomputation, must restore `dropout_index`. Other random numbers follow
from (seed, step, first row): the same after resuming, but not on another layout."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from motet.core.errors import check_input
from motet.core.seeds import derive_seed


class LayoutInvariantDropoutMode(TorchFunctionMode):
    """A mode for the forward of a micro-batch: `with mode.for_rows(step, rows): ...`."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.step, self.dropout_index = seed, 0, 0
        self.rows: list[int] = []
        self.on_mask: Callable[[int, Tensor], None] | None = None  # Called with each site and its mask

    @contextmanager
    def for_rows(self, step: int, rows: Tensor) -> Iterator["LayoutInvariantDropoutMode"]:
        """`rows` [R] are the indices of the rows in the global batch of the step."""
        self.step, self.rows, self.dropout_index = step, rows.tolist(), 0
        torch.manual_seed(derive_seed(self.seed, self.step, "elsewhere", *self.rows[:1]))
        with self:
            yield self

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return (partial(_REPLACEMENTS[func], self) if func in _REPLACEMENTS else func)(*args, **(kwargs or {}))

    def apply_dropout(self, x: Tensor, p: float, mask_dims: int | None = None) -> Tensor:
        """x with elements set to 0 with probability p and the others scaled by 1 / (1 - p).
        Elements beyond the first `mask_dims` dims are kept or dropped together."""
        count, shape = len(self.rows), list(x.shape)
        check_input(
            shape and count and shape[0] % count == 0,
            f"dropout on a tensor of shape {shape}: its first dim is no multiple of the {count} rows of the "
            "micro-batch, so its mask cannot follow rows; set the dropout to 0",
        )
        shape = shape[:mask_dims] + [1] * len(shape[mask_dims:] if mask_dims else ())
        shape[0] //= count
        keep = torch.cat([self._mask(row, shape, p, device=x.device) for row in self.rows])
        if self.on_mask:
            self.on_mask(self.dropout_index, keep)
        self.dropout_index += 1
        return x * keep.to(x.dtype).mul_(0.0 if p >= 1 else 1 / (1 - p))

    def _mask(self, row: int, shape: list[int], p: float, *, device: torch.device) -> Tensor:
        generator = torch.Generator(device).manual_seed(derive_seed(self.seed, self.step, self.dropout_index, row))
        return torch.empty(shape, dtype=torch.bool, device=device).bernoulli_(1 - p, generator=generator)


_DROPOUT_LAYERS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def has_dropout(module: nn.Module, config: dict[str, Any] | None = None) -> bool:
    """Whether a dropout layer or a config value of the model is above 0."""
    layers = any(isinstance(m, _DROPOUT_LAYERS) and m.p > 0 for m in module.modules())
    return layers or bool(dropout_settings(config or {}))


def dropout_settings(config: dict[str, Any]) -> list[str]:
    """The names of a config's values for dropout that are above 0."""
    inner = [name for value in config.values() if isinstance(value, dict) for name in dropout_settings(value)]
    numbers = {str(key): value for key, value in config.items() if isinstance(value, int | float)}
    return [*inner, *(key for key, p in numbers.items() if "drop" in key and p > 0)]


# --- replacements of torch's functions, with their signatures --------------------------------------


def _dropout(
    mode: LayoutInvariantDropoutMode,
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    mask_dims: int | None = None,
) -> Tensor:
    dropped = mode.apply_dropout(input, p, mask_dims) if training and p > 0 else input
    return input.copy_(dropped) if inplace else dropped


def _attention(  # noqa: PLR0913  # the signature of what it replaces
    mode: LayoutInvariantDropoutMode,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if dropout_p == 0:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = query @ key.mT * (1 / sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    return mode.apply_dropout(scores.softmax(-1), dropout_p) @ value


def _alpha_dropout(
    mode: LayoutInvariantDropoutMode, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Tensor:
    problem = f"alpha dropout with p = {p} draws masks that do not follow rows"
    check_input(not (training and p > 0), f"{problem}; use F.dropout in its place")
    return input


def _multi_head_attention(mode: LayoutInvariantDropoutMode, *args: Any, **kwargs: Any) -> Any:
    dropout_p = kwargs.get("dropout_p", args[10] if len(args) > 10 else 0.0)
    training = kwargs.get("training", args[13] if len(args) > 13 else True)
    check_input(
        not (dropout_p > 0 and training),
        f"nn.MultiheadAttention with dropout = {dropout_p} draws masks that do not follow rows; "
        "set its dropout to 0, or use F.scaled_dot_product_attention",
    )
    return F.multi_head_attention_forward(*args, **kwargs)


_channel_dropout = partial(_dropout, mask_dims=2)  # [R, C, ...]: all elements of a channel
_REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    F.dropout: _dropout,
    torch.dropout: lambda mode, input, p, train: _dropout(mode, input, p, train),
    torch.dropout_: lambda mode, input, p, train: _dropout(mode, input, p, train, inplace=True),
    F.dropout1d: _channel_dropout,
    F.dropout2d: _channel_dropout,
    F.dropout3d: _channel_dropout,
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _multi_head_attention,
    F.alpha_dropout: _alpha_dropout,
    F.feature_alpha_dropout: _alpha_dropout,
}
