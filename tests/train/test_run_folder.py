"""Which folder a run gets, and what may change when it is resumed."""

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

import motet
from motet.core.errors import InputError
from motet.monitor.events import RunEnded, RunStarted
from motet.monitor.summary import summarize, write_summary
from motet.parallel.process.launch_environment import SINGLE_RANK
from motet.train.job import Job, load_job
from motet.train.launch.entry_points import TrainRequest, train_rank
from motet.train.launch.failures import StopFlag
from motet.train.launch.run_folder import (
    RESUME_RULES,
    RunFolderChoice,
    check_resume,
    choose_resumed_run,
    choose_run_folder,
    collect_provenance,
    find_newest_run,
    job_to_tree,
    newest_checkpoint_step,
    read_stored_job,
    write_run_start,
)
from refusals import refused


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def job(*overrides: str) -> Job:
    return load_job("tiny", list(overrides))


def start(started: Job) -> Path:
    path = choose_run_folder(started).create()
    write_run_start(path, started, {"host": "here"})
    return path


def finish(path: Path, steps: int) -> None:
    begun = RunStarted(name="tiny", ranks=2, threads=1, device="cpu", parameters=1, data="x", last_step=steps)
    write_summary(summarize([begun, RunEnded(reason="finished", steps=steps)]), path)


def test_without_a_folder_runs_are_numbered() -> None:
    assert [start(job()) for _ in range(2)] == [Path("runs/tiny-001"), Path("runs/tiny-002")]
    Path("runs/tiny-1000").mkdir()
    Path("runs/tiny-2b").mkdir()
    Path("runs/tiny-big-005").mkdir()
    assert start(job()) == Path("runs/tiny-1001")


def test_runs_that_start_together_get_different_numbers() -> None:
    choice = choose_run_folder(job())
    with ThreadPoolExecutor(16) as pool:
        made = list(pool.map(lambda _: choice.create(), range(16)))
    assert sorted(path.name for path in made) == [f"tiny-{number:03d}" for number in range(1, 17)]


def test_choosing_makes_nothing_and_a_start_makes_a_named_folder() -> None:
    choose_run_folder(job())
    choose_run_folder(job("run.folder=a/b"))
    assert not list(Path().iterdir()) and start(job("run.folder=a/b")) == Path("a/b")
    assert read_stored_job(Path("a/b")) == job("run.folder=a/b") and Path("a/b/logs").is_dir()


@pytest.mark.parametrize("inside", [[], ["run.lock"], ["run.lock", ".job.toml.partial"]])
def test_an_empty_folder_is_taken(inside: list[str]) -> None:
    Path("a").mkdir()
    for name in inside:
        (Path("a") / name).touch()
    assert choose_run_folder(job("run.folder=a", "run.existing=refuse")) == RunFolderChoice(Path("a"))


def test_a_folder_of_something_else_is_left_alone() -> None:
    Path("a").mkdir()
    (Path("a") / "thesis.tex").touch()
    with pytest.raises(InputError, match=r"a is not a run folder: it has no job\.toml; give another folder"):
        choose_run_folder(job("run.folder=a"))


@pytest.mark.parametrize(
    ("file", "overrides", "sentence"),
    [
        ("a", ["run.folder=a"], r"run\.folder = a is a file"),
        ("a", ["run.folder=a/b"], r"cannot write run folder a/b: Not a directory; .* --run-folder"),
        ("runs", [], r"cannot write run folder runs/tiny: File exists"),
    ],
)
def test_a_file_is_no_folder(file: str, overrides: list[str], sentence: str) -> None:
    Path(file).touch()
    with pytest.raises(InputError, match=sentence):
        choose_run_folder(job(*overrides)).create()


def test_a_folder_without_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("a").mkdir()
    monkeypatch.setattr("os.access", lambda path, mode: False)  # tests may run as root, who may write everywhere
    with pytest.raises(InputError, match="cannot write run folder a: no permission to write"):
        choose_run_folder(job("run.folder=a")).create()


def test_an_unfinished_run_is_resumed_refused_or_numbered() -> None:
    start(job("run.folder=a"))
    begins = "a holds no checkpoint yet: the run begins at its first step"
    assert choose_run_folder(job("run.folder=a")) == RunFolderChoice(Path("a"), remarks=(begins,))
    with pytest.raises(InputError, match=r"run\.folder = a exists already; .*run\.existing to resume or number"):
        choose_run_folder(job("run.folder=a", "run.existing=refuse"))
    numbered = job("run.folder=a", "run.existing=number")
    assert [start(numbered), start(numbered)] == [Path("a-002"), Path("a-003")]


def test_a_finished_run_needs_more_to_do() -> None:
    finish(start(job("run.folder=a", "run.steps=40")), 40)
    with pytest.raises(InputError, match=r"holds a finished run \(run\.steps = 40\); give a larger run\.steps"):
        choose_run_folder(job("run.folder=a", "run.steps=40"))
    choice = choose_run_folder(job("run.folder=a", "run.steps=50"))
    assert choice.remarks[0] == "run.steps was 40 in a and is 50 now: a schedule that ends with the run is stretched"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("model.hidden=128", "model.hidden was 256 in a and is 128 now: it cannot change when a run is resumed"),
        ("model.rope_theta=1e6", "model.rope_theta was 10000.0 in a and is 1000000.0 now"),
        ("model.kv_heads=2", "model.kv_heads was 4 in a and is 2 now"),
        ("data.batch_sequences=32", "data.batch_sequences was 16"),
        ("data.samples=7", "data.samples was not given in a and is 7 now"),
        ("optimizer.name=sgd", "optimizer.name was 'adamw' in a and is 'sgd' now"),
        ("precision.recipe=bf16", "precision.recipe was 'fp32'"),
        ("run.seed=1", "run.seed was 0"),
        ("run.steps=100", "run.steps was 200 in a and is 100 now: it can only grow"),
        ("run.epochs=2", "run.epochs was not given in a and is 2.0 now: it can only grow"),
        ("name=other", "name was 'tiny'"),
    ],
)
def test_what_makes_it_another_run_is_refused(override: str, sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        check_resume(job(), job(override), Path("a"))
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("overrides", "remarks"),
    [
        ("run.ranks=4 run.threads=1 run.folder=b run.stop_at=3 run.restarts=3", 0),
        ("monitor.tensorboard=false checkpoint.every=3 data.workers=1 data.prefetch=0", 0),
        ("run.steps=201 layout.microbatches=2 communication.overlap=none run.device=cpu", 1),
        ("optimizer.learning_rate=1e-4 optimizer.clip_norm=false optimizer.schedule.kind=constant", 1),
    ],
)
def test_what_may_change_is_free_or_told(overrides: str, remarks: int) -> None:
    for override in overrides.split():
        assert len(check_resume(job(), job(override), Path("a"))) == remarks, override


def test_the_table_names_settings_that_exist() -> None:
    tree = Job.model_json_schema()

    def exists(key: str) -> bool:
        node = tree
        for part in key.split("."):
            properties = node["properties"]
            if part not in properties:
                return False
            reference = properties[part].get("$ref")
            node = tree["$defs"][reference.rpartition("/")[2]] if reference else {"properties": {}}
        return True

    assert [key for key in RESUME_RULES if key and not exists(key)] == []


def test_the_newest_run_of_a_job_or_of_any() -> None:
    refused(r"no run to resume in runs/", find_newest_run, None)
    first, second = start(job()), start(job("name=other"))
    assert (find_newest_run(None), find_newest_run("tiny"), find_newest_run("other")) == (second, first, second)
    refused(r"no run of job 'third' to resume in runs/; .*--resume-from", find_newest_run, "third")
    write_run_start(first, job(), {})  # continued since
    assert find_newest_run(None) == first
    (second / "job.toml").write_text("damaged")
    assert find_newest_run("tiny") == first


def test_a_damaged_run_is_a_sentence() -> None:
    path = start(job("run.folder=a"))
    (path / "job.toml").write_text("[")
    refused(r"cannot read a/job\.toml", choose_resumed_run, job(), path)
    (path / "versions.json").write_text("[")
    refused(r"versions\.json is damaged", write_run_start, path, job(), {})


def test_a_stored_job_with_an_unknown_setting_is_a_sentence() -> None:
    path = start(job("run.folder=a"))
    (path / "job.toml").write_text((path / "job.toml").read_text().replace("learning_rate =", "learning_rat ="))
    sentence = r"a/job\.toml: unknown key 'optimizer\.learning_rat'; did you mean 'learning_rate'"
    refused(sentence, choose_resumed_run, job(), path)


def test_a_full_disk_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    path = start(job("run.folder=a"))
    monkeypatch.setattr("motet.core.text_files.os.fsync", full)
    refused("cannot write run folder a: No space left on device", write_run_start, path, job("run.threads=3"), {})
    assert read_stored_job(path) == job("run.folder=a")


def test_every_start_adds_its_versions() -> None:
    path = start(job())
    write_run_start(path, job("run.ranks=4"), {"host": "there"})
    assert [entry["host"] for entry in json.loads((path / "versions.json").read_text())] == ["here", "there"]
    assert read_stored_job(path).run.ranks == 4


def test_the_newest_whole_checkpoint() -> None:
    path = start(job())
    assert newest_checkpoint_step(path) is None
    for name in ("step-00000020", "step-00000040", "step-00000060.partial"):
        (path / "checkpoints" / name).mkdir(parents=True)
    assert newest_checkpoint_step(path) == 40


def test_a_run_with_a_checkpoint_of_another_format_is_refused_before_ranks_start() -> None:
    path = start(job("run.folder=a"))
    newest = path / "checkpoints/step-00000040"
    newest.mkdir(parents=True)
    (newest / "manifest.json").write_text('{"step": 40, "shapes": {}, "dtypes": {}, "checksums": {}, "ranks": 2}')
    refused(
        "step-00000040 has no format number, .* resume with the version that saved it", choose_resumed_run, job(), path
    )
    newest.rename(path / "checkpoints/step-00000030")
    refused("step-00000030 has no format number", choose_run_folder, job("run.folder=a"))


def test_a_job_as_a_tree_has_no_none() -> None:
    tree = job_to_tree(job("optimizer.clip_norm=false"))
    assert tree["optimizer"]["clip_norm"] is False and "folder" not in tree["run"]


def git(*arguments: str) -> None:
    who = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *who, *arguments], check=True, capture_output=True)


def test_outside_of_a_repository_and_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    found = collect_provenance(2, 3, ["motet", "train"])
    assert (found["ranks"], found["threads"], found["command_line"]) == (2, 3, ["motet", "train"])
    assert (found["motet"], found["git"]) == (motet.__version__, None) and found["torch"][0].isdigit()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert collect_provenance(1, 1, [])["git"] is None


def test_the_state_of_a_repository() -> None:
    git("init", "-q")
    Path("a").write_text("1")
    git("add", "a")
    git("commit", "-q", "-m", "first")
    Path("untracked").touch()
    clean = collect_provenance(1, 1, [])["git"]
    assert (len(clean["commit"]), clean["dirty"]) == (40, False)
    Path("a").write_text("2")
    assert collect_provenance(1, 1, [])["git"] == {"commit": clean["commit"], "dirty": True}


def a_run_of(user: int, *overrides: str, mode: int = 0o700) -> tuple[Job, Path]:
    started = job("run.folder=theirs", *overrides)
    path = start(started)
    for each in (path / "job.toml", path):
        os.chown(each, user, -1)
        each.chmod(mode)
    return started, path


@pytest.mark.parametrize("name", ["", "job.toml"])
@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_job_that_was_given_away(name: str) -> None:
    theirs, path = a_run_of(0, "model={factory='os:system'}")
    os.chown(path / name, 1000, -1)
    request = TrainRequest(theirs, path, [])
    sentence = (
        r"belongs to another user \(id 1000; you have 0\), and its job calls model.factory = 'os:system'.*--trust"
    )
    refused(sentence, request.choose_folder)
    refused(sentence, train_rank, SINGLE_RANK, StopFlag(), str(path))  # It may have changed since the supervisor looked
    assert replace(request, is_trusted=True).choose_folder().path == path
    safe, elsewhere = a_run_of(1000, "run.folder=plain", "run.steps=9")
    assert TrainRequest(safe, elsewhere, []).choose_folder().path == elsewhere


def test_a_job_that_everybody_can_change() -> None:
    mine, path = a_run_of(os.getuid(), "model={factory='os:system'}", mode=0o777)
    refused(r"every user can change theirs \(mode 0777\).*os:system", TrainRequest(mine, path, []).choose_folder)
