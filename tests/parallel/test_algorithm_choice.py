"""Algorithms by name or by what they cost on a cluster, for the ranks that a layout joins."""

from pathlib import Path

import pytest

from motet.cluster.cluster import load_cluster_for_ranks
from motet.collectives.algorithms import build
from motet.collectives.cost.alpha_beta import estimate_cost
from motet.collectives.cost.cheapest_algorithm import cheapest, even_host_groups
from motet.collectives.program import Program
from motet.parallel.data_parallel.communication.communication_settings import (
    CollectiveAlgorithmSelector,
    CommunicationSettings,
    GroupName,
)
from motet.parallel.data_parallel.data_sharding import DataParallelSharding
from parallel.traffic_counter import count_bytes
from ranks import Ranks
from train.runs import small_job, train, worst_difference

SLOW = "two-hosts-200mbit"
AUTO = CommunicationSettings(all_reduce="auto", reduce_scatter="auto", all_gather="auto", cluster=SLOW)
MIB = 2**20


def crossing(found: Program, members: tuple[int, ...], per_host: int) -> int:
    """Parts of the message that travel between hosts."""
    host = [rank // per_host for rank in members]
    return sum(found.relative_size(t) for step in found.steps for t in step if host[t.src] != host[t.dst])


def test_across_slow_links_as_little_is_sent_as_can_be() -> None:
    for hosts in (2, 4):
        found = CollectiveAlgorithmSelector(AUTO, DataParallelSharding(2 * hosts, 1)).program(
            "all-reduce", "replicas", 16 * MIB
        )
        assert found is not None
        least = 2 * (hosts - 1) * found.message_size_units  # every host's sum out once and in once
        assert crossing(found, tuple(range(2 * hosts)), 2) == least
        ring = build("all-reduce", "ring", 2 * hosts)
        assert crossing(ring, tuple(range(2 * hosts)), 2) / ring.message_size_units > least / found.message_size_units


def test_a_name_has_the_hosts_of_the_cluster() -> None:
    """8 ranks on 4 hosts: without a cluster nobody can know that there are not 2."""
    for collective, field in (("all-reduce", "all_reduce"), ("all-gather", "all_gather")):
        layout = DataParallelSharding(8, 1, 1, 8) if field == "all_gather" else DataParallelSharding(8, 1)
        over: GroupName = "shards" if field == "all_gather" else "replicas"
        named = CommunicationSettings.model_validate({field: "hierarchical"})
        for settings, hosts in ((named, {}), (named.model_copy(update={"cluster": SLOW}), {"hosts": 4})):
            found = CollectiveAlgorithmSelector(settings, layout).program(collective, over, MIB)
            assert found == build(collective, "hierarchical", 8, **hosts)


def test_what_all_sets_do_at_once_shares_their_links() -> None:
    """Two rails of two ranks over one cable take twice as long as one of them."""
    cluster, ring = load_cluster_for_ranks(SLOW, 4), build("all-reduce", "ring", 2)
    one, both = (float(estimate_cost(ring, cluster, sets).seconds(64 * MIB)) for sets in (((0, 2),), ((0, 2), (1, 3))))
    assert both == pytest.approx(2 * one, rel=0.01)
    assert estimate_cost(ring, cluster, ((0, 1),)) == estimate_cost(ring, load_cluster_for_ranks(SLOW, 2))
    inside, across = ((0, 1), (2, 3)), ((0, 2), (1, 3))
    assert even_host_groups(cluster) == 2
    assert even_host_groups(cluster, inside) is even_host_groups(cluster, across) is None
    assert float(cheapest("all-reduce", MIB, cluster, rank_groups=inside).cost.seconds(MIB)) < one


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        pytest.param(4, ["layout.zero=0", "communication.overlap=forward"], marks=pytest.mark.proof),
        (4, ["layout.zero=2", "layout.shard_group=2", "layout.microbatches=3"]),
        pytest.param(4, ["layout.zero=3", "layout.shard_group=2"], marks=pytest.mark.proof),
        (3, ["layout.zero=1", "communication.compress_gradients=powersgd:rank=2"]),
    ],
)
def test_it_computes_the_same_and_sends_what_is_promised(
    ranks: Ranks, tmp_path: Path, world: int, settings: list[str]
) -> None:
    fields = ("all_reduce", "reduce_scatter", "all_gather")
    auto = [f"communication.cluster={SLOW}", *(f"communication.{field}=auto" for field in fields)]
    buckets = () if "layout.zero=3" in settings else ("communication.bucket_mib=0.02",)
    job = small_job(tmp_path, "data.batch_sequences=48", *settings, *auto, *buckets)
    for sent, promised, _, _ in ranks.run(world, count_bytes, job):
        assert sent == [promised] * 2 and promised > 0
    if "powersgd" not in settings[-1]:
        wanted = ranks.run(1, train, small_job(tmp_path, "data.batch_sequences=48"), 3)[0]
        for trained in ranks.run(world, train, job, 3):
            assert worst_difference(trained, wanted) < 1e-12
