"""Proofs that tokens of a model meet in attention alone; refusals name the module where they meet elsewhere."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_modules import ENTRIES, AttentionDecoder, Kind, batch_of_rows

from motet.core.batch import Batch
from motet.models.arch.attention_mask import AttentionMask
from motet.models.arch.loss import cross_entropy
from motet.models.build import TrainableModel, build_trainable_model
from motet.models.hf import attention_function
from motet.models.settings import ModelSettings, UserModuleSettings
from motet.models.user_module import make_logits_function
from motet.parallel.context_parallel.attention_calls import AttentionCall
from motet.parallel.layout import resolve_layout
from motet.parallel.proof.context_proof import prove_context
from motet.train.job import load_job
from motet.train.proof.context_batches import context_examples, window_examples
from motet.train.proof.proposed_sharding import sharding_of_job
from refusals import refused

_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 60, "pad_token_id": 0}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
_WINDOW = {"sliding_window": 7}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def proof_of_model(
    model: TrainableModel, *, packs: bool = True, knows_documents: bool = True
) -> tuple[AttentionCall, ...]:
    batch = batch_of_rows(40, model.vocab_size or ENTRIES)
    examples = context_examples(batch, packs=packs, last_position=63, knows_documents=True)
    return prove_context(
        model.module,
        model.loss_sum,
        examples,
        ranks=2,
        prepare=model.check_on_tokens,
    )


def trainable(settings: ModelSettings) -> TrainableModel:
    return build_trainable_model(settings, 0, torch.float64, torch.device("cpu"))


def hugging_face(kind: str, folder: Path, **config: Any) -> TrainableModel:
    pytest.importorskip("transformers")
    values = {"model_type": kind, **_SIZES, **_HEADS, **config}
    values.pop("head_dim" if kind == "falcon" else "", None)  # Falcon computes it
    (folder / "config.json").write_text(json.dumps(values))
    return trainable(UserModuleSettings(family="module", factory=f"hf:{folder}"))


def proof_of_decoder(kind: Kind) -> tuple[AttentionCall, ...]:
    module = AttentionDecoder(kind)
    logits = make_logits_function(module)

    def loss_sum(batch: Batch) -> torch.Tensor:
        return cross_entropy(logits(batch).flatten(0, 1), batch.targets.flatten(), batch.weights.flatten())

    examples = context_examples(batch_of_rows(40), packs=False, last_position=63, knows_documents=False)
    return prove_context(module, loss_sum, examples, ranks=2)


@pytest.mark.parametrize(
    ("kind", "config", "window"),
    [
        ("llama", {"attention_dropout": 0.1}, None),
        ("mistral", _WINDOW, 7),
        ("gemma2", _WINDOW, 7),
        ("gpt_oss", {**_WINDOW, **_EXPERTS}, 7),
        pytest.param("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, None, marks=pytest.mark.proof),
        pytest.param("bert", {"hidden_dropout_prob": 0.1}, None, marks=pytest.mark.proof),
    ],
)
def test_families_with_packed_documents_and_windows(
    kind: str, config: dict[str, Any], window: int | None, tmp_path: Path
) -> None:
    calls = proof_of_model(hugging_face(kind, tmp_path, **config))
    first, second = calls
    assert (first.query_heads, first.window, first.block, second.block) == (4, window, 0, 1)
    assert first.causal == second.causal == (kind != "bert")
    if kind not in ("falcon", "bert"):  # Others repeat their keys
        assert {(call.key_heads, call.key_dim, call.value_dim) for call in calls} == {(2, 8, 8)}


@pytest.mark.parametrize("kind", ["plain", "dropout", "dropout of all tokens", "bidirectional"])
def test_modules_of_a_user(kind: Kind) -> None:
    calls = proof_of_decoder(kind)
    assert [call.module for call in calls] == ["blocks.0", "blocks.1"]
    assert {call.causal for call in calls} == {kind != "bidirectional"}


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("convolution", r"blocks.0.conv \(Conv1d\) returns other values for a part of the tokens than for whole rows"),
        ("mean", r"blocks.0.qkv \(Linear\) gets other values for a part"),
        ("late mean", r"blocks.0 \(AttentionBlock\) returns other values for a part"),
        ("by hand", r"blocks.0.out \(Linear\) gets other values for a part"),
        ("counts", r"positions \(Embedding\) gets other indices, such as positions that its caller counts, for a part"),
        ("gradient", r"the gradients of embedding.weight are not those of whole rows: relative difference"),
        ("mask", r"blocks.0 \(AttentionBlock\): it gives attention a mask of shape \[29, 29\]"),
        ("dropout of heads", r"each row has the shape \[2, 15, 8\], on a rank with 15 tokens"),
        ("flat heads", r"blocks.0 \(AttentionBlock\): its queries, keys and values are \[4, 29, 8\]"),
    ],
)
def test_modules_whose_tokens_meet_elsewhere_are_refused(kind: Kind, sentence: str) -> None:
    refused(f"layout.cp = 2 cannot split the rows of AttentionDecoder, .*{sentence}.*leave", proof_of_decoder, kind)


@pytest.mark.parametrize(
    ("kind", "config", "sentence"),
    [
        ("bloom", {"n_layer": 2, "n_head": 4}, "a bloom computes whole rows only"),
        pytest.param(
            "xglm",
            {"ffn_dim": 48, "d_model": 32, "num_layers": 2, "attention_heads": 4},
            "xglm",
            marks=pytest.mark.proof,
        ),
        pytest.param("qwen3_next", _EXPERTS, "whole rows only", marks=pytest.mark.proof),
    ],
)
def test_families_that_are_refused(kind: str, config: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    refused(sentence, proof_of_model, hugging_face(kind, tmp_path, **config), packs=False)


def test_a_largest_position_that_a_part_does_not_see_is_found(tmp_path: Path) -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = hugging_face("llama", tmp_path, rope_parameters=scaling, max_position_embeddings=32)
    refused(r"rotary_emb \(LlamaRotaryEmbedding\) returns other values for a part", proof_of_model, model)


def test_a_forgotten_window_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = hugging_face("mistral", tmp_path, **_WINDOW)
    monkeypatch.setattr(attention_function, "marked_mask", lambda _: AttentionMask(causal=True))
    monkeypatch.setattr(attention_function, "AttentionMask", lambda **_: AttentionMask(causal=True))
    refused(r"self_attn.o_proj \(Linear\) gets other values with motet's attention", proof_of_model, model)


def test_a_row_is_proven_beyond_a_long_window() -> None:
    job = load_job("tiny", ["layout.dp=1", "layout.cp=2", "model.sliding_window=40", "model.layers=1"])
    sharding_of_job(job, resolve_layout(job.layout, 2, job.data.batch_sequences))
    calls = tuple(AttentionCall("", 1, 1, 1, 1, causal=True, window=window) for window in (None, 40))
    (example,) = window_examples(batch_of_rows(64), calls, packs=True)
    assert (example.partition.tokens, *example.batch.tokens.shape) == (52, 1, 52)
    assert not window_examples(batch_of_rows(40), calls, packs=True)
    assert not window_examples(batch_of_rows(64), (), packs=True)


def test_a_job_has_the_calls_of_its_model_by_its_twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = ["layout.dp=1", "layout.cp=16", "data.batch_sequences=64", "model.sliding_window=4096"]
    job = load_job("llama3-8b", words)
    _, sharding = sharding_of_job(job, resolve_layout(job.layout, 16, 64))
    expected = AttentionCall("blocks.7.attention", 32, 8, 128, 128, causal=True, window=4096, block=7)
    assert sharding.attention[7] == expected and len(sharding.attention) == 32
    assert "smaller model of 3 of 32 blocks" in sharding.proof
