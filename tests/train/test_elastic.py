"""Processes and links of a run with a parameter server that fail, and come back, on two hosts in miniature."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from torch import Tensor

from environment import uncounted
from motet.core.text_files import to_toml
from motet.monitor.events import Event, RunEnded, StepDone, WarningIssued, read_events
from motet.train.job import Job
from namespaces import Host, missing, two_hosts
from ranks import TESTS, Ranks
from train.runs import run_job, saved_tensors, small_job

NO_HOSTS = missing()
# Links that are cut and hosts with addresses of their own are network namespaces here, which need root and iproute2.
pytestmark = pytest.mark.skipif(NO_HOSTS is not None, reason=str(NO_HOSTS))
LIMIT_S = 60.0
STEPS = 100
PATHS = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
ADDRESS = "10.78.0.1:4007"
UNHURRIED = "model={factory='train.trainable_user_models:Unhurried'}"  # Processes that start need the processors
HURRIED = "model={factory='train.trainable_user_models:Table'}"  # The same model
SERVED = [
    *("layout.data=parameter_server", "layout.server.eviction_timeout_s=3", "layout.server.slice_mib=0.02"),
    *(UNHURRIED, f"layout.server.listen='{ADDRESS}'", "run.steps=100000", "checkpoint.every=100000", "run.threads=1"),
]


@dataclass
class Town:
    hosts: list[Host]
    folder: Path
    started: "list[subprocess.Popen[bytes]]" = field(default_factory=list)

    def train(self, host: int, job: Job, *words: str) -> "subprocess.Popen[bytes]":
        path = self.folder / "small.toml"
        path.write_text(to_toml(job.model_dump(exclude_none=True, exclude_unset=True)), encoding="utf-8")
        command = [sys.executable, "-m", "motet", "train", str(path), "run.folder=run", *words]
        command, environment = (
            self.hosts[host].command(*command),
            {**uncounted(), "OMP_NUM_THREADS": "1", "MOTET_RUN_TOKEN": "of both hosts in miniature"},
        )
        with self.output(host).open("wb") as output:
            streams = {"stdout": output, "stderr": output, "start_new_session": True}
            process = subprocess.Popen(command, cwd=self.folder, env={**environment, "PYTHONPATH": PATHS}, **streams)
        self.started.append(process)
        return process

    def output(self, host: int) -> Path:
        return self.folder / f"{self.hosts[host].name}.txt"

    def outputs(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in map(self.output, range(2)) if path.exists())

    def events(self) -> list[Event]:
        path = self.folder / "run" / "events.jsonl"
        return read_events(path) if path.is_file() else []

    def steps(self) -> list[StepDone]:
        return [event for event in self.events() if isinstance(event, StepDone)]

    def said(self) -> str:
        return "\n".join(event.text for event in self.events() if isinstance(event, WarningIssued))

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT_S
        while not condition():
            for process in self.started:
                assert process.poll() is None, self.outputs()
            assert time.monotonic() < end, self.said()
            time.sleep(0.3)

    def more_steps(self, count: int = 20) -> None:
        target = len(self.steps()) + count
        self.until(lambda: len(self.steps()) >= target)

    def cable(self, state: str) -> None:
        command = ["ip", "-n", self.hosts[1].space, "link", "set", "cable", state]
        subprocess.run(command, check=True, capture_output=True)

    def ends(self, process: "subprocess.Popen[bytes]") -> None:
        here = psutil.Process(process.pid)
        next(p for p in [here, *here.children(recursive=True)] if "motet" in p.cmdline()).send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) in (0, 130), self.outputs()
        self.started.remove(process)


def kill(process: "subprocess.Popen[bytes]", rank: int) -> None:
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.environ().get("MOTET_RANK") == str(rank) and "motet.cli.run_rank_function" in child.cmdline():
                child.kill()
                return
    raise AssertionError(f"there is no rank {rank}")


@pytest.fixture
def town(tmp_path: Path) -> Iterator[Town]:
    with two_hosts("host-a", "host-b") as hosts:
        town = Town(hosts, tmp_path)
        try:
            yield town
        finally:
            for process in [p for p in town.started if p.poll() is None]:
                for child in psutil.Process(process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
                process.kill()
                process.wait()


def learns_on(town: Town) -> None:
    """Losses are lower in the end, and nothing was repeated or left out."""
    steps = town.steps()
    assert [step.step for step in steps] == list(range(1, len(steps) + 1))
    assert sum(step.loss for step in steps[-10:]) < sum(step.loss for step in steps[:10])
    assert isinstance(town.events()[-1], RunEnded)


@pytest.mark.proof  # A minute each
@pytest.mark.parametrize("mode", ["bounded", "async"])
def test_late_joiners_whose_link_is_cut_and_healed_and_who_end(town: Town, mode: str) -> None:
    bound = ["layout.server.staleness=2", "layout.server.work_items_per_step=2"] * (mode == "bounded")
    changes = [f"layout.server.mode={mode}", "layout.server.max_process_restarts=0", *bound]
    job = small_job(town.folder, *SERVED, *changes)
    first = town.train(0, job, "--ranks", "1")
    town.until(lambda: len(town.steps()) > 5)
    joined = town.train(1, job, "--join", ADDRESS, "--ranks", "2")
    town.until(lambda: town.said().count("has joined the run") == 2)
    town.more_steps()
    town.cable("down")
    time.sleep(1.0)
    town.cable("up")
    town.more_steps()
    assert "gone" not in town.said(), "it was patient"
    town.cable("down")
    town.until(lambda: "is gone; 1 worker left" in town.said())
    town.more_steps()
    town.cable("up")
    town.until(lambda: all(f"/w{worker}+1 has joined the run" in town.said() for worker in range(2)))
    town.more_steps()
    kill(joined, 1)
    town.until(lambda: "/w1+1 is gone; 2 workers left" in town.said())
    town.more_steps()
    town.ends(joined)
    assert "leaving the run" in town.output(1).read_text()
    town.until(lambda: "/w0+1 is gone; 1 worker left" in town.said())
    town.more_steps()
    town.ends(first)
    learns_on(town)


def test_nobody_is_there_to_join(town: Town) -> None:
    job = small_job(town.folder, *SERVED, "layout.server.eviction_timeout_s=1")
    assert town.train(1, job, "--join", ADDRESS, "--ranks", "1").wait(LIMIT_S) == 2
    said = town.output(1).read_text()
    assert f"failed: cannot reach the coordinator at {ADDRESS} within 1 s; check that the run exists" in said


@pytest.mark.proof  # Half a minute each; servers that take over in one process are in tests/parallel/parameter_server
@pytest.mark.parametrize("copies", [1, 2])
def test_a_server_ends(town: Town, ranks: Ranks, copies: int) -> None:
    """Two copies lose nothing: the numbers are those of one rank alone."""
    allowed = town.folder / "allowed.txt"
    sure = [
        f"run.steps={STEPS}",
        f"checkpoint.every={STEPS}",
        "layout.server.count=2",
        f"layout.server.copies={copies}",
        f"model={{factory='train.trainable_user_models:Held', arguments={{allowed='{allowed}'}}}}",
    ]
    allowed.write_text("40")  # Steps go on without a server, but the run must not end before another one has started
    first = town.train(0, small_job(town.folder, *SERVED, *sure), "--ranks", "1")
    town.until(lambda: len(town.steps()) > 15)
    kill(first, 1)
    town.until(lambda: "server s0.1 takes the place of s0" in town.said())
    if copies == 2:
        allowed.write_text("70")
        town.more_steps(5)
        kill(first, 2)
        assert "and gets all slices from the other server" in town.said()
    allowed.write_text(str(10 * STEPS))
    assert first.wait(LIMIT_S) == 0, town.outputs()
    learns_on(town)
    assert len(town.steps()) == STEPS
    if copies == 2:
        found, one, two = saved_tensors(town.folder / "run"), quiet(town, ranks, 1), quiet(town, ranks, 2)
        assert furthest(found, one) < 10 * furthest(two, one), "as far as sums in another order are after all steps"


def quiet(town: Town, ranks: Ranks, world: int) -> dict[str, Tensor]:
    folder = town.folder / f"quiet-{world}"
    ranks.run_places(world, run_job, small_job(town.folder, HURRIED, f"run.steps={STEPS}", "run.threads=1"), folder)
    return saved_tensors(folder)


def furthest(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted)
