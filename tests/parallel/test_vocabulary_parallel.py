"""Embedding, head and loss on shards of a vocabulary equal those of one device."""

from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet.core.batch import Batch
from motet.models.arch import loss
from motet.models.arch.loss import set_vocabulary_shard
from motet.models.build import TrainableModel, build_trainable_model
from motet.models.generation import generate_tokens
from motet.models.hf.hf_model import separates_documents
from motet.models.settings import (
    DecoderSettings,
    EncoderDecoderSettings,
    EncoderSettings,
    TransformerSettings,
    UserModuleSettings,
)
from motet.parallel.layout import LayoutSettings, resolve_layout
from motet.parallel.process.process_group import RankGroup
from motet.parallel.tensor_parallel.vocabulary.rank_vocabulary import RankVocabularyShard
from motet.train.evaluation import evaluate
from parallel.vocabulary_by_hand import cut, spec_of, split_lookup, split_vocabulary
from ranks import RankFailureError, Ranks

SIZES = {"context": 16, "layers": 1, "hidden": 16, "heads": 4, "ffn_hidden": 24, "init_std": 0.5}


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm().clamp(min=1e-30))


# --- the loss alone -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PaddingCounts(RankVocabularyShard):
    """Takes the padding for entries."""

    @staticmethod
    def of(shard: RankVocabularyShard) -> "PaddingCounts":
        width = -(-shard.size // shard.group.world)
        return PaddingCounts(shard.start, shard.start + width, shard.size, shard.group)


class NoMaximum(RankVocabularyShard):
    def all_reduce(self, tensor: Tensor, op: Any) -> Tensor:
        return super().all_reduce(tensor, op) if op == "sum" else tensor.zero_()


class NoSumOfHidden(RankVocabularyShard):
    def all_reduce(self, tensor: Tensor, op: Any) -> Tensor:
        return tensor if op == "sum" and tensor.shape[-1] == 6 else super().all_reduce(tensor, op)


FAULTS = {
    "": lambda shard: shard,
    "padding": PaddingCounts.of,
    "maximum": lambda s: NoMaximum(s.start, s.stop, s.size, s.group),
    "hidden": lambda s: NoSumOfHidden(s.start, s.stop, s.size, s.group),
}


@patch.object(loss, "SOFTMAX_CHUNK_BYTES", {"cpu": 1})  # the smallest pieces: 8 rows
@patch.object(loss, "LOGITS_BLOCK_BYTES", {"cpu": 1})
def _losses(group: RankGroup, vocab: int, dtype: torch.dtype, scale: float, fault: str) -> dict[str, float]:
    """Distances of both losses and of their gradients from those of one device."""
    torch.manual_seed(vocab)
    whole = [torch.randn(shape).to(dtype) for shape in ((20, 6), (vocab, 6), (vocab,))]
    whole[0] *= scale
    targets, weights = torch.randint(0, vocab, (20,)), torch.rand(20)
    weights[::3] = 0.0
    shard = FAULTS[fault](RankVocabularyShard.from_spec(spec_of((vocab, 6), group), 0, group=group))
    plain = [x.clone().requires_grad_() for x in whole]
    local = [x.requires_grad_() for x in (whole[0].clone(), cut(whole[1], group), cut(whole[2], group))]
    expected = loss.linear_cross_entropy(*plain, targets=targets, weights=weights) * 0.5
    expected.backward()
    got = loss.linear_cross_entropy(*local, targets=targets, weights=weights, vocabulary=shard) * 0.5
    got.backward()
    found = {"loss": distance(got, expected), "hidden": distance(local[0].grad, plain[0].grad)}
    for name, mine, theirs in zip(("weight", "bias"), local[1:], plain[1:], strict=True):
        found[name] = float((mine.grad - cut(theirs.grad, group)).norm() / theirs.grad.norm())
    logits = [F.linear(*(x.detach() for x in (h, w, b))).requires_grad_() for h, w, b in (plain, local)]
    targets[1] = -100
    expected = loss.cross_entropy(logits[0], targets, weights) * 0.5
    got = loss.cross_entropy(logits[1], targets, weights, vocabulary=shard) * 0.5
    expected.backward(), got.backward()
    found["loss of logits"] = distance(got, expected)
    found["logits"] = float((logits[1].grad.T - cut(logits[0].grad.T, group)).norm() / logits[0].grad.norm())
    padding = slice(spec_of((vocab,), group).numel, None)
    found["padding"] = float(sum(x.abs().sum() for x in (local[1].grad[padding], logits[1].grad[:, padding])))
    return found


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("vocab", [4, 5, 259])  # over three ranks, 4 entries leave one rank without any
def test_the_loss_and_its_gradients_equal_those_of_one_device(ranks: Ranks, world: int, vocab: int) -> None:
    for scale in (1.0, 1e4):  # exponentials of the large logits are infinite
        for found in ranks.run(world, _losses, vocab, torch.float64, scale, ""):
            assert found.pop("padding") == 0.0
            assert max(found.values()) < 1e-13, found


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 3e-7), (torch.bfloat16, 2e-2)])
def test_other_dtypes_differ_by_rounding(ranks: Ranks, dtype: torch.dtype, bound: float) -> None:
    for found in ranks.run(2, _losses, 259, dtype, 1.0, ""):
        assert found.pop("padding") == 0.0
        assert max(found.values()) < bound and found["loss"] < 1e-6, found


@pytest.mark.parametrize(
    ("fault", "scale", "wrong"),
    [("padding", 1.0, {"loss", "hidden", "weight"}), ("maximum", 1e4, {"loss", "weight"}), ("hidden", 1.0, {"hidden"})],
)
def test_a_planted_fault_is_seen(ranks: Ranks, fault: str, scale: float, wrong: set[str]) -> None:
    for found in ranks.run(2, _losses, 259, torch.float64, scale, fault):
        seen = {name for name, far in found.items() if not far < 1e-9}
        assert wrong <= seen, found
        assert fault != "hidden" or seen == wrong


def _outside(group: RankGroup) -> None:
    shard = RankVocabularyShard.from_spec(spec_of((5,), group), 0, group=group)
    loss.cross_entropy(torch.zeros(2, 3), torch.tensor([1, 5]), torch.ones(2), vocabulary=shard)


def test_a_target_that_no_rank_has_is_refused(ranks: Ranks) -> None:
    with pytest.raises(RankFailureError, match=r"target \[5\] is outside of the vocabulary, which has 5 entries"):
        ranks.run(2, _outside)


def _gathered(group: RankGroup, vocab: int) -> bool:
    scores = torch.arange(6.0 * vocab).view(3, 2, vocab)
    shard = RankVocabularyShard.from_spec(spec_of((vocab,), group), 0, group=group)
    local = cut(scores.movedim(-1, 0) - 1, group).movedim(0, -1) + 1  # padding is 1
    return torch.equal(shard.gather_logits(local), scores)


@pytest.mark.parametrize("vocab", [4, 7])
def test_gathered_logits_are_whole(ranks: Ranks, vocab: int) -> None:
    assert ranks.run(3, _gathered, vocab) == [True] * 3


def _separates(group: RankGroup) -> bool:
    module = nn.Linear(1, 1)
    set_vocabulary_shard(module, RankVocabularyShard.from_spec(spec_of((4,), group), 0, group=group))
    return separates_documents(
        module,
        lambda batch: torch.ones(*batch.tokens.shape, 2),
        lambda batch: torch.full((*batch.tokens.shape, 2), 1.0 + group.rank),
        vocab_size=None,
    )


def test_ranks_decide_alike_whether_a_model_separates_documents(ranks: Ranks) -> None:
    assert ranks.run(2, _separates) == [False, False]  # Although the logits of rank 0 are equal


# --- embedding tables ---------------------------------------------------------------------------------------


class ScaledEmbedding(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 3.0


def _embedding(group: RankGroup, vocab: int, padding_idx: int | None, scaled: bool, by_name: bool) -> float:
    torch.manual_seed(1)
    kind = ScaledEmbedding if scaled else nn.Embedding
    whole = kind(vocab, 6, padding_idx=padding_idx, dtype=torch.float64)
    local = kind(vocab, 6, padding_idx=padding_idx, dtype=torch.float64)
    local.weight = nn.Parameter(cut(whole.weight.data, group))
    split_lookup(local, group, vocab)
    ids = torch.randint(0, vocab, (3, 50))
    weights = torch.randn(3, 50, 6, dtype=torch.float64)
    outputs = [table(input=ids) if by_name else table(ids) for table in (whole, local)]
    for output in outputs:
        (output * weights).sum().backward()
    assert torch.equal(*outputs)
    return distance(local.weight.grad, cut(whole.weight.grad, group))


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("padding_idx", [None, 0, 258])
def test_a_table_gives_the_vectors_of_all_rows(ranks: Ranks, padding_idx: int | None, scaled: bool) -> None:
    assert max(ranks.run(2, _embedding, 259, padding_idx, scaled, False)) < 1e-14


def test_a_table_may_be_without_rows_of_its_own_and_called_by_name(ranks: Ranks) -> None:
    assert max(ranks.run(3, _embedding, 4, None, False, True)) < 1e-14


# --- models -------------------------------------------------------------------------------------------------


class CappedDecoder(nn.Module):
    """A module of a user, whose logits go through a soft-cap after its head."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.wte, self.mix = nn.Embedding(vocab, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        return 3 * torch.tanh(self.head(torch.tanh(self.mix(self.wte(tokens)))) / 3)


def _built(kind: str, vocab: int) -> TrainableModel:
    settings: dict[str, TransformerSettings] = {
        "tied decoder": DecoderSettings(**SIZES, vocab_size=vocab),
        "decoder": DecoderSettings(**SIZES, vocab_size=vocab, tied=False, positions="learned"),
        "encoder": EncoderSettings(**SIZES, vocab_size=vocab),
        "classifier": EncoderSettings(**SIZES, vocab_size=vocab, head="classify", classes=3),
        "encoder-decoder": EncoderDecoderSettings(**SIZES, vocab_size=vocab),
    }
    chosen = settings.get(kind) or UserModuleSettings(factory=f"{__name__}:CappedDecoder", arguments={"vocab": vocab})
    return build_trainable_model(chosen, 5, torch.float64, torch.device("cpu"))


def _batch(kind: str, vocab: int) -> Batch:
    draw = torch.Generator().manual_seed(3)
    tokens, targets = (torch.randint(0, vocab, (2, 12), generator=draw) for _ in range(2))
    if kind == "classifier":
        targets = torch.tensor([0, 2])
    weights = (torch.rand(targets.shape, generator=draw) < 0.6).float()
    return Batch(tokens, targets, weights, torch.arange(2), source=tokens.flip(0))


@dataclass(frozen=True)
class HeldOut:
    batch: Batch

    def evaluation_batches(self, split: str) -> int:
        return 1

    def evaluation_batch(self, split: str, index: int, rows: range) -> Batch:
        chosen = slice(rows.start, rows.stop)
        parts = {name: getattr(self.batch, name)[chosen] for name in ("tokens", "targets", "weights", "rows", "source")}
        return replace(self.batch, **parts)


def _model(group: RankGroup, kind: str, vocab: int) -> None:
    plain, split, batch = _built(kind, vocab), _built(kind, vocab), _batch(kind, vocab)
    alone = RankGroup(0, 1, None, group.device)
    names = split_vocabulary(split.module, group, vocab, has_head=kind != "classifier")
    expected, got = plain.loss_sum(batch), split.loss_sum(batch)
    assert distance(got, expected) < 1e-13
    expected.backward(), got.backward()
    whole = {name: p.grad for name, p in plain.module.named_parameters()}
    for name, parameter in split.module.named_parameters():
        right = cut(whole[name], group) if name in names else whole[name]
        assert float((parameter.grad - right).norm()) < 1e-12 * float(whole[name].norm().clamp(min=1e-30)), name
        if name in names:
            assert not parameter.grad[spec_of(tuple(whole[name].shape), group).numel // right[0].numel() :].any()
    layout = resolve_layout(LayoutSettings(), 1, 2)
    results = [
        evaluate(model, HeldOut(batch), "test", max_batches=1, group=alone, layout=layout, batch_sequences=2)
        for model in (plain, split)
    ]
    assert abs(results[0].loss - results[1].loss) < 1e-13 * results[0].loss
    assert results[0].accuracy == results[1].accuracy
    if plain.is_autoregressive:
        first = replace(batch, targets=plain.logits(batch)[:, -1].argmax(-1), weights=torch.ones(2))
        last_token_models = [replace(m, logits=lambda batch, m=m: m.logits(batch)[:, -1]) for m in (plain, split)]
        options = {"max_batches": 1, "group": alone, "layout": layout, "batch_sequences": 2}
        accuracies = [evaluate(model, HeldOut(first), "test", **options).accuracy for model in last_token_models]
        assert accuracies == [1.0, 1.0]
        for temperature in (0, 1):
            tokens = [generate_tokens(m, [1, 2], 20, seed=4, temperature=temperature) for m in (plain, split)]
            assert tokens[0] == tokens[1]


@pytest.mark.parametrize("kind", ["tied decoder", "decoder", "encoder", "classifier", "encoder-decoder", "of a user"])
def test_models_equal_those_of_one_device(ranks: Ranks, kind: str) -> None:
    ranks.run(2, _model, kind, 259)
    ranks.run(3, _model, kind, 259)
