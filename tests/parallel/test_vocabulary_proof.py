"""The proof splits lookups and heads that shards can compute, and leaves whole what mixes the vocabulary."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet.models.adapters import add_adapters
from motet.models.build import build_module
from motet.models.hf.hf_model import build_hf_model, open_hf_checkpoint
from motet.models.hf.peft_weights import DrawnAdapters
from motet.models.settings import (
    AdapterSettings,
    DecoderSettings,
    EncoderDecoderSettings,
    EncoderSettings,
    TransformerSettings,
)
from motet.parallel.model_sharding import LOSS, ShardRule
from motet.parallel.proof import part_proof, proof_values
from motet.parallel.tensor_parallel.vocabulary.vocabulary_proof import VocabularySplit, prove_vocabulary

V = 23  # Neither 2 nor 3 divides it
SIZES: dict[str, Any] = {"context": 16, "layers": 1, "hidden": 16, "heads": 4, "ffn_hidden": 24, "vocab_size": V}


def tokens(length: int, entries: int = V) -> Tensor:
    return torch.randint(0, entries, (2, length), generator=torch.Generator().manual_seed(length))


def proven(module: nn.Module, degree: int = 2, **options: Any) -> VocabularySplit:
    forwards = [lambda n=n: module(tokens(n)) for n in (5, 8)]
    return prove_vocabulary(module, forwards, degree, **options)


def dims(split: VocabularySplit) -> dict[str, int]:
    return {name: each.dim for name, rule in split.rules.items() for each in rule.splits}


def comms(split: VocabularySplit) -> list[tuple[str, str, str, int | str]]:
    return [(comm.module, comm.side, comm.operation, comm.argument) for comm in split.boundary_comms]


def whole(split: VocabularySplit) -> dict[str, str]:
    return {region.module: region.reason for region in split.whole_regions}


def around(table: str, head: str = "") -> list[tuple[str, str, str, int | str]]:
    """The comms of a table, and of a head whose logits stay split."""
    head_collectives = [(head, "input", "copy", 0), (head, "output", "sum", LOSS)] if head else []
    return [(table, "output", "sum", 0), *head_collectives]


# --- our models, and those of transformers --------------------------------------------------------------------


@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize(
    ("settings", "tensors"),
    [
        (DecoderSettings(**SIZES), {"embedding.weight"}),
        (
            DecoderSettings(**{**SIZES, "context": V}, tied=False, positions="learned"),
            {"embedding.weight", "head.weight"},
        ),
        (EncoderSettings(**SIZES, dropout=0.1), {"embedding.weight", "head.bias"}),
        (EncoderDecoderSettings(**SIZES), {"embedding.weight"}),
    ],
)
def test_our_models_are_split(settings: TransformerSettings, tensors: set[str], degree: int) -> None:
    with torch.device("meta"):
        module = build_module(settings)
    source = {"source": tokens(6)} if isinstance(settings, EncoderDecoderSettings) else {}
    split = prove_vocabulary(module, [lambda n=n: module(tokens(n), **source) for n in (5, 8)], degree)
    assert dims(split) == dict.fromkeys(tensors, 0)
    assert comms(split) == around("embedding", "projection")
    assert all(parameter.is_meta for parameter in module.parameters())
    assert whole(split).keys() <= {"positions"}


def test_a_large_model_needs_gradients_of_one_block_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    module = build_module(DecoderSettings(**{**SIZES, "layers": 3}))
    expected = proven(module)
    monkeypatch.setattr(proof_values, "LARGE_MODEL", 0)
    assert proven(module) == expected and expected.rules


def test_classes_of_rows_stay_whole() -> None:
    module = build_module(EncoderSettings(**SIZES, head="classify", classes=3))
    split = proven(module)
    assert dims(split) == {"embedding.weight": 0} and comms(split) == around("embedding")
    assert not split.whole_regions


FAMILIES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "llama": ({}, {"model.embed_tokens.weight", "lm_head.weight"}),
    "gemma2": ({"head_dim": 8, "num_key_value_heads": 2}, {"model.embed_tokens.weight"}),
    "gpt2": ({"n_embd": 16, "n_head": 2, "n_layer": 1}, {"transformer.wte.weight"}),
    "cohere": ({"num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 1}, {"model.embed_tokens.weight"}),
    "bert": ({}, {"bert.embeddings.word_embeddings.weight", "cls.predictions.bias"}),
    "t5": ({"d_model": 16, "d_kv": 8, "d_ff": 16, "num_heads": 2, "num_layers": 1}, {"shared.weight"}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_transformers_are_split(family: str, tmp_path: Any) -> None:
    arguments, tensors = FAMILIES[family]
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes = {} if family in ("gpt2", "t5") else sizes
    suffix = {"bert": "ForMaskedLM", "t5": "ForConditionalGeneration"}.get(family, "ForCausalLM")
    config = {"model_type": family, "architectures": [f"X{suffix}"], "vocab_size": V, **sizes, **arguments}
    (path := tmp_path / "config.json").write_text(__import__("json").dumps(config))
    module: Any = build_hf_model(open_hf_checkpoint(str(path), {}))
    more = {"decoder_input_ids": tokens(4)} if family == "t5" else {}
    split = prove_vocabulary(module, [lambda n=n: module(tokens(n), **more).logits for n in (5, 8)], 3)
    assert dims(split) == dict.fromkeys(tensors, 0) and not split.whole_regions
    assert comms(split)[-1][1:] == ("output", "sum", LOSS)


# --- modules of users -----------------------------------------------------------------------------------------


class UserModel(nn.Module):
    """A lookup, a layer and a head, with something after the head."""

    def __init__(self, after: Callable[[Tensor], Tensor] = lambda x: x, *, tied: bool = False, **options: Any) -> None:
        super().__init__()
        self.table, self.mix, self.after = nn.Embedding(V, 6, **options), nn.Linear(6, 6), after
        self.head = nn.Linear(6, V)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.after(self.head(torch.tanh(self.mix(self.table(ids)))))


class Conv1D(nn.Module):
    """The weight is [in, out], as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias, self.nf = nn.Parameter(torch.randn(6, V)), nn.Parameter(torch.randn(V)), V

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def test_scores_may_be_scaled_and_capped() -> None:
    split = proven(UserModel(lambda x: 30 * torch.tanh(x * 0.5 / 30), padding_idx=V - 1), 3)
    assert dims(split) == {"table.weight": 0, "head.weight": 0, "head.bias": 0} and not split.whole_regions
    assert comms(split) == around("table", "head")
    assert split.rules["head.weight"].reason == "23 entries of a vocabulary, and 1 of padding; proven"


def test_a_transposed_head() -> None:
    module = UserModel()
    module.head = Conv1D()  # type: ignore[assignment]  # also x W + b
    assert dims(proven(module)) == {"table.weight": 0, "head.weight": 1, "head.bias": 0}


def test_an_adapter_is_split_with_its_head() -> None:
    module = UserModel()
    add_adapters(module, AdapterSettings(rank=2, targets=("head",)), DrawnAdapters(0))
    split = proven(module)
    assert dims(split) == {"table.weight": 0, "head.weight": 0, "head.bias": 0, "head.adapter_b": 0}
    assert split.rules["head.adapter_a"].partial_over == (*ShardRule().partial_over, "tp")


def set_one(x: Tensor) -> Tensor:
    x = x.clone()
    x[..., 3] = float("-inf")
    return x


class TwiceCalled(UserModel):
    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.mix(self.table(ids))) + self.head(self.table(ids))


class ScaledAfterwards(UserModel):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.mix.weight[0, 0]


class BiasAfterwards(UserModel):
    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Parameter(torch.randn(V))

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + self.late


class ProjectionAfterwards(UserModel):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(V, V)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(super().forward(ids))


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (UserModel(lambda x: x.softmax(-1)), "the logits depend on the vocabulary of other ranks"),
        (UserModel(lambda x: x - x.mean(-1, keepdim=True)), "the logits depend on the vocabulary of other ranks"),
        (UserModel(lambda x: F.layer_norm(x, (V,))), "the forward of a shard fails at test_vocabulary_proof.py:"),
        (UserModel(lambda x: x.flip(-1)), "the logits depend on the vocabulary of other ranks"),
        (UserModel(set_one), "the logits depend on the vocabulary of other ranks"),
        (TwiceCalled(), "is called several times in a forward"),
        (ScaledAfterwards(), "the gradient of mix.weight, which comes after it, differs on shards"),
        (UserModel(torch.detach), "the computation after it has no gradient"),
        (BiasAfterwards(), "the forward of a shard fails at test_vocabulary_proof.py:"),
    ],
)
def test_what_mixes_the_vocabulary_stays_whole(module: nn.Module, reason: str) -> None:
    split = proven(module)
    assert whole(split).keys() == {"head"} and whole(split)["head"].startswith(reason), whole(split)
    assert dims(split) == {"table.weight": 0} and comms(split) == around("table")


def test_the_last_of_two_heads_is_split() -> None:
    split = proven(ProjectionAfterwards())
    assert dims(split) == {"table.weight": 0, "last.weight": 0, "last.bias": 0} and not split.whole_regions


class ReadsTableBefore(UserModel):
    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids) + self.table.weight.mean(0))


def test_a_table_that_is_also_read_before_the_head_stays_whole() -> None:
    split = proven(ReadsTableBefore())
    (reason,) = whole(split).values()
    assert whole(split).keys() == {"table"} and reason.startswith(
        "something besides lookups reads the table: the input"
    )
    assert dims(split) == {"head.weight": 0, "head.bias": 0}


class ReadsTable(UserModel):
    """Its head is no module."""

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.table(ids), self.table.weight)


@pytest.mark.parametrize(
    ("module", "reasons"),
    [
        (
            ReadsTable(),
            {"table": "the module's result has another shape", "": "no layer computes its logits as x W + b"},
        ),
        (UserModel(lambda x: x.softmax(-1), tied=True), {"table": "shares its weight with head", "head": "the logits"}),
        (
            UserModel(max_norm=1.0, tied=True),
            {"table": "max_norm: it renormalises", "head": "shares its weight with table"},
        ),
    ],
)
def test_a_table_that_something_else_reads_stays_whole(module: nn.Module, reasons: dict[str, str]) -> None:
    split = proven(module)
    assert not split.rules and not split.boundary_comms and whole(split).keys() == reasons.keys()
    assert all(whole(split)[name].startswith(reason) for name, reason in reasons.items()), whole(split)


@pytest.mark.parametrize("option", [{"sparse": True}, {"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_a_lookup_whose_gradient_is_another_stays_whole(option: dict[str, Any]) -> None:
    split = proven(UserModel(**option))
    assert dims(split) == {"head.weight": 0, "head.bias": 0} and next(iter(option)) in whole(split)["table"]


def test_more_ranks_than_entries() -> None:
    split = proven(UserModel(), V + 1)
    assert not split.rules and whole(split)["head"] == "23 entries cannot be split over tp = 24"
    assert len(dims(proven(UserModel(), V - 1))) == 3  # Some ranks have padding alone


# --- logits that are gathered ---------------------------------------------------------------------------------


def test_gathered_logits_may_be_mixed_and_become_a_loss() -> None:
    module = UserModel(lambda x: x.softmax(-1))
    forwards = [lambda n=n: -module(tokens(n))[..., 3].log().sum() for n in (5, 8)]
    split = prove_vocabulary(module, forwards, 3, input_entries=V, gathers_logits=True)
    assert dims(split) == {"table.weight": 0, "head.weight": 0, "head.bias": 0} and not split.whole_regions
    assert comms(split)[1:] == [("head", "input", "copy", 0), ("head", "output", "gather", 0)]


def test_a_module_that_looks_nothing_up_has_no_vocabulary() -> None:
    module = nn.Sequential(nn.Linear(V, 24), nn.GELU(), nn.Linear(24, V))
    forwards = [lambda n=n: module(torch.ones(2, n, V, dtype=torch.float64)) for n in (5, 8)]
    assert prove_vocabulary(module, forwards, 2, gathers_logits=True) == VocabularySplit()


# --- the proof can fail ---------------------------------------------------------------------------------------


def test_a_lookup_that_is_not_masked_is_seen() -> None:
    def unmasked(module: nn.Module, entries: range) -> Callable[[], None]:
        return module.register_forward_pre_hook(lambda _, args: (args[0] % len(entries),)).remove

    with patch.object(part_proof, "shard_embedding", unmasked):
        split = proven(UserModel())
    (reason,) = whole(split).values()
    assert whole(split).keys() == {"table"} and reason.startswith("the outputs of the shards of table do not add up")
