"""Sums by a tree: the same expression for every range of rows, order and cut; who computes rows; bytes sent, kept."""

import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from pages.control_collectives import control_bytes
from torch import Tensor

from motet.collectives.execute.api import all_to_all
from motet.core.errors import InputError
from motet.parallel.data_parallel.data_sharding import (
    DataParallelSharding,
    microbatches_of_data_rank,
    partial_sums_sent_by_rank,
    partial_sums_sent_by_replica,
)
from motet.parallel.layout import LayoutSettings, resolve_layout
from motet.parallel.process.process_group import RankGroup
from motet.parallel.reproducible import tree_reduce
from motet.parallel.reproducible.summation_tree import PartialTreeSums, SummationTreeNode, maximal_subtrees
from motet.train.job import Job
from parallel.traffic_counter import count_bytes
from ranks import Ranks
from train.runs import small_job

LAYOUTS = [
    (dp, zero, group) for dp in range(1, 7) for zero in range(4) for group in range(1, dp + 1)
    if dp % group == 0 and (zero or group == 1)
]  # fmt: skip


def expression(first: int, stop: int) -> str:
    if stop - first == 1:
        return str(first)
    middle = first + (stop - first + 1) // 2
    return f"({expression(first, middle)}+{expression(middle, stop)})"


def forest(count: int) -> PartialTreeSums[str]:
    return PartialTreeSums(count, lambda left, right: f"({left}+{right})")


def layout_of(dp: int, zero: int, group: int, rows: int) -> DataParallelSharding:
    settings = LayoutSettings(zero=zero, **({"shard_group": group} if zero else {}))
    return resolve_layout(settings, dp, rows, reproducible=True).sharding


@pytest.mark.parametrize("count", range(1, 17))
def test_any_order_gives_one_expression(count: int) -> None:
    draw = random.Random(count)
    for _ in range(20):
        rows, sums = list(range(count)), forest(count)
        draw.shuffle(rows)
        for row in rows:
            sums.add(SummationTreeNode(row, row + 1), str(row))
        assert sums.pop_all() == {SummationTreeNode(0, count): expression(0, count)} and not sums.pending


@pytest.mark.parametrize("count", range(1, 17))
def test_what_a_range_has_is_added_within_it_and_is_the_most_that_can_be(count: int) -> None:
    for first in range(count):
        for stop in range(first + 1, count + 1):
            sums = forest(count)
            for row in range(first, stop):
                sums.add(SummationTreeNode(row, row + 1), str(row))
            nodes = maximal_subtrees(range(first, stop), count)
            assert sums.pop_all() == {node: expression(*node) for node in nodes}
            assert [row for node in nodes for row in range(*node)] == list(range(first, stop))


@pytest.mark.parametrize(("dp", "zero", "group"), LAYOUTS)
def test_whatever_ranks_tell_each_other_comes_to_one_expression(dp: int, zero: int, group: int) -> None:
    for count in range(dp, 17):
        layout, whole = layout_of(dp, zero, group, count), forest(count)
        for replica in range(dp // layout.shards):
            told = sums_of_replica(layout, replica, count)
            assert list(told) == partial_sums_sent_by_replica(layout, replica)
            for node, value in told.items():
                whole.add(node, value)
        assert whole.pop_all() == {SummationTreeNode(0, count): expression(0, count)}


def sums_of_replica(layout: DataParallelSharding, replica: int, count: int) -> dict[SummationTreeNode, str]:
    """The tree nodes that the ranks of a replica sum, micro-batch after micro-batch."""
    together = forest(count)
    mates = range(replica * layout.shards, (replica + 1) * layout.shards)
    own = {mate: forest(count) for mate in mates}
    for part in range(layout.microbatches):
        for mate in mates:
            rows, counts, _ = microbatches_of_data_rank(layout, mate, count)[part]
            if counts:
                own[mate].add(SummationTreeNode(rows.start, rows.stop), str(rows.start))
            told = partial_sums_sent_by_rank(layout, mate)[part]
            if told:
                given = own[mate].pop_all()
                assert list(given) == told
                for node, value in given.items():
                    together.add(node, value)
    return together.pop_all()


@pytest.mark.parametrize(("dp", "zero", "group"), LAYOUTS)
def test_every_row_counts_once_and_all_ranks_compute_equally_often(dp: int, zero: int, group: int) -> None:
    for count in range(dp, 17):
        layout = layout_of(dp, zero, group, count)
        shares = [microbatches_of_data_rank(layout, rank, count) for rank in range(dp)]
        assert {len(rank_shares) for rank_shares in shares} == {-(-count // dp)}
        counting = [
            row for rank_shares in shares for share in rank_shares if share.contributes_gradients for row in share.rows
        ]
        assert sorted(counting) == list(range(count))
        assert all(len(share.rows) == 1 for rank_shares in shares for share in rank_shares)


def test_at_stages_2_and_3_a_few_shards_wait_at_any_time() -> None:
    """Ranks take rows in turn, so that what waits are the sums of one range: no more than the tree is high."""
    layout = layout_of(8, 2, 8, 256)
    sums, most = forest(256), 0
    for part in range(layout.microbatches):
        for rank in range(8):
            for node in partial_sums_sent_by_rank(layout, rank)[part]:
                sums.add(node, "")
        most = max(most, len(sums.pending))
    assert most == 5  # 256 = 2^8 rows, 2^3 of which come together


def test_fewer_sequences_than_ranks_are_refused() -> None:
    with pytest.raises(InputError, match="leaves some of 4 ranks without a sequence"):
        layout_of(4, 0, 1, 3)


@pytest.mark.parametrize(
    ("world", "batch", "layout"),
    [(2, 8, "zero=0"), (3, 10, "zero=0"), (3, 10, "zero=1"), (4, 10, "zero=2 shard_group=2"), (3, 7, "zero=3")],
)
def test_bytes(ranks: Ranks, tmp_path: Path, world: int, batch: int, layout: str) -> None:
    settings = [f"layout.{setting}" for setting in layout.split()]
    same = ["run.reproducible=layout", "communication.all_gather=ring", f"data.batch_sequences={batch}"]
    job = small_job(tmp_path, *same, *settings, "precision.recipe=fp32")
    for sent, promised, kept, formula in ranks.run(world, _count, job):
        assert sent == promised > 0 and kept == formula


def _count(group: RankGroup, job: Job) -> tuple[int, ...]:
    """Measured and predicted bytes of two steps, without the split sizes that each all-to-all exchanges first."""
    split_sizes = 0

    def counting(output: Tensor, input: Tensor, ranks: RankGroup, *args: Any, **kwargs: Any) -> Any:
        nonlocal split_sizes
        split_sizes += control_bytes("split sizes", 2 * ranks.world, rank=ranks.rank, hosts=(0,) * ranks.world)
        return all_to_all(output, input, ranks, *args, **kwargs)

    with patch.object(tree_reduce, "all_to_all", counting):
        counted = count_bytes(group, job)
    return sum(counted.sent) - split_sizes, 2 * counted.promised, counted.kept, counted.formula
