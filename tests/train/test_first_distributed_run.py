"""docs/guide/first-distributed-run.md, as it is written there: on one host, on two, and as one rank alone computes it.
Compared in float64, to 1e-12, as everywhere. float32 would need a tolerance chosen by eye: Adam divides a gradient that
is all rounding, such as that of a bias of keys, by its own size, so that rounding grows from step to step."""

import contextlib
import io
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from environment import uncounted
from motet.monitor.events import read_steps
from motet.parallel.process.launch_environment import RankEnvironment
from motet.train.job import load_job
from namespaces import Host, missing, two_hosts
from ranks import Ranks
from train.runs import train

PAGE = Path(__file__).parents[2] / "docs/guide/first-distributed-run.md"
SMALL = [
    *("precision.recipe=fp64", "run.steps=16", "run.threads=1", "run.device=cpu", "data.samples=64"),
    *("data.batch_sequences=32", "data.validation_fraction=0.0", "model.hidden=64", "model.ffn_hidden=128"),
    *("optimizer.learning_rate=3e-3", "optimizer.schedule.warmup_steps=2", "monitor.tensorboard=false"),
]
"""What makes `bert-classify` small: two batches of 32 samples again and again."""
NO_HOSTS = missing()
needs_hosts = pytest.mark.skipif(NO_HOSTS is not None, reason=str(NO_HOSTS))


def script(folder: Path) -> str:
    """The page's script with float64 for float32, as a file."""
    (text,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert text.count('precision="fp32"') == 1
    (folder / "classify.py").write_text(text.replace('precision="fp32"', 'precision="fp64"'))
    (folder / "float32.py").write_text(text)
    return "classify.py"


def commands(start: str) -> list[str]:
    return [line for line in re.findall(r"\| `([^`]+)` \|", PAGE.read_text(encoding="utf-8")) if line.startswith(start)]


ONE_HOST, TWO_HOSTS = commands("torchrun --standalone"), commands("torchrun --nnodes 2")


def started(command: str, folder: Path, host: Host | None = None) -> "subprocess.Popen[str]":
    words = command.replace("torchrun", f"{sys.executable} -m torch.distributed.run", 1).split()
    words += [*SMALL, "run.folder=run"] if "motet" in words else []
    words, streams = host.command(*words) if host else words, {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = {**uncounted(), "OMP_NUM_THREADS": "1"} | (
        {"MOTET_RUN_TOKEN": "of both hosts in miniature"} if host else {}
    )
    return subprocess.Popen(words, cwd=folder, env=environment, text=True, **streams)


def outputs(runs: "list[subprocess.Popen[str]]") -> str:
    """The output of all runs, once they have ended well."""
    try:
        ended = [run.communicate(timeout=120) for run in runs]
    finally:
        for run in runs:
            run.kill()
    assert [run.returncode for run in runs] == [0] * len(runs), "\n".join(error for _, error in ended)
    return "".join(output for output, _ in ended)


def printed(output: str) -> list[float]:
    lines = [line.split() for line in output.splitlines()]
    assert [int(step) for step, _ in lines] == list(range(1, 25)), "one rank prints each step once"
    return [float(loss) for _, loss in lines]


def recorded(folder: Path) -> list[float]:
    return [step.loss for step in read_steps(folder / "run" / "events.jsonl")]


def same(losses: list[float], alone: list[float]) -> bool:
    return len(losses) == len(alone) and max(abs(a - b) / b for a, b in zip(losses, alone, strict=True)) < 1e-12


def run_script_alone(_: RankEnvironment, path: str) -> list[float]:
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as output:
        for name, value in variables.items():
            patch.setenv(name, value)
        runpy.run_path(path)
    return printed(output.getvalue())


@pytest.fixture(scope="module")
def script_alone(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    folder = tmp_path_factory.mktemp("alone")
    script(folder)
    names = ("classify.py", "float32.py")
    return {name: ranks.run_places(1, run_script_alone, str(folder / name))[0] for name in names}


@pytest.fixture(scope="module")
def job_alone(ranks: Ranks) -> list[float]:
    losses: list[float] = ranks.run(1, train, load_job("bert-classify", [*SMALL, "run.ranks=1"]))[0].losses
    return losses


def test_the_script_learns(script_alone: dict[str, list[float]]) -> None:
    """The last pass over the 512 texts is better than the first; passes have the same texts in the same order."""
    for losses in script_alone.values():
        assert sum(losses[-8:]) < sum(losses[:8])


def test_the_job_learns(job_alone: list[float]) -> None:
    assert sum(job_alone[-4:]) < 0.9 * sum(job_alone[:4])


@pytest.mark.proof
def test_the_job_on_one_host(tmp_path: Path, job_alone: list[float]) -> None:
    assert "on 2 ranks" in outputs([started(ONE_HOST[1], tmp_path)]) and same(recorded(tmp_path), job_alone)


@pytest.mark.proof
def test_the_script_on_one_host(tmp_path: Path, script_alone: dict[str, list[float]]) -> None:
    script(tmp_path)
    assert same(printed(outputs([started(ONE_HOST[0], tmp_path)])), script_alone["classify.py"])


@pytest.mark.proof
@needs_hosts
@pytest.mark.parametrize("per_host", [1, 2])
def test_the_script_on_two_hosts(tmp_path: Path, script_alone: dict[str, list[float]], per_host: int) -> None:
    script(tmp_path)
    command = TWO_HOSTS[0].replace("--nproc-per-node 2", f"--nproc-per-node {per_host}")
    with two_hosts("host-a", "host-b") as hosts:
        output = outputs([started(command, tmp_path, host) for host in hosts])
    assert same(printed(output), script_alone["classify.py"])


@pytest.mark.proof
@needs_hosts
def test_the_job_on_two_hosts(tmp_path: Path, job_alone: list[float]) -> None:
    with two_hosts("host-a", "host-b") as hosts:
        output = outputs([started(TWO_HOSTS[1], tmp_path, host) for host in hosts])
    assert "on 4 ranks" in output and same(recorded(tmp_path), job_alone)
