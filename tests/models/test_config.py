"""Sizes from a config.json equal those of the module that transformers builds from the same config, exactly."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_configs import TINY_CONFIGS

from motet.core.errors import InputError
from motet.models.hf.hf_config import read_config, settings_from_config
from motet.models.settings import DecoderSettings, EncoderDecoderSettings, EncoderSettings
from motet.models.spec.model_spec import spec_from_settings

LLAMA = {"vocab_size": 101, "hidden_size": 24, "intermediate_size": 33, "num_hidden_layers": 3}
LLAMA |= {"num_attention_heads": 6, "bos_token_id": 0, "eos_token_id": 1}
MOE = {**LLAMA, "num_experts_per_tok": 2}
DEEPSEEK = {**MOE, "moe_intermediate_size": 7, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "kv_lora_rank": 5}
DEEPSEEK |= {"q_lora_rank": 11, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 3}
GPT2 = {"vocab_size": 101, "n_positions": 19, "n_embd": 24, "n_layer": 3, "n_head": 4, "bos_token_id": 0}
GPT2 |= {"eos_token_id": 1}
BERT = {"vocab_size": 101, "hidden_size": 24, "intermediate_size": 33, "num_hidden_layers": 3}
BERT |= {"num_attention_heads": 6, "max_position_embeddings": 17}
T5 = {"vocab_size": 101, "d_model": 24, "d_kv": 5, "d_ff": 33, "num_layers": 3, "num_heads": 6}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", GPT2),
    ("gpt2", {**GPT2, "n_inner": 50, "tie_word_embeddings": False}),
    ("gpt2", {}),
    ("openai-gpt", {}),
    ("openai-gpt", {"n_embd": 24, "n_head": 3, "n_layer": 2, "n_positions": 9, "afn": "relu"}),
    ("gpt2", {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "max_position_embeddings": 9}),
    ("llama", LLAMA),
    ("llama", {**LLAMA, "tie_word_embeddings": True, "num_key_value_heads": 2, "head_dim": 10}),
    ("llama", {**LLAMA, "attention_bias": True, "num_key_value_heads": 3}),
    ("llama", {**LLAMA, "mlp_bias": True, "num_key_value_heads": 1}),
    ("llama", {**LLAMA, "attention_bias": True, "mlp_bias": True}),
    ("llama", {}),
    ("mistral", {**LLAMA, "num_key_value_heads": 2}),
    ("mistral", {**LLAMA, "num_key_value_heads": 6, "head_dim": 10, "tie_word_embeddings": True}),
    ("mistral", {}),
    ("qwen2", {**LLAMA, "num_key_value_heads": 2}),
    ("qwen2", {**LLAMA, "num_key_value_heads": None, "tie_word_embeddings": True}),
    ("qwen2", {**LLAMA, "num_key_value_heads": 3, "head_dim": 10}),
    ("qwen2", {}),
    ("qwen3", {**LLAMA, "num_key_value_heads": 2}),
    ("qwen3", {**LLAMA, "num_key_value_heads": 2, "head_dim": 10, "attention_bias": True}),
    ("qwen3", {**LLAMA, "num_key_value_heads": 6, "tie_word_embeddings": True}),
    ("qwen3", {}),
    ("nemotron", {**LLAMA, "num_key_value_heads": 2}),
    ("nemotron", {**LLAMA, "num_key_value_heads": 6, "attention_bias": True, "tie_word_embeddings": True}),
    ("nemotron", {**LLAMA, "mlp_bias": True, "head_dim": 10, "num_key_value_heads": 1}),
    ("nemotron", {"num_key_value_heads": 8}),
    ("mixtral", {**MOE, "num_key_value_heads": 2, "num_local_experts": 3}),
    ("mixtral", {**MOE, "num_key_value_heads": 1, "num_experts": 5, "head_dim": 10, "tie_word_embeddings": True}),
    ("mixtral", {}),
    ("deepseek_v3", DEEPSEEK),
    ("deepseek_v3", {**DEEPSEEK, "q_lora_rank": None, "first_k_dense_replace": 1, "n_shared_experts": 3}),
    ("deepseek_v3", {**DEEPSEEK, "attention_bias": True, "first_k_dense_replace": 0, "tie_word_embeddings": True}),
    ("deepseek_v3", {**DEEPSEEK, "attention_bias": True, "q_lora_rank": None, "first_k_dense_replace": 9}),
    ("deepseek_v3", {}),
    ("bert", BERT),
    ("bert", {**BERT, "type_vocab_size": 0}),
    ("bert", {**BERT, "architectures": ["BertForSequenceClassification"]}),
    ("bert", {**BERT, "architectures": ["BertForSequenceClassification"], "num_labels": 5, "type_vocab_size": 3}),
    ("bert", {**BERT, "architectures": ["BertForSequenceClassification"], "tie_word_embeddings": False}),
    ("bert", {}),
    ("t5", T5),
    ("t5", {**T5, "feed_forward_proj": "gated-gelu", "num_decoder_layers": 1, "tie_word_embeddings": False}),
    ("t5", {**T5, "feed_forward_proj": "gated-silu", "relative_attention_num_buckets": 9, "num_decoder_layers": 5}),
    ("t5", {}),
    *((family, {}) for family in ("bloom", "falcon", "gemma", "gemma2", "gemma3_text", "gpt_neox", "gpt_oss")),
    *((family, {}) for family in ("olmo2", "opt", "phi3", "qwen3_moe")),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 8, "num_attention_heads": 64, "hidden_size": 512}),
    ("falcon", {"multi_query": False, "parallel_attn": False, "bias": True, "alibi": True}),
    (
        "falcon",
        {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1, "num_attention_heads": 64, "hidden_size": 512},
    ),
    ("gpt_neox", {"attention_bias": False, "tie_word_embeddings": True}),
    ("opt", {"enable_bias": False}),
    ("phi3", {**LLAMA, "num_key_value_heads": 2, "pad_token_id": 0}),
    ("gemma2", {**LLAMA, "num_key_value_heads": 2, "head_dim": 10, "attention_bias": True}),
    (
        "qwen3_moe",
        {**LLAMA, "num_key_value_heads": 2, "num_experts": 5, "num_experts_per_tok": 2, "mlp_only_layers": [0]},
    ),
    ("gpt_oss", {**LLAMA, "num_key_value_heads": 2, "head_dim": 10, "num_local_experts": 5, "attention_bias": False}),
]


def built_by_transformers(config: dict[str, Any]) -> torch.nn.Module:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    kind = transformers.AutoConfig.for_model(**config)
    classes = {"bert": "BertForMaskedLM", "t5": "T5ForConditionalGeneration", "gpt2": "GPT2LMHeadModel"}
    classes["openai-gpt"] = "OpenAIGPTLMHeadModel"
    causal = type(kind).__name__.removesuffix("Config").removesuffix("Text") + "ForCausalLM"
    name = config.get("architectures", [classes.get(config["model_type"], causal)])[0]
    with torch.device("meta"):
        module: torch.nn.Module = getattr(transformers, name)(kind)
    return module


@pytest.mark.parametrize(("model_type", "values"), CASES, ids=[f"{k}-{i}" for i, (k, _) in enumerate(CASES)])
def test_parameters_equal_those_of_transformers(model_type: str, values: dict[str, Any]) -> None:
    config = {"model_type": model_type, **values}
    theirs = sum(p.numel() for p in built_by_transformers(config).parameters())
    assert spec_from_settings(settings_from_config(config)).parameter_count == theirs


@pytest.mark.parametrize("family", TINY_CONFIGS)
@pytest.mark.parametrize("is_complete", [False, True])
def test_parameters_of_each_family(family: str, is_complete: bool) -> None:
    """The keys are those that people write, or all keys that transformers saves."""
    config = {"model_type": family, **TINY_CONFIGS[family]}
    theirs = sum(p.numel() for p in built_by_transformers(config).parameters())
    saved = transformers.AutoConfig.for_model(**config).to_dict() if is_complete else config
    assert spec_from_settings(settings_from_config({**saved, "architectures": None})).parameter_count == theirs


FAMILIES = (
    "bert, bloom, deepseek_v3, falcon, gemma, gemma2, gemma3_text, gpt2, gpt_neox, gpt_oss, llama, mistral, mixtral"
)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "mamba"}, ["'mamba'", FAMILIES, "`motet show model hf:FOLDER --trace`"]),
        ({"model_type": "gemma2", "layer_types": ["sliding_attention"]}, ["layer_types", "each of the 26 layers"]),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 0}, ["sliding_window_pattern = 0", "at least 1"]),
        ({"model_type": "bloom", "n_embed": "big"}, ["hidden_size = 'big'", "whole number"]),
        ({"model_type": "falcon", "bias": "no"}, ["bias = 'no'"]),
        ({"model_type": "gpt_oss", "layer_types": [{}] * 36}, ["layer_types"]),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [[]]}, ["mlp_only_layers"]),
        ({"model_type": "opt", "word_embed_proj_dim": 512}, ["word_embed_proj_dim = 512", "768"]),
        ({"model_type": "opt", "do_layer_norm_before": False}, ["do_layer_norm_before = False"]),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [3]}, ["mlp_only_layers = [3]", "first layers"]),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, ["decoder_sparse_step = 2"]),
        ({"model_type": "qwen3_moe", "num_experts": 0}, ["num_experts = 0", "at least 1"]),
        ({}, ["model_type = None"]),
        ({"model_type": ["llama"]}, ["model_type = ['llama']"]),
        ({"model_type": "llama", "hidden_size": "big"}, ["hidden_size = 'big'", "whole number"]),
        ({"model_type": "llama", "num_hidden_layers": 0}, ["num_hidden_layers = 0", "at least 1"]),
        ({"model_type": "llama", "num_attention_heads": True}, ["num_attention_heads = True"]),
        ({"model_type": "llama", "hidden_act": "mish"}, ["hidden_act = 'mish'", "silu"]),
        ({"model_type": "llama", "num_key_value_heads": 5}, ["model.heads = 32", "model.kv_heads = 5"]),
        ({"model_type": "llama", "rope_scaling": 4}, ["rope_scaling = 4"]),
        ({"model_type": "llama", "tie_word_embeddings": "no"}, ["tie_word_embeddings = 'no'"]),
        ({"model_type": "llama", "rms_norm_eps": "tiny"}, ["norm_eps = 'tiny'"]),
        ({"model_type": "llama", "architectures": ["LlamaForTokenClassification"]}, ["LlamaForCausalLM"]),
        ({"model_type": "gpt2", "n_embd": 10, "n_head": 3}, ["model.hidden = 10", "model.heads = 3"]),
        ({"model_type": "gpt2", "add_cross_attention": True}, ["add_cross_attention = True"]),
        ({"model_type": "bert", "architectures": ["BertForPreTraining"]}, ["BertForMaskedLM"]),
        ({"model_type": "bert", "tie_word_embeddings": False}, ["tie_word_embeddings = False"]),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, ["model.experts.per_token = 9", "count = 8"]),
        ({"model_type": "t5", "feed_forward_proj": "twice-gelu"}, ["feed_forward_proj = 'twice-gelu'"]),
    ],
)
def test_what_cannot_be_is_told_in_a_sentence(config: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        settings_from_config(config)
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)


def test_what_is_read_besides_sizes() -> None:
    rope = {"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 4096}
    values = {"rope_theta": 500000.0, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_scaling": rope}
    llama: Any = settings_from_config({"model_type": "llama", **values})
    assert (llama.rope_theta, llama.norm_eps, llama.context, llama.tied) == (5e5, 1e-5, 131072, False)
    assert (llama.rope_scaling.factor, llama.rope_scaling.original_context) == (32.0, 4096)
    nemotron: Any = settings_from_config({"model_type": "nemotron"})
    assert (nemotron.rotary_fraction, nemotron.activation, nemotron.norm_eps) == (0.5, "relu_squared", 1e-5)
    classes = {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "a", "1": "b", "2": "c"}}
    bert: Any = settings_from_config({"model_type": "bert", **classes})
    assert (bert.head, bert.classes, bert.dropout) == ("classify", 3, 0.1)
    t5: Any = settings_from_config({"model_type": "t5", "feed_forward_proj": "gated-gelu"})
    assert [type(x) for x in (llama, bert, t5)] == [DecoderSettings, EncoderSettings, EncoderDecoderSettings]
    assert (t5.activation, t5.gated, t5.relative_distance) == ("gelu_tanh", True, 128)


@pytest.mark.parametrize(("use", "first", "window"), [(False, 0, None), (True, 0, 64), (True, 4, None)])
def test_qwen_keeps_its_window_only_if_every_layer_has_it(use: bool, first: int, window: int | None) -> None:
    values = {"use_sliding_window": use, "max_window_layers": first, "sliding_window": 64}
    qwen: Any = settings_from_config({"model_type": "qwen2", **values})
    assert qwen.sliding_window == window


def test_rotary_settings_of_old_and_new_configs_mean_the_same() -> None:
    old = {"model_type": "llama", "rope_theta": 7e5, "partial_rotary_factor": 0.25}
    new = {"model_type": "llama", "rope_parameters": {"rope_theta": 7e5, "partial_rotary_factor": 0.25}}
    assert settings_from_config(old) == settings_from_config(new)


def test_a_config_is_read_from_its_folder_or_its_path(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "gpt2"}))
    assert read_config(tmp_path) == read_config(file) == {"model_type": "gpt2"}


@pytest.mark.parametrize(("text", "words"), [("{", "not valid JSON"), ("[1]", "holds a list"), (None, "No such file")])
def test_a_file_that_is_no_config_is_named(tmp_path: Path, text: str | None, words: str) -> None:
    file = tmp_path / "config.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(InputError, match=words) as caught:
        read_config(file)
    assert str(file) in str(caught.value)
