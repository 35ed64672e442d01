"""The job `bert-classify`, made small, learns what its rule is: nearly all samples that it has not seen are right."""

import tempfile
from pathlib import Path

import torch

from motet.parallel.process.process_group import RankGroup
from motet.train.build import build_components, precision_context
from motet.train.evaluation import evaluate
from motet.train.job import Job, load_job
from ranks import Ranks

SMALL = [
    *("model.hidden=32", "model.ffn_hidden=64", "model.layers=1", "optimizer.learning_rate=3e-3", "run.epochs=1"),
    *("run.device=cpu", "run.threads=1", "monitor.tensorboard=false"),
]


def accuracies(group: RankGroup, job: Job, steps: int) -> tuple[float, float, float]:
    """Held-out accuracy before and after training, and the latter as counted here, on what one rank computes alone."""
    with precision_context(job), tempfile.TemporaryDirectory() as folder:
        parts = build_components(job, group, Path(folder))
        rows = job.data.batch_sequences

        def held_out() -> float:
            found = evaluate(
                parts.model, parts.data, "validation", max_batches=16, group=group, layout=parts.layout,
                batch_sequences=rows,
            )  # fmt: skip
            assert found.accuracy is not None
            return found.accuracy

        before, stepper = held_out(), parts.make_train_step(job)
        for number in range(steps):
            stepper.step(number, job.optimizer.learning_rate)
        after, right, all_rows = held_out(), 0, 0
        for index in range(parts.data.evaluation_batches("validation")):
            batch = parts.data.evaluation_batch("validation", index, range(rows))
            with torch.no_grad():
                chosen = parts.model.logits(batch)[:, 1] > parts.model.logits(batch)[:, 0]
            counted = batch.weights > 0
            right += int((chosen.long() == batch.targets)[counted].sum())
            all_rows += int(counted.sum())
        return before, after, right / all_rows


def test_held_out_samples_are_classified(ranks: Ranks) -> None:
    for before, after, counted in ranks.run(2, accuracies, load_job("bert-classify", SMALL), 60, timeout_s=120):
        assert 0.3 < before < 0.7 and after > 0.97 and after == counted
