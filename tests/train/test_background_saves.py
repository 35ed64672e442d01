"""A checkpoint that is written while the next step runs has the bits of one for which training waited."""

import time
from pathlib import Path
from typing import Any

import pytest

from motet.checkpoint.background_writer import CheckpointSaver
from motet.checkpoint.data_files import DataFileWriter
from motet.monitor.events import CheckpointSaved, read_events
from motet.parallel.process.launch_environment import RankEnvironment
from motet.train.job import Job
from ranks import Ranks
from train.runs import run_job, small_job

STEPS = 5
NORMED = "model={factory='train.trainable_user_models:WithBatchNorm', arguments={vocab_size=260}, vocab_size=260}"
HOST, DISK = "memory.optimizer=host", "memory.optimizer=disk"
ROWS = ("layout.zero=3", DISK, "memory.parameters=disk", "memory.window=1")
# Settings, of which `make test` takes those before the mark
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "one rank": (1, ()),
    "stage 2, micro-batches": (2, ("layout.zero=2", "layout.microbatches=2", "precision.recipe=bf16")),
    "fp16 with overflows": (2, ("precision.recipe=fp16", "precision.loss_scale_initial=16777216")),
    "disk, overlap forward": (1, (DISK, "communication.overlap=forward")),
    "delayed": (2, (HOST, "layout.zero=1", "memory.update=delayed", "communication.overlap=forward")),
    "pipeline": (2, ("layout.pp=2", "layout.microbatches=3")),
}
PROOF: dict[str, tuple[int, tuple[str, ...]]] = {
    "stage 0, overlap forward": (2, ("communication.overlap=forward",)),
    "stage 1": (3, ("layout.zero=1",)),
    "stage 3": (2, ("layout.zero=3",)),
    "hybrid": (4, ("layout.zero=3", "layout.shard_group=2")),
    "tp": (2, ("layout.tp=2", "layout.sp=true")),
    "zb-v": (
        4,
        (
            "layout.pp=2",
            "layout.tp=2",
            "model.layers=4",
            "layout.schedule=zb-v",
            "layout.chunks=2",
            "layout.microbatches=4",
        ),
    ),
    "host": (2, (HOST, "layout.zero=1")),
    "host, overlap forward": (2, (HOST, "layout.zero=2", "communication.overlap=forward")),
    "disk": (2, (DISK, "layout.zero=2")),
    "disk, delayed": (2, (DISK, "layout.zero=1", "memory.update=delayed")),
    "fp16 with overflows, delayed": (
        1,
        (HOST, "memory.update=delayed", "precision.recipe=fp16", "precision.loss_scale_initial=16777216"),
    ),
    "rows on the host": (2, ("layout.zero=3", HOST, "memory.parameters=host")),
    "rows on disk": (1, ROWS),
    "buffers": (1, (NORMED, "precision.recipe=fp32")),
    "compact moments": (2, ("precision.moment_dtype=8bit", "precision.recipe=fp32")),
    "momentum": (2, ("optimizer.name=sgd", "optimizer.momentum=0.9")),
    "reproducible": (2, ("run.reproducible=layout", "precision.recipe=fp32")),
    "replicas": (2, ("layout.zero=2", "layout.shard_group=1", "outer.every=2")),
    "compression": (2, ("layout.zero=2", "communication.compress_gradients=int4")),
}
QUICK = ("one rank", "disk, overlap forward")
EACH = [pytest.param(name, marks=() if name in QUICK else pytest.mark.proof) for name in (*CASES, *PROOF)]


def _train(place: RankEnvironment, job: Job, folder: Path, slow_s: float = 0.0, is_broken: bool = False) -> int:
    """A run whose disk takes so long for each box of a tensor; a broken one lets an update pass the barrier."""
    with pytest.MonkeyPatch.context() as patch:
        write = DataFileWriter.write_box

        def write_slowly(self: DataFileWriter, *arguments: Any) -> None:
            time.sleep(slow_s)
            write(self, *arguments)

        patch.setattr(DataFileWriter, "write_box", write_slowly)
        if is_broken:
            patch.setattr(CheckpointSaver, "before_update", lambda *_: None)
        return run_job(place, job, folder)


def _job(folder: Path, case: str, *others: str) -> Job:
    _, settings = (CASES | PROOF)[case]
    settings = (*settings, f"memory.folder={folder}") if any("disk" in each for each in settings) else settings
    return small_job(folder, *settings, f"run.steps={STEPS}", "checkpoint.every=1", "checkpoint.keep=99", *others)


def _bytes(run: Path) -> dict[str, bytes]:
    folder = run / "checkpoints"
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _saved(run: Path) -> list[CheckpointSaved]:
    return [event for event in read_events(run / "events.jsonl") if isinstance(event, CheckpointSaved)]


@pytest.mark.parametrize("case", EACH)
def test_bits_are_those_of_a_save_that_training_waits_for(ranks: Ranks, tmp_path: Path, case: str) -> None:
    world = (CASES | PROOF)[case][0]
    ranks.run_places(world, _train, _job(tmp_path, case, "checkpoint.mode=sync"), tmp_path / "sync", timeout_s=240)
    for name, slow_s in (("quick", 0.0), ("slow", 0.02 if case in PROOF else 0.008)):
        ranks.run_places(world, _train, _job(tmp_path, case), tmp_path / name, slow_s, timeout_s=240)
        assert _bytes(tmp_path / name) == _bytes(tmp_path / "sync"), name
    assert [event.step for event in _saved(tmp_path / "slow")] == list(range(1, STEPS + 1))
    copies = [event.copied_bytes for event in _saved(tmp_path / "slow")]
    assert case.startswith(("disk", "fp16", "rows on disk")) or any(copies), copies
    assert all(event.stall_s >= 0.5 * event.duration_s for event in _saved(tmp_path / "sync"))


@pytest.mark.parametrize(
    "case",
    ["stage 2, micro-batches", *(pytest.param(name, marks=pytest.mark.proof) for name in QUICK)],
)
def test_an_update_that_passes_the_barrier_changes_bits(ranks: Ranks, tmp_path: Path, case: str) -> None:
    world, runs = (CASES | PROOF)[case][0], [tmp_path / "right", tmp_path / "broken"]
    for run, is_broken in zip(runs, (False, True), strict=True):
        ranks.run_places(world, _train, _job(tmp_path, case), run, 0.004, is_broken, timeout_s=240)
    right, broken = map(_bytes, runs)
    assert {name.split("/")[0] for name in right if right[name] != broken[name]} >= {"step-00000001", "step-00000002"}
