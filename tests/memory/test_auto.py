"""`memory.recompute = "auto"`: live bytes of a step stay within the budget, and no number changes."""

import re
import tempfile
from pathlib import Path

import pytest
import torch

from live_storages import LiveStorages
from motet.core.errors import InputError
from motet.memory.measured_costs import MEASURED_STEPS
from motet.monitor.events import RecomputationChosen
from motet.parallel.process.process_group import RankGroup
from motet.train.build import build_components, precision_context
from motet.train.job import Job
from ranks import Ranks
from train.runs import small_job

SINGLE = RankGroup(0, 1, None, torch.device("cpu"))
MEASURED = len(MEASURED_STEPS)


def watched(group: RankGroup, job: Job) -> tuple[list[float], RecomputationChosen | None, int]:
    """The losses, the choice, and the most bytes that were alive in the last step."""
    with precision_context(job), tempfile.TemporaryDirectory() as folder:
        parts = build_components(job, group, Path(folder))
        stepper, results = parts.make_train_step(job), []
        for step in range(MEASURED + 1):
            results.append(stepper.step(step, 0.001))
        with LiveStorages(parts.engine.recomputation.known_tensors()) as storages:
            results.append(stepper.step(MEASURED + 1, 0.001))
        choices = [result.recomputation for result in results if result.recomputation]
        assert len(choices) == (job.memory.recompute == "auto")
        return [result.loss for result in results], choices[0] if choices else None, storages.peak


def peaks(ranks: Ranks, world: int, job: Job) -> tuple[list[float], RecomputationChosen | None, list[int]]:
    results = ranks.run(world, watched, job, timeout_s=120) if world > 1 else [watched(SINGLE, job)]
    return results[0][0], results[0][1], [result[2] for result in results]


CASES: dict[str, tuple[int, list[str]]] = {
    "one rank": (1, []),
    "zero 2": (2, ["layout.zero=2"]),
    "zero 3": (2, ["layout.zero=3", "layout.microbatches=2"]),
    "tp": (2, ["layout.tp=2", "layout.sp=true"]),
    "1f1b": (2, ["layout.pp=2", "layout.microbatches=4"]),
    "interleaved": (2, ["layout.pp=2", "layout.chunks=2", "layout.schedule=interleaved", "layout.microbatches=4"]),
}


def check(ranks: Ranks, folder: Path, name: str, *settings: str, parts: int, model: str) -> None:
    world, layout = CASES[name]

    def job(*more: str) -> Job:
        size = ["model.layers=4"] if model == "decoder" else []
        how = ["data.batch_sequences=24", "precision.recipe=fp32"]
        return small_job(folder, *how, *size, *layout, *settings, *more, model=model)

    losses, _, most = peaks(ranks, world, job())
    _, _, least = peaks(ranks, world, job("memory.recompute=full"))
    largest, smallest = max(most), max(least)
    spread = max(largest - smallest, 0)  # Buffers of messages can outweigh the activations of so small a model
    assert spread or world > 1
    seconds = []
    for part in range(parts + 1):
        budget = smallest + spread * part // parts + 8192 + largest // 50
        auto_losses, choice, alive = peaks(ranks, world, job("memory.recompute=auto", f"memory.budget={budget}"))
        assert choice is not None and auto_losses == losses
        assert max(alive) <= budget and max(alive) <= choice.predicted_peak * 1.001 + 8192 <= budget * 1.001 + 8192
        assert choice.budget == budget and choice.step == MEASURED
        seconds.append(choice.full + choice.selective)
    assert seconds[0] > seconds[-1] or not spread


def test_live_bytes_stay_within_the_budget(ranks: Ranks, tmp_path: Path) -> None:
    check(ranks, tmp_path, "one rank", parts=1, model="decoder")


@pytest.mark.proof
@pytest.mark.parametrize("model", ["decoder", "gpt2", "bert", "t5", "llama"])
@pytest.mark.parametrize("name", CASES)
def test_live_bytes_stay_within_eight_budgets(ranks: Ranks, tmp_path: Path, name: str, model: str) -> None:
    if name in ("1f1b", "interleaved") and model != "decoder":
        pytest.skip("two blocks")
    check(ranks, tmp_path, name, parts=7, model=model)


def test_a_budget_that_is_too_small_is_refused_with_the_bytes(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=re.escape("memory.budget = 1000 is too little: a step takes")) as refusal:
        watched(SINGLE, small_job(tmp_path, "memory.recompute=auto", "memory.budget=1000"))
    needed = int(re.search(r"\((\d+) bytes\)", str(refusal.value))[1])  # type: ignore[index]
    job = small_job(tmp_path, "memory.recompute=auto", f"memory.budget={needed}")
    _, choice, alive = watched(SINGLE, job)
    assert choice is not None and choice.full >= 1 and alive <= needed + 8192
