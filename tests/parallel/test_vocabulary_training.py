"""Training with a vocabulary that ranks split, in float64, is that of one process; so are evaluation and samples."""

import tempfile
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from motet.core.batch import Batch
from motet.models.arch.loss import vocabulary_shard_of
from motet.models.generation import generate_tokens
from motet.parallel.model_sharding import ModelSharding
from motet.parallel.process.process_group import RankGroup
from motet.parallel.tensor_parallel.vocabulary.vocabulary_proof import prove_vocabulary
from motet.train.build import build_components, build_model, precision_context
from motet.train.evaluation import evaluate
from motet.train.job import Job
from parallel.split_decoders import (
    GPT2_LIKE,
    SplitRun,
    decoder_sharding,
    huggingface_gpt2_sharding,
    llama_sharding,
    train_split,
    with_vocabulary,
    worst_difference,
)
from ranks import Ranks
from train.runs import small_job

ALONE = RankGroup(0, 1, None, torch.device("cpu"))
BATCH = ("data.batch_sequences=4", "data.sequence_length=16")
OURS, GPT2 = ("embedding", "projection"), ("transformer.wte", "lm_head")
LLAMA = ("model.embed_tokens", "lm_head", "lm_head.weight")
TABLE = ("model.embed_tokens.weight",)
UNTIED = "model.arguments.tie_word_embeddings=false"


@lru_cache
def alone(folder: Path, model: str, *overrides: str) -> SplitRun:
    return train_split(ALONE, small_job(folder, *BATCH, *overrides, model=model), None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vocabulary")


CASES: dict[str, tuple[str, list[str], ModelSharding]] = {
    "tied decoder": (
        "decoder",
        [*GPT2_LIKE, "model.dropout=0.1"],
        with_vocabulary(decoder_sharding(kv_heads=4, gated=False), *OURS, "embedding.weight"),
    ),
    "decoder": (
        "decoder",
        ["model.tied=false"],
        with_vocabulary(decoder_sharding(), *OURS, "head.weight", others=("embedding.weight",)),
    ),
    "transformers' GPT-2": ("gpt2", [], with_vocabulary(huggingface_gpt2_sharding(), *GPT2, "transformer.wte.weight")),
    "transformers' Llama": ("llama", [], with_vocabulary(llama_sharding(), *LLAMA, others=TABLE)),
    "gathered logits": ("llama", [], with_vocabulary(llama_sharding(), *LLAMA, others=TABLE, gathers=True)),
}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_as_one(ranks: Ranks, folder: Path, case: str) -> None:
    model, overrides, sharding = CASES[case]
    job = small_job(folder, *BATCH, *overrides, "layout.tp=2", model=model)
    runs = ranks.run(2, train_split, job, sharding)
    assert worst_difference(runs, alone(folder, model, *overrides), rates=0.03) < 1e-12


@pytest.mark.parametrize("gathers", [False, True])
def test_three_ranks_split_the_vocabulary_alone(ranks: Ranks, folder: Path, gathers: bool) -> None:
    job = small_job(folder, *BATCH, "layout.tp=3", "layout.zero=0", model="llama")
    runs = ranks.run(3, train_split, job, with_vocabulary(ModelSharding(), *LLAMA, others=TABLE, gathers=gathers))
    assert worst_difference(runs, alone(folder, "llama"), rates=0.03) < 1e-12


def test_a_head_alone(ranks: Ranks, folder: Path) -> None:
    """After the head of one forward, the dropout after the whole table of the next one draws masks of whole rows."""
    job = small_job(folder, *BATCH, UNTIED, "layout.tp=2", model="gpt2")
    sharding = with_vocabulary(ModelSharding(), *GPT2, "lm_head.weight")
    runs = ranks.run(2, train_split, job, replace(sharding, boundary_comms=sharding.boundary_comms[1:]))
    assert worst_difference(runs, alone(folder, "gpt2", UNTIED), rates=0.03) < 1e-12


def _evaluated(group: RankGroup, job: Job, sharding: ModelSharding | None) -> tuple[float, list[int]]:
    with precision_context(job), tempfile.TemporaryDirectory() as folder:
        parts = build_components(job, group, Path(folder), model_sharding=sharding)
        assert (vocabulary_shard_of(parts.model.module) is None) == (group.world == 1)
        result: Any = evaluate(
            parts.model, parts.data, "validation", max_batches=1, group=group, layout=parts.layout, batch_sequences=4
        )
        return result.loss, generate_tokens(parts.model, [1, 2, 3], 12, seed=3)


@pytest.mark.parametrize("case", ["tied decoder", "transformers' Llama"])
def test_evaluation_and_samples(ranks: Ranks, folder: Path, case: str) -> None:
    model, overrides, sharding = CASES[case]
    split, whole = (small_job(folder, *BATCH, *overrides, f"layout.tp={tp}", model=model) for tp in (2, 1))
    loss, tokens = _evaluated(ALONE, whole, None)
    for split_loss, split_tokens in ranks.run(2, _evaluated, split, sharding):
        assert abs(split_loss - loss) < 1e-13 * loss and split_tokens == tokens


# --- proven splits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "tensors"), [("decoder", 1), ("bert", 2), ("t5", 1), ("gpt2", 1), ("classify", 1)])
def test_what_is_proven_trains_as_one(ranks: Ranks, folder: Path, model: str, tensors: int) -> None:
    overrides = ["data.batch_sequences=4"] if model == "classify" else list(BATCH)
    job = small_job(folder, *overrides, "layout.tp=3", "layout.zero=0", model=model)
    trainable = build_model(job, ALONE.device, ALONE)[1]
    batches = [random_batch(length, trainable.vocab_size or 0) for length in (6, 9)]
    forwards = [partial(trainable.logits, batch) for batch in batches]
    split = prove_vocabulary(trainable.module, forwards, 3, input_entries=trainable.vocab_size)
    assert len(split.rules) == tensors and not split.whole_regions
    runs = ranks.run(
        3, train_split, job, ModelSharding(split.rules, split.boundary_comms, head_tensors=split.head_tensors)
    )
    whole = train_split(ALONE, small_job(folder, *overrides, model=model), None)
    assert worst_difference(runs, whole, rates=0.03) < 1e-12


def random_batch(length: int, entries: int) -> Batch:
    tokens = torch.randint(0, entries, (2, length), generator=torch.Generator().manual_seed(length))
    return Batch(tokens, tokens, torch.ones(2, length), torch.arange(2), source=tokens.flip(0))
