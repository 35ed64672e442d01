"""The process groups that one rank of 16,384 makes: one for each dimension, however many groups the dimension has."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_inventory import PLANS, PlanCase, Sharding, make_plan, model_sharding
from torch.testing._internal.distributed import fake_pg

from motet.parallel.data_parallel import composite
from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.parallel.data_parallel.communication.shard_replica_mesh import join_subgroup
from motet.parallel.process import process_group
from motet.parallel.process.process_group import RankGroup, default_rank_group
from motet.parallel.sync_groups import module_part_groups, pipeline_groups, same_loss_groups

RANKS, RANK = 16384, 9001


@pytest.fixture
def world() -> Iterator[RankGroup]:
    """One rank of a world whose other ranks do not exist."""
    assert fake_pg  # Importing it registers the backend
    dist.init_process_group("fake", rank=RANK, world_size=RANKS, store=dist.HashStore())
    try:
        yield default_rank_group(torch.device("cpu"))
    finally:
        dist.destroy_process_group()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The ranks of each process group that torch is asked for."""
    asked, make = list[tuple[int, ...]](), process_group.new_named_process_group

    def counted(ranks: Any) -> Any:
        asked.append(tuple(ranks))
        return make(ranks)

    monkeypatch.setattr(process_group, "new_named_process_group", counted)
    return asked


def test_a_rank_makes_one_process_group_for_each_dimension(
    world: RankGroup, calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"pp": 2, "dp": 2048, "tp": 4}
    stages = (range(1), range(1, 3))
    case = PlanCase(sizes, Sharding(2048, zero=2, shards=64), model_sharding(stages=stages))
    monkeypatch.setitem(PLANS, "many", case)
    plan = make_plan("many")
    for groups in (module_part_groups(plan.dims), pipeline_groups(plan.dims), same_loss_groups(plan.dims)):
        joined = join_subgroup(world, groups)
        (expected,) = (ranks for ranks in groups if RANK in ranks)
        assert joined is not None and joined.process_group is not None
        assert dist.get_process_group_ranks(joined.process_group) == list(expected)
        assert (joined.rank, joined.world) == (expected.index(RANK), len(expected))
    assert len(calls) == 3
    calls.clear()
    meshes = composite._meshes([*plan.groups], group=world, settings=CommunicationSettings())
    # A sum group, a shard group and a replica group: of both stages' tensors, of their tensors that tensor-parallel
    # ranks add too (norms of each head, and shared keys), and of the embedding that both stages have.
    assert len(plan.groups) == 7 and len(calls) == 4 * 3
    for each, mesh in zip(plan.groups, meshes, strict=True):
        position = each.position(RANK)
        assert (mesh is None) == (position is None)
        if mesh is not None and position is not None:
            ranks, shards = each.group.sum_group_of(RANK), each.group.sharding.shards
            first = position // shards * shards
            assert mesh.shard_group.process_group is not None
            assert dist.get_process_group_ranks(mesh.shard_group.process_group) == [*ranks[first : first + shards]]
            assert mesh.shard_group.rank == position % shards


def test_a_second_group_of_the_same_ranks_is_another_one(world: RankGroup) -> None:
    pairs = tuple((first, first + 1) for first in range(0, RANKS, 2))
    first, second = (join_subgroup(world, pairs) for _ in range(2))
    assert first and second and first.process_group is not second.process_group
    assert join_subgroup(world, ((0, 1),)) is None
