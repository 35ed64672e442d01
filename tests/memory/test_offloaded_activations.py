"""Activations on the host change where saved tensors lie, and no number."""

from pathlib import Path

import pytest

from ranks import Ranks
from train.runs import same_bits, small_job
from train.tensor_parallel_runs import train_and_reassemble

STEPS = 3
SIZES = "vocab_size=260, context=128, layers=4, hidden=64, heads=4"
MODELS = {
    "decoder": [f"model={{family='decoder', {SIZES}, kv_heads=2, ffn_hidden=128}}"],
    "t5": [f"model={{family='encoder-decoder', {SIZES.replace('260', '359')}, ffn_hidden=128}}", "data.objective=spans"],
}
SHAPE = ["data.sequence_length=128", "data.batch_sequences=8"]
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "zero 0": (2, ["layout.microbatches=2"]),
    "zero 1, overlap": (2, ["layout.zero=1", "communication.overlap=forward"]),
    "zero 2": (2, ["layout.zero=2", "layout.microbatches=2", "precision.recipe=fp16"]),
    "zero 3": (2, ["layout.zero=3", "layout.microbatches=2", "precision.recipe=bf16"]),
    "zero 3, full": (2, ["layout.zero=3", "memory.recompute=full", "precision.recipe=bf16"]),
    "tp": (2, ["layout.tp=2", "memory.recompute=selective"]),
    "sp, pieces": (2, ["layout.tp=2", "layout.sp=true", "communication.tp_pieces=2"]),
    "gpipe": (2, ["layout.pp=2", "layout.schedule=gpipe", "layout.microbatches=4"]),
    "1f1b": (2, ["layout.pp=2", "layout.microbatches=4"]),
    "interleaved": (2, ["layout.pp=2", "layout.chunks=2", "layout.schedule=interleaved", "layout.microbatches=4"]),
    "zero bubble": (2, ["layout.pp=2", "layout.chunks=2", "layout.schedule=zb-v", "layout.microbatches=4"]),
    "reproducible": (2, ["run.reproducible=layout"]),
    "replicas": (2, ["outer.every=2"]),
}
QUICK = ["zero 3, full", "1f1b"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.proof) for name in LAYOUTS]
)
def test_a_layout_has_the_same_bits(ranks: Ranks, tmp_path: Path, name: str) -> None:
    world, settings = LAYOUTS[name]
    places = [
        ranks.run(
            world,
            train_and_reassemble,
            small_job(tmp_path, *SHAPE, *MODELS["decoder"], *settings, f"memory.activations={place}"),
            STEPS,
            timeout_s=240,
        )[0]
        for place in ("device", "host")
    ]
    assert places[0].losses == places[1].losses
    assert same_bits(places[0].masters, places[1].masters)
