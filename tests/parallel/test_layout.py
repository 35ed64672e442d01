"""The arithmetic of batches and ranks, and settings of layouts and communication that cannot be."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from motet.core.config_loading import settings_from_dict
from motet.core.errors import InputError
from motet.core.text_files import to_toml
from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings, check_communication
from motet.parallel.data_parallel.data_sharding import DataParallelSharding
from motet.parallel.layout import (
    LayoutSettings,
    microbatches_of_rank,
    parse_layout,
    parse_stages,
    resolve_dims,
    resolve_layout,
)
from motet.parallel.pipeline.schedules import SCHEDULES
from motet.parallel.tensor_parallel.split_regions import LayerSplit, splits_by_rule
from motet.parity.candidate_layouts import make_candidate
from motet.train.job import job_from_tree, load_job
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


def test_dimensions_are_written_as_text() -> None:
    layout = parse_layout("tp=2 sp=true pp=2 schedule=interleaved chunks=2 dp=2 zero=1 microbatches=8")
    assert (layout.tp, layout.sp, layout.pp, layout.chunks, layout.schedule) == (2, True, 2, 2, "interleaved")
    assert resolve_dims(layout, 8).sizes == (("pp", 2), ("dp", 2), ("cp", 1), ("tp", 2))
    assert resolve_dims(parse_layout("cp=3 tp=2"), 24).sizes == (("pp", 1), ("dp", 4), ("cp", 3), ("tp", 2))
    assert resolve_dims(LayoutSettings(), 1).sizes == (("pp", 1), ("dp", 1), ("cp", 1), ("tp", 1))


@pytest.mark.parametrize(
    ("text", "ranks", "sentence"),
    [
        ("dp=4", 2, r"^layout\.dp = 4 does not match 2 ranks; start 4 ranks \(--ranks 4\) or leave layout\.dp out$"),
        ("dp=1 tp=2", 4, r"^layout\.dp = 1 x layout\.tp = 2 does not match 4 ranks; start 2 ranks"),
        (
            "pp=2 dp=2 cp=2 tp=2",
            8,
            r"^layout\.pp = 2 x layout\.dp = 2 x layout\.cp = 2 x layout\.tp = 2 does not match",
        ),
        ("pp=2 tp=3", 16, r"^layout\.pp = 2 x layout\.tp = 3 does not divide 16 ranks; start 12 ranks .* other sizes$"),
        ("tp=4", 2, r"^layout\.tp = 4 does not divide 2 ranks; start 4 ranks"),
        ("ep=3 cp=2", 4, r"^layout\.ep = 3 does not divide the 4 ranks of data and context .*; use one of 1, 2, 4$"),
        ("pp=2 schedule=1f1", 2, r"^layout\.schedule = '1f1' is not a file; did you mean '1f1b'\?"),
    ],
)
def test_dimensions_must_fit_the_ranks(text: str, ranks: int, sentence: str) -> None:
    refused(sentence, resolve_dims, parse_layout(text), ranks)


def test_rules_of_layers_are_written_as_text_or_as_a_table() -> None:
    rules = {"*.up_proj": "rows", "blocks.0.*": "whole"}
    assert parse_layout("tp=2 rules.*.up_proj=rows rules.blocks.0.*=whole").rules == rules
    overrides = ["layout.tp=2", "layout.rules.*.up_proj=rows", "layout.rules.blocks.0.*=whole"]
    job = load_job("tiny", overrides)
    assert job.layout.rules == rules and list(job.layout.rules) == list(rules)
    assert job_from_tree(tomllib.loads(to_toml(job.model_dump(mode="json", exclude_unset=True)))) == job
    assert load_job("tiny", ["layout.tp=2", 'layout.rules={"*.up_proj" = "rows"}', overrides[2]]) == job
    assert make_candidate(load_job("tiny"), "dp=1 tp=2 rules.*.up_proj=rows").job.layout.rules == {"*.up_proj": "rows"}
    refused("^tiny: layout.rules = .* has no effect with layout.tp = 1", load_job, "tiny", overrides[1:])
    refused("has no effect with layout.tp = 1", load_job, "tiny", ["layout.tp=1", overrides[1]])
    refused("layout.rules.a.b = 'row' must be .*; did you mean 'rows'", load_job, "tiny", ["layout.rules.a.b=row"])


def test_the_last_rule_that_matches_a_layer_counts() -> None:
    layers = ["blocks.0.ffn.up", "blocks.0.ffn.down", "blocks.1.ffn.up", "head"]
    rules: dict[str, LayerSplit] = {"blocks.*": "whole", "*.up": "rows"}
    assert splits_by_rule(rules, layers) == {layers[0]: "rows", layers[1]: "whole", layers[2]: "rows"}
    assert splits_by_rule({"*.up": "rows", "blocks.*": "whole"}, layers) == dict.fromkeys(layers[:3], "whole")
    refused(
        r"^layout\.rules: '\*\.upp' matches no layer; the nearest names are blocks\.1\.ffn\.up",
        *(splits_by_rule, {"*.up": "rows", "*.upp": "rows"}, layers),
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_a_name_or_a_file(name: str, tmp_path: Path) -> None:
    chunks = SCHEDULES[name].chunks or 3
    assert resolve_dims(parse_layout(f"pp=2 schedule={name} chunks={chunks}"), 2).sizes[0] == ("pp", 2)
    (tmp_path / name).write_text("", encoding="utf-8")
    assert resolve_dims(parse_layout(f"pp=2 schedule={tmp_path / name} chunks=5"), 2)
    if SCHEDULES[name].chunks:
        refused(rf"where a rank holds {chunks}; set .*={chunks}$", parse_layout, f"pp=2 schedule={name} chunks=5")


def test_stages_are_ranges_of_blocks() -> None:
    assert parse_stages("0-3,4-7") == (range(4), range(4, 8)) and parse_stages("0, 1-2") == (range(1), range(1, 3))
    assert parse_layout("pp=2 chunks=2 stages=0,1-2,3,4-9").stages == "0,1-2,3,4-9"


@pytest.mark.parametrize(
    ("stages", "sentence"),
    [
        ("", r"'' is not a range of blocks; write FIRST-LAST, such as 0-3$"),
        ("0-3,", r"'' is not a range of blocks; write FIRST-LAST, such as 4-7$"),
        ("0-3,7-4", r"'7-4' is not a range"),
        ("-1-3,4-7", r"'-1-3' is not a range"),
        ("0-3;4-7", r"'0-3;4-7' is not a range"),
        ("\u0660-3,4-7", "is not a range"),
        ("1-3,4-7", r"'1-3' leaves a gap; begin it with block 0$"),
        ("0-3,5-7", r"'5-7' leaves a gap; begin it with block 4$"),
        ("0-3,3-7", r"'3-7' overlaps the range before; begin it with block 4$"),
        ("4-7,0-3", r"'4-7' leaves a gap; begin it with block 0$"),
        ("0-7", r"has 1 range of blocks, but layout\.pp = 2 x layout\.chunks = 1 is 2; write 2 ranges$"),
        ("0,1,2", r"has 3 ranges .* write 2 ranges$"),
    ],
)
def test_stages_that_are_no_ranges_of_all_blocks_are_refused(stages: str, sentence: str) -> None:
    refused(sentence, settings_from_dict, LayoutSettings, {"pp": 2, "stages": stages}, "layout")


def test_ranges_of_blocks_are_the_stages_of_a_schedule_file(tmp_path: Path) -> None:
    """A file with stages 0 and 2 on rank 0, and stage 1 on rank 1."""
    path = tmp_path / "uneven.csv"
    path.write_text("0F0,2F0,2B0,0B0\n1F0,1B0\n", encoding="utf-8")
    words = f"pp=2 dp=1 schedule={path} microbatches=1 chunks=2"
    layout = resolve_layout(parse_layout(f"{words} stages=0,1,2-3"), 2, 1)
    assert layout.pipeline_schedule(1).stage_ranks == (0, 1, 0)
    for stages, ranges in (("0,1,2,3", "4 ranges"), ("0-3", "1 range")):
        sentence = rf"= '{stages}' has {ranges} of blocks, but layout\.schedule = '.*' has 3 stages; write 3 ranges$"
        refused(sentence, resolve_layout, parse_layout(f"{words} stages={stages}"), 2, 1)
    refused("'1-3' leaves a gap", parse_layout, f"{words} stages=1-3")


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
        ({"compress_gradients": "int8:block=0"}, ONE, "block is 0; give a whole number from 1 up"),
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
            "communication.all_gather = 'auto' takes the cheapest algorithm of a network that is not",
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
