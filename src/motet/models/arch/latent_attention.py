"""DeepSeek's multi-head latent attention.

Keys and values of all heads come from one short vector of each token, and so do queries where `query_rank` is set. A
part of each key is rotated by its position; all heads share it. As in other attention layers here, the rotated
components of a head are its first ones. DeepSeek's files have them last.
"""

from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from motet.models.arch.attention_core import dot_product_attention
from motet.models.arch.attention_mask import AttentionMask
from motet.models.arch.key_value_cache import LayerCache
from motet.models.arch.layers import RMSNorm, apply_rotary
from motet.models.settings import DecoderSettings, LatentAttentionSettings


class LatentAttention(nn.Module):
    """Self-attention whose queries, and keys with values, come from short vectors."""

    tensor_parallel_plan: ClassVar = {
        "query": "columns",
        "query_up": "columns",
        "key_value_up": "columns",
        "shared_key": "copy",
        "output": "rows",
    }

    def __init__(self, s: DecoderSettings, latent: LatentAttentionSettings) -> None:
        super().__init__()
        self.latent, self.dropout = latent, s.dropout
        self.key_dim = latent.rotary_head_dim + latent.plain_head_dim
        self.scale, has_bias = self.key_dim**-0.5, s.qkv_bias or s.bias
        rank, width = latent.key_value_rank, latent.plain_head_dim + latent.value_head_dim
        if latent.query_rank is None:
            self.query = nn.Linear(s.hidden, s.heads * self.key_dim, bias=False)
        else:
            self.query_down = nn.Linear(s.hidden, latent.query_rank, bias=has_bias)
            self.query_norm = RMSNorm(latent.query_rank, s.norm_eps)
            self.query_up = nn.Linear(latent.query_rank, s.heads * self.key_dim, bias=False)
        self.key_value_down = nn.Linear(s.hidden, rank + latent.rotary_head_dim, bias=has_bias)
        self.shared_key = nn.Identity()  # Gets the part of a key that is rotated, for the heads of all ranks
        self.key_value_norm = RMSNorm(rank, s.norm_eps)
        self.key_value_up = nn.Linear(rank, s.heads * width, bias=False)
        self.output = nn.Linear(s.heads * latent.value_head_dim, s.hidden, bias=s.bias)

    def forward(self, x: Tensor, mask: AttentionMask, rotary: Tensor, *, cache: LayerCache | None = None) -> Tensor:
        """[R, T, H] -> [R, T, H]; `rotary` are the rotations of the tokens."""
        s = self.latent
        # Products that all ranks compute come before the split ones
        short, rotated = self.key_value_down(x).split((s.key_value_rank, s.rotary_head_dim), dim=-1)
        short_query = None if s.query_rank is None else self.query_norm(self.query_down(x))
        shared = apply_rotary(self.shared_key(rotated).unsqueeze(2), rotary)
        keys_values = self.key_value_up(self.key_value_norm(short))
        queries = self.query(x) if short_query is None else self.query_up(short_query)
        q = apply_rotary(queries.unflatten(-1, (-1, self.key_dim)), rotary)
        plain, v = keys_values.unflatten(-1, (-1, s.plain_head_dim + s.value_head_dim)).split(
            (s.plain_head_dim, s.value_head_dim), dim=-1
        )
        k = torch.cat((shared.expand(-1, -1, plain.shape[2], -1), plain), dim=-1)
        if cache is not None:
            k, v = cache.extend(k, v)
        dropout = self.dropout if self.training else 0.0
        return cast(Tensor, self.output(dot_product_attention(q, k, v, mask, scale=self.scale, dropout=dropout)))
