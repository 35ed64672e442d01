"""Names of earlier versions: a job that uses one is refused, a run that was stored with them is resumed.
tests/train/data/ holds runs that earlier versions stopped after step 2 of 6, with the events of the same run without a
stop. Two ranks at stage 3: one by the version before the renaming, with SGD and momentum, and one by commit d12aa69,
with AdamW, which is resumed in another layout. By commit 386f737, whose manifest was one file that said who saved it:
compression over two replicas of two ranks at stage 3, with error feedback, and two independent replicas."""

import copy
import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from motet.core.config_loading import parse_value
from motet.core.errors import InputError
from motet.core.renamed_settings import RENAMED_SETTINGS, translate_renamed_settings
from motet.monitor.events import read_steps
from motet.monitor.summary import read_summary
from motet.parallel.layout import parse_layout
from motet.train.job import Job, job_from_tree, load_job, with_overrides
from motet.train.launch.entry_points import SupervisorIO, TrainRequest, supervise_local_ranks
from motet.train.launch.run_folder import read_stored_job
from ranks import Ranks
from train.runs import run_job

DATA = Path(__file__).parent / "data"
TRANSPORT, MIXED = "layout.server.transport", "data.mixture.source"
TWO_SOURCES = "data.mixture=[{source='stdlib'}, {source='made:majority'}]"
REFUSALS = {
    "layout.regather=false": "layout.regather is now layout.reshard_after_forward",
    "layout.whole_below=7": "layout.whole_below is now layout.min_shard_numel",
    "layout.server.place=own": "layout.server.place = 'own' is now layout.server.placement = 'dedicated'",
    "layout.server.place=workers": "layout.server.place = 'workers' is now layout.server.placement = 'colocated'",
    f"{TRANSPORT}=messages": f"{TRANSPORT} = 'messages' is now {TRANSPORT} = 'point-to-point'",
    f"{TRANSPORT}=programs": f"{TRANSPORT} = 'programs' is now {TRANSPORT} = 'collectives'",
    "layout.server.reduce=tree": "layout.server.reduce is now layout.server.reduce_algorithm",
    "layout.server.broadcast=tree": "layout.server.broadcast is now layout.server.broadcast_algorithm",
    "layout.server.first=1": "layout.server.first is now layout.server.first_k",
    "layout.server.order=need": "layout.server.order = 'need' is now layout.server.send_order = 'priority'",
    "layout.server.order=arrival": "layout.server.order = 'arrival' is now layout.server.send_order = 'fifo'",
    "layout.server.compress=int8": "layout.server.compress is now layout.server.compress_pushes",
    "layout.server.rate=plain": "layout.server.rate = 'plain' is now layout.server.learning_rate_scaling = 'none'",
    "layout.server.rate=by-staleness": "layout.server.rate is now layout.server.learning_rate_scaling",
    "layout.server.shares=3": "layout.server.shares is now layout.server.work_items_per_step",
    "layout.server.patience_s=3.0": "layout.server.patience_s is now layout.server.eviction_timeout_s",
    "layout.server.spares=3": "layout.server.spares is now layout.server.max_process_restarts",
    "layout.server.piece_mib=3.0": "layout.server.piece_mib is now layout.server.slice_mib",
    "monitor.watch_every=3": "monitor.watch_every is now monitor.replica_check_every",
    "monitor.watch=warn": "monitor.watch is now monitor.replica_check_action",
    "outer.mix=0.25": "outer.mix is now outer.mixing_factor",
    "data.source=made:majority": "data.source = 'made:majority' is now data.source = 'synthetic:majority'",
    TWO_SOURCES: f"{MIXED} = 'made:majority' is now {MIXED} = 'synthetic:majority'",
}

STORED_RUNS = {  # Its name, and the settings with which it is resumed
    "run_with_old_names": [],
    "run_at_stage_3": ["run.ranks=3", "layout.zero=2", "communication.overlap=forward", "layout.microbatches=2"],
    "run_with_compression": [],
    "run_of_replicas": [],
}


def test_every_renamed_setting_is_among_the_refusals() -> None:
    refused = {override.partition("=")[0] for override in REFUSALS}
    names = {f"{setting.section}.{setting.old}" for setting in RENAMED_SETTINGS}
    assert names == (refused - {"data.mixture"}) | {"data.mixture.source"}


@pytest.mark.parametrize(("override", "sentence"), REFUSALS.items(), ids=REFUSALS)
def test_a_job_with_an_old_name_is_refused(override: str, sentence: str) -> None:
    with pytest.raises(InputError) as refusal:
        load_job("tiny", [override])
    assert (str(refusal.value), refusal.value.exit_code) == (f"tiny: {sentence}", 2)
    with pytest.raises(InputError) as refusal:
        with_overrides(load_job("tiny"), [override], "verify")
    assert str(refusal.value) == f"verify: {sentence}"


def test_a_layout_text_with_an_old_name_is_refused() -> None:
    with pytest.raises(InputError) as refusal:
        parse_layout("zero=3 regather=false")
    assert str(refusal.value) == "layout 'zero=3 regather=false': layout.regather is now layout.reshard_after_forward"


def test_a_file_with_an_old_name_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text("[model]\nlayers = 1\n[layout]\nzero = 3\nregather = false\n")
    with pytest.raises(InputError) as refusal:
        load_job(str(file))
    assert str(refusal.value) == f"{file}: layout.regather is now layout.reshard_after_forward"


@pytest.mark.parametrize("override", REFUSALS)
def test_a_stored_job_with_an_old_name_has_the_new_one(override: str) -> None:
    key, _, text = override.partition("=")
    value: Any = parse_value(text)
    for name in reversed(key.split(".")):
        value = {name: value}
    tree: dict[str, Any] = value
    translate_renamed_settings(tree)
    job_from_tree({"name": "x", "run": {"steps": 1}, "model": {"factory": "a:b"}, **tree})
    again = copy.deepcopy(tree)
    translate_renamed_settings(again)
    assert again == tree


def test_the_job_of_a_run_that_was_stored_with_old_names() -> None:
    run = DATA / "run_with_old_names"
    summary, job = read_summary(run), read_stored_job(run, [])
    assert (summary.steps, summary.mfu is not None) == (2, True)
    assert (job.layout.reshard_after_forward, job.layout.min_shard_numel) == (False, 16)
    assert (job.monitor.replica_check_every, job.monitor.replica_check_action) == (2, "warn")


def supervise(job: Job, run: Path) -> None:
    """Resume a run in processes of its own, with warnings that the layout has changed."""
    warnings: list[str] = []
    supervisor_io = SupervisorIO(os.environ, warnings.append, lambda: nullcontext(lambda *_: None))
    _, exit_status = supervise_local_ranks(TrainRequest(job, run, []), supervisor_io)
    assert (exit_status.exit_code, exit_status.message) == (0, "") and warnings


@pytest.mark.parametrize(
    "stored",
    [pytest.param(run, marks=() if run == "run_with_old_names" else pytest.mark.proof) for run in STORED_RUNS],
)
def test_a_stored_run_is_resumed(ranks: Ranks, stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    corpus = shutil.copy(DATA / "corpus.txt", tmp_path)
    run = shutil.copytree(DATA / stored, tmp_path / "run")
    overrides = ["run.stop_at=6", "run.cpu_backend=auto", f"run.folder={run}", *STORED_RUNS[stored]]
    if STORED_RUNS[stored]:
        supervise(read_stored_job(run, overrides), run)
    else:  # Ranks of the pool are in another folder
        job = read_stored_job(run, [*overrides, f"data.source={corpus}", f"data.cache={tmp_path}/cache"])
        ranks.run_places(job.run.ranks, run_job, job, run)
    files = run / "events.jsonl", run / "uninterrupted_events.jsonl"
    curves = [[(step.loss, step.grad_norm) for step in read_steps(file)] for file in files]
    assert len(curves[0]) == len(curves[1]) == 6
    for resumed, uninterrupted in zip(*curves, strict=True):
        assert resumed == pytest.approx(uninterrupted, rel=1e-12)  # other processors round otherwise
    assert read_summary(run).finished
