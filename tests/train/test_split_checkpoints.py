"""Checkpoints of tensor-parallel layouts hold whole tensors without padding; any layout reads them, bit for bit."""

from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from motet.parallel.model_inventory import TensorInfo
from motet.parallel.model_sharding import ActivationSplit, BoundaryComm, DimensionSplit, ModelSharding, ShardRule
from motet.parallel.process.process_group import RankGroup
from motet.train.build import build_components, build_model, precision_context
from motet.train.job import Job
from motet.train.optimizer.sharded_optimizer import model_inventory
from motet.train.state import newest_checkpoint
from ranks import Ranks
from train.runs import run_job, same_bits, saved_tensors, small_job
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
    "*[kv]_proj.weight": SHARED_HEADS,
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
        activations=tuple(ActivationSplit(name, "input", ((2, "tp"),)) for name in sorted(inside)),
    )


def save_again(group: RankGroup, job: Job, source: str, target: str) -> Items:
    """Restore the newest checkpoint of a run, and save it from this layout. Returns the boxes that a rank writes."""
    with precision_context(job):
        inventory = model_inventory(build_model(job, group.device, group)[1].module, job.optimizer)
        splits = split_by_name(inventory.tensors, job.layout.tp) if job.layout.tp > 1 else ModelSharding()
        parts = build_components(job, group, Path(target), model_sharding=splits)
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
CASES = [(name, 4) for name in ("adapters", "bf16")]
PROOF = [pytest.param(name, len(ROUND_TRIP), marks=pytest.mark.proof) for name in MODELS]


@pytest.mark.parametrize(("name", "count"), [*CASES, *PROOF])
def test_every_layout_saves_what_one_rank_saved(ranks: Ranks, tmp_path: Path, name: str, count: int) -> None:
    """Each layout reads what the one before wrote. Masters, moments and frozen parameters are equal in bits."""
    model, settings = MODELS[name]
    start = small_job(tmp_path, *settings, "run.steps=3", model=model)
    ranks.run_places(1, run_job, start, tmp_path / "start")
    expected, source = saved_tensors(tmp_path / "start"), "start"
    for layout in list(ROUND_TRIP)[:count]:
        job = small_job(tmp_path, *settings, "run.steps=3", *(f"layout.{word}" for word in layout.split()), model=model)
        by_rank = ranks.run(ROUND_TRIP[layout], save_again, job, str(tmp_path / source), str(tmp_path / layout))
        source = layout
        count_writers(by_rank, saved_shapes(tmp_path / source))
        assert same_bits(saved_tensors(tmp_path / source), expected), layout
