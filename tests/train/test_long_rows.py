"""Steps of 32,768 tokens in one row, on ranks that may have an eighth of the bytes of the mask of one layer."""

import json
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import pytest

from data_limit import data_bytes, data_limit
from motet.memory.tiers.device_limit import DeviceLimit
from motet.parallel.context_parallel import attention_blocks, attention_tiles
from motet.parallel.process.process_group import RankGroup
from motet.train.build import build_components, precision_context
from motet.train.job import Job
from motet.train.memory_check.predicted_ranks import predict_step_memory
from ranks import RankFailureError, Ranks
from train.runs import TEXT, small_job

pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA limits mapped memory on Linux only"),
]
TOKENS = 32_768
LIMIT = 4 * TOKENS * TOKENS // 8  # The mask in float32 has eight times as many bytes
NO_LIMIT = 1 << 46
TOLERANCE = 0.05
SETTINGS = [
    f"model={{family='decoder', vocab_size=260, context={TOKENS}, layers=2, hidden=64, heads=1, ffn_hidden=128}}",
    *(f"data.sequence_length={TOKENS}", "data.batch_sequences=1", "precision.recipe=fp32", "optimizer.name=sgd"),
]


def long_job(folder: Path, layout: str, *, packed: bool) -> Job:
    """A job on documents of about 5,000 tokens."""
    document, texts = TEXT.read_text(), folder / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"{number} {document}"}) + "\n" for number in range(30)))
    words = [f"layout.{word}" for word in layout.split()]
    return small_job(folder, *SETTINGS, f"data.source={texts}", f"data.restart_documents={str(packed).lower()}", *words)


def peak_of_step(group: RankGroup, job: Job, limit: int, data: int) -> int:
    """The peak of live bytes, with a limit of these and one of the data that the process has more than before."""
    with precision_context(job, group.device), tempfile.TemporaryDirectory() as folder:
        with data_limit(data_bytes() + data):
            parts = build_components(job, group, Path(folder))
            step, known = parts.make_train_step(job), parts.engine.recomputation.known_tensors
            with (limited := DeviceLimit(limit, group.device, known=known)).active():
                step.step(0, job.optimizer.learning_rate)
        return limited.peak()


def check_peaks(ranks: Ranks, job: Job, world: int, *, packed: bool = False) -> None:
    planned = [each.predicted.peak for each in predict_step_memory(job, job.layout_for(world), is_packed=packed)]
    peaks = ranks.run(world, peak_of_step, job, LIMIT, LIMIT, timeout_s=600)
    for measured, expected in zip(peaks, planned, strict=True):
        assert abs(expected / measured - 1) < TOLERANCE, (measured, expected)


@pytest.mark.parametrize(
    ("layout", "world"), [("", 1), ("dp=1 cp=2", 2), ("dp=1 cp=4", 4), ("dp=1 cp=4 cp_kind=ring", 4)]
)
def test_a_rank_has_the_planned_peak(ranks: Ranks, tmp_path: Path, layout: str, world: int) -> None:
    check_peaks(ranks, long_job(tmp_path, layout, packed=False), world)


@pytest.mark.parametrize("layout", ["dp=1 cp=4", "dp=1 cp=4 cp_kind=ring"])
def test_packed_documents(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    check_peaks(ranks, long_job(tmp_path, layout, packed=True), 4, packed=True)


def step_with_one_tile(group: RankGroup, job: Job, limit: int, data: int) -> None:
    """A step whose ranks make the mask of all their queries and keys together."""
    with (
        patch.object(attention_blocks, "TILE_ELEMENTS", TOKENS * TOKENS),
        patch.object(attention_tiles, "MASKED_EDGE", TOKENS),
    ):
        peak_of_step(group, job, limit, data)


@pytest.mark.parametrize(
    ("limit", "data", "sentence"),
    [(LIMIT, NO_LIMIT, f"memory.device_limit = {LIMIT} "), (NO_LIMIT, LIMIT, "can't allocate memory")],
    ids=["device_limit", "RLIMIT_DATA"],
)
def test_a_dense_mask_passes_either_limit(ranks: Ranks, tmp_path: Path, limit: int, data: int, sentence: str) -> None:
    job = long_job(tmp_path, "dp=1 cp=4 cp_order=contiguous", packed=True)
    with pytest.raises(RankFailureError, match=sentence):
        ranks.run(4, step_with_one_tile, job, limit, data, timeout_s=600)
