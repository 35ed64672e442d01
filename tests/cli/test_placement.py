"""`motet show layout --cluster`: hosts, devices, groups with their links, and bytes, against sums by hand."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from motet.cli.show.show_commands import show_app
from motet.parallel.pipeline.border_bytes import sends_slices

SMALL = [
    "model.layers=4",
    "model.hidden=64",
    "model.ffn_hidden=128",
    "data.sequence_length=32",
    "model.vocab_size=4096",
]
HIDDEN, TOKENS, FLOAT32 = 64, 32, 4


def shown(words: str, *more: str) -> str:
    result = CliRunner().invoke(show_app, ["layout", words, "--cluster", "dgx-h100", *SMALL, *more])
    assert result.exit_code == 0, result.output
    return result.stdout


def report(words: str, *more: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(shown(words, "--json", *more))
    return answer


def test_two_hosts_of_eight_devices() -> None:
    """Tensor-parallel ranks are neighbours; stage 2 begins on the second host."""
    found = report("pp=4 tp=2 dp=2 microbatches=8")["placement"]
    assert (found["hosts"], found["devices_per_host"], len(found["places"])) == (2, 8, 16)
    place = found["places"][11]
    assert (place["host"], place["device"], place["coordinates"]) == (1, 3, {"pp": 2, "dp": 1, "tp": 1})
    assert (place["stages"], place["blocks"]) == ([2], [[2, 2]])
    groups = {each["purpose"]: each for each in found["groups"]}
    assert groups["tp"]["ranks"] == [[i, i + 1] for i in range(0, 16, 2)] and not groups["tp"]["crosses_hosts"]
    assert groups["dp"]["ranks"][-1] == [13, 15] and groups["dp"]["bandwidth_Bps"] == 450e9
    assert groups["pp"]["ranks"][1] == [1, 5, 9, 13] and groups["pp"]["bandwidth_Bps"] == 50e9
    assert groups["gradients of stages 0 and 3"]["ranks"] == [[0, 2, 12, 14], [1, 3, 13, 15]]  # The tied embedding
    pipeline = found["pipeline"]
    assert [each["links"]["crosses_hosts"] for each in pipeline["borders"]] == [False, True, False]
    message = 1 * TOKENS * HIDDEN * FLOAT32 // 2  # Of one row; each of two ranks sends a slice
    assert {each["activation_bytes"] for each in pipeline["borders"]} == {message}
    assert pipeline["sent_bytes_by_pipeline_rank"] == [8 * message, 16 * message, 16 * message, 8 * message]


@pytest.mark.parametrize(
    ("words", "crossings"), [("schedule=1f1b", 1), ("chunks=2", 3), ("chunks=2 schedule=zb-v", 2)], ids=str
)
def test_more_chunks_cross_more_borders(words: str, crossings: int) -> None:
    pipeline = report(f"pp=2 dp=1 microbatches=4 {words}")["placement"]["pipeline"]
    message = 4 * TOKENS * HIDDEN * FLOAT32  # Of four rows
    assert sum(pipeline["sent_bytes_by_pipeline_rank"]) == 4 * crossings * 2 * message
    assert pipeline["times_one_chunk"] == crossings


def test_gradients_reduced_each_micro_batch_or_once() -> None:
    often, once = report("pp=2 dp=2 zero=2 microbatches=4", "model.tied=false")["placement"]["gradients"]
    assert (often["reduce_gradients"], once["reduce_gradients"]) == ("microbatch", "step")
    assert often["gradient_bytes"] < once["gradient_bytes"]
    scattered = [each["sent_bytes"]["reduce_scatter"] for each in (often, once)]
    assert scattered[0] == 4 * scattered[1] > 0
    for words in ("pp=2 dp=2 zero=1", "pp=2 dp=2 zero=2 chunks=2 schedule=zb-v"):
        assert [each["reduce_gradients"] for each in report(words)["placement"]["gradients"]] == ["step"]


def test_groups_on_several_hosts_are_warned_of() -> None:
    text = shown("pp=1 dp=1 tp=16", "model.heads=16", "model.kv_heads=16")
    assert "ranks 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 split layers, but lie on several hosts of 8 devices" in text
    text = shown("pp=2 dp=16 zero=3")
    assert "share one copy, but lie on several hosts of 8 devices. Use layout.shard_group=8 to stay" in text
    assert "several hosts" not in shown("pp=4 tp=2 dp=2 zero=3")


def test_activations_of_split_layers_are_those_of_the_stages_of_a_rank() -> None:
    """Each of four stages has a block, with two sums forward and two backward; stage 0 has the table besides."""
    whole, stage = (
        report(words, "data.batch_sequences=8")["sent_activation_bytes_of_first_rank"]["all_reduce"]
        for words in ("pp=1 dp=1 tp=2 microbatches=8", "pp=4 dp=1 tp=2 microbatches=8")
    )
    block = 4 * 8 * TOKENS * HIDDEN * FLOAT32  # Between two ranks an all-reduce sends its size
    assert whole - stage >= 3 * block and block <= stage <= 1.5 * block


@pytest.mark.parametrize(
    ("setting", "degree", "local", "sliced"),
    [
        (None, 2, 8, True),
        (None, 2, 16, False),
        (None, 3, 8, False),
        (None, 1, 8, False),
        (True, 2, 16, True),
        (False, 2, 8, False),
    ],
)
def test_slices_by_default_where_links_inside_of_a_host_are_faster(
    setting: bool | None, degree: int, local: int, sliced: bool
) -> None:
    assert sends_slices(setting, degree=degree, local_ranks=local, ranks=16) == sliced


def test_many_hosts_are_cut_short_as_text() -> None:
    text = shown("pp=4 dp=40", "data.batch_sequences=160")
    assert "dgx-h100: 20 hosts of 8 devices" in text and "... and 4 more hosts" in text and "host 16" not in text
