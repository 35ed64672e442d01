"""Jobs whose activations lie on the host: bytes of each place, the bytes that travel, limits and refusals."""

import tempfile
from pathlib import Path

import pytest

from motet.parallel.process.process_group import RankGroup
from motet.train.build import build_components, precision_context
from motet.train.job import Job
from motet.train.memory_check.step_prediction import predict_host_activations
from ranks import Ranks
from train.runs import small_job

STEPS = 2
SIZES = "vocab_size=260, context=128, layers=4, hidden=64, heads=4"
DECODER = [f"model={{family='decoder', {SIZES}, kv_heads=2, ffn_hidden=128}}"]
T5 = [
    f"model={{family='encoder-decoder', {SIZES.replace('260', '359')}, ffn_hidden=128, dropout=0.1}}",
    *("data.objective=spans", "data.batch_sequences=48"),
]
SHAPE = ["data.sequence_length=128", "data.batch_sequences=8", "precision.recipe=fp32"]


def moved_bytes(group: RankGroup, job: Job) -> tuple[list[int], list[int]]:
    """The largest bytes of activations on the host, and those that a step sends there and back; both as predicted."""
    with precision_context(job, group.device), tempfile.TemporaryDirectory() as folder:
        parts = build_components(job, group, Path(folder))
        engine, step = parts.engine, parts.make_train_step(job)
        for index in range(STEPS):
            step.step(index, job.optimizer.learning_rate)
        recomputation = engine.recomputation.recomputation
        assert recomputation is not None and recomputation.offloaded is not None
        link = recomputation.offloaded.link
        assert link.host_bytes == 0  # After a step nothing is left
        predicted = predict_host_activations(job, engine.plan, parts.layout, rank=group.rank)
        sent = [link.peak_host_bytes, link.sent_to_host // STEPS, link.sent_to_device // STEPS]
        return sent, [predicted.peak_bytes, predicted.to_host, predicted.to_device]


CASES: dict[str, tuple[int, list[str]]] = {
    "one rank": (1, DECODER),
    "micro-batches": (1, [*DECODER, "layout.microbatches=4"]),
    "selective": (1, [*DECODER, "memory.recompute=selective"]),
    "full": (1, [*DECODER, "memory.recompute=full"]),
    "every second": (1, [*DECODER, "memory.recompute=every-k"]),
    "bf16, zero 3": (2, [*DECODER, "precision.recipe=bf16", "layout.zero=3"]),
    "tp": (2, [*DECODER, "layout.tp=2"]),
    "sp": (2, [*DECODER, "layout.tp=2", "layout.sp=true"]),
    "gpipe": (2, [*DECODER, "layout.pp=2", "layout.schedule=gpipe", "layout.microbatches=4"]),
    "1f1b": (2, [*DECODER, "layout.pp=2", "layout.microbatches=4"]),
    "1f1b, full": (2, [*DECODER, "layout.pp=2", "layout.microbatches=4", "memory.recompute=full"]),
    "interleaved": (
        2,
        [*DECODER, "layout.pp=2", "layout.chunks=2", "layout.schedule=interleaved", "layout.microbatches=4"],
    ),
    "zero bubble": (
        2,
        [*DECODER, "layout.pp=2", "layout.chunks=2", "layout.schedule=zb-v", "layout.microbatches=4", "model.layers=8"],
    ),
    "t5": (1, T5),
    "t5, full": (1, [*T5, "memory.recompute=full"]),
}
QUICK = ["micro-batches", "selective", "1f1b"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.proof) for name in CASES]
)
def test_bytes_on_the_host_and_its_link_are_those_of_the_prediction(ranks: Ranks, tmp_path: Path, name: str) -> None:
    world, settings = CASES[name]
    job = small_job(tmp_path, *SHAPE, *settings, "memory.activations=host")
    ranks_moved = ranks.run(world, moved_bytes, job, timeout_s=120)
    assert [moved for moved, _ in ranks_moved] == [predicted for _, predicted in ranks_moved]
    assert all(ranks_moved[0][0])
