"""Dropout that does not depend on the layout: a mask element depends on (seed, step, site, row, index in the row).

A mode replaces every dropout of a module while it runs. The site is the block that calls the dropout and the number of
the dropout within it, so a rank that has some blocks only draws their masks, and a block that is recomputed in backward
draws its masks again. Other random numbers follow from (seed, step, first row): the same after resuming, but not on
another layout.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from motet.core.errors import check_input
from motet.core.seeds import derive_seed
from motet.models.dropout_mask import Spans, apply_mask, draw_mask, scaled_where_kept
from motet.models.hf.hf_config import dropout_settings
from motet.models.mode_in_backward import BACKWARDS, backward_in_mode
from motet.models.torch_private import is_active_mode, is_in_backward, softmax_or_zeros
from motet.models.user_module import find_blocks

# Shape of a row on this rank -> its shape in the complete model, and the spans of each dimension here.
RowSplit = Callable[[tuple[int, ...]], tuple[tuple[int, ...], Spans]]

# Set by code that splits activations over ranks. Shapes of rows are without the dimension of rows.
row_split: ContextVar[RowSplit | None] = ContextVar("row_split", default=None)


class TokenPart(NamedTuple):
    """The part of each row that a rank computes."""

    tokens: int  # Those of a whole row
    spans: Sequence[tuple[int, int]]  # (first, stop) of its places

    def in_rows(self, shape: tuple[int, ...], spans: Spans | None) -> tuple[tuple[int, ...], Spans]:
        """The shape of a whole row, and the spans of this rank, from those of its part of the row. Tokens are along the
        dimension after rows, or together with them: the proof of a layout runs parts of several lengths, so that no
        other dimension has their length by chance."""
        here, dim = sum(stop - first for first, stop in self.spans), int(shape[0] == 1)
        spans = [[(0, length)] for length in shape] if spans is None else [*spans]
        if set(shape[dim : dim + 1]) <= {1}:  # The same for all tokens
            return shape, spans
        check_input(
            shape[dim : dim + 1] == (here,),
            f"dropout on a tensor of which each row has the shape {list(shape[dim:])}, on a rank with {here} tokens of "
            "each row: masks follow tokens along the dimension after rows alone; apply dropout to [rows, tokens, ...], "
            "or set it to 0",
        )
        spans[dim] = [place for pair in spans[dim] for place in places_in_spans(self.spans, *pair)]
        return (*shape[:dim], self.tokens, *shape[dim + 1 :]), spans


def places_in_spans(spans: Sequence[tuple[int, int]], first: int, stop: int) -> Iterator[tuple[int, int]]:
    """The elements from `first` to `stop` of those in spans, which are counted one span after another."""
    start = 0
    for place, end in spans:
        low, high = max(first, start), min(stop, start + end - place)
        if low < high:
            yield place + low - start, place + high - start
        start += end - place


token_part: ContextVar[TokenPart | None] = ContextVar("token_part", default=None)
_active_mode: ContextVar["LayoutInvariantDropoutMode | None"] = ContextVar("layout_invariant_dropout", default=None)


def active_dropout_mode() -> "LayoutInvariantDropoutMode | None":
    """The mode that draws the masks of the code that runs in this thread."""
    return _active_mode.get()


def repeatable_dropout() -> Callable[[], AbstractContextManager[None]]:
    """Called before a forward: the context in which recomputation draws the masks of that forward again. Autograd may
    run the recomputation in a thread of its device, where no mode is active."""
    mode = _active_mode.get()
    return nullcontext if mode is None else partial(mode.repeat, mode.state(), row_split.get())


@dataclass
class _DropoutPlace:
    """A call of a block, or a stretch outside of blocks."""

    name: str
    calls: int = 0  # Calls of the block so far
    dropouts: int = 0  # Dropouts in this call so far


class DropoutState(NamedTuple):
    """The state that the masks of a forward depend on."""

    step: int
    rows: list[int]
    places: list[_DropoutPlace]  # The place outside of blocks, and the blocks that are running
    calls: Counter[int]  # Calls of each block so far


@dataclass(frozen=True)
class AttentionPart:
    """The part of attention probabilities [heads, tokens, tokens] of complete rows that a rank computes."""

    heads: int  # The heads of the module on this rank
    tokens: int
    local_heads: tuple[int, int]  # (first, stop) of the rank's heads among these
    queries: Sequence[tuple[int, int]]  # Spans of the rank's places; it has all keys


@dataclass(frozen=True)
class AttentionDropout:
    """The masks of the probabilities in a call of attention, of which code draws one block after another."""

    p: float
    row_keys: Sequence[int]
    shape: tuple[int, ...]  # [heads, tokens, tokens] of the complete model
    head_spans: Sequence[tuple[int, int]]  # The heads of the part, in the complete model

    @property
    def factor(self) -> float:
        """The factor of probabilities that are kept."""
        return 0.0 if self.p >= 1 else 1 / (1 - self.p)

    def keep(
        self,
        heads: tuple[int, int],
        queries: Sequence[tuple[int, int]],
        keys: tuple[int, int],
        *,
        device: torch.device,
    ) -> Tensor:
        """[rows, heads, queries, keys], for heads counted from the first of the part and spans of places."""
        spans = [[*places_in_spans(self.head_spans, *heads)], queries, [keys]]
        return draw_mask(self.row_keys, self.shape, self.p, spans=spans, device=device)


class LayoutInvariantDropoutMode(TorchFunctionMode):
    """A mode for a micro-batch: `with mode.for_rows(step, rows): ...` around its forward and its backward.

    A block that is called several times in the forward draws another mask each time. Recomputation is a forward inside
    of a backward, and draws the masks of the forward again. Without `repeatable_dropout`, it must consist of whole
    blocks that are called once.
    """

    def __init__(self, seed: int, module: nn.Module | None = None) -> None:
        super().__init__()
        self.seed, self.step = seed, 0
        self.rows: list[int] = []
        # Called with each site, its mask, and what `row_split` returned where ranks split its rows.
        self.on_mask: Callable[[str, Tensor, tuple[tuple[int, ...], Spans] | None], None] | None = None
        self.on_recomputed_mask: Callable[[str, Tensor], None] | None = None  # Called with masks drawn in backward
        self._blocks = find_blocks(module) if module is not None else []
        self._places: list[_DropoutPlace] = []  # The place outside of blocks, and the blocks that are running
        self._calls: Counter[int] = Counter()
        self._is_repeating = False  # A forward whose state is known

    def state(self) -> DropoutState:
        """A copy of the state that the next masks depend on."""
        return DropoutState(self.step, self.rows, [replace(place) for place in self._places], self._calls.copy())

    @contextmanager
    def repeat(self, state: DropoutState, split: RowSplit | None) -> Iterator[None]:
        """Draw the masks that followed a state, in any thread."""
        before, was_repeating = DropoutState(self.step, self.rows, self._places, self._calls), self._is_repeating
        self.step, self.rows, self._places, self._calls = state.step, state.rows, [*state.places], state.calls.copy()
        self._is_repeating = True
        active, outer_split = _active_mode.set(self), row_split.set(split)
        try:
            with nullcontext() if is_active_mode(self) else self:
                yield
        finally:
            row_split.reset(outer_split)
            _active_mode.reset(active)
            (self.step, self.rows, self._places, self._calls), self._is_repeating = before, was_repeating

    @contextmanager
    def for_rows(self, step: int, rows: Tensor) -> Iterator["LayoutInvariantDropoutMode"]:
        """`rows` [R] are the indices of the rows in the global batch of the step."""
        self.step, self.rows = step, rows.tolist()
        self._places, self._calls = [_DropoutPlace("before the blocks")], Counter()
        row_split.set(None)  # Recomputation may have set it
        torch.manual_seed(derive_seed(self.seed, self.step, "elsewhere", *self.rows[:1]))
        # A device's thread of autograd would not have the mode: recomputation by the user's own code needs it, too.
        with self, torch.autograd.set_multithreading_enabled(False), ExitStack() as hooks:
            hooks.callback(_active_mode.reset, _active_mode.set(self))
            for block_id, block in enumerate(self._blocks):
                hooks.callback(block.register_forward_pre_hook(partial(self._enter_block, block_id)).remove)
                # Also called when recomputation stops inside of the block, which is an exception.
                hooks.callback(block.register_forward_hook(self._leave_block, always_call=True).remove)
            yield self

    def _enter_block(self, block_id: int, *_: Any) -> None:
        self._calls[block_id] += self._is_repeating or not is_in_backward()
        calls = self._calls[block_id]
        self._places.append(_DropoutPlace(f"block {block_id}" + (f" (call {calls})" if calls > 1 else ""), calls))

    def _leave_block(self, *_: Any) -> None:
        left = self._places.pop()
        if len(self._places) == 1 and not is_in_backward():
            self._places[0] = _DropoutPlace(f"after {left.name}")

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
            f"dropout on a tensor of shape {shape}: its first dim is not a multiple of the {count} rows of the "
            "micro-batch, so its mask cannot follow rows; set the dropout to 0",
        )
        shape = shape[:mask_dims] + [1] * len(shape[mask_dims:] if mask_dims else ())
        row_shape, spans = (shape[0] // count, *shape[1:]), None
        if split := row_split.get():
            row_shape, spans = split(row_shape)
        if part := token_part.get():
            row_shape, spans = part.in_rows(row_shape, spans)
        site = self._next_site()
        keys = [derive_seed(self.seed, self.step, site, row) for row in self.rows]
        if shape == list(x.shape) and not (self.on_mask or self.on_recomputed_mask):
            return apply_mask(x, keys, row_shape, p=p, spans=spans)
        keep = draw_mask(keys, row_shape, p, spans=spans, device=x.device).view(shape)
        if self.on_mask and not is_in_backward():
            self.on_mask(site, keep, None if spans is None else (row_shape, spans))
        if self.on_recomputed_mask and is_in_backward():
            self.on_recomputed_mask(site, keep)
        return scaled_where_kept(x, keep, p)

    def attention_dropout(self, p: float, part: AttentionPart, device: torch.device) -> AttentionDropout:
        """The masks of the next site, for attention probabilities of which this rank computes a part."""
        row_shape: tuple[int, ...] = part.heads, part.tokens, part.tokens
        spans: Spans | None = None
        if split := row_split.get():
            row_shape, spans = split(row_shape)
        head_spans = [*places_in_spans([(0, part.heads)] if spans is None else spans[0], *part.local_heads)]
        site = self._next_site()
        keys = [derive_seed(self.seed, self.step, site, row) for row in self.rows]
        dropout = AttentionDropout(p, keys, tuple(row_shape), head_spans)
        if self.on_mask or self.on_recomputed_mask:
            all_heads = (0, part.local_heads[1] - part.local_heads[0])
            keep = dropout.keep(all_heads, part.queries, (0, part.tokens), device=device)
            if self.on_mask and not is_in_backward():
                self.on_mask(site, keep, (row_shape, [head_spans, part.queries, [(0, part.tokens)]]))
            if self.on_recomputed_mask and is_in_backward():
                self.on_recomputed_mask(site, keep)
        return dropout

    def _next_site(self) -> str:
        place = self._places[-1]
        check_input(
            len(self._places) > 1 or not is_in_backward(),
            "a dropout is recomputed in backward outside of the model's blocks or with a part of a block, where its "
            "place in the forward is not known; recompute whole blocks (items of an nn.ModuleList that are not "
            "nn.Sequential and share no parameters), or set the dropout to 0",
        )
        check_input(
            place.calls <= 1 or self._is_repeating or not is_in_backward(),
            f"a dropout of a block that was called {place.calls} times in the forward is recomputed in backward, where "
            "it is not known which call that repeats; set the dropout to 0, or do not recompute this block",
        )
        place.dropouts += 1
        return f"{place.name} dropout {place.dropouts}"


_DROPOUT_LAYERS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def has_dropout(module: nn.Module, config: dict[str, Any] | None = None) -> bool:
    """Whether a dropout layer or a config value of the model is above 0."""
    layers = any(isinstance(m, _DROPOUT_LAYERS) and m.p > 0 for m in module.modules())
    return layers or bool(dropout_settings(config or {}))


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
    every_query_sees_a_key = attn_mask is None or is_causal
    probabilities = scores.softmax(-1) if every_query_sees_a_key else softmax_or_zeros(scores)
    return mode.apply_dropout(probabilities, dropout_p) @ value


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
    **dict.fromkeys(BACKWARDS, backward_in_mode),
}
