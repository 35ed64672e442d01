"""The outcome of a run, worked out from its events, and the file that is whole or the old one."""

import json
import math

import pytest
from example_events import ended, evaluated, started, step, whole_run

from motet.core.errors import CheckpointSaveError
from motet.monitor.events import WarningIssued
from motet.monitor.summary import read_summary, summarize, write_summary
from refusals import refused


def test_the_outcome_of_a_whole_run():
    result = summarize(whole_run())
    assert (result.finished, result.exit_reason, result.steps, result.last_step) == (True, "finished", 4, 4)
    assert (result.first_loss, result.final_loss, result.uniform_loss) == (7.5, 4.5, math.log(4096))
    assert (result.tokens, result.tokens_per_s, result.ranks, result.attempts) == (400, 200.0, 2, 1)
    assert result.peak_bytes == 1024**3 and result.evaluations["validation"].perplexity == 148.4


def test_medians_and_peaks_are_over_all_steps_and_tokens_also_of_those_between():
    steps = [step(n, tokens_per_s=n * 100.0, memory_bytes=10 * n, mfu=0.1 * n) for n in (1, 2, 4)]
    result = summarize([started(), *steps])
    assert (result.tokens_per_s, result.peak_bytes, result.mfu) == (200.0, 40, 0.2)
    assert summarize([started(), step(1), step(4, tokens=50)]).tokens == 100 + 3 * 50


def test_a_resumed_run_is_one_run():
    events = [started(), step(1), step(2), step(3), started(first_step=3), step(3), step(4, loss=2.0), ended()]
    result = summarize(events)
    assert (result.first_loss, result.final_loss, result.tokens, result.attempts) == (7.5, 2.0, 400, 2)


def test_the_last_evaluation_of_each_split_counts():
    result = summarize([started(), evaluated(1), evaluated(2, loss=4.0), evaluated(2, split="test", accuracy=0.5)])
    assert {split: found.loss for split, found in result.evaluations.items()} == {"validation": 4.0, "test": 5.0}


def test_an_attempt_that_does_not_end_is_running_and_one_that_fails_says_why():
    killed_then_resumed = [started(), step(1), ended(reason="stopped", steps=1), started(first_step=2)]
    assert summarize(killed_then_resumed).exit_reason == "running"
    failed = [started(), step(1), ended(reason="diverged", steps=1, message="loss nan"), WarningIssued(text="late")]
    result = summarize(failed)
    assert (result.exit_reason, result.finished, result.message, result.steps) == ("diverged", False, "loss nan", 1)


def test_a_run_without_steps_has_no_losses_and_one_without_a_start_is_refused():
    result = summarize([started(num_classes=None), ended(reason="failed", steps=0)])
    assert (result.first_loss, result.final_loss, result.uniform_loss, result.tokens) == (None, None, None, 0)
    refused("run_started", summarize, [step(1)])


def test_the_file_comes_back_and_is_strict_json(tmp_path):
    result = summarize([started(), step(1, loss=math.nan), ended(reason="diverged", steps=1)])
    write_summary(result, tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["final_loss"] == "NaN"
    assert repr(read_summary(tmp_path)) == repr(result)
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_a_write_that_fails_leaves_the_old_one_whole(tmp_path, monkeypatch):
    old = summarize([started()])
    write_summary(old, tmp_path)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("motet.core.text_files.os.fsync", full)
    with pytest.raises(CheckpointSaveError, match=r"summary\.json: No space left on device"):
        write_summary(summarize(whole_run()), tmp_path)
    assert read_summary(tmp_path) == old


def test_a_folder_without_summary_is_told(tmp_path):
    refused("is not the summary of a run", read_summary, tmp_path)
    (tmp_path / "summary.json").write_text('{"name": "tiny"}')
    refused("finished", read_summary, tmp_path)
