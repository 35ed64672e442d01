"""Tensor parallelism that splits nothing computes what data parallelism alone does, bit for bit."""

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from pages.control_collectives import control_bytes

from motet.core.trace import install_sink
from motet.parallel.process.process_group import RankGroup
from motet.parallel.step_plan.traffic import sent_bytes_per_step
from motet.train.build import precision_context
from motet.train.job import Job
from on_ranks import Counter
from ranks import Ranks
from train.runs import saved_tensors, small_job
from train.unsplit import build_unsplit

STEPS = 3


class Outcome(NamedTuple):
    losses: list[float]
    norms: list[float]
    counts: list[tuple[float, int]]  # Targets and tokens of each step
    sent: list[int]  # Bytes in each step besides the control collectives
    planned: int
    written: dict[str, int]  # Elements of each master that this rank writes to a checkpoint


def train(group: RankGroup, job: Job, folder: str) -> Outcome:
    with precision_context(job):
        parts, runner = build_unsplit(job, group, Path(folder))
        engine, outcome = parts.engine, Outcome([], [], [], [], 0, {})
        stepper = replace(parts.make_train_step(job), runner=runner)
        for step in range(STEPS):
            counter = Counter()
            with install_sink(counter):
                result = stepper.step(step, 0.01)
            outcome.losses.append(result.loss)
            outcome.norms.append(result.grad_norm)
            outcome.counts.append((result.targets, result.tokens))
            control = control_bytes("agreement", 2 + group.world, rank=group.rank, hosts=(0,) * group.world)
            sent = counter.counts.get("sent_bytes", 0) - counter.counts.get("check_bytes", 0)
            outcome.sent.append(int(sent) - control)
        engine.save(Path(folder) / "checkpoints", STEPS)
        recipe, rank = job.precision.resolved, engine.step_group.rank
        planned = sent_bytes_per_step(engine.plan, recipe, settings=job.communication, rank=rank).total
        tensors = engine.training_state(folder).written_tensors().items()
        lengths = {name: [lengths for lengths, _ in t.boxes.values()] for name, t in tensors if "master/" in name}
        written = {name: sum(map(prod, boxes)) for name, boxes in lengths.items()}
        return outcome._replace(planned=planned, written=written)


def trained(ranks: Ranks, folder: Path, *layout: str, model: str = "decoder") -> list[Outcome]:
    sizes = dict(word.split("=") for word in layout)
    world = int(sizes.get("tp", 1)) * int(sizes.get("dp", 1))
    folder.mkdir()
    job = small_job(folder, *(f"layout.{word}" for word in layout), model=model)
    return ranks.run(world, train, job, str(folder))


def stored_bytes(folder: Path) -> int:
    """The bytes of all data files without their headers."""
    files = list(folder.rglob("*.safetensors"))
    return sum(file.stat().st_size - 8 - int.from_bytes(file.read_bytes()[:8], "little") for file in files)


@pytest.mark.parametrize(
    ("model", "with_nothing_split", "alone"),
    [
        ("decoder", ["tp=2"], []),
        ("bert", ["tp=2"], []),
        *(("decoder", ["tp=2", "dp=2", f"zero={zero}"], ["dp=2", f"zero={zero}"]) for zero in range(4)),
    ],
)
def test_nothing_changes(
    ranks: Ranks, tmp_path: Path, model: str, with_nothing_split: list[str], alone: list[str]
) -> None:
    wanted, *_ = trained(ranks, tmp_path / "alone", *alone, model=model)
    found = trained(ranks, tmp_path / "unsplit", *with_nothing_split, model=model)
    for rank, outcome in enumerate(found):
        assert (outcome.losses, outcome.norms, outcome.counts) == (wanted.losses, wanted.norms, wanted.counts), rank
        assert outcome.sent == [outcome.planned] * STEPS, rank
    stored, expected = saved_tensors(tmp_path / "unsplit"), saved_tensors(tmp_path / "alone")
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], expected[name]) for name in expected)
    masters = {name: t.numel() for name, t in expected.items() if "master/" in name}
    assert {name: sum(outcome.written.get(name, 0) for outcome in found) for name in masters} == masters
    payload = sum(t.nbytes for t in expected.values())
    assert payload <= stored_bytes(tmp_path / "unsplit") < stored_bytes(tmp_path / "alone") + 0.2 * payload
