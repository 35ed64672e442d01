"""Checkpoints of tensor-parallel and pipeline layouts hold whole tensors without padding; any layout reads them."""

from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import pytest

from motet.parallel.model_sharding import (
    ActivationSplit,
    BoundaryComm,
    DimensionSplit,
    ModelSharding,
    ShardRule,
    TensorInfo,
)
from motet.parallel.process.process_group import RankGroup
from motet.train.build import build_components, build_model, precision_context
from motet.train.job import Job
from motet.train.optimizer.module_plan import model_inventory
from motet.train.state import newest_checkpoint
from ranks import Ranks
from train.runs import ENCODER, run_job, same_bits, saved_tensors, small_job
from train.test_layouts_of_checkpoints import Items, count_writers, saved_shapes, written_boxes

COLUMN, ROW = ShardRule((DimensionSplit(0, "tp"),)), ShardRule((DimensionSplit(1, "tp"),))
EVERYWHERE = ("dp", "cp", "tp")
HEADS = ShardRule((DimensionSplit(0, "tp", unit=8),))
SHARED_HEADS = ShardRule((DimensionSplit(0, "tp", unit=8),), EVERYWHERE)
# Tensors of a llama with four heads, two of keys and values, and of a decoder with three fused parts.
RULES = {
    "*embed*.weight": COLUMN,
    "lm_head.weight": COLUMN,
    "*q_proj.weight": HEADS,
    "*q_proj.bias": HEADS,
    "*[kv]_proj.weight": SHARED_HEADS,
    "*[kv]_proj.bias": SHARED_HEADS,
    "*o_proj.weight": ShardRule((DimensionSplit(1, "tp", unit=8),)),
    "*q_proj.adapter_b": HEADS,
    "*v_proj.adapter_b": SHARED_HEADS,
    "*gate_proj.weight": COLUMN,
    "*up_proj.weight": COLUMN,
    "*down_proj.weight": ROW,
    "*qkv.weight": ShardRule((DimensionSplit(0, "tp", (32, 16, 16), unit=8),)),
    "*ffn.up.weight": ShardRule((DimensionSplit(0, "tp", (48, 48)),)),
    "*ffn.down.weight": ROW,
}


def rule_for(tensor: TensorInfo, tp: int) -> ShardRule | None:
    rule = next((rule for pattern, rule in RULES.items() if fnmatchcase(tensor.name, pattern)), None)
    for split in rule.splits if rule else ():
        units = min(split.parts or (tensor.shape[split.dim],)) // split.unit
        if split.unit > 1 and units % tp and (split.parts or tp % units):
            return None  # The heads do not fit, or a fused tensor would have shared ones and others
    return rule if rule != SHARED_HEADS or tp > tensor.shape[0] // 8 else HEADS


def split_by_name(tensors: tuple[TensorInfo, ...], tp: int) -> ModelSharding:
    """The split of a module, for plans alone: nothing communicates its activations."""
    rules = {tensor.name: rule for tensor in tensors if (rule := rule_for(tensor, tp))}
    inside = {name.rpartition(".")[0] for name, rule in rules.items() if name.endswith("adapter_b")}
    rules |= {f"{name}.adapter_a": ShardRule(partial_over=EVERYWHERE) for name in inside}
    layers = tuple(sorted({name.rpartition(".")[0] for name in rules}))
    return ModelSharding(
        rules,
        (BoundaryComm("", "input", 0, "copy", "tp", shared_by=layers), BoundaryComm("", "output", 0, "sum", "tp")),
        activations=tuple(ActivationSplit(name, "input", (DimensionSplit(2, "tp"),)) for name in sorted(inside)),
    )


def save_again_by_name(group: RankGroup, job: Job, source: str, target: str) -> Items:
    """Restore and save in a layout whose tensors are split by their names."""
    with precision_context(job):
        if job.layout.tp == 1:
            return save_again(group, job, source, target, ModelSharding())
        inventory = model_inventory(build_model(job, group.device, group)[1].module, job.optimizer)
        return save_again(group, job, source, target, split_by_name(inventory.tensors, job.layout.tp))


def save_again(
    group: RankGroup, job: Job, source: str, target: str, model_sharding: ModelSharding | None = None
) -> Items:
    """Restore the newest checkpoint of a run, and save it from this layout. Returns the boxes that a rank writes."""
    with precision_context(job):
        parts = build_components(job, group, Path(target), model_sharding=model_sharding)
        newest = newest_checkpoint(Path(source) / "checkpoints")
        assert newest is not None
        step, _ = parts.state.restore(newest)
        parts.state.save(step)
        return written_boxes(parts.state)


ROUND_TRIP = {  # `make test` takes the first four
    "tp=2": 2, "tp=4": 4, "tp=2 dp=2 zero=3": 4, "dp=1": 1, "dp=4": 4, "tp=3 zero=1": 3, "tp=2 dp=2 zero=2": 4,
    "tp=4 zero=3": 4, "tp=3": 3, "tp=2 dp=2 zero=3 min_shard_numel=100": 4, "dp=3 zero=3": 3,
}  # fmt: skip
MODELS: dict[str, tuple[str, list[str]]] = {
    "adapters": ("adapters", []),
    "llama": ("llama", []),
    "decoder": ("decoder", []),
    "tied": ("qwen2", []),
    "bf16": ("llama", ["precision.recipe=bf16"]),
    "frozen": ("llama", ["model.frozen=['*gate_proj*', '*k_proj*']"]),
}
CASES = [("bf16", 4)]
PROOF = [pytest.param(name, len(ROUND_TRIP), marks=pytest.mark.proof) for name in MODELS]


@pytest.mark.parametrize(("name", "count"), [*CASES, *PROOF])
def test_every_layout_saves_what_one_rank_saved(ranks: Ranks, tmp_path: Path, name: str, count: int) -> None:
    """Each layout reads what the one before wrote. Masters, moments and frozen parameters are equal in bits."""
    model, settings = MODELS[name]
    start = small_job(tmp_path, *settings, "run.steps=3", model=model)
    ranks.run_places(1, run_job, start, tmp_path / "start")
    layouts = [(layout, ROUND_TRIP[layout]) for layout in list(ROUND_TRIP)[:count]]
    make_job = partial(small_job, tmp_path, *settings, "run.steps=3", model=model)
    save_in_turn(ranks, tmp_path, make_job, layouts, save=save_again_by_name)


def save_in_turn(
    ranks: Ranks,
    folder: Path,
    make_job: Callable[..., Job],
    layouts: list[tuple[str, int]],
    *,
    save: Callable[..., Items],
) -> None:
    """Restore and save in one layout after the other, from the run in `start`: (layout, ranks)."""
    expected, source = saved_tensors(folder / "start"), "start"
    for layout, world in layouts:
        job = make_job(*(f"layout.{word}" for word in layout.split()))
        by_rank = ranks.run(world, save, job, str(folder / source), str(folder / layout), timeout_s=120)
        source = layout
        count_writers(by_rank, saved_shapes(folder / source))
        assert same_bits(saved_tensors(folder / source), expected), layout


PIPELINES = {  # `make test` takes the first three
    "pp=2 schedule=interleaved chunks=2": 2, "pp=4": 4, "dp=1": 1, "tp=2": 2, "pp=2 schedule=zb-v chunks=2": 2,
    "dp=4 zero=2": 4, "pp=2 tp=2": 4, "pp=2 dp=2 zero=3": 4, "dp=4 zero=3": 4, "pp=2": 2, "tp=4": 4,
    "pp=2 schedule=dualpipe-v chunks=2 dp=2 zero=1": 4, "pp=4 schedule=1f1b": 4,
}  # fmt: skip
PIPELINE_MODELS: dict[str, list[str]] = {
    "tied": ["model.tied=true"],
    "t5": [f"model={{family='encoder-decoder', {ENCODER.replace('260', '359')}}}", "data.objective=spans"],
    "bf16": ["precision.recipe=bf16"],
    "adapters": ["model.adapters={rank=4, targets=['*qkv', '*up']}"],
    "frozen": ["model.frozen=['*ffn*', '*blocks.1.*']", "layout.require_split=0.4"],  # tp=4 leaves two key heads whole
}


@pytest.mark.parametrize(
    ("name", "count"),
    [("tied", 3), *(pytest.param(name, len(PIPELINES), marks=pytest.mark.proof) for name in PIPELINE_MODELS)],
)
def test_every_pipeline_saves_what_two_stages_saved(ranks: Ranks, tmp_path: Path, name: str, count: int) -> None:
    """The first checkpoint is that of two stages after three steps."""
    settings = ["run.steps=3", *PIPELINE_MODELS[name]]
    settings += [] if name == "t5" else ["model.layers=4"]
    make_job = partial(small_job, tmp_path, *settings)
    ranks.run_places(2, run_job, make_job("layout.pp=2"), tmp_path / "start", timeout_s=120)
    save_in_turn(ranks, tmp_path, make_job, list(PIPELINES.items())[:count], save=save_again)
