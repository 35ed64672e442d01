"""Smaller sizes of a model with the same structure, from its settings or from a config of Hugging Face.

A number of ranks divides a size of the small model if and only if it divides that size of the large one, the widths of
fused products included. Key heads stay fewer than query heads where they are, layers of several kinds keep one of each,
and sizes that differ stay different, so that no two dimensions are confused.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from motet.models.settings import (
    DecoderSettings,
    LatentAttentionSettings,
    MixtureOfExpertsSettings,
    TransformerSettings,
)

_LAYER_KEYS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "layers"),
    *("num_decoder_layers", "decoder_layers"),
)
_HEAD_KEYS = (
    *("num_attention_heads", "n_head", "n_heads", "num_heads", "heads"),
    *("encoder_attention_heads", "decoder_attention_heads"),
)
_KV_HEAD_KEYS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
_HIDDEN_KEYS = ("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim", "hidden", "width")
_HEAD_DIM_KEYS = ("head_dim", "d_kv")
_FFN_KEYS = (
    *("intermediate_size", "n_inner", "d_ff", "hidden_dim", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"),
    *("ffn_hidden", "ffn_hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
)
_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk")
_ENTRY_KEYS = ("vocab_size",)
_ROTARY_KEYS = ("rotary_dim",)
_SHRUNK_KEYS = {
    *(*_LAYER_KEYS, *_HEAD_KEYS, *_KV_HEAD_KEYS, *_HIDDEN_KEYS),
    *(*_HEAD_DIM_KEYS, *_FFN_KEYS, *_ENTRY_KEYS, *_ROTARY_KEYS, *_EXPERT_KEYS),
}

_MOST_HEAD_DIMS = 16  # Sizes of a head that are tried, besides that of the model


@dataclass(frozen=True)
class SmallSizes:
    """Limits of a smaller model, from which its sizes follow."""

    blocks: int = 2  # Blocks of each list, or one of each kind
    degree: int = 4  # Ranks that divide a small size if and only if they divide the large one
    large_degree: int | None = None  # Ranks that divide the large size, if they are more than `degree`
    units_per_rank: int = 1  # Heads of one rank, if the model has that many
    head_dim: int = 16  # The largest size of a head
    entries: int | None = None  # The fewest entries of the vocabulary; None: all of them
    window: int | None = None  # Tokens that a sliding window shows; None: as many as before
    avoided: Collection[int] = ()  # Sizes that no dimension should have

    def shrink_settings(self, model: TransformerSettings) -> dict[str, Any]:
        """The smaller sizes of one of motet's architectures, by the names of its settings."""
        rotated = 2 / getattr(model, "rotary_fraction", 1.0)
        kv_heads = getattr(model, "kv_heads", None)
        small = _Widths(
            self,
            model.heads,
            (kv_heads or model.heads,),
            head_dim=model.dim_per_head,
            head_unit=math.ceil(rotated / 2) * 2,
        )
        is_square = model.hidden == model.heads * model.dim_per_head
        hidden = small.heads * small.head_dim if is_square else small.width_of_heads(model.hidden)
        sizes: dict[str, Any] = {
            "layers": min(model.layers, self.blocks),
            "heads": small.heads,
            "hidden": small.take(hidden),
            "ffn_hidden": small.width(model.ffn_hidden, model.ffn_hidden * hidden / model.hidden),
        }
        if model.head_dim is not None or not is_square:
            sizes["head_dim"] = small.head_dim
        if kv_heads is not None:
            sizes["kv_heads"] = small.kv_heads[kv_heads]
        for name, limit in {"sliding_window": self.window, "decoder_layers": self.blocks}.items():
            if limit is not None and (size := getattr(model, name, None)) is not None:
                sizes[name] = min(size, limit)
        if self.entries is not None:
            sizes["vocab_size"] = small.width(model.vocab_size, self.entries, keeps_remainder=True)
        if isinstance(model, DecoderSettings):
            if model.experts is not None:
                sizes["experts"] = _smaller_experts(model.experts, small, sizes).model_dump()
            if model.latent_attention is not None:
                latent = _smaller_latent_attention(model.latent_attention, small, sizes["hidden"])
                sizes["latent_attention"] = latent.model_dump()
        return sizes

    def shrink_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The smaller sizes of a config of Hugging Face, or of the arguments of a function, by their names."""
        present = {name: value for name, value in config.items() if value}
        small = self._fewer_layers(present)
        if "sliding_window" in present and self.window is not None:
            small["sliding_window"] = min(present["sliding_window"], self.window)
        heads, hidden = _first_integer(present, _HEAD_KEYS), _first_integer(present, _HIDDEN_KEYS)
        if hidden:
            small |= self._smaller_widths(present, heads or 1, hidden)
        if "vocab_size" in small:
            small |= _tokens_below(small["vocab_size"], config)
        return small

    def shrink_entries(self, arguments: Mapping[str, Any]) -> dict[str, int]:
        """Fewer entries of a vocabulary, and nothing else, in the arguments of a function."""
        kept, unit = {size for size in arguments.values() if type(size) is int}, math.lcm(self.degree, 8)
        first, small = self.entries or 0, dict[str, int]()
        for name in (name for name in _ENTRY_KEYS if type(arguments.get(name)) is int and self.entries is not None):
            size = arguments[name]
            alike = (few for few in range(first + (size - first) % unit, size, unit) if few not in kept)
            small[name] = next(alike, size)
        return small

    def _smaller_widths(self, present: Mapping[str, Any], heads: int, hidden: int) -> dict[str, Any]:
        kv_heads = tuple(_integers(present, _KV_HEAD_KEYS).values()) or (heads,)
        per_head = _first_integer(present, _HEAD_DIM_KEYS) or hidden // heads
        kept = {size for name, size in present.items() if _is_kept_size(name) and type(size) is int}
        sizes = replace(self, avoided={*self.avoided, *kept})
        widths = _Widths(sizes, heads, kv_heads, head_dim=per_head, head_unit=_rotated_unit(present, per_head))
        if heads == 1:
            new_hidden = widths.width(hidden, max(4, self.degree) * self.head_dim)
        elif hidden == heads * per_head:
            new_hidden = widths.take(widths.heads * widths.head_dim)
        else:
            new_hidden = widths.width_of_heads(hidden)
        scale = new_hidden / hidden
        small: dict[str, Any] = {
            name: widths.heads if count == heads else widths.other_heads(count, hidden, new_hidden)
            for name, count in _integers(present, _HEAD_KEYS).items()
        }
        small |= {name: widths.kv_heads[count] for name, count in _integers(present, _KV_HEAD_KEYS).items()}
        head_dims = _integers(present, _HEAD_DIM_KEYS)
        small |= {name: widths.head_dim for name, size in head_dims.items() if size == per_head}
        for name in (name for name in _HIDDEN_KEYS if name in present):
            size = present[name]
            small[name] = new_hidden if size == hidden else widths.width(size, size * scale)
        per_token = _first_integer(present, _EXPERTS_PER_TOKEN_KEYS)
        largest = new_hidden // 4 if per_token else 4 * new_hidden  # There are many experts
        for name in (name for name in _FFN_KEYS if name in present):
            small[name] = _per_layer(present[name], lambda size: widths.width(size, min(size * scale, largest)))
        for name in (name for name in _EXPERT_KEYS if name in present and present.get("n_group", 1) == 1):
            small[name] = widths.width(present[name], 2 * per_token) if per_token else present[name]
        for name in (name for name in _ROTARY_KEYS if name in present):
            small[name] = max(2, widths.head_dim * present[name] // per_head // 2 * 2)
        for name in (name for name in _ENTRY_KEYS if name in present and self.entries is not None):
            small[name] = widths.width(present[name], self.entries or 0, keeps_remainder=True)
        return {name: size for name, size in small.items() if name in present}

    def _fewer_layers(self, present: Mapping[str, Any]) -> dict[str, Any]:
        """Numbers of layers, and lists with an entry for each layer."""
        kinds = present.get("layer_types", [])
        layers = max(self.blocks, 1 + max((kinds.index(kind) for kind in set(kinds)), default=0))  # One of each kind
        counts = _integers(present, _LAYER_KEYS)
        small: dict[str, Any] = {name: min(count, layers) for name, count in counts.items()}
        for name, value in present.items():
            if isinstance(value, list) and len(value) in counts.values() and len(value) > layers:
                small[name] = value[:layers]
        if "attention_types" in present:  # [[kinds of layers, how often they repeat], ...]
            period = sum(len(names) for names, _ in present["attention_types"])
            repeats = max(1, max((small[name] for name in counts), default=layers) // period)
            small["attention_types"] = [[names, repeats] for names, _ in present["attention_types"]]
            small |= dict.fromkeys(counts, repeats * period)
            if "attention_layers" in present:  # The kind of each layer
                small["attention_layers"] = present["attention_layers"][: repeats * period]
        return small


def _smaller_experts(
    experts: MixtureOfExpertsSettings, small: "_Widths", sizes: Mapping[str, Any]
) -> MixtureOfExpertsSettings:
    """Fewer and narrower experts: a token leaves at least every second one of its groups, and each kind of layer
    stays."""
    in_groups = 2 * experts.per_token * experts.groups / (experts.groups_per_token or experts.groups)
    return experts.model_copy(
        update={
            "count": small.width(experts.count, in_groups, step=experts.groups),
            "hidden": small.width(experts.hidden, sizes["hidden"] / 4),
            "first_dense_layers": min(experts.first_dense_layers, sizes["layers"] - 1),
        }
    )


def _smaller_latent_attention(
    latent: LatentAttentionSettings, small: "_Widths", hidden: int
) -> LatentAttentionSettings:
    """Short vectors, and small parts of heads; equal parts stay equal. A size of a head is that of no vector."""
    plain, rank = small.width(latent.plain_head_dim, 8), latent.query_rank
    rotary = small.width(latent.rotary_head_dim, 8, plus=plain)
    is_plain = latent.value_head_dim == latent.plain_head_dim
    return latent.model_copy(
        update={
            "plain_head_dim": plain,
            "rotary_head_dim": rotary,
            "value_head_dim": plain if is_plain else small.width(latent.value_head_dim, 8),
            "query_rank": rank and small.width(rank, hidden / 2),
            "key_value_rank": small.width(latent.key_value_rank, hidden / 4, plus=rotary),
        }
    )


def shrink_heads(heads: int, kv_heads: int, sizes: SmallSizes) -> tuple[int, int]:
    """The fewest query and key heads that ranks divide or share as before, with several on a rank if it had several;
    as many as before if no fewer are alike."""
    few, few_keys = next(_fewer_heads(heads, (kv_heads,), sizes), (heads, {kv_heads: kv_heads}))
    return few, few_keys[kv_heads]


def _fewer_heads(heads: int, kv_heads: Collection[int], sizes: SmallSizes) -> Iterator[tuple[int, dict[int, int]]]:
    """Numbers of heads that are alike, each with the numbers that stand for those of key heads; small ones first."""
    kinds = tuple(dict.fromkeys(kv_heads))
    keys = [[n for n in range(1, kind + 1) if _are_heads_like(n, kind, sizes)] for kind in kinds]
    for few in (n for n in range(1, heads + 1) if _are_heads_like(n, heads, sizes)):
        for few_keys in product(*keys):
            pairs = list(zip(few_keys, kinds, strict=True))
            same_ratios = all(
                (few == n, few % n == 0, few < n) == (heads == kind, heads % kind == 0, heads < kind)
                for n, kind in pairs
            )
            if same_ratios and len(set(few_keys)) == len(kinds):
                yield few, {kind: n for n, kind in pairs}


def _are_heads_like(few: int, heads: int, sizes: SmallSizes) -> bool:
    """Whether ranks divide or share few heads as they do `heads`, and have several of both or of neither.

    Position biases of heads (ALiBi) are computed in another way for numbers that are not powers of two.
    """
    degree, large_degree = sizes.degree, sizes.large_degree or sizes.degree
    if (few == 1, _is_power_of_two(few)) != (heads == 1, _is_power_of_two(heads)):
        return False
    if heads < large_degree:  # Ranks share heads, or cannot
        return few < degree and (degree % few == 0) == (large_degree % heads == 0)
    least = degree if heads % large_degree else degree * min(sizes.units_per_rank, heads // large_degree)
    return few >= least and math.gcd(few, degree) * large_degree == math.gcd(heads, large_degree) * degree


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


@dataclass
class _Widths:
    """Small widths that differ from each other."""

    sizes: SmallSizes
    large_heads: int
    large_kv_heads: Collection[int]
    head_dim: int
    head_unit: int  # The size of a head is a multiple of it
    taken: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        large = self.large_heads * self.head_dim
        self.heads, self.kv_heads, self.head_dim = self._least_heads()
        self.taken = {*self.sizes.avoided, *self._numbers_of(self.heads, self.kv_heads)}
        self.take(self.head_dim)
        self.scale = self.heads * self.head_dim / large
        self.taken |= {count * self.head_dim for count in (self.heads, *self.kv_heads.values())}

    def _least_heads(self) -> tuple[int, dict[int, int], int]:
        """The numbers of heads and of key heads, and the size of a head, whose width is the least that is alike."""
        unit = math.lcm(8, self.head_unit)
        small = min(self.head_dim, self.sizes.head_dim)
        fewer = range(max(unit, small - small % unit), self.head_dim, unit)
        dims = [*fewer[:_MOST_HEAD_DIMS], self.head_dim]
        options = product(_fewer_heads(self.large_heads, self.large_kv_heads, self.sizes), dims)

        def order(option: tuple[tuple[int, dict[int, int]], int]) -> tuple[int, int]:
            (heads, kv_heads), head_dim = option
            return len({heads, *kv_heads.values()}.intersection(self.sizes.avoided)), heads * head_dim

        for (heads, kv_heads), head_dim in sorted(options, key=order):
            if self._are_alike(heads, kv_heads, head_dim):
                return heads, kv_heads, head_dim
        if self.sizes.large_degree not in (None, self.sizes.degree):
            raise ValueError(f"no fewer than {self.large_heads} heads of {self.head_dim} elements are alike")
        return self.large_heads, {count: count for count in self.large_kv_heads}, self.head_dim

    def _are_alike(self, heads: int, kv_heads: Mapping[int, int], head_dim: int) -> bool:
        """Whether ranks divide the widths of heads, and of products that have queries, keys and values, as before."""
        sums = [(heads, self.large_heads)]
        for kind, few in kv_heads.items():
            sums += [(few, kind), (heads + 2 * few, self.large_heads + 2 * kind)]
            if kind == self.large_heads:  # A flag may make them one
                sums.append((heads + 2, self.large_heads + 2))
        taken = {*self.sizes.avoided, *self._numbers_of(heads, kv_heads)}
        widths = {head_dim, heads * head_dim, *(n * head_dim for n in kv_heads.values())}
        return taken.isdisjoint(widths) and all(
            math.gcd(few * head_dim, self.sizes.degree) == math.gcd(count * self.head_dim, self.sizes.degree)
            for few, count in sums
        )

    @staticmethod
    def _numbers_of(heads: int, kv_heads: Mapping[int, int]) -> set[int]:
        return {heads, *kv_heads.values(), *(heads // count for count in kv_heads.values())}

    def other_heads(self, count: int, hidden: int, new_hidden: int) -> int:
        """Fewer heads where another part of the model has another number of them."""
        alike = (n for n in range(2, count + 1) if _are_heads_like(n, count, self.sizes) and n != self.heads)
        few = next((n for n in alike if (new_hidden % n == 0) == (hidden % count == 0)), None)
        if few is None:
            raise ValueError(f"no fewer heads are alike to the {self.large_heads} and {count} of its parts")
        return few

    def take(self, size: int) -> int:
        """Let no other width be this one."""
        self.taken |= {size, 2 * size, 3 * size}
        return size

    def width_of_heads(self, size: int) -> int:
        """The hidden width where it is not that of the heads; the heads divide it if they did."""
        step = self.heads if size % self.large_heads == 0 else 1
        return self.width(size, self.scale * size, step=step)

    def width(self, size: int, target: float, *, keeps_remainder: bool = False, step: int = 1, plus: int = 0) -> int:
        """A width of about `target`, which ranks divide as they did, and which is a multiple of 8 if it was. No other
        width is its sum with `plus`."""
        unit = math.lcm(self.sizes.degree, 8)
        first = math.ceil(max(8, math.ceil(target)) / step) * step
        for small in range(first, min(size, first + 64 * unit * step), step):
            same = small % unit == size % unit if keeps_remainder else self._is_like(small, size)
            if same and self.taken.isdisjoint({small, small + plus}):
                self.take(small + plus)
                return self.take(small)
        return size

    def _is_like(self, small: int, size: int) -> bool:
        degree = self.sizes.degree
        return math.gcd(small, degree) == math.gcd(size, degree) and math.gcd(small, 8) == math.gcd(size, 8)


def _is_kept_size(name: str) -> bool:
    """Whether a name is that of another size, such as a number of buckets or of experts."""
    is_size = name.startswith("n_") or any(word in name for word in ("size", "dim", "num_", "rank", "position"))
    return is_size and name not in _SHRUNK_KEYS


def _integers(config: Mapping[str, Any], names: Collection[str]) -> dict[str, int]:
    return {name: config[name] for name in names if type(config.get(name)) is int}


def _first_integer(config: Mapping[str, Any], names: Collection[str]) -> int | None:
    return next(iter(_integers(config, names).values()), None)


def _per_layer(size: Any, shrink: Any) -> Any:
    """A width, or a list with one for each layer."""
    if isinstance(size, list):
        small = {each: shrink(each) for each in dict.fromkeys(size)}
        return [small[each] for each in size]
    return shrink(size) if type(size) is int else size


def _rotated_unit(config: Mapping[str, Any], per_head: int) -> int:
    """The unit of a head's size with which an even number of elements is rotated."""
    rotary = config.get("rotary_dim")
    fraction = rotary / per_head if rotary else config.get("partial_rotary_factor") or config.get("rotary_pct") or 1.0
    return math.ceil(2 / fraction / 2) * 2


def _tokens_below(entries: int, config: Mapping[str, Any]) -> dict[str, int]:
    """Replacements in the smaller vocabulary for special tokens that lie beyond it."""
    tokens = {n: v for n, v in config.items() if n.endswith("_token_id") and type(v) is int and v >= entries}
    return {name: value % entries for name, value in tokens.items()}
