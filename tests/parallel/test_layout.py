"""The arithmetic of batches and ranks, and settings of layouts and communication that cannot be."""

from typing import Any

import pytest

from motet.core.errors import InputError
from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings, check_communication
from motet.parallel.data_parallel.data_sharding import DataParallelSharding
from motet.parallel.layout import LayoutSettings, microbatches_of_rank, resolve_layout
from refusals import refused


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_ranks_and_microbatches_cover_the_batch_once(ranks: int, microbatches: int) -> None:
    layout = resolve_layout(LayoutSettings(microbatches=microbatches), ranks, 48)
    shares = [share.rows for rank in range(ranks) for share in microbatches_of_rank(layout, rank, 48)]
    assert [row for rows in shares for row in rows] == list(range(48))
    assert {len(rows) for rows in shares} == {48 // ranks // microbatches}


@pytest.mark.parametrize(
    ("settings", "ranks", "rows", "sentence"),
    [
        ({"microbatches": 2}, 3, 16, "= 16 cannot be cut evenly over 3 ranks x 2 micro-batches = 6; use .* 12 or 18"),
        ({}, 8, 4, "use data.batch_sequences = 8,"),
        ({"dp": 4}, 2, 16, "layout.dp = 4 does not match 2 ranks; start 4 ranks"),
        ({"zero": 1, "shard_group": 4}, 6, 12, "shard_group = 4 does not divide 6 ranks of .*; use one of 1, 2, 3, 6"),
        (
            {"zero": 3, "secondary_group": 3, "shard_group": 4},
            *(8, 8, "secondary_group = 3 does not divide the 4 ranks .* use one of 1, 2, 4"),
        ),
        (
            {"zero": 3, "secondary_group": 3, "reshard_after_forward": False},
            *(6, 6, r"secondary_group = 3 has no effect with layout\.reshard_after_forward = false"),
        ),
    ],
)
def test_impossible_layouts_are_refused(settings: dict[str, Any], ranks: int, rows: int, sentence: str) -> None:
    refused(sentence, resolve_layout, LayoutSettings(**settings), ranks, rows)


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (3, DataParallelSharding(6, 1, 3, 6, secondary_shards=3)),
        (1, DataParallelSharding(6, 1, 3, 6, reshard_after_forward=False)),
        (6, DataParallelSharding(6, 1, 3, 6)),
    ],
)
def test_a_second_copy_must_be_smaller_than_the_first(size: int, layout: DataParallelSharding) -> None:
    assert resolve_layout(LayoutSettings(zero=3, secondary_group=size), 6, 6).sharding == layout


SLOW, ONE, SHARED, STAGE_3 = (
    "two-hosts-200mbit",
    DataParallelSharding(4, 1),
    DataParallelSharding(6, 1, 1, 3),
    DataParallelSharding(4, 1, 3, 4),
)
INT8 = {"compress_gradients": "int8"}


@pytest.mark.parametrize(
    ("settings", "layout", "sentence"),
    [
        ({"compress_gradients": "int7"}, ONE, "compress_gradients = 'int7': .* no codec 'int7'; use one of int8"),
        ({"compress_gradients": "int8:block=0"}, ONE, "block is 0; it must be a whole number from 1 up"),
        (
            {"compress_parameters": "topk"},
            DataParallelSharding(4, 1, 1, 4),
            "'topk' would leave most .* use one of int8, .*, sign$",
        ),
        ({"compress_parameters": "int8"}, ONE, "no effect with layout.zero = 0, .* set layout.zero=1"),
        ({"compress_gradients": "randomk"}, ONE, "errors grow; use randomk:unbiased=false, or .*=false"),
        (
            INT8 | {"compress_over": "replicas"},
            *(
                DataParallelSharding(4, 1, 2, 4),
                "all 4 ranks share one copy, so there are no replicas; set layout.shard_group",
            ),
        ),
        (INT8 | {"compress_over": "shards"}, ONE, "each of the 4 ranks holds a full copy; set layout.zero"),
        ({"compress_gradients": "sign", "overlap": "forward"}, ONE, "'forward' with layout.zero = 0"),
        ({"compress_gradients": "topk"}, STAGE_3, "'topk' cannot sum over .* stage 3; use one of int8"),
        (
            INT8 | {"error_feedback": True},
            *(
                DataParallelSharding(4, 1, 3, 2),
                "error_feedback = true, but at stage 3 .* layout.zero=2 or .*compress_over=replicas",
            ),
        ),
        ({"compress_gradients": "topk", "all_reduce": "torus-2d"}, SHARED, "all_reduce = 'torus-2d': .*2 ranks"),
        ({"all_reduce": "rings"}, SHARED, "communication.all_reduce = 'rings': .*nearest: ring"),
        ({"all_reduce": "naive"}, SHARED, "adds in another order on each rank"),
        ({"all_reduce": "torus-2d"}, SHARED, "2 ranks: all-reduce/torus-2d takes 4, 6"),
        ({"all_gather": "nothing"}, SHARED, "communication.all_gather = 'nothing'"),
        (
            {"all_gather": "auto"},
            ONE,
            "communication.all_gather = 'auto' takes what is cheapest on a network that is not",
        ),
        ({"cluster": SLOW}, ONE, "communication.cluster = 'two-hosts-200mbit' has no effect where the backend chooses"),
        ({"cluster": "moon", "all_reduce": "auto"}, ONE, "communication.cluster = 'moon': .*moon"),
        (
            {"cluster": "tpu-v4", "all_reduce": "auto"},
            *(DataParallelSharding(5000, 1), "communication.cluster = 'tpu-v4': cluster tpu-v4 has 64 ranks, not"),
        ),
    ],
)
def test_impossible_communication_is_refused(
    settings: dict[str, Any], layout: DataParallelSharding, sentence: str
) -> None:
    refused(sentence, check_communication, CommunicationSettings(**settings), layout)


@pytest.mark.parametrize(
    ("settings", "layout"),
    [
        (
            {"compress_gradients": "topk", "compress_over": "replicas", "error_feedback": True},
            DataParallelSharding(4, 1, 3, 2),
        ),
        (INT8 | {"error_feedback": False}, STAGE_3),
        ({"compress_gradients": "randomk", "error_feedback": False}, ONE),
    ],
)
def test_what_stage_3_can_do_is_not_refused(settings: dict[str, Any], layout: DataParallelSharding) -> None:
    check_communication(CommunicationSettings(**settings), layout)


def test_replicas_that_train_apart_tell_each_other_all_of_it() -> None:
    """Whatever runs beside the next forward inside of a replica."""
    ahead = CommunicationSettings(all_reduce="hierarchical-sharded", overlap="forward")
    with pytest.raises(InputError, match=r"all_reduce = 'hierarchical-sharded'.* 3 ranks"):
        check_communication(ahead, DataParallelSharding(3, 1), independent_replicas=True)
    check_communication(ahead, DataParallelSharding(4, 1), independent_replicas=True)
    check_communication(
        CommunicationSettings(**INT8, overlap="forward"), DataParallelSharding(2, 1), independent_replicas=True
    )
