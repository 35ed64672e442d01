"""Our three architectures give the logits and gradients of transformers' own modules, in float64, weights copied."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from motet.models.arch.decoder import CausalDecoder
from motet.models.arch.encoder import BidirectionalEncoder
from motet.models.arch.encoder_decoder import EncoderDecoderModel
from motet.models.settings import DecoderSettings, EncoderDecoderSettings, EncoderSettings, RopeScalingSettings
from motet.precision.float64_mode import use_float64

transformers = pytest.importorskip("transformers")
VOCAB, LENGTH = 50, 13
Weights = dict[str, Tensor]


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    torch.manual_seed(0)
    transformers.utils.logging.set_verbosity_error()
    with use_float64():
        yield


def randomised(theirs: nn.Module) -> nn.Module:
    """Every value random, so that a bias or a norm at the wrong place shows."""
    for parameter in theirs.parameters():
        parameter.data.normal_(0, 0.2)
    return theirs.eval()


def load(ours: nn.Module, weights: Weights) -> nn.Module:
    ours.load_state_dict(weights, strict=True)
    return ours


def renamed(given: Weights, names: dict[str, str], ours: str = "", theirs: str = "") -> Weights:
    """The weight of each layer, and its bias if it has one, under our names with these prefixes."""
    pairs = [(f"{a}.{kind}", f"{theirs}{b}.{kind}") for a, b in names.items() for kind in ("weight", "bias")]
    return {f"{ours}{a}": given[b] for a, b in pairs if b in given}


def fused_rows(given: Weights, pattern: str, names: Iterable[str]) -> Tensor:
    return torch.cat([given[pattern % name] for name in names])


def agree(ours: nn.Module, theirs: nn.Module, logits: tuple[Tensor, Tensor], shared: tuple[str, str]) -> None:
    """Logits, and the gradient of a parameter that everything flows back to, to the rounding of float64."""
    mine, other = logits
    assert mine.dtype == other.dtype == torch.float64 and (mine - other).abs().max() <= 1e-12 * other.abs().max()
    weight = torch.randn_like(mine)
    (mine * weight).sum().backward()
    (other * weight).sum().backward()
    mine_grad, other_grad = ours.get_parameter(shared[0]).grad, theirs.get_parameter(shared[1]).grad
    assert mine_grad is not None and other_grad is not None
    assert (mine_grad - other_grad).norm() <= 1e-12 * other_grad.norm()


def agree_on_tokens(ours: nn.Module, theirs: nn.Module, shared: tuple[str, str], lowest: int = 0) -> None:
    tokens = torch.randint(lowest, VOCAB, (3, LENGTH))
    agree(ours, theirs, (ours(tokens), theirs(tokens).logits), shared)


def neighbours(weight: Tensor, head_dim: int, turned: int | None = None) -> Tensor:
    """Rows of a projection whose halves are turned against each other -> ours, whose neighbours are."""
    turned = turned or head_dim
    order = torch.cat((torch.arange(turned).view(2, -1).T.flatten(), torch.arange(turned, head_dim)))
    return weight.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1)


# --- decoders ----------------------------------------------------------------------------------------
def llama_weights(theirs: nn.Module, head_dim: int, values: Weights | None = None) -> Weights:
    """The values of a module of transformers, or others of its tensors such as gradients, by our names."""
    given = values or theirs.state_dict()
    names = {"embedding": "model.embed_tokens", "norm": "model.norm"}
    names |= {} if theirs.config.tie_word_embeddings else {"head": "lm_head"}
    weights = renamed(given, names)
    layers = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    layers |= {"attention.output": "self_attn.o_proj", "ffn.down": "mlp.down_proj"}
    for i in range(theirs.config.num_hidden_layers):
        theirs_i, ours_i = f"model.layers.{i}.", f"blocks.{i}."
        weights |= renamed(given, layers, ours_i, theirs_i)
        for kind in ("weight", "bias"):
            if f"{theirs_i}self_attn.k_proj.{kind}" in given:
                q, k, v = (given[f"{theirs_i}self_attn.{n}_proj.{kind}"] for n in "qkv")
                qkv = (neighbours(q, head_dim), neighbours(k, head_dim), v)
                weights[f"{ours_i}attention.qkv.{kind}"] = torch.cat(qkv)
        norms = {"attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm"}
        weights |= {n: neighbours(w, head_dim) for n, w in renamed(given, norms, ours_i, theirs_i).items()}
        if f"{theirs_i}mlp.gate_proj.weight" in given:  # And not a mixture of experts
            weights[f"{ours_i}ffn.up.weight"] = fused_rows(given, f"{theirs_i}mlp.%s_proj.weight", ("gate", "up"))
    return weights


COMMON = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
COMMON |= {"num_attention_heads": 4, "max_position_embeddings": 64}
OURS = {"vocab_size": VOCAB, "hidden": 32, "ffn_hidden": 48, "layers": 2, "heads": 4, "context": 64}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 16
LLAMA3_SETTINGS = {"rope_theta": 500.0, "rope_scaling": RopeScalingSettings(original_context=16)}


@pytest.mark.parametrize(
    ("family", "values", "more"),
    [
        ("Llama", {"rms_norm_eps": 1e-3}, {"norm_eps": 1e-3, "tied": False}),
        ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}, LLAMA3_SETTINGS),
        ("Qwen2", {"tie_word_embeddings": True}, {"qkv_bias": True}),
        ("Qwen3", {"head_dim": 10}, {"head_dim": 10, "query_key_norm": True, "tied": False}),
        ("Mistral", {"sliding_window": 4}, {"sliding_window": 4, "tied": False}),
    ],
    ids=["llama", "llama-3.1", "qwen2", "qwen3", "mistral"],
)
def test_relatives_of_llama(family: str, values: dict[str, Any], more: dict[str, Any]) -> None:
    config = getattr(transformers, f"{family}Config")(**COMMON, num_key_value_heads=2, **values)
    other = randomised(getattr(transformers, f"{family}ForCausalLM")(config))
    ours = DecoderSettings(**{**OURS, "kv_heads": 2, "norm_eps": 1e-6, **more})
    mine = load(CausalDecoder(ours), llama_weights(other, ours.dim_per_head))
    agree_on_tokens(mine, other, ("embedding.weight", "model.embed_tokens.weight"))


def test_gpt2() -> None:
    config = transformers.GPT2Config(vocab_size=VOCAB, n_positions=20, n_embd=32, n_layer=2, n_head=4, n_inner=40)
    other = randomised(transformers.GPT2LMHeadModel(config))
    given = other.state_dict()
    weights = renamed(given, {"embedding": "wte", "positions": "wpe", "norm": "ln_f"}, theirs="transformer.")
    layers = {"attention.qkv": "attn.c_attn", "attention.output": "attn.c_proj"}
    layers |= {"ffn.up": "mlp.c_fc", "ffn.down": "mlp.c_proj"}
    for i in range(2):
        theirs_i, ours_i = f"transformer.h.{i}.", f"blocks.{i}."
        linear = renamed(given, layers, ours_i, theirs_i)
        weights |= {name: value.T if name.endswith("weight") else value for name, value in linear.items()}
        weights |= renamed(given, {"attention_norm": "ln_1", "ffn_norm": "ln_2"}, ours_i, theirs_i)
    kinds = {"activation": "gelu_tanh", "norm": "layer", "positions": "learned", "gated": False, "bias": True}
    settings = DecoderSettings.model_validate({**OURS, "context": 20, "ffn_hidden": 40, **kinds})
    agree_on_tokens(load(CausalDecoder(settings), weights), other, ("positions.weight", "transformer.wpe.weight"))


def test_part_of_each_head_is_turned() -> None:
    """GPT-NeoX turns a quarter of a head. Its parallel branches are no setting of ours: only rotary is compared."""
    from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb

    from motet.models.arch.layers import RotaryEmbedding, apply_rotary

    head_dim, turned, positions = 16, 4, torch.arange(LENGTH)
    q = torch.randn(2, 3, LENGTH, head_dim)
    frequencies = 10000.0 ** -(torch.arange(0, turned, 2).double() / turned)
    angles = torch.cat((positions[:, None] * frequencies,) * 2, -1)[None]
    part, _ = apply_rotary_pos_emb(q[..., :turned], q[..., :turned], angles.cos(), angles.sin())
    theirs = torch.cat((part, q[..., turned:]), -1)
    order = neighbours(torch.arange(head_dim), head_dim, turned)
    rotations = RotaryEmbedding(turned, 10000.0).rotations_at(positions, q.dtype)
    ours = apply_rotary(q[..., order].transpose(1, 2), rotations)
    assert (ours - theirs[..., order].transpose(1, 2)).abs().max() < 1e-14


# --- encoders ----------------------------------------------------------------------------------------
BERT = {**COMMON, "max_position_embeddings": 20}
OUR_BERT = {**OURS, "context": 20}


def bert_weights(theirs: nn.Module, head: dict[str, str]) -> Weights:
    given = theirs.state_dict()
    tables = {"embedding": "word", "positions": "position", "token_types": "token_type"}
    names = {ours: f"{table}_embeddings" for ours, table in tables.items()} | {"embedding_norm": "LayerNorm"}
    weights = renamed(given, names, theirs="bert.embeddings.") | renamed(given, head)
    layers = {"attention.output": "attention.output.dense", "attention_norm": "attention.output.LayerNorm"}
    layers |= {"ffn.up": "intermediate.dense", "ffn.down": "output.dense", "ffn_norm": "output.LayerNorm"}
    for i in range(2):
        layer = f"bert.encoder.layer.{i}."
        weights |= renamed(given, layers, f"blocks.{i}.", layer)
        for kind in ("weight", "bias"):
            qkv = fused_rows(given, f"{layer}attention.self.%s.{kind}", ("query", "key", "value"))
            weights[f"blocks.{i}.attention.qkv.{kind}"] = qkv
    return weights


def test_bert_for_masked_tokens() -> None:
    other = randomised(transformers.BertForMaskedLM(transformers.BertConfig(**BERT)))
    transform = "cls.predictions.transform."
    weights = bert_weights(other, {"transform": f"{transform}dense", "transform_norm": f"{transform}LayerNorm"})
    weights["head.bias"] = other.state_dict()["cls.predictions.bias"]
    mine = load(BidirectionalEncoder(EncoderSettings(**OUR_BERT)), weights)
    tokens = torch.randint(VOCAB, (3, LENGTH))
    padding = torch.ones(3, LENGTH, dtype=torch.long)
    padding[0, 9:] = 0
    seen, documents = padding.bool(), 1 - padding  # filling is a document of its own
    logits = mine(tokens, documents=documents)[seen], other(tokens, attention_mask=padding).logits[seen]
    agree(mine, other, logits, ("positions.weight", "bert.embeddings.position_embeddings.weight"))


def test_bert_for_classes() -> None:
    other = randomised(transformers.BertForSequenceClassification(transformers.BertConfig(**BERT, num_labels=3)))
    weights = bert_weights(other, {"pooler": "bert.pooler.dense", "head": "classifier"})
    mine = load(BidirectionalEncoder(EncoderSettings(**OUR_BERT, head="classify", classes=3)), weights)
    # Theirs never trains token 0, its padding.
    agree_on_tokens(mine, other, ("embedding.weight", "bert.embeddings.word_embeddings.weight"), lowest=1)


# --- encoder-decoder ---------------------------------------------------------------------------------
def t5_weights(theirs: nn.Module, gated: bool) -> Weights:
    given = theirs.state_dict()
    is_tied = theirs.lm_head.weight is theirs.shared.weight
    weights = renamed(given, {"embedding": "shared"} | ({} if is_tied else {"head": "lm_head"}))
    up = ("wi_0", "wi_1") if gated else ("wi",)
    for stack, ffn in (("encoder", 1), ("decoder", 2)):
        relative = "block.0.layer.0.SelfAttention.relative_attention_bias"
        weights |= renamed(given, {"norm": "final_layer_norm", "relative": relative}, f"{stack}.", f"{stack}.")
        names = {"attention_norm": "0.layer_norm", "attention.output": "0.SelfAttention.o"}
        names |= {"ffn_norm": f"{ffn}.layer_norm", "ffn.down": f"{ffn}.DenseReluDense.wo"}
        if stack == "decoder":
            names |= {"cross_norm": "1.layer_norm", "cross.query": "1.EncDecAttention.q"}
            names |= {"cross.output": "1.EncDecAttention.o"}
        for i in range(2):
            theirs_i, ours_i = f"{stack}.block.{i}.layer.", f"{stack}.blocks.{i}."
            weights |= renamed(given, names, ours_i, theirs_i)
            weights[f"{ours_i}attention.qkv.weight"] = fused_rows(given, f"{theirs_i}0.SelfAttention.%s.weight", "qkv")
            weights[f"{ours_i}ffn.up.weight"] = fused_rows(given, f"{theirs_i}{ffn}.DenseReluDense.%s.weight", up)
            if stack == "decoder":
                key_value = fused_rows(given, f"{theirs_i}1.EncDecAttention.%s.weight", "kv")
                weights[f"{ours_i}cross.key_value.weight"] = key_value
    return weights


@pytest.mark.parametrize("gated", [True, False])
def test_t5(gated: bool) -> None:
    values = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 6, "d_ff": 40, "num_layers": 2, "num_heads": 4}
    values |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 11}
    values |= {"feed_forward_proj": "gated-gelu" if gated else "relu", "tie_word_embeddings": not gated}
    other = transformers.T5ForConditionalGeneration(transformers.T5Config(**values))
    if gated:  # T5 1.1: transformers shares the table all the same, and only leaves out the scaling
        other.lm_head.weight = nn.Parameter(torch.empty(VOCAB, 32))
    randomised(other)
    sizes = {**OURS, "head_dim": 6, "ffn_hidden": 40, "relative_buckets": 8, "relative_distance": 11}
    kinds = {"activation": "gelu_tanh" if gated else "relu", "gated": gated, "tied": not gated}
    mine = load(EncoderDecoderModel(EncoderDecoderSettings(**sizes, **kinds)), t5_weights(other, gated))
    source, tokens = torch.randint(VOCAB, (3, 19)), torch.randint(VOCAB, (3, LENGTH))
    logits = mine(tokens, source), other(input_ids=source, decoder_input_ids=tokens, use_cache=False).logits
    relative = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    agree(mine, other, logits, ("encoder.relative.weight", relative))
    assert math.isfinite(mine.get_parameter("embedding.weight").grad.norm())
