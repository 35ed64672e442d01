"""The manifest says nothing about the layout, each element is written once, and any layout goes on from any other."""

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

import motet
from motet.checkpoint.manifest import read_manifest
from motet.monitor.events import WarningIssued, read_events, read_steps
from motet.parallel.model_sharding import ModelSharding
from motet.parallel.process.process_group import RankGroup
from motet.train.build import build_components, precision_context
from motet.train.job import Job
from motet.train.state import TrainingState, newest_checkpoint
from ranks import Ranks
from refusals import refused
from train.runs import run_job, same_bits, saved_tensors, small_job

Items = dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]]  # Boxes by name: offsets and lengths


def save_one_step(group: RankGroup, job: Job, folder: str) -> Items:
    """Save after a step. Returns what this rank writes."""
    with precision_context(job):
        splits = ModelSharding() if job.layout.tp > 1 else None
        parts = build_components(job, group, Path(folder), model_sharding=splits)
        parts.make_train_step(job).step(0, 0.01)
        parts.state.save(1)
        return written_boxes(parts.state)


def written_boxes(state: TrainingState) -> Items:
    """The boxes that this rank writes."""
    return {
        name: [(offsets, lengths) for offsets, (lengths, _) in shard.boxes.items()]
        for name, shard in state.written_tensors().items()
    }


def manifest_of(folder: Path) -> dict[str, Any]:
    """Everything but checksums and sizes, which have the names of files as well."""
    newest = newest_checkpoint(folder / "checkpoints")
    assert newest is not None
    content: dict[str, Any] = json.loads((newest / "manifest.json").read_text())
    del content["checksum"], content["checksums"]
    assert {*content.pop("sizes")} == {path.name for path in newest.iterdir()} - {"manifest.json"}
    return content


def count_writers(by_rank: list[Items], shapes: dict[str, list[int]]) -> None:
    """Each element is in one box of one rank."""
    for name, shape in shapes.items():
        times = torch.zeros(shape, dtype=torch.int)
        for offsets, lengths in (box for items in by_rank for box in items.get(name, [])):
            times[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))] += 1
        assert (times == 1).all(), f"{name}: elements are written {times.unique().tolist()} times"


LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "stage 0": (4, []),
    "stage 1": (3, ["layout.zero=1"]),
    "stage 2": (2, ["layout.zero=2"]),
    "stage 3": (4, ["layout.zero=3"]),
    "hybrid": (4, ["layout.zero=3", "layout.shard_group=2"]),
    "secondary shards": (4, ["layout.zero=3", "layout.secondary_group=2"]),
    "stage 3 with small tensors in buckets": (2, ["layout.zero=3", "layout.min_shard_numel=100"]),
    "tp that splits nothing": (4, ["layout.tp=2", "layout.dp=2", "layout.zero=1"]),
    "replicas": (4, ["layout.zero=2", "layout.shard_group=2", "outer.every=1"]),
    "compression": (2, ["layout.zero=2", "communication.compress_gradients=int4"]),
    "compression and tp": (4, ["layout.tp=2", "layout.dp=2", "communication.compress_gradients=int4"]),
    "forward overlap": (2, ["communication.overlap=forward"]),
}
SPLIT_LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "tp=2": (2, ["layout.tp=2"]),
    "tp=4": (4, ["layout.tp=4"]),
    "tp=2 sp dp=2 stage 3": (4, ["layout.tp=2", "layout.sp=true", "layout.dp=2", "layout.zero=3"]),
    "pp=2": (2, ["layout.pp=2"]),
    "pp=4": (4, ["layout.pp=4", "layout.schedule=gpipe"]),
    "interleaved pp=2": (2, ["layout.pp=2", "layout.schedule=interleaved", "layout.chunks=2"]),
    "pp=2 dp=2 stage 3": (4, ["layout.pp=2", "layout.dp=2", "layout.zero=3"]),
    "zb-v pp=2 tp=2": (4, ["layout.pp=2", "layout.tp=2", "layout.schedule=zb-v", "layout.chunks=2"]),
}
CONTEXT_LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "cp=2 pp=2": (4, ["layout.cp=2", "layout.pp=2"]),
    "cp=2 dp=2 stage 3": (4, ["layout.cp=2", "layout.dp=2", "layout.zero=3", "layout.cp_kind=ring"]),
    "tp=2 cp=2": (4, ["layout.tp=2", "layout.cp=2", "layout.zero=1", "layout.cp_kind=all-to-all"]),
}
NORMED = "model={factory='train.trainable_user_models:WithBatchNorm', arguments={vocab_size=260}, vocab_size=260}"
SLASHED = "model={factory='train.trainable_user_models:WithSlashes', vocab_size=260}"
# What is trained -> (model, settings, layouts, of which `make test` takes the first two)
JOBS: dict[str, tuple[str, list[str], list[str]]] = {
    "decoder": ("decoder", [], ["stage 3", "compression and tp", *LAYOUTS]),
    "bf16": ("decoder", ["precision.recipe=bf16"], ["stage 0", "stage 3", "replicas"]),
    "momentum": ("decoder", ["optimizer.name=sgd", "optimizer.momentum=0.9"], ["stage 1", "stage 3"]),
    "frozen": ("adapters", ["precision.recipe=bf16"], ["hybrid", "tp that splits nothing", "stage 0", "stage 3"]),
    "buffers": ("decoder", [NORMED, "precision.recipe=fp32"], ["stage 0", "replicas", "stage 3"]),
    "tied": ("qwen2", [], ["stage 2", "stage 3"]),
    "names with slashes": ("decoder", [SLASHED], ["stage 0", "tp that splits nothing", "replicas"]),
}


@pytest.mark.parametrize("count", [2, pytest.param(99, marks=pytest.mark.proof)])
@pytest.mark.parametrize("name", JOBS)
def test_manifests_are_equal_and_each_element_is_written_once(
    ranks: Ranks, tmp_path: Path, name: str, count: int
) -> None:
    model, settings, layouts = JOBS[name]
    job = small_job(tmp_path, *settings, model=model)
    (tmp_path / "alone").mkdir()
    count_writers(ranks.run(1, save_one_step, job, str(tmp_path / "alone")), saved_shapes(tmp_path / "alone"))
    expected = manifest_of(tmp_path / "alone")
    assert len(expected["shapes"]) > 10 and expected["shapes"].keys() == expected["dtypes"].keys()
    for layout in dict.fromkeys(layouts[:count]):
        world, changes = LAYOUTS[layout]
        folder = tmp_path / layout
        folder.mkdir()
        by_rank = ranks.run(world, save_one_step, small_job(tmp_path, *settings, *changes, model=model), str(folder))
        assert manifest_of(folder) == expected, layout
        count_writers(by_rank, saved_shapes(folder))
        sizes = [sum(prod(lengths) for boxes in items.values() for _, lengths in boxes) for items in by_rank]
        assert min(sizes) > 0.1 * max(sizes), f"{layout}: ranks write {sizes} elements"


def saved_shapes(folder: Path) -> dict[str, list[int]]:
    newest = newest_checkpoint(folder / "checkpoints")
    assert newest is not None
    return read_manifest(newest).all_shapes


@dataclass(frozen=True)
class LayoutPair:
    """Three steps in one layout, and three in another."""

    before: str
    after: str
    settings: tuple[str, ...] = ()
    same_bits: bool = False

    def __str__(self) -> str:
        return " ".join([self.before, "to", self.after, *self.settings])


REPRODUCIBLE = ("run.reproducible=layout", "precision.recipe=fp32")
SPLIT = ("model.kv_heads=4", "model.vocab_size=261", "model.dropout=0.1")  # Two ranks pad the vocabulary
STAGES = (*SPLIT, "model.layers=4", "layout.microbatches=3")
PAIRS = [  # `make test` takes the first two
    LayoutPair("interleaved pp=2", "one rank", STAGES),
    LayoutPair("tp=2", "tp=4", SPLIT),
    LayoutPair("tp=2 sp dp=2 stage 3", "one rank", SPLIT),
    LayoutPair("stage 3", "stage 1", REPRODUCIBLE, same_bits=True),
    LayoutPair("compression", "compression", same_bits=True),
    LayoutPair("one rank", "stage 3"),
    LayoutPair("stage 3", "one rank"),
    LayoutPair("hybrid", "secondary shards"),
    LayoutPair("replicas", "replicas", same_bits=True),
    LayoutPair("stage 0", "stage 1"),
    LayoutPair("stage 1", "stage 2"),
    LayoutPair("tp=4", "stage 0", SPLIT),
    LayoutPair("one rank", "tp=2 sp dp=2 stage 3", SPLIT),
    LayoutPair("stage 3", "tp=4", (*SPLIT, "model.adapters={rank=4, targets=['*qkv', '*up']}")),
    LayoutPair("tp=4", "tp=2 sp dp=2 stage 3", (*SPLIT, "model.adapters={rank=4, targets=['*qkv', '*up']}")),
    LayoutPair("pp=2", "pp=4", STAGES),
    LayoutPair("interleaved pp=2", "tp=2", STAGES),
    LayoutPair("pp=2", "stage 3", STAGES),
    LayoutPair("one rank", "interleaved pp=2", STAGES),
    LayoutPair("tp=4", "pp=4", STAGES),
    LayoutPair("stage 3", "pp=2 dp=2 stage 3", STAGES),
    LayoutPair("zb-v pp=2 tp=2", "pp=2", STAGES),
    LayoutPair("stage 2", "hybrid"),
    LayoutPair("secondary shards", "stage 3 with small tensors in buckets"),
    LayoutPair("stage 3 with small tensors in buckets", "forward overlap"),
    LayoutPair("forward overlap", "stage 0"),
    LayoutPair("stage 1", "one rank", REPRODUCIBLE, same_bits=True),
    LayoutPair("hybrid", "hybrid", ("precision.recipe=bf16",), same_bits=True),
    LayoutPair("stage 2", "stage 2", ("optimizer.name=sgd", "optimizer.momentum=0.9"), same_bits=True),
    LayoutPair("stage 1", "stage 1", (SLASHED,), same_bits=True),
    LayoutPair("cp=2 pp=2", "stage 0", STAGES),
    LayoutPair("cp=2 pp=2", "tp=2 cp=2", STAGES),
    LayoutPair("cp=2 pp=2", "one rank", STAGES),
    LayoutPair("one rank", "cp=2 pp=2", STAGES),
    LayoutPair("tp=2 cp=2", "cp=2 pp=2", STAGES),
    LayoutPair("cp=2 dp=2 stage 3", "cp=2 pp=2", STAGES),
    LayoutPair("cp=2 dp=2 stage 3", "cp=2 dp=2 stage 3", SPLIT, same_bits=True),
]
QUICK_AND_PROOF = [PAIRS[0], *(pytest.param(pair, marks=pytest.mark.proof) for pair in PAIRS[1:])]


@pytest.mark.parametrize("pair", QUICK_AND_PROOF, ids=str)
def test_another_layout_goes_on(ranks: Ranks, tmp_path: Path, pair: LayoutPair) -> None:
    settings = ["run.steps=6", *pair.settings]
    (world, before), (other, after) = (
        {**LAYOUTS, **SPLIT_LAYOUTS, **CONTEXT_LAYOUTS, "one rank": (1, [])}[name] for name in (pair.before, pair.after)
    )
    ranks.run_places(other, run_job, small_job(tmp_path, *settings, *after), tmp_path / "whole", timeout_s=120)
    first = small_job(tmp_path, *settings, *before, "run.stop_at=3")
    ranks.run_places(world, run_job, first, tmp_path / "run", timeout_s=120)
    ranks.run_places(other, run_job, small_job(tmp_path, *settings, *after), tmp_path / "run", timeout_s=120)
    resumed, whole = (read_steps(tmp_path / folder / "events.jsonl") for folder in ("run", "whole"))
    found, expected = saved_tensors(tmp_path / "run"), saved_tensors(tmp_path / "whole")
    assert len(resumed) == len(whole) == 6 and found.keys() == expected.keys()
    if pair.same_bits:
        assert same_bits(found, expected) and [step.loss for step in resumed] == [step.loss for step in whole]
        return
    for step, undisturbed in zip(resumed, whole, strict=True):
        assert abs(step.loss - undisturbed.loss) < 1e-12 * undisturbed.loss
    rates = sum(step.learning_rate for step in whole)
    for name, tensor in ((name, tensor) for name, tensor in expected.items() if name.startswith("master/")):
        unit = max(tensor.norm().item(), rates * tensor.numel() ** 0.5)
        assert (found[name] - tensor).norm() < 1e-12 * unit, name
    told = [event.text for event in read_events(tmp_path / "run/events.jsonl") if isinstance(event, WarningIssued)]
    assert any(f"made with ranks = {world}, this run has {other}" in text for text in told) == (world != other)


def test_other_buffers_are_refused(tmp_path: Path) -> None:
    module = torch.nn.BatchNorm1d(3)
    engine = motet.parallelize(module, loss=lambda net, x: net(x).square().sum())
    engine.save(tmp_path, 1)
    changes = {
        "late": (torch.ones(2), r"buffer late was missing at the start and is \[2\] of float32 now, so no run could"),
        "running_mean": (torch.ones(4), r"running_mean was \[3\] of float32 at the start and is \[4\] of float32 now"),
        "running_var": (None, r"buffer running_var was \[3\] of float32 at the start and is missing now"),
    }
    for name, (other, sentence) in changes.items():
        before = getattr(module, name, None)
        module.register_buffer(name, other)
        refused(sentence, engine.save, tmp_path, 2)
        module.register_buffer(name, before)
    engine.save(tmp_path, 2)
