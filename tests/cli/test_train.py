"""`motet train` as a person uses it: whole runs in processes of their own, and what is refused before ranks start."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer import Exit

from motet.cli.train import train_command
from motet.parallel.process.launch_environment import RankEnvironment
from motet.train.job import Job, builtin_jobs, load_job
from motet.train.launch import entry_points
from motet.train.launch.failures import StopFlag
from motet.train.launch.supervisor import LaunchExitStatus, LaunchSpec
from motet.train.loop import run_rank
from ranks import Ranks
from train.runs import same_bits, saved_tensors
from waiting import free_port, until

Motet = Callable[..., subprocess.CompletedProcess[str]]
TEXT = Path(__file__).parent.parent / "data" / "small.txt"
JOB = """
name = "small"
[model]
vocab_size = 260
context = 32
layers = 1
hidden = 16
heads = 2
ffn_hidden = 16
[data]
source = "{text}"
tokenizer = "bytes"
sequence_length = 32
batch_sequences = 4
cache = "cache"
workers = 1
[monitor]
tensorboard = false
[run]
ranks = 2
steps = 6
threads = 1
"""
COMPILER_CACHE = "TORCHINDUCTOR_CACHE_DIR"
FACTORY = '''
import os, signal
from pathlib import Path
from torch import nn

class Model(nn.Module):
    """Fails once, in the third forward of rank 1, in the way that the file `how` says."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head, self.calls = nn.Embedding(260, 8), nn.Linear(8, 260), 0

    def forward(self, tokens):
        import torch.distributed as dist
        self.calls += 1
        how = Path("how")
        if self.training and self.calls == 3 and dist.get_rank() == 1 and how.exists():
            kind = how.read_text()
            how.unlink()
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("a bug in the model")
        return self.head(self.embedding(tokens))
'''


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)  # see environment.uncounted
    Path("small.toml").write_text(JOB.format(text=TEXT))


@pytest.fixture
def refused(motet: Motet, monkeypatch: pytest.MonkeyPatch) -> Motet:
    """Run `motet train` where no process may be started."""
    monkeypatch.setattr(subprocess, "Popen", None)
    return lambda *arguments: motet("train", *arguments)


def summary(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(folder) / "summary.json").read_text())
    return found


def failing_job(how: str) -> None:
    Path("their_model.py").write_text(FACTORY)
    Path("how").write_text(how)
    text = JOB.format(text=TEXT).replace('"small"', '"failing"')
    model = text[text.index("[model]") : text.index("[data]")]
    Path("failing.toml").write_text(text.replace(model, '[model]\nfactory = "their_model:Model"\nvocab_size = 260\n'))


@pytest.mark.parametrize(
    ("settings", "environment", "expected"),
    [
        ([], {}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ([], {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, {}),
        ([], {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}),
        (["run.reproducible=layout"], {"PYTORCH_ALLOC_CONF": ""}, {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}),
        (
            ["run.reproducible=layout"],
            {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "PYTORCH_ALLOC_CONF": ""},
            {"CUBLAS_WORKSPACE_CONFIG": ":16:8"},
        ),
        ([], {"PYTORCH_ALLOC_CONF": "", COMPILER_CACHE: "mine"}, {COMPILER_CACHE: "mine"}),
    ],
)
def test_ranks_find_the_variables_that_cuda_and_the_compiler_read_when_they_start(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    settings: list[str],
    environment: dict[str, str],
    expected: dict[str, str],
) -> None:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG", COMPILER_CACHE)
    for name in names:
        monkeypatch.setenv(name, "")  # So that its state is restored at the end
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    seen = list[dict[str, str]]()

    def launch(spec: LaunchSpec, log: object) -> LaunchExitStatus:
        seen.append({name: spec.environment[name] for name in names if spec.environment.get(name)})
        return LaunchExitStatus(3, "no rank was started")

    monkeypatch.setattr(entry_points, "launch_ranks", launch)
    with pytest.raises(Exit):
        train_command(words=["small.toml", *settings])
    default = {COMPILER_CACHE: str(tmp_path / "motet/compiled")}
    assert seen == [{**default, **{name: value for name, value in environment.items() if value}, **expected}]


@pytest.mark.proof  # g++ compiles for seconds
def test_compiled_code_goes_to_the_cache_folder(motet: Motet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(COMPILER_CACHE, "")
    monkeypatch.delenv(COMPILER_CACHE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    done = motet("train", "small.toml", "run.compile=blocks", "run.steps=1", "run.ranks=1")
    assert done.returncode == 0, done.stderr
    assert any((tmp_path / "caches/motet/compiled").rglob("*.cpp"))


# --- whole runs ------------------------------------------------------------------------------------
def test_a_run_its_stop_and_its_end(motet: Motet) -> None:
    first = motet("train", "small.toml", "--json", "run.stop_at=4")
    assert first.returncode == 0, first.stderr
    told = json.loads(first.stdout)
    assert told == summary("runs/small-001")
    assert (told["steps"], told["last_step"], told["finished"], told["ranks"]) == (4, 6, False, 2)
    assert "continue from step 4 with: motet train --resume-from runs/small-001" in first.stderr
    assert "step 4/6" in first.stderr
    second = motet("train", "--resume")
    assert second.returncode == 0, second.stderr
    assert "step 5/6" in second.stdout and "step 4/6" not in second.stdout
    assert "continue from" not in second.stderr and summary("runs/small-001")["finished"]
    third = motet("train", "--resume")
    assert (third.returncode, third.stdout) == (2, "")
    assert "runs/small-001 holds a finished run (run.steps = 6)" in third.stderr
    files = {path.name for path in Path("runs/small-001").iterdir()}
    assert files >= {"job.toml", "versions.json", "events.jsonl", "summary.json", "checkpoints", "logs"}
    starts = json.loads(Path("runs/small-001/versions.json").read_text())
    assert [start["command_line"][-1] for start in starts] == ["run.stop_at=4", "--resume"]
    assert {(start["ranks"], start["threads"]) for start in starts} == {(2, 1)}
    assert load_job("runs/small-001/job.toml").run.stop_at is None


@pytest.fixture
def long_run() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "motet", "train", "small.toml", "run.steps=1000000", "monitor.every=1000000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until(lambda: Path("runs/small-001/events.jsonl").exists())
    yield process
    process.kill()
    process.communicate()


def test_a_run_in_progress_is_not_run_twice_and_ctrl_c_saves_it(long_run: subprocess.Popen[str], motet: Motet) -> None:
    second = motet("train", "--resume")
    assert second.returncode == 2 and "runs/small-001 is in use by another motet" in second.stderr
    long_run.send_signal(signal.SIGINT)
    _, err = long_run.communicate(timeout=60)
    assert long_run.returncode == 130
    told = summary("runs/small-001")
    assert told["exit_reason"] == "stopped"
    assert err.splitlines()[-2:] == [
        "stopping after this step and saving; Ctrl-C once more stops immediately",
        f"continue from step {told['steps']} with: motet train --resume-from runs/small-001",
    ]


@pytest.mark.proof  # Supervisors and killed ranks are in tests/train/test_supervisor.py
def test_a_killed_rank_ends_the_run(long_run: subprocess.Popen[str]) -> None:
    psutil.Process(long_run.pid).children()[1].kill()
    _, err = long_run.communicate(timeout=60)
    assert long_run.returncode == 3 and err.count("rank 1 was killed by signal 9 (SIGKILL)") == 1
    assert summary("runs/small-001")["message"].startswith("rank 1 was killed by signal 9 (SIGKILL)")


def test_an_error_on_a_rank_is_told_once(motet: Motet) -> None:
    failing_job("raise")
    done = motet("train", "failing.toml", "--json")
    assert done.returncode == 3 and done.stderr.count("rank 1 failed: ValueError: a bug in the model") == 1
    assert done.stderr.count("Traceback") == 1 and "in forward" in done.stderr
    assert json.loads(done.stdout)["message"] == "rank 1 failed: ValueError: a bug in the model"
    assert "in forward" in Path("runs/failing-001/logs/failure.txt").read_text()


def without_a_break(place: RankEnvironment, job: Job, folder: Path) -> int:
    return run_rank(job, place, folder, StopFlag()).completed_steps


@pytest.mark.proof
def test_killed_from_outside_and_resumed_is_bit_for_bit_the_same(motet: Motet, ranks: Ranks, tmp_path: Path) -> None:
    changes = ["run.steps=50", "checkpoint.every=5", "precision.recipe=bf16"]
    job = load_job("small.toml", [*changes, f"data.cache={tmp_path}/cache"])
    assert ranks.run_places(2, without_a_break, job, tmp_path / "whole") == [50, 50]
    draw = random.SystemRandom()
    killed, after = draw.randrange(2), draw.randrange(8, 30)
    command = [sys.executable, "-m", "motet", "train", "small.toml", *changes, "--run-folder", "cut"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        events = Path("cut/events.jsonl")
        until(lambda: events.exists() and events.read_bytes().count(b"step_done") >= after)
        psutil.Process(process.pid).children()[killed].kill()
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    what = f"rank {killed} killed after step {after}"
    assert process.returncode == 3, what
    assert f"rank {killed} was killed by signal 9 (SIGKILL)" in err, what
    assert summary("cut")["steps"] < 50, what
    again = motet("train", "--resume-from", "cut")
    assert again.returncode == 0, again.stderr
    assert "resumed from checkpoints/step-" in again.stdout, what
    assert summary("cut")["steps"] == 50
    assert same_bits(saved_tensors(Path("whole")), saved_tensors(Path("cut"))), what


@pytest.mark.proof  # Restarts of the supervisor are in tests/train/test_supervisor.py, and one under torchrun is below
def test_a_killed_rank_is_started_again_from_the_checkpoint(motet: Motet) -> None:
    failing_job("kill")
    done = motet("train", "failing.toml", "run.restarts=1", "checkpoint.every=1")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("starting again from the last checkpoint (1 of 1)") == 1
    assert (
        re.search("resumed from checkpoints/step-0000000[12]", done.stdout) and summary("runs/failing-001")["finished"]
    )
    assert len(json.loads(Path("runs/failing-001/versions.json").read_text())) == 1


@pytest.mark.proof  # Ranks of torchrun without a restart are below and in test_first_distributed_run.py
def test_under_torchrun_with_a_restart() -> None:
    failing_job("raise")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    arguments = ["-m", "motet", "train", "failing.toml", "checkpoint.every=1"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("rank 1 of 2 failed: ValueError: a bug in the model") == 1
    assert [path.name for path in Path("runs").iterdir()] == ["failing-001"]
    assert summary("runs/failing-001")["finished"] and "resumed from checkpoints/step-00000002" in done.stdout


def test_alone_under_torchrun(motet: Motet, monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)
    done = motet("train", "small.toml", "run.stop_at=2")
    assert done.returncode == 0, done.stderr
    assert "step 2/6" in done.stdout
    again = motet("train", "small.toml", "--resume-from", "runs/small-001", "layout.microbatches=2")
    assert again.returncode == 0, again.stderr
    assert "warning: layout.microbatches was not given in runs/small-001 and is 2 now" in again.stderr
    assert summary("runs/small-001")["finished"]


def test_under_slurm() -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "2"}
    job |= {"SLURM_NODEID": "0", "SLURM_NODELIST": "here", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "motet", "train", "small.toml", "run.ranks=7"]
    places = [{**os.environ, **job, "SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in ("0", "1")]
    output_options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ranks = [subprocess.Popen(command, env=place, **output_options) for place in places]
    output = [rank.communicate(timeout=100)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], output
    assert "step 6/6" in output[0] and output[1] == "" and summary("runs/small-001")["ranks"] == 2
    assert load_job("runs/small-001/job.toml").run.ranks == 2


# --- refused by the ranks, before they allocate -----------------------------------------------------
LARGE = """
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.up = nn.Embedding(260, 1024), nn.Linear(1024, 32768, bias=False)
"""
LAUNCHERS = {
    "supervisor": (f"{sys.executable} -m motet train large.toml", "rank 0 failed: "),
    "torchrun": (
        f"{sys.executable} -m torch.distributed.run --nproc-per-node=2 -m motet train large.toml",
        "of 2 failed: ",
    ),
}


@pytest.mark.proof  # tests/train/test_memory_check.py has ranks that refuse together, and a limited command
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_refuse_what_they_may_not_allocate(launcher: str) -> None:
    """The weights have 129 MiB: they fit beside an idle rank, gradients and moments do not."""
    Path("their_model.py").write_text(LARGE)
    text = JOB.format(text=TEXT)
    model = text[text.index("[model]") : text.index("[data]")]
    Path("large.toml").write_text(text.replace(model, '[model]\nfactory = "their_model:Model"\nvocab_size = 260\n'))
    command, who = LAUNCHERS[launcher]
    limited = ["bash", "-c", f"ulimit -d {700 << 10}; exec {command}"]
    done = subprocess.run(limited, capture_output=True, text=True, check=False, timeout=100)
    said = " ".join(done.stderr.split())
    sentence = (
        "layout 'dp=2 zero=0' takes [^;]* of memory at least: 129 MiB of parameters, 129 MiB of gradients, 258 MiB of "
        r"moments, 128 MiB of gathered and unreduced tensors, \d+ MiB of the process itself; RLIMIT_DATA "
        r"\(ulimit -d\) allows 700 MiB; use layout.zero=3 on [^;]* or take a smaller model"
    )
    assert len(re.findall(sentence, said)) == 1 and said.count(who) == 1, done.stderr
    if launcher == "supervisor":
        assert done.returncode == 2 and "Traceback" not in done.stderr and not Path("runs/small-001").exists()


# --- refused before any rank starts ----------------------------------------------------------------
def test_ctrl_c_before_ranks_start(refused: Motet, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("motet.train.launch.entry_points.prepare_data", interrupted)
    done = refused("small.toml")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped before any rank was started\n")
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("environment", "options", "says"),
    [
        ({"LOCAL_RANK": "0"}, [], "RANK is not set, though other variables of torchrun are"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["--ranks", "3"], "--ranks 3, but the launcher started 2 ranks"),
        ({"RANK": "0", "WORLD_SIZE": "3"}, [], "cannot be cut evenly over 3 ranks"),
    ],
)
def test_bad_input_of_a_launcher(
    refused: Motet, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], options: list[str], says: str
) -> None:
    rest = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in (environment | rest if "RANK" in environment else environment).items():
        monkeypatch.setenv(name, value)
    done = refused("small.toml", *options)
    assert done.returncode == 2 and says in done.stderr and not Path("runs").exists()


# --- answers without training ----------------------------------------------------------------------
def test_the_resolved_job_is_a_job(refused: Motet) -> None:
    out = refused("--print-job", "small.toml", "--ranks", "4", "--run-folder", "12").stdout
    Path("printed.toml").write_text(out)
    assert load_job("printed.toml") == load_job("small.toml", ["run.ranks=4", 'run.folder="12"'])
    assert json.loads(refused("--print-job", "--json", "printed.toml").stdout) == tomllib.loads(out)


def test_built_in_jobs_are_listed(refused: Motet) -> None:
    lines = refused("--list-jobs").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(builtin_jobs())
    about = json.loads(refused("--list-jobs", "--json").stdout)
    assert list(about) == list(builtin_jobs())
    assert all(text.endswith((".", ":")) and "\n" not in text for text in about.values()), about


def test_the_schema_describes_a_job_and_bare_train_is_the_tiny_one(refused: Motet) -> None:
    assert json.loads(refused("--schema").stdout) == Job.model_json_schema()
    assert tomllib.loads(refused("--print-job").stdout)["name"] == "tiny"
    job = tomllib.loads(refused("--print-job", "run.steps=3").stdout)
    assert (job["name"], job["run"]["steps"]) == ("tiny", 3)
