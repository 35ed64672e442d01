"""The keys and values of the tokens that a decoder has read, so that the next token costs one token's work."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from motet.models.arch.attention_mask import AttentionMask, AttentionTokens


@dataclass
class LayerCache:
    """Keys, already rotated, and values of one attention layer: [R, capacity, kv heads, D or Dv]."""

    capacity: int
    length: int = 0
    keys: Tensor | None = None
    values: Tensor | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the keys and values of further tokens [R, T, kv heads, D or Dv]; return those of all tokens."""
        if self.keys is None or self.values is None:
            self.keys, self.values = (x.new_empty(x.shape[0], self.capacity, *x.shape[2:]) for x in (keys, values))
        stop = self.length + keys.shape[1]
        self.keys[:, self.length : stop], self.values[:, self.length : stop] = keys, values
        self.length = stop
        return self.keys[:, :stop], self.values[:, :stop]


@dataclass
class KeyValueCache:
    """The caches of all layers of a decoder, for at most `capacity` tokens of a row."""

    capacity: int
    length: int = 0  # Tokens that every layer has read
    layers: dict[int, LayerCache] = field(default_factory=dict)

    def layer(self, index: int) -> LayerCache:
        return self.layers.setdefault(index, LayerCache(self.capacity))

    def places(self, count: int, device: torch.device) -> Tensor:
        """The places in the row of the next tokens."""
        return torch.arange(self.length, self.length + count, device=device)

    def mask(self, places: Tensor, window: int | None) -> AttentionMask:
        """Causal attention of the next tokens to themselves and those before."""
        hides_nothing = len(places) == 1 and (window is None or window > self.length)
        tokens = AttentionTokens(None if hides_nothing else places)
        return AttentionMask(tokens, causal=not hides_nothing, window=None if hides_nothing else window)
