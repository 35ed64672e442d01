"""The live bytes of ranks that split sequences are those that are predicted, for each kind of exchange."""

import json
import tempfile
from pathlib import Path

import pytest

from motet.parallel.process.process_group import RankGroup
from motet.train.job import Job
from motet.train.memory_check.step_memory import measure_on_group
from ranks import Ranks
from train.runs import TEXT, small_job

TOLERANCE = 0.04
TOKENS, RANKS = 512, 4
SIZES = f"vocab_size=260, context={TOKENS}, layers=2, hidden=128, heads=4, ffn_hidden=256"
DECODER = f"model={{family='decoder', {SIZES}, kv_heads=4}}"
ENCODER = f"model={{family='encoder', {SIZES}, dropout=0.1}}"
SETTINGS = [f"data.sequence_length={TOKENS}", "data.batch_sequences=2", "layout.dp=1", f"layout.cp={RANKS}"]
MODELS = {
    "complete rows": [DECODER, "precision.recipe=fp32", "data.restart_documents=false"],
    "packed rows": [DECODER, "precision.recipe=fp32", "data.restart_documents=true"],
    "bf16": [DECODER, "precision.recipe=bf16", "precision.emulate=true", "data.restart_documents=false"],
    "dropout": [ENCODER, "precision.recipe=fp32", "data.objective=masked", "data.restart_documents=false"],
}


def peaks(group: RankGroup, job: Job) -> tuple[int, int]:
    with tempfile.TemporaryDirectory() as folder:
        memory = measure_on_group(job, group, Path(folder))
    assert memory.measured is not None
    return memory.measured.peak, memory.predicted.peak


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["all-gather", "ring", "ring layout.cp_inner=2", "all-to-all"])
@pytest.mark.parametrize("model", MODELS)
def test_each_rank_has_the_predicted_peak(ranks: Ranks, tmp_path: Path, kind: str, model: str) -> None:
    text, texts = TEXT.read_text(), tmp_path / "texts.jsonl"  # Rows of several documents, if they are packed
    texts.write_text("".join(json.dumps({"text": text[start : start + 200]}) + "\n" for start in range(0, 3000, 20)))
    job = small_job(tmp_path, f"data.source={texts}", *SETTINGS, *MODELS[model], *f"layout.cp_kind={kind}".split())
    for measured, predicted in ranks.run(RANKS, peaks, job, timeout_s=240):
        assert abs(predicted / measured - 1) < TOLERANCE, (measured, predicted)
