"""`motet show layout`: who does what, and the sentence that it is proven."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from motet.cli.show.show_commands import show_app as app
from motet.parallel.layout import parse_layout, resolve_layout
from motet.parallel.step_plan.check import InvalidStepPlanError


def shown(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["layout", *arguments], env={"COLUMNS": "400"})
    assert result.exit_code == 0, result.output
    return result.output


def answer(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(shown(*arguments, "--json"))
    return found


def test_it_says_who_does_what_and_that_it_is_proven() -> None:
    text = shown("dp=8 zero=3 shard_group=4", "communication.all_reduce=ring")
    assert "Gradients are summed, a shard to each, over ranks 0 1 2 3 | 4 5 6 7." in text
    assert "Shards are summed over ranks 0 4 | 1 5 | 2 6 | 3 7." in text
    assert "is updated once in 2 copies, with the gradients of 8 ranks x 1 micro-batch, each once" in text
    assert "each of 16 rows is read once" in text
    assert "Proven, too: all-reduce/ring of 2 ranks." in text


def test_its_json_has_what_each_rank_updates_and_reads() -> None:
    found = answer("dp=4 zero=1 microbatches=2")
    layout = resolve_layout(parse_layout("zero=1 microbatches=2"), 4, 16)
    assert sum(rank["updated_elements"] for rank in found["ranks"]) == found["proof"]["elements"]
    assert found["ranks"][3]["rows"] == [[12, 14], [14, 16]]
    assert found["schedule"][0] == {
        "kind": "reduce_scatter",
        "rank_groups": [list(ranks) for ranks in layout.shard_groups],
    }
    assert found["state_placement"] == {
        "parameters": "replicated",
        "gradients": "replicated",
        "optimizer_states": "sharded",
    }


def test_replicas_that_train_apart_and_owners_are_told() -> None:
    assert "Replicas take an outer step over ranks 0 2 | 1 3." in shown("dp=4 zero=2 shard_group=2", "outer.every=5")
    owners = shown("dp=4 data=parameter_server server.transport=collectives server.count=2")
    assert "the owner of a bucket all of it" in owners and "broadcast/tree of 4 ranks" in owners


def test_of_many_ranks_the_first_are_shown() -> None:
    text = shown("dp=64", "data.batch_sequences=64")
    assert "48 more" in text and "over ranks 0 1 2 3 4 5 6 7 ...." in text


def test_what_is_not_right_is_no_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(plan: object) -> None:
        raise InvalidStepPlanError("nobody updates element 0 of w")

    monkeypatch.setattr("motet.cli.show.layout_report.prove_step_plan", wrong)
    result = CliRunner().invoke(app, ["layout", "dp=2"])
    assert isinstance(result.exception, AssertionError)
