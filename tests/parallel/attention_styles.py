"""Small language models with the attention layers that people write by hand, each in the style of a known project."""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class GPTConfig:
    block_size: int = 24
    vocab_size: int = 64
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 32
    dropout: float = 0.0
    bias: bool = True


class NanoAttention(nn.Module):
    """nanoGPT: the width of the input, one product for queries, keys and values, and two attributes."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        assert config.n_embd % config.n_head == 0
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.attn_dropout, self.resid_dropout = nn.Dropout(config.dropout), nn.Dropout(config.dropout)
        self.n_head, self.n_embd, self.dropout = config.n_head, config.n_embd, config.dropout

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()  # noqa: N806
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        output: Tensor = self.resid_dropout(self.c_proj(y))
        return output


class MinAttention(nn.Module):
    """minGPT: three layers, a causal mask in a buffer, and a softmax of its own."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.key, self.query = nn.Linear(config.n_embd, config.n_embd), nn.Linear(config.n_embd, config.n_embd)
        self.value, self.proj = nn.Linear(config.n_embd, config.n_embd), nn.Linear(config.n_embd, config.n_embd)
        self.attn_drop, self.resid_drop = nn.Dropout(config.dropout), nn.Dropout(config.dropout)
        mask = torch.tril(torch.ones(config.block_size, config.block_size))
        self.register_buffer("mask", mask.view(1, 1, config.block_size, config.block_size))
        self.n_head = config.n_head

    def forward(self, x: Tensor, layer_past: None = None) -> Tensor:
        B, T, C = x.size()  # noqa: N806
        k = self.key(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = self.query(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = self.value(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        assert isinstance(self.mask, Tensor)
        att = att.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf"))
        y = self.attn_drop(F.softmax(att, dim=-1)) @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        output: Tensor = self.resid_drop(self.proj(y))
        return output


class NeoXAttention(nn.Module):
    """GPT-NeoX: queries, keys and values of a head stand together; a quarter of each head turns."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_attention_heads, self.hidden_size = config.n_head, config.n_embd
        self.head_size = self.hidden_size // self.num_attention_heads
        self.rotary_ndims = self.head_size // 4
        self.norm_factor = math.sqrt(self.head_size)
        self.query_key_value = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.dense = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, hidden_states: Tensor) -> Tensor:
        qkv = self.query_key_value(hidden_states)
        qkv = qkv.view(*qkv.size()[:-1], self.num_attention_heads, 3 * self.head_size)
        query, key, value = (part.permute(0, 2, 1, 3) for part in qkv.chunk(3, -1))
        query, key = self._rotate(query), self._rotate(key)
        length = query.size(-2)
        scores = torch.matmul(query, key.transpose(-1, -2)) / self.norm_factor
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), torch.finfo(scores.dtype).min)
        context = torch.matmul(scores.softmax(-1), value).permute(0, 2, 1, 3).contiguous()
        output: Tensor = self.dense(context.view(context.size(0), context.size(1), self.hidden_size))
        return output

    def _rotate(self, x: Tensor) -> Tensor:
        turned, rest = x[..., : self.rotary_ndims], x[..., self.rotary_ndims :]
        angles = torch.arange(x.size(-2), dtype=x.dtype)[:, None] * 10.0 ** -torch.arange(
            self.rotary_ndims // 2, dtype=x.dtype
        )
        angles = torch.cat([angles, angles], -1)
        first, second = turned.chunk(2, -1)
        turned = turned * angles.cos() + torch.cat([-second, first], -1) * angles.sin()
        return torch.cat([turned, rest], -1)


class ViTAttention(nn.Module):
    """Vision transformers: one reshape to (3, heads, size of a head), and the width of the input."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads, self.scale = config.n_head, (config.n_embd // config.n_head) ** -0.5
        self.qkv, self.proj = nn.Linear(config.n_embd, 3 * config.n_embd), nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape  # noqa: N806
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4).unbind(0)
        attention = ((q * self.scale) @ k.transpose(-2, -1)).softmax(dim=-1)
        output: Tensor = self.proj((attention @ v).transpose(1, 2).reshape(B, N, C))
        return output


class GroupedAttention(nn.Module):
    """Fewer key heads than query heads, repeated, with sizes in a config and `reshape(..., -1)`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.args = SimpleNamespace(heads=config.n_head, kv_heads=config.n_head // 2)
        size = config.n_embd // config.n_head
        self.wq = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.wk = nn.Linear(config.n_embd, config.n_head // 2 * size, bias=False)
        self.wv = nn.Linear(config.n_embd, config.n_head // 2 * size, bias=False)
        self.wo = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        size = width // self.args.heads
        q = self.wq(x).view(batch, length, self.args.heads, size).transpose(1, 2)
        k = self.wk(x).view(batch, length, self.args.kv_heads, size).transpose(1, 2)
        v = self.wv(x).view(batch, length, self.args.kv_heads, size).transpose(1, 2)
        k, v = (each.repeat_interleave(self.args.heads // self.args.kv_heads, dim=1) for each in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        output: Tensor = self.wo(y.transpose(1, 2).reshape(batch, length, -1))
        return output


HEADS = 4  # A global number, which motet cannot change for one module


class GlobalAttention(NanoAttention):
    """nanoGPT's with a number of heads that is a global of the file."""

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()  # noqa: N806
        q, k, v = self.c_attn(x).chunk(3, dim=2)
        q, k, v = (each.view(B, T, HEADS, C // HEADS).transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        output: Tensor = self.c_proj(y.reshape(B, T, C))
        return output


class ChangedGlobalAttention(NanoAttention):
    """The same with the change that motet names."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.heads = HEADS

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()  # noqa: N806
        q, k, v = self.c_attn(x).chunk(3, dim=2)
        q, k, v = (each.view(B, T, self.heads, C // self.heads).transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        output: Tensor = self.c_proj(y.reshape(B, T, C))
        return output


class ReadsItsInput(NanoAttention):
    """nanoGPT's, which multiplies by something that a rank's view of the input does not have."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x.mean(-1, keepdim=True)


class ReadsOneColumn(NanoAttention):
    """A column that a rank's view of the input has as well."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x[..., :1]


class GatesWithOneColumn(NanoAttention):
    """A column that a rank's view has, whose gradient is a sum over all columns of what is multiplied."""

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()  # noqa: N806
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (each.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C)
        output: Tensor = self.c_proj(y * x[..., :1])
        return output


ATTENTIONS: dict[str, type[nn.Module]] = {
    "nanoGPT": NanoAttention,
    "minGPT": MinAttention,
    "GPT-NeoX": NeoXAttention,
    "ViT": ViTAttention,
    "grouped": GroupedAttention,
    "global": GlobalAttention,
    "changed global": ChangedGlobalAttention,
    "reads its input": ReadsItsInput,
    "reads one column": ReadsOneColumn,
    "gates with one column": GatesWithOneColumn,
}


class _Block(nn.Module):
    def __init__(self, config: GPTConfig, style: str) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(config.n_embd, bias=config.bias), ATTENTIONS[style](config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(config.n_embd, 4 * config.n_embd), "c_proj": nn.Linear(4 * config.n_embd, config.n_embd)}
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        output: Tensor = x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x))))
        return output


class GPT(nn.Module):
    """Learned positions, blocks, and a head that shares its weight with the table; it returns (logits, loss)."""

    def __init__(self, config: GPTConfig, style: str = "nanoGPT") -> None:
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "drop": nn.Dropout(config.dropout),
                "h": nn.ModuleList([_Block(config, style) for _ in range(config.n_layer)]),
                "ln_f": nn.LayerNorm(config.n_embd, bias=config.bias),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def logits(self, idx: Tensor) -> Tensor:
        _, length = idx.size()
        assert length <= self.config.block_size, f"a sequence of length {length} is too long"
        x = self.transformer["wte"](idx) + self.transformer["wpe"](torch.arange(length, device=idx.device))
        x = self.transformer["drop"](x)
        blocks = self.transformer["h"]
        assert isinstance(blocks, nn.ModuleList)
        for block in blocks:
            x = block(x)
        logits: Tensor = self.lm_head(self.transformer["ln_f"](x))
        return logits

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.logits(idx)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class LanguageModel(nn.Module):
    """The same for a job, which gives no targets and computes the loss itself; sizes are arguments."""

    def __init__(self, style: str, n_layer: int, n_head: int, n_embd: int, vocab_size: int) -> None:
        super().__init__()
        self.gpt = GPT(GPTConfig(24, vocab_size, n_layer, n_head, n_embd), style)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.gpt.logits(tokens)
