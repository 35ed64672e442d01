"""The ranks of each group of identical copies hold the same elements of each tensor, and other ranks do not."""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from sharded_inventory import BATCH_SEQUENCES, PLANS, inventory, make_plan

from motet.parallel.layout import Layout
from motet.parallel.model_sharding import ModelInventory, TensorInfo
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.step_plan.plan import StepPlan, copies_in_plan, make_step_plan, updated_ranges
from motet.precision.recipe import RECIPES

Groups = set[tuple[int, ...]]


def held_elements(plan: StepPlan, name: str, rank: int, kind: str) -> tuple[int, ...] | None:
    """Indices in the whole tensor, in the order in which a rank holds them; None if no stage of it has the tensor."""
    spec = plan.specs[name].get(rank)
    if spec is None:
        return None
    indices = np.arange(np.prod(spec.shape, dtype=int)).reshape(spec.shape)
    for dim, spans in enumerate(spec.spans):
        indices = np.concatenate([indices.take(range(*span), dim) for span in spans], dim)
    pads = [(0, pad) for pad in spec.padding or (0,) * indices.ndim]
    local = np.pad(indices, pads, constant_values=-1).reshape(-1)
    first, stop = updated_ranges(plan, rank).get(name, (0, 0)) if kind != "parameters" else (0, len(local))
    return tuple(local[first:stop].tolist())


def groups_by_hand(plan: StepPlan, names: tuple[str, ...], kind: str) -> Groups:
    holders = defaultdict(list)
    for rank in range(plan.dims.ranks):
        held = tuple(held_elements(plan, name, rank, kind) for name in names)
        if held[0] is not None:
            holders[held].append(rank)
    return set(map(tuple, holders.values()))


@pytest.mark.parametrize("case", PLANS)
def test_copies_of_what_is_trained(case: str) -> None:
    plan = make_plan(case)
    found = list(copies_in_plan(plan))
    kinds = defaultdict(set)
    for copies in found:
        kinds[copies.kind].update(copies.names)
        wanted = groups_by_hand(plan, copies.names, copies.kind)
        if case == "forward overlap" and copies.kind == "gradients":
            wanted = {(0,), (1,)}  # Each rank has half of the sums, and updates all parameters
        assert set(copies.rank_groups) == wanted, copies
    trained = {tensor.name for tensor in inventory().trained}
    rows = {name for group in plan.groups if group.group.unit_kind == "rows" for name in group.group.names}
    assert kinds == {"states": trained, "gradients": trained} | (
        {"parameters": trained - rows} if trained - rows else {}
    )


def frozen_plan(sizes: dict[str, int], zero: int, shards: int) -> StepPlan:
    """The plan of the usual tensors, of which the weights of feed-forward networks and all norms are frozen."""

    def frozen(tensor: TensorInfo) -> TensorInfo:
        is_frozen = tensor.kind == "trained" and ("mlp" in tensor.name or "norm" in tensor.name)
        return replace(tensor, kind="frozen") if is_frozen else tensor

    case = next(case for case in PLANS.values() if case.sizes == sizes)
    sharding = replace(case.sharding, zero=zero, shards=shards, secondary_shards=None, min_shard_numel=10)
    return make_step_plan(
        ModelInventory(tuple(map(frozen, inventory().tensors))),
        Layout(ParallelDims(tuple(sizes.items())), sharding),
        RECIPES["fp32"],
        settings=case.settings,
        batch_sequences=BATCH_SEQUENCES,
        model_sharding=case.model,
    )


@pytest.mark.parametrize(
    ("sizes", "zero", "shards", "feed_forward", "norms"),
    [
        ({"dp": 4}, 1, 4, {(0, 1, 2, 3)}, {(0, 1, 2, 3)}),
        ({"dp": 4}, 3, 4, {(0,), (1,), (2,), (3,)}, {(0, 1, 2, 3)}),  # A norm of 8 elements is not cut into rows
        ({"dp": 4}, 3, 2, {(0, 2), (1, 3)}, {(0, 1, 2, 3)}),
        ({"dp": 2, "tp": 2}, 0, 1, {(0, 2), (1, 3)}, {(0, 1, 2, 3)}),
        ({"dp": 2, "tp": 2}, 3, 2, {(0,), (1,), (2,), (3,)}, {(0, 1, 2, 3)}),
        ({"pp": 2, "dp": 2}, 3, 2, {(0,), (1,)}, {(0, 1)}),  # Of block 0, which is on the first stage
    ],
)
def test_copies_of_what_is_frozen(
    sizes: dict[str, int], zero: int, shards: int, feed_forward: Groups, norms: Groups
) -> None:
    copies = [each for each in copies_in_plan(frozen_plan(sizes, zero, shards)) if each.kind == "parameters"]
    groups = {name: set(each.rank_groups) for each in copies for name in each.names}
    assert groups["blocks.0.mlp.up.weight"] == feed_forward
    assert groups["blocks.0.norm.weight"] == norms
    names = [name for each in copies for name in each.names]
    assert len(names) == len(set(names)) and {t for t in names if "mlp" in t or "norm" in t} == {
        tensor.name for tensor in inventory().trained if "mlp" in tensor.name or "norm" in tensor.name
    }
