"""Models of transformers that cannot separate the documents of a row get a row for each; refusals name the model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_huggingface import BERT, LLAMA, SIZES, folder, one, trainee
from test_packed_rows import packed

from motet.core.errors import InputError
from motet.precision.float64_mode import use_float64

pytest.importorskip("transformers")
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
BART = {
    "vocab_size": 30, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 32,
    "dropout": 0.0, "decoder_start_token_id": 1, "forced_eos_token_id": None, "init_std": 0.3, **NO_TOKENS,
}  # fmt: skip
MOE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    "ALiBi": dict(model_type="bloom", vocab_size=30, hidden_size=16, n_layer=2, n_head=4, **NO_TOKENS),
    "ALiBi, with positions": dict(model_type="falcon", alibi=True, **SIZES, **NO_TOKENS),
    "a state": dict(model_type="mamba", vocab_size=30, hidden_size=16, num_hidden_layers=2, state_size=4, **NO_TOKENS),
    "positions that it counts": dict(model_type="bart", architectures=["BartForCausalLM"], **BART),
    "positions that it counts, two stacks": dict(
        model_type="bart", architectures=["BartForConditionalGeneration"], **BART
    ),
    "positions after that of padding": dict(
        model_type="roberta", architectures=["RobertaForMaskedLM"], **{**BERT, **NO_TOKENS, "pad_token_id": 1}
    ),
    "a mixture": dict(model_type="mixtral", **LLAMA, **MOE),
    "another mixture": dict(model_type="olmoe", **LLAMA, **MOE),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_documents_are_as_the_documents_alone(tmp_path: Path, name: str) -> None:
    """The rows hold different documents. The usual kernel for mixtures has no float64."""
    with use_float64():
        model = trainee(folder(tmp_path, CONFIGS[name]))
        first, second = [one(6, 1), one(4, 2), one(5, 3)], [one(9, 4), one(6, 5)]
        alone = torch.stack([model.loss_sum(batch) for batch in (*first, *second)]).sum()
        a, b = packed(first, 2), packed(second, 2)
        fields = {name: (getattr(a, name), getattr(b, name)) for name in a.__slots__ if not name.startswith("source")}
        together = {name: None if rows[0] is None else torch.cat(rows) for name, rows in fields.items()}
        # The sources of the rows are of other lengths: one is filled up with tokens of no document.
        sources = {}
        for field, filling in (("source", 0), ("source_documents", 9)):
            parts = [getattr(row, field) for row in (a, b)]
            length = max(part.shape[1] for part in parts)
            fill = [torch.nn.functional.pad(p, (0, length - p.shape[1]), value=filling) for p in parts]
            sources[field] = torch.cat(fill)
        batch = replace(a, **together, **sources)
        loss = model.loss_sum(batch)
        assert abs(alone - loss) < 1e-12 * alone
        loss.backward()
        assert abs(model.loss_sum(replace(batch, documents=None, positions=None, source_documents=None)) - alone) > 1e-3


def refused(tmp_path: Path, says: str, config: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=says):
        trainee(folder(tmp_path, config)).loss_sum(packed([one(6, 1), one(4, 2)], 2))


def test_an_encoder_that_sees_what_it_predicts_is_refused(tmp_path: Path) -> None:
    encoder = dict(model_type="bert", architectures=["BertLMHeadModel"], **BERT)
    refused(tmp_path, r"BertLMHeadModel with is_decoder = false sees the tokens.*is_decoder = true", encoder)
    trainee(folder(tmp_path, {**encoder, "is_decoder": True})).loss_sum(one(6, 1))
    # The same value says nothing of a model that is causal without it.
    trainee(folder(tmp_path, dict(model_type="gpt_neox", is_decoder=False, **SIZES))).loss_sum(one(6, 1))


def test_dropout_that_could_not_follow_rows_is_refused(tmp_path: Path) -> None:
    bloom = dict(CONFIGS["ALiBi"], hidden_dropout=0.1)
    refused(tmp_path, r"a bloom computes packed documents one by one.*set hidden_dropout = 0", bloom)


def test_a_model_that_reads_padding_is_refused(tmp_path: Path) -> None:
    sizes = {"vocab_size": 30, "hidden_size": 16, "dim_head": 4, "dim_ff": 24, "prompt_types": 2, "prompt_length": 2}
    config = dict(model_type="cpmant", num_hidden_layers=2, num_attention_heads=4, segment_types=2, **sizes)
    refused(tmp_path, r"a cpmant does not separate packed documents; set data.restart_documents = false", config)
