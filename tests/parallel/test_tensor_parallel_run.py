"""Training with splits written by hand on tensor-parallel ranks, in float64, is that of one process."""

from functools import lru_cache
from pathlib import Path

import pytest
import torch

from motet.parallel.model_sharding import ModelSharding
from motet.parallel.process.process_group import CpuBackend, RankGroup
from motet.train.job import Job
from parallel.split_decoders import (
    GPT2_LIKE,
    SplitRun,
    decoder_sharding,
    huggingface_gpt2_sharding,
    llama_sharding,
    recomputed_sharding,
    train_split,
    with_sequence,
    with_table,
    worst_difference,
)
from ranks import Ranks
from train.runs import small_job

ALONE = RankGroup(0, 1, None, torch.device("cpu"))
DROPOUT = "model.dropout=0.1"
BATCH = ("data.batch_sequences=4", "data.sequence_length=16")


@lru_cache
def alone(folder: Path, model: str, *overrides: str) -> SplitRun:
    return train_split(ALONE, small_job(folder, *BATCH, *overrides, model=model), None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("split")


ADAPTED = ("q_proj", "o_proj", "up_proj", "down_proj")
ADAPTERS = [f"model.adapters={{rank=4, targets={[f'*{name}' for name in ADAPTED]}}}"]
NORMS = [
    f"blocks.{i}.{name}.{kind}"
    for i in range(2)
    for name in ("attention_norm", "ffn_norm")
    for kind in ("weight", "bias")
]
LLAMA_NORMS = [
    f"model.layers.{i}.{name}.weight" for i in range(2) for name in ("input_layernorm", "post_attention_layernorm")
]
GATHERS = {"self_attn.q_proj": "self_attn", "mlp.gate_proj": "mlp"}
GPT2 = decoder_sharding(kv_heads=4, gated=False)
CASES: dict[str, tuple[str, list[str], ModelSharding]] = {
    "decoder": ("decoder", [DROPOUT, "model.query_key_norm=true", "model.tied=false"], with_table(decoder_sharding())),
    "GPT-2-like": ("decoder", [*GPT2_LIKE, DROPOUT], GPT2),
    "transformers' GPT-2": ("gpt2", [], huggingface_gpt2_sharding()),
    "transformers' Llama": ("llama", [], llama_sharding()),
    "adapters": ("llama", ADAPTERS, llama_sharding(targets=ADAPTED)),
    "recomputed": (
        "recomputed",
        ["model={factory='parallel.split_decoders:Recomputed', arguments={reentrant=false}}"],
        recomputed_sharding(),
    ),
    "recomputed by autograd": (
        "recomputed",
        ["model={factory='parallel.split_decoders:Recomputed', arguments={reentrant=true}}"],
        recomputed_sharding(),
    ),
    # Sizes that ranks do not divide: a vocabulary of 260, an inner width of 50.
    "three ranks": (
        "decoder",
        [
            "model.hidden=24",
            "model.heads=3",
            "model.kv_heads=3",
            "model.ffn_hidden=50",
            "model.gated=false",
            "model.tied=false",
            DROPOUT,
        ],
        with_table(decoder_sharding(heads=3, kv_heads=3, gated=False, tp=3, inner=50)),
    ),
    "shared heads": ("llama", [], llama_sharding(tp=4)),
    "GPT-2-like, sequence": ("decoder", [*GPT2_LIKE, DROPOUT], with_sequence(GPT2, NORMS, "blocks")),
    "Llama, sequence": (
        "llama",
        ADAPTERS,
        with_sequence(llama_sharding(targets=ADAPTED), LLAMA_NORMS, "model.layers", gather_at=GATHERS),
    ),
    "recomputed, sequence": (
        "recomputed",
        ["model={factory='parallel.split_decoders:Recomputed', arguments={reentrant=false}}"],
        with_sequence(
            recomputed_sharding(), [f"blocks.{i}.norm.{n}" for i in range(2) for n in ("weight", "bias")], "blocks"
        ),
    ),
}


def worst(ranks: Ranks, folder: Path, case: str, *settings: str) -> float:
    model, overrides, sharding = CASES[case]
    job: Job = small_job(folder, *BATCH, *overrides, *settings, model=model)
    runs = ranks.run(job.layout.dims.ranks, train_split, job, sharding)
    return worst_difference(runs, alone(folder, model, *overrides), rates=0.03)


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("three ranks", "shared heads")])
def test_two_ranks_train_as_one(ranks: Ranks, folder: Path, case: str) -> None:
    assert worst(ranks, folder, case, "layout.tp=2") < 1e-12


@pytest.mark.parametrize("case", ["GPT-2-like", "adapters", "GPT-2-like, sequence", "recomputed, sequence"])
@pytest.mark.parametrize(("backend", "pieces"), [("motet", 3), ("gloo", 1)])
def test_communication_during_matmuls_changes_nothing(
    ranks: Ranks, folder: Path, case: str, backend: CpuBackend, pieces: int
) -> None:
    settings = "layout.tp=2", f"communication.tp_pieces={pieces}"
    assert worst(ranks.on(backend), folder, case, *settings) < 1e-12


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        ("three ranks", "tp=3"),
        ("shared heads", "tp=4"),
        *(("GPT-2-like", f"tp=2 dp=2 zero={zero}") for zero in (0, 2, 3)),
        ("GPT-2-like, sequence", "tp=2 dp=2 zero=3"),
    ],
)
def test_more_ranks_train_as_one(ranks: Ranks, folder: Path, case: str, layout: str) -> None:
    assert worst(ranks, folder, case, *(f"layout.{each}" for each in layout.split())) < 1e-12
