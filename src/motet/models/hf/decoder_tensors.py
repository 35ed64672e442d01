"""The tensors of motet's decoder and those of a folder of Hugging Face: one description, read in both directions.

motet joins projections that read the same input, turns neighbouring components of a head by a rotary angle where
transformers turns its halves, and stores each weight as [out, in], which GPT-2 does not. Nothing here imports torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from motet.models.settings import AdapterSettings, DecoderSettings
from motet.models.spec.model_spec import spec_from_settings

Shape = tuple[int, ...]
LORA_PARTS = {"adapter_a": "lora_A.weight", "adapter_b": "lora_B.weight"}


@dataclass(frozen=True)
class FolderPart:
    """A tensor of a folder: some rows of a tensor of motet's decoder, perhaps in another order or transposed."""

    name: str
    first_row: int
    rows: int
    columns: Shape  # Sizes of the other dimensions
    head_dim: int | None = None  # Rows are heads of this size, whose halves are motet's neighbours
    is_transposed: bool = False

    @property
    def shape(self) -> Shape:
        """The shape in the folder."""
        return (*self.columns, self.rows) if self.is_transposed else (self.rows, *self.columns)


@dataclass(frozen=True)
class _Slice:
    """A module of the folder that computes some outputs of a module of motet; all if `rows` is None."""

    name: str
    rows: int | None = None
    head_dim: int | None = None


@dataclass(frozen=True)
class DecoderTensors:
    """All tensors of a decoder: name in motet -> the tensors of the folder that hold its rows, in order."""

    parts: dict[str, tuple[FolderPart, ...]]

    def in_folder(self) -> Iterator[tuple[str, FolderPart]]:
        """Each tensor of the folder, with the name of motet's tensor that it is a part of."""
        for name, parts in self.parts.items():
            yield from ((name, part) for part in parts)


def map_decoder_tensors(settings: DecoderSettings, model_type: str) -> DecoderTensors:
    """The tensors of a decoder with these settings, and those of a folder of this `model_type`."""
    blocks = spec_from_settings(settings).blocks
    parameters = (p for block in blocks for repetition in block.parameters_by_repetition() for p in repetition)
    modules = _modules(settings, model_type)
    return DecoderTensors({p.name: tuple(_parts(p.name, p.shape, modules)) for p in parameters})


def is_adapter(name: str) -> bool:
    """Whether a parameter was added by an adapter."""
    return name.rpartition(".")[2] in LORA_PARTS


def _parts(name: str, shape: Shape, modules: "_Modules") -> Iterator[FolderPart]:
    module, _, kind = name.rpartition(".")
    block, _, inner = module.partition(".")[2].partition(".") if module.startswith("blocks.") else ("", "", module)
    prefix, first = modules.block_prefix.format(i=block) if block else "", 0
    for piece in modules.by_name[inner]:
        full_name = f"{prefix}{piece.name}.{LORA_PARTS.get(kind, kind)}"
        if kind == "adapter_a":  # Projections that motet joins share it
            yield FolderPart(full_name, 0, shape[0], shape[1:])
            continue
        rows = shape[0] if piece.rows is None else piece.rows
        is_transposed = modules.has_transposed_weights and kind == "weight" and inner in _LINEAR
        yield FolderPart(full_name, first, rows, shape[1:], piece.head_dim, is_transposed)
        first += rows


@dataclass(frozen=True)
class _Modules:
    block_prefix: str
    by_name: Mapping[str, Sequence[_Slice]]
    has_transposed_weights: bool = False


_LINEAR = ("attention.qkv", "attention.output", "ffn.up", "ffn.down")
_GPT2_MODULES = {
    "embedding": "transformer.wte",
    "positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn.up": "mlp.c_fc",
    "ffn.down": "mlp.c_proj",
}
_LLAMA_MODULES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "attention.output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.down": "mlp.down_proj",
}


def _modules(s: DecoderSettings, model_type: str) -> _Modules:
    if model_type == "gpt2":
        by_name = {name: [_Slice(theirs)] for name, theirs in _GPT2_MODULES.items()}
        return _Modules("transformer.h.{i}.", by_name, has_transposed_weights=True)
    head_dim, kv_rows = s.dim_per_head, (s.kv_heads or s.heads) * s.dim_per_head
    joined = {
        "attention.qkv": [
            _Slice("self_attn.q_proj", s.heads * head_dim, head_dim),
            _Slice("self_attn.k_proj", kv_rows, head_dim),
            _Slice("self_attn.v_proj", kv_rows),
        ],
        "attention.query_norm": [_Slice("self_attn.q_norm", head_dim, head_dim)],
        "attention.key_norm": [_Slice("self_attn.k_norm", head_dim, head_dim)],
        "ffn.up": [_Slice("mlp.gate_proj", s.ffn_hidden), _Slice("mlp.up_proj", s.ffn_hidden)],
    }
    plain = {name: [_Slice(theirs)] for name, theirs in _LLAMA_MODULES.items()}
    return _Modules("model.layers.{i}.", plain | joined)


def adaptable_modules(settings: DecoderSettings, model_type: str) -> list[str]:
    """The modules of the folder that adapters of motet's decoder can be on."""
    adapted = settings.model_copy(update={"adapters": AdapterSettings(rank=1), "frozen": ()})
    ending = f".{LORA_PARTS['adapter_a']}"
    names = (part.name for _, part in map_decoder_tensors(adapted, model_type).in_folder())
    return [name.removesuffix(ending) for name in names if name.endswith(ending)]
