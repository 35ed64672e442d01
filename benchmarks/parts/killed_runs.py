"""A small run that is killed at a chosen moment and resumed, and must then equal a run that nobody killed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import psutil

MOTET = str(Path(sys.executable).with_name("motet"))
STEPS, EVERY, KEEP = 30, 3, 2
JOB = f"""
name = "killed"

[model]
family = "decoder"
vocab_size = 260
context = 32
layers = 2
hidden = 32
heads = 2
ffn_hidden = 64
dropout = 0.1

[data]
source = "text.jsonl"
cache = "cache"
tokenizer = "bytes"
sequence_length = 32
batch_sequences = 8

[checkpoint]
every = {EVERY}
keep = {KEEP}

[monitor]
tensorboard = false

[run]
steps = {STEPS}
ranks = 2
threads = 1
cpu_backend = "motet"
"""
MOMENTS = ("starting", "training", "writing", "publishing", "deleting", "ending")
VICTIMS = ("supervisor", "rank 0", "rank 1", "all")
FULL_DISK = "full disk"  # The moment of a run that is not killed: the data file of one rank reaches a limit
LARGEST_FILE_BYTES = 2**17  # Less than a data file, more than every other file
SAVE_FAILED_CODE = 5
MARK = "MOTET_KILLED_RUN"  # A variable in the environment of every process of a run
LIMIT_S = 120.0
DEATH_LIMIT_S = 10.0


@dataclass(frozen=True)
class KilledRun:
    """A folder in which a run is started, killed and resumed, with its temporary files and cache."""

    folder: Path

    def prepare(self) -> None:
        (self.folder / "tmp").mkdir(parents=True)
        (self.folder / "job.toml").write_text(JOB, encoding="utf-8")
        words, random = ("alpha", "beta", "gamma", "delta"), Random(1)
        lines = [json.dumps({"text": " ".join(random.choices(words, k=30))}) for _ in range(300)]
        (self.folder / "text.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")

    @property
    def run_folder(self) -> Path:
        return self.folder / "runs" / "killed"

    def start(self) -> "subprocess.Popen[bytes]":
        return self._motet("--run-folder", "runs/killed")

    def resume(self) -> str:
        """Train to the end. Returns the problem, or an empty text."""
        has_run = (self.run_folder / "job.toml").exists()
        process = self._motet("--resume") if has_run else self.start()
        code, output = process.wait(LIMIT_S), (self.folder / "output.txt").read_text(encoding="utf-8")
        is_finished = code == 2 and "holds a finished run" in output
        return "" if code == 0 or is_finished else f"the resumed run ended with {code}: {output[-2000:]}"

    def _motet(self, *options: str) -> "subprocess.Popen[bytes]":
        variables = {**os.environ, "TMPDIR": str(self.folder / "tmp"), MARK: str(self.folder)}
        with (self.folder / "output.txt").open("wb") as output:
            command = [MOTET, "train", "job.toml", *options]
            return subprocess.Popen(command, cwd=self.folder, env=variables, stdout=output, stderr=subprocess.STDOUT)

    # --- the state of a run ---------------------------------------------------------------------------------

    def processes(self) -> list[psutil.Process]:
        """Living processes of the run, whoever is their parent."""
        return [process for process in psutil.process_iter() if _mark_of(process) == str(self.folder)]

    def partial_folders(self) -> list[str]:
        """Folders of checkpoints that are not complete."""
        return [path.name for path in (self.run_folder / "checkpoints").glob("*.partial")]

    def files(self) -> list[str]:
        """Names of all files and folders of the run, of its cache, and of its temporary folder."""
        tops = ("runs", "cache", "tmp")
        paths = [str(path.relative_to(self.folder)) for top in tops for path in (self.folder / top).rglob("*")]
        return sorted(re.sub("[0-9a-f]{24}", "KEY", path) for path in paths)  # a key of the cache depends on the path

    def checkpoint_bytes(self) -> dict[str, bytes]:
        folder = self.run_folder / "checkpoints"
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def events(self, kind: str) -> list[dict[str, object]]:
        path = self.run_folder / "events.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in events if event["event"] == kind]

    def losses(self) -> set[tuple[object, ...]]:
        """Step, loss and norm of every step that an attempt took, and of every evaluation: equal ones are one."""
        steps = {(event["step"], event["loss"], event["grad_norm"]) for event in self.events("step_done")}
        return steps | {(event["step"], event["split"], event["loss"]) for event in self.events("evaluation_done")}


def _mark_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(MARK) if process.status() != psutil.STATUS_ZOMBIE else None
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None


@dataclass(frozen=True)
class UndisturbedRun:
    """The run that a killed and resumed run must equal, and the durations of the phases of a run."""

    run: KilledRun
    start_s: float
    end_s: float
    files: list[str] = field(default_factory=list)

    @classmethod
    def train(cls, folder: Path) -> "UndisturbedRun":
        run, began_s = KilledRun(folder), time.time()
        run.prepare()
        process = run.start()
        code = process.wait(LIMIT_S)
        assert code == 0, (folder / "output.txt").read_text(encoding="utf-8")
        first, last = run.events("step_done")[0]["time"], run.events("checkpoint_saved")[-1]["time"]
        assert isinstance(first, float) and isinstance(last, float)
        return cls(run, first - began_s, time.time() - last, run.files())

    def differences(self, run: KilledRun) -> Iterator[str]:
        if run.checkpoint_bytes() != self.run.checkpoint_bytes():
            yield "the checkpoints have other bytes"
        if other := run.losses() ^ self.run.losses():
            yield f"{len(other)} losses differ"

    def leftovers(self, run: KilledRun) -> list[str]:
        """Files that only one of them has."""
        return sorted(set(run.files()) ^ set(self.files))


# --- killing ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kill:
    """The moment at which a run is killed, and the processes to kill."""

    moment: str
    victim: str
    fraction: float  # Fraction of the moment's time
    step: int  # The kill comes at this step or after it

    def wait(self, run: KilledRun, process: "subprocess.Popen[bytes]", undisturbed: UndisturbedRun) -> bool:
        """Wait for the moment. False if the run ended before it."""
        checkpoints = run.run_folder / "checkpoints"
        due = -(-self.step // EVERY) * EVERY
        saved = checkpoints / f"step-{due:08d}"
        partial = saved.with_name(f"{saved.name}.partial")
        described = [partial / name for name in ("rank-00001.written.json", "tensors.json", "saved_by.json")]
        until: dict[str, tuple[Callable[[], bool], float]] = {
            "starting": (lambda: True, undisturbed.start_s),
            FULL_DISK: (lambda: any(event["step"] == self.step for event in run.events("step_done")), 0.0),
            "training": (lambda: any(event["step"] == self.step for event in run.events("step_done")), 0.04),
            "writing": (partial.exists, 0.01),
            "publishing": (lambda: any(path.exists() for path in described), 0.003),
            "deleting": (saved.exists, 0.003),
            "ending": ((checkpoints / f"step-{STEPS:08d}").exists, undisturbed.end_s),
        }
        condition, seconds = until[self.moment]
        while not condition():
            if process.poll() is not None:
                return False
        time.sleep(self.fraction * seconds)
        while not self.victims(process):  # a rank that has not started yet
            if process.poll() is not None:
                return False
        return True

    def victims(self, process: "subprocess.Popen[bytes]") -> list[psutil.Process]:
        """The processes to kill; none while a rank that is to be killed has not started, or has ended."""
        try:
            supervisor = psutil.Process(process.pid)
            ranks = sorted(supervisor.children(), key=lambda child: (child.create_time(), child.pid))
        except psutil.NoSuchProcess:
            return []
        if self.victim == "supervisor":
            return [supervisor]
        return [supervisor, *ranks] if self.victim == "all" else ranks[int(self.victim[-1]) :][:1]

    def strike(self, process: "subprocess.Popen[bytes]") -> bool:
        """Kill. False if there is no process left to kill."""
        struck = False
        for victim in self.victims(process):
            if victim.status() != psutil.STATUS_ZOMBIE:
                victim.send_signal(signal.SIGKILL)
                struck = True
        return struck and process.wait(DEATH_LIMIT_S) != 0


@dataclass(frozen=True)
class KillOutcome:
    """The state of a run that was killed and resumed."""

    kill: Kill
    processes: int  # Processes alive some seconds after the kill
    has_cut_save: bool  # An incomplete checkpoint was there after the kill
    problem: str  # The problem of the resumed run
    differences: list[str]
    leftovers: list[str]


def kill_and_resume(kill: Kill, folder: Path, undisturbed: UndisturbedRun) -> KillOutcome | None:
    """The outcome; None if the run ended before the kill."""
    run = KilledRun(folder)
    run.prepare()
    process = run.start()
    try:
        if not (kill.wait(run, process, undisturbed) and kill.strike(process)):
            return None
        return _resume(kill, run, undisturbed)
    finally:
        for process_left in run.processes():
            process_left.kill()
        process.wait()


def fill_disk_and_resume(victim: str, step: int, folder: Path, *, undisturbed: UndisturbedRun) -> KillOutcome:
    """The outcome of a run in which one rank, from a step on, cannot write its part of a checkpoint."""
    run, kill = KilledRun(folder), Kill(FULL_DISK, victim, 0.0, step)
    run.prepare()
    process = run.start()
    try:
        assert kill.wait(run, process, undisturbed), "the run ended before its disk was full"
        for rank in kill.victims(process):
            rank.rlimit(psutil.RLIMIT_FSIZE, (LARGEST_FILE_BYTES, LARGEST_FILE_BYTES))
        code, output = process.wait(LIMIT_S), (folder / "output.txt").read_text(encoding="utf-8")
        problems = [] if code == SAVE_FAILED_CODE else [f"the run ended with {code}: {output[-2000:]}"]
        problems += [] if "could not save" in output else [f"no sentence about the checkpoint: {output[-2000:]}"]
        outcome = _resume(kill, run, undisturbed)
        problems += ["an incomplete checkpoint stayed"] if outcome.has_cut_save else []
        return replace(outcome, problem="; ".join([*problems, *filter(None, [outcome.problem])]))
    finally:
        for process_left in run.processes():
            process_left.kill()
        process.wait()


def _resume(kill: Kill, run: KilledRun, undisturbed: UndisturbedRun) -> KillOutcome:
    deadline = time.monotonic() + DEATH_LIMIT_S
    while (alive := run.processes()) and time.monotonic() < deadline:
        time.sleep(0.05)
    has_cut_save, problem = bool(run.partial_folders()), run.resume()
    differences, leftovers = list(undisturbed.differences(run)), undisturbed.leftovers(run)
    return KillOutcome(kill, len(alive), has_cut_save, problem, differences, leftovers)
