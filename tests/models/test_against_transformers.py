"""Our three architectures give the logits and gradients of transformers' own modules, in float64, weights copied."""

import math
from collections.abc import Callable, Iterator
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
    """All of them, and no others."""
    ours.load_state_dict(weights, strict=True)
    return ours


def agree(
    ours: nn.Module, theirs: nn.Module, call: Callable[[], tuple[Tensor, Tensor]], shared: tuple[str, str]
) -> None:
    """Logits, and the gradient of a parameter that everything flows back to, to the rounding of float64."""
    mine, other = call()
    assert mine.dtype == other.dtype == torch.float64
    assert (mine - other).abs().max() <= 1e-12 * other.abs().max()
    weight = torch.randn_like(mine)
    (mine * weight).sum().backward()
    (other * weight).sum().backward()
    mine_grad, other_grad = ours.get_parameter(shared[0]).grad, theirs.get_parameter(shared[1]).grad
    assert mine_grad is not None and other_grad is not None
    assert (mine_grad - other_grad).norm() <= 1e-12 * other_grad.norm()


def agree_on_tokens(ours: nn.Module, theirs: nn.Module, shared: tuple[str, str], lowest: int = 0) -> None:
    tokens = torch.randint(lowest, VOCAB, (3, LENGTH))
    agree(ours, theirs, lambda: (ours(tokens), theirs(tokens).logits), shared)


def neighbours(weight: Tensor, head_dim: int, turned: int | None = None) -> Tensor:
    """Rows of a projection whose halves are turned against each other -> ours, whose neighbours are."""
    turned = turned or head_dim
    order = torch.arange(turned).view(2, -1).T.flatten()
    order = torch.cat((order, torch.arange(turned, head_dim)))
    return weight.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1)


# --- decoders ----------------------------------------------------------------------------------------


def llama_weights(theirs: nn.Module, head_dim: int, head_norms: bool = False) -> Weights:
    """Weights of Llama, Qwen and Mistral."""
    given = theirs.state_dict()
    weights = {"embedding.weight": given["model.embed_tokens.weight"], "norm.weight": given["model.norm.weight"]}
    if not theirs.config.tie_word_embeddings:
        weights["head.weight"] = given["lm_head.weight"]
    for i in range(theirs.config.num_hidden_layers):
        theirs_i, ours_i = f"model.layers.{i}.", f"blocks.{i}."
        for kind in ("weight", "bias"):
            if f"{theirs_i}self_attn.q_proj.{kind}" in given:
                q, k, v = (given[f"{theirs_i}self_attn.{n}_proj.{kind}"] for n in "qkv")
                fused = torch.cat((neighbours(q, head_dim), neighbours(k, head_dim), v))
                weights[f"{ours_i}attention.qkv.{kind}"] = fused
        if head_norms:
            for n, ours in (("q", "query"), ("k", "key")):
                norm = given[f"{theirs_i}self_attn.{n}_norm.weight"]
                weights[f"{ours_i}attention.{ours}_norm.weight"] = neighbours(norm, head_dim)
        weights[f"{ours_i}attention.output.weight"] = given[f"{theirs_i}self_attn.o_proj.weight"]
        weights[f"{ours_i}attention_norm.weight"] = given[f"{theirs_i}input_layernorm.weight"]
        weights[f"{ours_i}ffn_norm.weight"] = given[f"{theirs_i}post_attention_layernorm.weight"]
        gate_up = [given[f"{theirs_i}mlp.{n}_proj.weight"] for n in ("gate", "up")]
        weights[f"{ours_i}ffn.up.weight"] = torch.cat(gate_up)
        weights[f"{ours_i}ffn.down.weight"] = given[f"{theirs_i}mlp.down_proj.weight"]
    return weights


COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
OURS = {"vocab_size": VOCAB, "hidden": 32, "ffn_hidden": 48, "layers": 2, "heads": 4, "kv_heads": 2, "context": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


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
    config = getattr(transformers, f"{family}Config")(**COMMON, **values)
    other = randomised(getattr(transformers, f"{family}ForCausalLM")(config))
    ours = DecoderSettings(**{**OURS, "norm_eps": 1e-6, **more})
    mine = load(CausalDecoder(ours), llama_weights(other, ours.dim_per_head, ours.query_key_norm))
    agree_on_tokens(mine, other, ("embedding.weight", "model.embed_tokens.weight"))


def test_gpt2() -> None:
    config = transformers.GPT2Config(vocab_size=VOCAB, n_positions=20, n_embd=32, n_layer=2, n_head=4, n_inner=40)
    other = randomised(transformers.GPT2LMHeadModel(config))
    given = other.state_dict()
    weights = {"embedding.weight": given["transformer.wte.weight"], "positions.weight": given["transformer.wpe.weight"]}
    names = {
        "attn.c_attn": "attention.qkv",
        "attn.c_proj": "attention.output",
        "mlp.c_fc": "ffn.up",
        "mlp.c_proj": "ffn.down",
    }
    norms = {"ln_1": "attention_norm", "ln_2": "ffn_norm"}
    for kind in ("weight", "bias"):
        weights[f"norm.{kind}"] = given[f"transformer.ln_f.{kind}"]
        for i in range(2):
            for theirs, ours in names.items():
                value = given[f"transformer.h.{i}.{theirs}.{kind}"]
                weights[f"blocks.{i}.{ours}.{kind}"] = value.T if kind == "weight" else value
            for theirs, ours in norms.items():
                weights[f"blocks.{i}.{ours}.{kind}"] = given[f"transformer.h.{i}.{theirs}.{kind}"]
    sizes = {**OURS, "kv_heads": None, "context": 20, "ffn_hidden": 40}
    kinds = {"activation": "gelu_tanh", "norm": "layer", "positions": "learned"}
    settings = DecoderSettings.model_validate({**sizes, **kinds, "gated": False, "bias": True})
    mine = load(CausalDecoder(settings), weights)
    agree_on_tokens(mine, other, ("positions.weight", "transformer.wpe.weight"))


def test_part_of_each_head_is_turned() -> None:
    """GPT-NeoX turns a quarter of a head. Its parallel branches are no setting of ours: only rotary is compared."""
    from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb

    from motet.models.arch.rotary import RotaryEmbedding, apply_rotary

    head_dim, turned = 16, 4
    q = torch.randn(2, 3, LENGTH, head_dim)
    positions = torch.arange(LENGTH)
    frequencies = 10000.0 ** -(torch.arange(0, turned, 2).double() / turned)
    angles = torch.cat((positions[:, None] * frequencies,) * 2, -1)[None]
    part, _ = apply_rotary_pos_emb(q[..., :turned], q[..., :turned], angles.cos(), angles.sin())
    theirs = torch.cat((part, q[..., turned:]), -1)
    order = neighbours(torch.arange(head_dim), head_dim, turned)
    ours = apply_rotary(
        q[..., order].transpose(1, 2), RotaryEmbedding(turned, 10000.0).rotations_at(positions, q.dtype)
    )
    assert (ours - theirs[..., order].transpose(1, 2)).abs().max() < 1e-14


# --- encoders ----------------------------------------------------------------------------------------

BERT = {name: value for name, value in COMMON.items() if name != "num_key_value_heads"}
BERT["max_position_embeddings"] = 20
OUR_BERT = {"vocab_size": VOCAB, "hidden": 32, "layers": 2, "heads": 4, "ffn_hidden": 48, "context": 20}


def bert_weights(theirs: nn.Module) -> Weights:
    given = theirs.state_dict()
    weights = {}
    for table, ours in (("word", "embedding"), ("position", "positions"), ("token_type", "token_types")):
        weights[f"{ours}.weight"] = given[f"bert.embeddings.{table}_embeddings.weight"]
    names = {
        "attention.output.dense": "attention.output",
        "attention.output.LayerNorm": "attention_norm",
        "intermediate.dense": "ffn.up",
        "output.dense": "ffn.down",
        "output.LayerNorm": "ffn_norm",
    }
    for kind in ("weight", "bias"):
        weights[f"embedding_norm.{kind}"] = given[f"bert.embeddings.LayerNorm.{kind}"]
        for i in range(2):
            layer = f"bert.encoder.layer.{i}."
            for name, ours in names.items():
                weights[f"blocks.{i}.{ours}.{kind}"] = given[f"{layer}{name}.{kind}"]
            qkv = [given[f"{layer}attention.self.{n}.{kind}"] for n in ("query", "key", "value")]
            weights[f"blocks.{i}.attention.qkv.{kind}"] = torch.cat(qkv)
    return weights


def test_bert_for_masked_tokens() -> None:
    other = randomised(transformers.BertForMaskedLM(transformers.BertConfig(**BERT)))
    given = other.state_dict()
    weights = bert_weights(other)
    for kind in ("weight", "bias"):
        weights[f"transform.{kind}"] = given[f"cls.predictions.transform.dense.{kind}"]
        weights[f"transform_norm.{kind}"] = given[f"cls.predictions.transform.LayerNorm.{kind}"]
    weights["head.bias"] = given["cls.predictions.bias"]
    mine = load(BidirectionalEncoder(EncoderSettings(**OUR_BERT)), weights)
    tokens = torch.randint(VOCAB, (3, LENGTH))
    padding = torch.ones(3, LENGTH, dtype=torch.long)
    padding[0, 9:] = 0
    documents = 1 - padding  # filling is a document of its own

    def call() -> tuple[Tensor, Tensor]:
        seen = padding.bool()
        return mine(tokens, documents=documents)[seen], other(tokens, attention_mask=padding).logits[seen]

    agree(mine, other, call, ("positions.weight", "bert.embeddings.position_embeddings.weight"))


def test_bert_for_classes() -> None:
    other = randomised(transformers.BertForSequenceClassification(transformers.BertConfig(**BERT, num_labels=3)))
    given = other.state_dict()
    weights = bert_weights(other)
    for kind in ("weight", "bias"):
        weights[f"pooler.{kind}"] = given[f"bert.pooler.dense.{kind}"]
        weights[f"head.{kind}"] = given[f"classifier.{kind}"]
    mine = load(BidirectionalEncoder(EncoderSettings(**OUR_BERT, head="classify", classes=3)), weights)
    # Theirs never trains token 0, its padding.
    agree_on_tokens(mine, other, ("embedding.weight", "bert.embeddings.word_embeddings.weight"), lowest=1)


# --- encoder-decoder ---------------------------------------------------------------------------------


def t5_weights(theirs: nn.Module, gated: bool) -> Weights:
    given = theirs.state_dict()
    weights = {"embedding.weight": given["shared.weight"]}
    if theirs.lm_head.weight is not theirs.shared.weight:
        weights["head.weight"] = given["lm_head.weight"]
    for stack, ffn in (("encoder", 1), ("decoder", 2)):
        weights[f"{stack}.norm.weight"] = given[f"{stack}.final_layer_norm.weight"]
        relative = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        weights[f"{stack}.relative.weight"] = given[relative]
        for i in range(2):
            theirs_i, ours_i = f"{stack}.block.{i}.layer.", f"{stack}.blocks.{i}."
            attention = f"{theirs_i}0.SelfAttention."
            weights[f"{ours_i}attention_norm.weight"] = given[f"{theirs_i}0.layer_norm.weight"]
            weights[f"{ours_i}attention.qkv.weight"] = torch.cat([given[f"{attention}{n}.weight"] for n in "qkv"])
            weights[f"{ours_i}attention.output.weight"] = given[f"{attention}o.weight"]
            if stack == "decoder":
                cross = f"{theirs_i}1.EncDecAttention."
                weights[f"{ours_i}cross_norm.weight"] = given[f"{theirs_i}1.layer_norm.weight"]
                weights[f"{ours_i}cross.query.weight"] = given[f"{cross}q.weight"]
                weights[f"{ours_i}cross.key_value.weight"] = torch.cat([given[f"{cross}{n}.weight"] for n in "kv"])
                weights[f"{ours_i}cross.output.weight"] = given[f"{cross}o.weight"]
            dense = f"{theirs_i}{ffn}.DenseReluDense."
            up = [given[f"{dense}{n}.weight"] for n in (("wi_0", "wi_1") if gated else ("wi",))]
            weights[f"{ours_i}ffn_norm.weight"] = given[f"{theirs_i}{ffn}.layer_norm.weight"]
            weights[f"{ours_i}ffn.up.weight"] = torch.cat(up)
            weights[f"{ours_i}ffn.down.weight"] = given[f"{dense}wo.weight"]
    return weights


@pytest.mark.parametrize("gated", [True, False])
def test_t5(gated: bool) -> None:
    config = transformers.T5Config(
        vocab_size=VOCAB,
        d_model=32,
        d_kv=6,
        d_ff=40,
        num_layers=2,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=11,
        feed_forward_proj="gated-gelu" if gated else "relu",
        tie_word_embeddings=not gated,
    )
    other = transformers.T5ForConditionalGeneration(config)
    if gated:  # T5 1.1: transformers shares the table all the same, and only leaves out the scaling
        other.lm_head.weight = nn.Parameter(torch.empty(VOCAB, 32))
    randomised(other)
    sizes = {"vocab_size": VOCAB, "context": 64, "layers": 2, "hidden": 32, "heads": 4, "head_dim": 6, "ffn_hidden": 40}
    kinds = {"activation": "gelu_tanh" if gated else "relu", "gated": gated, "tied": not gated}
    settings = EncoderDecoderSettings(**sizes, **kinds, relative_buckets=8, relative_distance=11)
    mine = load(EncoderDecoderModel(settings), t5_weights(other, gated))
    source, tokens = torch.randint(VOCAB, (3, 19)), torch.randint(VOCAB, (3, LENGTH))

    def call() -> tuple[Tensor, Tensor]:
        theirs = other(input_ids=source, decoder_input_ids=tokens, use_cache=False).logits
        return mine(tokens, source), theirs

    relative = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    agree(mine, other, call, ("encoder.relative.weight", relative))
    assert math.isfinite(mine.get_parameter("embedding.weight").grad.norm())
