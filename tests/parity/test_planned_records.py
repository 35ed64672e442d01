"""The plan says which elements each rank has: a gap, an overlap and other bits in a copy are differences."""

from collections.abc import Callable

import pytest
import torch

from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.parallel.layout import parse_layout, resolve_layout
from motet.parallel.model_sharding import (
    BoundaryComm,
    DimensionSplit,
    ModelInventory,
    ModelSharding,
    ShardRule,
    TensorInfo,
)
from motet.parallel.shard_spec import ShardSpec
from motet.parallel.step_plan.plan import make_step_plan
from motet.parity.compare.align_with_reference import PlannedRecords
from motet.parity.compare.tensor_differences import ReferenceStep, build_reference_tensors, compare_with_reference
from motet.parity.record.tensor_recorder import RecordedShard, RecordedTensor, TensorKey, TensorKind, TensorRecorder
from motet.precision.recipe import PrecisionSettings

SHAPE = (6, 40)
VALUES = torch.arange(240, dtype=torch.float64).view(SHAPE) + 1
FUSED = ShardRule((DimensionSplit(0, "tp", parts=(4, 2)),))
COMMS = (BoundaryComm("a", "input", 0, "copy", "tp"), BoundaryComm("a", "output", 0, "sum", "tp"))
HALVES = {0: [0, 1, 4], 1: [2, 3, 5]}  # Rows of the fused tensor on each of two tensor-parallel ranks


def planned(layout: str) -> PlannedRecords:
    settings = parse_layout(layout)
    resolved = resolve_layout(settings, settings.dims.ranks, 4)
    sharding = ModelSharding({"a.weight": FUSED}, COMMS) if settings.tp > 1 else ModelSharding()
    inventory = ModelInventory((TensorInfo("a.weight", SHAPE, "float64", "trained"),))
    recipe, communication = PrecisionSettings(recipe="fp64").resolved, CommunicationSettings()
    plan = make_step_plan(
        inventory, resolved, recipe, settings=communication, batch_sequences=4, model_sharding=sharding
    )
    return PlannedRecords(plan)


def rows_of(layout: str, kind: TensorKind) -> list[list[int]]:
    """The rows that each rank has, written down by hand; masters of stage 1 are cut in equal numbers of elements."""
    half, everything = [[0, 1, 2], [3, 4, 5]], list(range(6))
    if "tp=2" in layout:
        return [HALVES[0], HALVES[1]] * (2 if "dp=2" in layout else 1)
    return half if "zero=3" in layout or ("zero=1" in layout and kind == "gradient") else [everything, everything]


@pytest.mark.parametrize("kind", ["parameter", "gradient"])
@pytest.mark.parametrize("layout", ["dp=2", "dp=2 zero=1", "dp=2 zero=3", "tp=2", "tp=2 dp=2"])
def test_each_rank_has_its_elements(layout: str, kind: TensorKind) -> None:
    shards = planned(layout).shards(TensorKey(kind, "a.weight"), SHAPE)
    found = {rank: shard.cut(VALUES).tolist() for rank, shard in shards.items()}
    if layout == "dp=2 zero=1" and kind == "gradient":  # A bucket is padded to a multiple of 64 elements
        assert found == {0: VALUES.flatten()[:128].tolist(), 1: VALUES.flatten()[128:].tolist()}
    else:
        assert found == {r: VALUES[rows].flatten().tolist() for r, rows in enumerate(rows_of(layout, kind))}


def recorded(shards: dict[int, RecordedShard], ranks: int) -> list[list[RecordedTensor]]:
    """Records of the right values at these places."""
    records: list[list[RecordedTensor]] = [[] for _ in range(ranks)]
    for rank, shard in shards.items():
        recorder = TensorRecorder()
        recorder.add_shard("parameter", "a.weight", VALUES)
        records[rank] = [recorder.records[0]._replace(value=shard.cut(VALUES), shard=shard, digest=7)]
    return records


WHOLE = RecordedShard(ShardSpec.full(SHAPE), 0, 240)
Mistake = Callable[[dict[int, RecordedShard]], dict[int, RecordedShard]]


@pytest.mark.parametrize(
    ("mistake", "reason"),
    [
        (lambda s: s, ""),
        (lambda s: {0: s[0]}, "rank 1 has nothing of it, where it should have elements 120 to 239 of shape [6, 40]"),
        (lambda s: s | {1: s[0]}, "rank 1 has elements 0 to 119 of shape [6, 40], where it should have elements 120"),
        (lambda s: s | {0: WHOLE}, "rank 0 has elements 0 to 239 of shape [6, 40], where it should have elements 0 to"),
        (lambda s: {0: s[1], 1: s[0]}, "rank 0 has elements 120 to 239 of shape [6, 40], where"),
    ],
)
def test_gaps_and_overlaps_are_judged_by_the_plan(mistake: Mistake, reason: str) -> None:
    plan = planned("dp=2 zero=3")
    shards = mistake(plan.shards(TensorKey("parameter", "a.weight"), SHAPE))
    reference = ReferenceStep(build_reference_tensors(recorded({0: WHOLE}, 1)[0]), 1e-3)
    (found,) = compare_with_reference(reference, recorded(shards, 2), plan)
    assert found.is_rounding == (not reason) and reason in found.reason, found


@pytest.mark.parametrize(("layout", "ranks"), [("dp=2", ("0", "1")), ("tp=2 dp=2", ("1", "3"))])
def test_copies_have_the_same_bits(layout: str, ranks: tuple[str, str]) -> None:
    plan = planned(layout)
    records = recorded(plan.shards(TensorKey("parameter", "a.weight"), SHAPE), plan.plan.dims.ranks)
    reference = ReferenceStep(build_reference_tensors(recorded({0: WHOLE}, 1)[0]), 1e-3)
    assert compare_with_reference(reference, records, plan)[0].is_rounding
    records[-1] = [records[-1][0]._replace(digest=8)]
    (found,) = compare_with_reference(reference, records, plan)
    assert found.reason == f"rank {ranks[0]} and rank {ranks[1]} hold copies that should be equal, but differ"
