"""Starting, agreeing in and leaving groups of ranks, on real processes."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from motet.core.errors import InputError
from motet.parallel.data_parallel.communication.communication_settings import (
    CommunicationSettings,
    resolve_communication_groups,
)
from motet.parallel.data_parallel.communication.shard_replica_mesh import (
    join_subgroup,
    make_mesh,
    make_meshes,
)
from motet.parallel.layout import LayoutSettings, resolve_layout
from motet.parallel.process.launch_environment import SINGLE_RANK, RankEnvironment
from motet.parallel.process.process_group import (
    RankGroup,
    broadcast_decision,
    new_process_group,
    open_store,
    pick_device,
    read_decision,
    start_process_group,
)
from motet.train.launch.failures import run_and_record
from ranks import Ranks
from refusals import refused
from waiting import free_port


def total(group: RankGroup) -> float:
    tensor = torch.tensor([group.rank + 1.0])
    if group.process_group is not None:
        dist.all_reduce(tensor, group=group.process_group)
    return tensor.item()


def over_tcp(place: RankEnvironment, port: int) -> float:
    """Join a group as under srun: rank 0 serves the store, on which the ranks first agree on the run folder."""
    place = replace(place, rendezvous=f"tcp://127.0.0.1:{port}")
    store = open_store(place, 30.0)
    assert broadcast_decision(store, place.rank, "folder", decide=lambda: "runs/x-001") == "runs/x-001"
    with start_process_group(replace(place, store_exists=True), "cpu", 30.0) as group:
        return total(group)


def attempts_on_one_store(place: RankEnvironment) -> list[float]:
    """Join a group as under torchrun after a restart: the store still has the keys of the last attempt."""
    sums, store = [], open_store(place, 30.0)  # a FileStore is gone with the last that has it open
    for attempt in range(3):
        with start_process_group(replace(place, attempt=attempt), "cpu", 30.0) as group:
            sums.append(total(group))
    broadcast_decision(store, place.rank, "left-0", decide=lambda: "by attempt 0")
    assert read_decision(store, "left-0") == "by attempt 0"
    return sums


def one_cannot_decide(place: RankEnvironment) -> tuple[int, str, bool]:
    def fail() -> str:
        raise InputError("runs/ is not writable")

    def work() -> int:
        broadcast_decision(open_store(place, 30.0), place.rank, "folder", decide=fail)
        return 0

    record = run_and_record(place.rank, work)
    return record.exit_code, record.error_message, record.caused_by_peer


def test_a_world_of_one_needs_no_process_group() -> None:
    with start_process_group(SINGLE_RANK, "cpu", 1.0) as group:
        assert group == RankGroup(0, 1, None, torch.device("cpu")) and not dist.is_initialized()


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_meet(ranks: Ranks, world: int) -> None:
    assert ranks.run(world, total) == [world * (world + 1) / 2] * world


def test_a_store_that_rank_0_serves(ranks: Ranks) -> None:
    assert ranks.run_places(2, over_tcp, free_port()) == [3.0, 3.0]


def test_attempts_meet_on_keys_of_their_own(ranks: Ranks) -> None:
    assert ranks.run_places(2, attempts_on_one_store) == [[3.0] * 3] * 2


def test_when_rank_0_cannot_decide_it_alone_is_the_cause(ranks: Ranks) -> None:
    first, second = ranks.run_places(2, one_cannot_decide)
    assert first == (2, "runs/ is not writable", False) and second == (3, "rank 0 failed: runs/ is not writable", True)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    here = RankEnvironment(3, 8, 1, 2, 0, "tcp://x:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("cpu", here) == torch.device("cpu")
    assert pick_device("auto", here) == pick_device("cuda", here) == torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert pick_device("auto", here) == torch.device("cpu")
    refused(r"has 1 CUDA devices for 2 local ranks; start 1 ranks here", pick_device, "cuda", here)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused("torch finds no CUDA device on this machine", pick_device, "cuda", here)


def sums_in_the_mesh_of_some_ranks(world: RankGroup, members: list[int], shards: int) -> list[float] | None:
    """Sums in a mesh within a group that is not the world: of the shard group, the replica group, and all."""
    everyone = new_process_group(world, members)
    if world.rank not in members:
        return None
    group = RankGroup(members.index(world.rank), len(members), everyone, world.device)
    layout = resolve_layout(LayoutSettings(zero=3, shard_group=shards), group.world, 12).sharding
    mesh = make_mesh(group, resolve_communication_groups(CommunicationSettings(), layout))
    again = replace(group, process_group=new_process_group(group, range(group.world)))
    sums = []
    for each in (mesh.shard_group, mesh.replica_group, again):
        number = torch.tensor([10.0**world.rank])
        dist.all_reduce(number, group=each.process_group)
        assert each.world == dist.get_world_size(each.process_group)
        sums.append(number.item())
    return sums


def test_groups_within_a_group_that_is_not_the_world(ranks: Ranks) -> None:
    """World ranks 1 to 4 are two replicas of two shards; rank 0 is none of them."""
    shards, replicas, everyone = {1: 110, 2: 110, 3: 11000, 4: 11000}, {1: 1010, 3: 1010, 2: 10100, 4: 10100}, 11110
    found = ranks.run(5, sums_in_the_mesh_of_some_ranks, [1, 2, 3, 4], 2)
    assert found == [None, *([shards[rank], replicas[rank], everyone] for rank in range(1, 5))]


def sums_after_other_groups(world: RankGroup) -> list[float] | None:
    """Sums in the mesh of ranks that have made different numbers of process groups before, as stages of a pipeline."""
    join_subgroup(world, ((0, 1),))
    layout = resolve_layout(LayoutSettings(zero=1, shard_group=2), 4, 12).sharding
    mesh = make_meshes(world, ((0, 1, 2, 3),), resolve_communication_groups(CommunicationSettings(), layout))
    return [total(each) for each in (mesh.shard_group, mesh.replica_group)] if mesh else None


def test_ranks_that_have_other_groups_meet(ranks: Ranks) -> None:
    assert ranks.run(5, sums_after_other_groups, timeout_s=30) == [[3.0, 3.0]] * 4 + [None]
