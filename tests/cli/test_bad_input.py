"""docs/reference/bad-input.md, line by line: each command is run, and says, answers and leaves what the table says.

Ranks run inside this process, because importing torch for each line would take minutes; tests/cli/test_train.py shows
that ranks in processes of their own are told of in the same words.
"""

import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from bad_input_cases import CASES, FINISHED, MODELS, RUN, CannotBeTriedError

from motet.checkpoint.checkpoint_folders import complete_checkpoints
from motet.cli.main import main
from motet.core.errors import EXIT_CODES
from motet.monitor.events import RunEnded, StepDone, read_events
from motet.parallel.process.launch_environment import SINGLE_RANK
from motet.train.launch.entry_points import train_rank
from motet.train.launch.failures import StopFlag, run_and_record
from motet.train.launch.supervisor import LaunchExitStatus, LaunchSpec
from train.runs import saved_tensors

PAGE = Path(__file__).parents[2] / "docs/reference/bad-input.md"
TEXT = Path(__file__).parents[1] / "data/small.txt"


class Line(NamedTuple):
    wrong: str
    command: str
    says: str
    code: int
    left: str


def lines_of_page() -> list[Line]:
    cells = [
        [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if re.match(r"\| (?!what is wrong)\S", line)
    ]
    return [Line(wrong, command.strip("`"), says, int(code), left) for wrong, command, says, code, left in cells]


LINES = lines_of_page()


def small_job() -> str:
    (job,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return str(job)


# --- the folder in which a line is tried -----------------------------------------------------------
class Done(NamedTuple):
    code: int
    out: str
    err: str


def in_this_process(start: LaunchSpec, tell: Callable[[str], None]) -> LaunchExitStatus:
    """Run one rank in this process, with the exit status that the supervisor would report."""
    record = run_and_record(0, lambda: train_rank(SINGLE_RANK, StopFlag(), start.command[-1]))
    return LaunchExitStatus(record.exit_code, record.message, record.traceback)


def call(monkeypatch: pytest.MonkeyPatch, command: str) -> int:
    """Run `[NAME=VALUE ...] motet ...` here."""
    words = shlex.split(command)
    start = words.index("motet")
    for name, _, value in (word.partition("=") for word in words[:start]):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", words[start:])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("motet.train.launch.entry_points.launch_ranks", in_this_process)
    monkeypatch.delitem(sys.modules, "models", raising=False)
    with pytest.raises(SystemExit) as done:
        main()
    return done.value.code if isinstance(done.value.code, int) else 0


def put_basics() -> None:
    job = small_job()
    Path("small.toml").write_text(job, encoding="utf-8")
    mine = re.sub(r"\[model\].*?\n\n", '[model]\nfactory = "models:Plain"\n\n', job, flags=re.DOTALL)
    Path("mine.toml").write_text(mine, encoding="utf-8")
    Path("models.py").write_text(MODELS, encoding="utf-8")
    shutil.copy(TEXT, "text.txt")


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    command = "motet train small.toml run.steps=6 checkpoint.every=2 --run-folder"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        put_basics()
        assert call(patch, f"{command} {RUN} run.stop_at=4") == 0 and call(patch, f"{command} {FINISHED}") == 0
    return folder


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder, with what every line has."""
    monkeypatch.chdir(tmp_path)
    put_basics()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield tmp_path
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    if os.path.ismount("disk"):
        subprocess.run(["umount", "-l", "disk"], check=True)


# --- the words of the last column, and how they are checked -----------------------------------------
def files() -> dict[str, bytes]:
    """Everything but what may be left of an attempt: corpora in the cache, which are good ones, and locks."""
    found = [path for path in Path().rglob("*") if path.is_file() and not {"cache", "__pycache__"} & {*path.parts}]
    return {str(path): path.read_bytes() for path in found if not path.name.endswith("lock")}


def nothing_was_made(before: dict[str, bytes], done: Done) -> None:
    assert files() == before and not Path("runs").exists()


def the_new_run_folder_is_gone(before: dict[str, bytes], done: Done) -> None:
    assert files() == before and not any(Path("runs").iterdir()) and "continue from" not in done.err


def the_run_is_as_it_was(before: dict[str, bytes], done: Done) -> None:
    assert any("checkpoints" in name for name in before) and files() == before and "continue from" not in done.err


def the_run_folder_keeps_the_traceback(before: dict[str, bytes], done: Done) -> None:
    assert done.err.count("Traceback") == 1
    assert done.err.rstrip().splitlines()[-1] in Path("runs/mine-001/logs/failure.txt").read_text(encoding="utf-8")


def the_events_say_how_the_run_failed(before: dict[str, bytes], done: Done) -> None:
    last = read_events(Path("runs/mine-001/events.jsonl"))[-1]
    assert isinstance(last, RunEnded) and last.reason == "failed" and last.message in done.err
    assert "Traceback" not in done.err


def no_such_step_was_applied(before: dict[str, bytes], done: Done) -> None:
    """The third step is the first that is not finite; the events say how it ended."""
    run = Path("runs/mine-001")
    events = read_events(run / "events.jsonl")
    steps = [event for event in events if isinstance(event, StepDone)]
    assert isinstance(events[-1], RunEnded) and events[-1].reason == "diverged"
    assert [event.skipped for event in steps] == [event.step > 2 for event in steps]
    assert {tensor.item() for name, tensor in saved_tensors(run).items() if name == "step"} == {2.0}
    last = complete_checkpoints(run / "checkpoints")[-1][0]
    assert f"continue from step {last} with: motet train --resume-from {run}" in done.err


def earlier_checkpoints_are_whole(before: dict[str, bytes], done: Done) -> None:
    whole = complete_checkpoints(Path("disk/run/checkpoints"))
    assert {path.name for _, path in whole} == {path.name for path in Path("disk/run/checkpoints").iterdir()}
    assert all(tensor.isfinite().all() for tensor in saved_tensors(Path("disk/run")).values())
    assert f"continue from step {whole[-1][0]} with: motet train --resume-from disk/run" in done.err


def the_renamed_folder_keeps_its_checkpoints(before: dict[str, bytes], done: Done) -> None:
    assert [path.name for path in Path("runs").iterdir()] == ["renamed"]
    assert [step for step, _ in complete_checkpoints(Path("runs/renamed/checkpoints"))] == [1, 2]


LEFT = {
    "nothing was made": nothing_was_made,
    "the new run folder is gone again": the_new_run_folder_is_gone,
    "the run is as it was": the_run_is_as_it_was,
    "the events say how the run failed": the_events_say_how_the_run_failed,
    "the run folder keeps the traceback": the_run_folder_keeps_the_traceback,
    "no such step was applied; the checkpoints before are whole": no_such_step_was_applied,
    "the renamed folder keeps its checkpoints": the_renamed_folder_keeps_its_checkpoints,
    "earlier checkpoints are whole": earlier_checkpoints_are_whole,
}


# --- the lines -------------------------------------------------------------------------------------
def pattern(says: str) -> str:
    """`...` in the page stands for anything; a rank or the command itself says it."""
    anything = ".*".join(re.escape(part) for part in says.split("..."))
    return r"(motet: |rank 0 failed: |Error: |(?=stopped at step))" + anything


@pytest.mark.parametrize("line", LINES, ids=[line.wrong for line in LINES])
def test_a_line(
    line: Line, bench: Path, runs: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for step in CASES.get(line.wrong, []):
        if isinstance(step, str):
            shutil.copytree(runs / step, step)
            continue
        try:
            step()
        except CannotBeTriedError as error:
            pytest.skip(str(error))
    before = files()
    capfd.readouterr()
    done = Done(call(monkeypatch, line.command), *capfd.readouterr())
    starts = re.compile(r"motet: |rank 0 failed: |Error: |stopped at step")
    told = [text for text in done.err.splitlines() if starts.match(text)]
    assert len(told) == 1, done.err
    assert re.fullmatch(pattern(line.says), told[0]) and done.code == line.code
    is_sentence = line.left == "the events say how the run failed"
    assert ("Traceback" in done.err) == (line.code == 3 and not is_sentence)
    assert done.out == "" or not line.command.startswith("motet train") or line.left != "nothing was made"
    LEFT[line.left](before, done)


def test_the_table_and_the_cases_belong_together() -> None:
    words = [line.wrong for line in LINES]
    assert len(set(words)) == len(words) and set(CASES) <= set(words) and {line.left for line in LINES} == set(LEFT)
    assert {line.code for line in LINES} == {2, 3, 4, 5, 6} <= set(EXIT_CODES)
