"""The folder of a run: its choice for a job, the rules for resuming there, and the files written at the start.
A run without `run.folder` gets `runs/NAME-001`, `-002` and so on. A folder that holds a run is resumed if one table of
rules allows it; otherwise a sentence says why not."""

import json
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import motet
from motet.checkpoint.manifest import complete_checkpoints, read_manifest
from motet.core.atomic_file import write_file_atomically
from motet.core.errors import InputError, check_input, convert_os_errors
from motet.core.text_formats import parse_json, parse_toml
from motet.core.toml_writer import to_toml
from motet.monitor.summary import SUMMARY_FILE, read_summary
from motet.train.config_rules import drop_unused_settings
from motet.train.job import Job, is_existing_file, job_from_tree, overridden_job
from motet.train.launch.run_folder_lock import CHECKPOINTS_FOLDER, LOCK_FILE

RUNS_FOLDER = Path("runs")
JOB_FILE = "job.toml"
VERSIONS_FILE = "versions.json"
# A start that is killed before it has written the job leaves only these, and the next start is the first.
_FILES_BEFORE_JOB = {LOCK_FILE, f".{JOB_FILE}.partial"}
LOGS_FOLDER = "logs"

ResumeRule = Literal["ignored", "warned", "may_grow", "fixed"]

# Settings that may change when a run is resumed; the longest name that fits counts. `ignored` does not change what is
# computed (a checkpoint itself reports other ranks, threads or versions, which change the last bits), `warned` does and
# is reported, `may_grow` may only grow, and `fixed` would make it another run.
RESUME_RULES: dict[str, ResumeRule] = {
    "": "fixed",
    **dict.fromkeys(("checkpoint", "monitor", "data.workers", "data.cache", "run"), "ignored"),
    **dict.fromkeys(("run.steps", "run.epochs"), "may_grow"),
    **dict.fromkeys(("run.seed", "optimizer.name", "optimizer.momentum"), "fixed"),
    **dict.fromkeys(("layout", "communication", "outer", "optimizer"), "warned"),
    **dict.fromkeys(("run.device", "precision.reduce_dtype", "precision.emulate"), "warned"),
    **dict.fromkeys(("precision.loss_scale", "precision.loss_scale_growth_steps"), "warned"),
    "precision.loss_scale_initial": "ignored",
    **dict.fromkeys(("layout.server.send_order", "layout.server.copies", "layout.server.snapshot_every"), "ignored"),
    **dict.fromkeys(("layout.server.listen", "layout.server.eviction_timeout_s"), "ignored"),
    "layout.server.max_process_restarts": "ignored",
}


@dataclass(frozen=True)
class RunFolderChoice:
    """The folder that a job will run in; nothing is created yet."""

    path: Path  # Without its number if `is_numbered`
    is_numbered: bool = False
    first_number: int = 1
    remarks: tuple[str, ...] = ()  # For the user, about resuming there

    def create(self) -> Path:
        """Create the folder, or the next free number. Two runs that start at the same time get two numbers."""
        with convert_os_errors(f"write run folder {self.path}", "give another one with --run-folder"):
            if not self.is_numbered:
                self.path.mkdir(parents=True, exist_ok=True)
                if not os.access(self.path, os.W_OK | os.X_OK):
                    raise PermissionError(13, "no permission to write")
                return self.path
            self.path.parent.mkdir(parents=True, exist_ok=True)
            while True:
                path = _next_numbered(self.path, self.first_number)
                with suppress(FileExistsError):
                    path.mkdir()
                    return path


def choose_run_folder(job: Job) -> RunFolderChoice:
    """The folder for a new start of a job, by `run.folder` and `run.existing`."""
    if job.run.folder is None:
        return RunFolderChoice(RUNS_FOLDER / job.name, is_numbered=True)
    path = Path(job.run.folder)
    with convert_os_errors(f"use run.folder = {path}", "give another one"):
        exists = path.exists()
        has_files = path.is_dir() and any(file.name not in _FILES_BEFORE_JOB for file in path.iterdir())
    check_input(not exists or path.is_dir(), f"run.folder = {path} is a file; give the name of a folder")
    if not has_files:
        return RunFolderChoice(path)
    if job.run.existing == "number":
        return RunFolderChoice(path, is_numbered=True, first_number=2)
    check_input(
        job.run.existing != "refuse",
        f"run.folder = {path} exists already; remove it, give another one, or set run.existing to resume or number",
    )
    return choose_resumed_run(job, path)


def existing_run_folder(text: str) -> Path:
    sentence = f"no run in {text!r} to resume, for there is no {JOB_FILE}; give the folder of a run"
    check_input(is_existing_file(f"{text}/{JOB_FILE}"), sentence)
    return Path(text)


def choose_resumed_run(job: Job, path: Path) -> RunFolderChoice:
    """Resume the run in `path` with this job, or raise with the reason why not."""
    stored = read_stored_job(path)
    remarks = check_resume(stored, job, path)
    for _, newest in complete_checkpoints(path / CHECKPOINTS_FOLDER)[-1:]:
        read_manifest(newest)  # One of another format is refused before data is prepared and ranks start
    saved_step, stop_at = newest_checkpoint_step(path), job.run.stop_at
    check_input(
        saved_step is None or stop_at is None or stop_at >= saved_step,
        f"run.stop_at = {stop_at}, but {path} is at step {saved_step} already; give a later one or leave it out",
    )
    if saved_step is None:
        remarks.append(f"{path} holds no checkpoint yet: the run begins at its first step")
    is_finished = (path / SUMMARY_FILE).is_file() and read_summary(path).finished
    key = "run.steps" if job.run.steps is not None else "run.epochs"
    check_input(
        not is_finished or (job.run.steps, job.run.epochs) != (stored.run.steps, stored.run.epochs),
        f"run folder {path} holds a finished run ({key} = {job.run.steps or job.run.epochs}); give a larger {key} to "
        "train on, or another folder",
    )
    return RunFolderChoice(path, remarks=tuple(remarks))


def find_newest_run(name: str | None, runs: Path = RUNS_FOLDER) -> Path:
    """The run that was started or resumed last, of one job or of any."""
    run_folders = [path.parent for path in runs.glob(f"*/{JOB_FILE}") if name is None or _stored_name(path) == name]
    of_job = f"of job {name!r} " if name else ""
    check_input(run_folders, f"no run {of_job}to resume in {runs}/; start one, or name its folder with --resume-from")
    return max(run_folders, key=lambda path: ((path / JOB_FILE).stat().st_mtime_ns, path.name))


def read_stored_job(path: Path, overrides: list[str] | None = None) -> Job:
    """The resolved job of a run folder; with overrides, a setting that they leave without effect is refused."""
    tree, source = read_stored_tree(path), str(path / JOB_FILE)
    return job_from_tree(tree, source) if overrides is None else overridden_job(tree, overrides, source)


def read_stored_tree(path: Path) -> dict[str, Any]:
    """The resolved job of a run folder as plain nested values."""
    try:
        return parse_toml((path / JOB_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} is no run folder, for it has no {JOB_FILE}; give another folder") from None
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path / JOB_FILE}: {error}; repair it or give another folder") from None


def check_resume(old: Job, new: Job, path: Path) -> list[str]:
    """Remarks about changed settings; raises at the first setting that may not change."""
    old_values, new_values = dict(_flatten(_full_tree(old))), dict(_flatten(_full_tree(new)))
    remarks = []
    for key in sorted(old_values.keys() | new_values.keys(), key=lambda key: (_resume_rule(key) != "fixed", key)):
        old_value, new_value = old_values.get(key), new_values.get(key)
        if old_value == new_value:
            continue
        was, now = ("not given" if value is None else repr(value) for value in (old_value, new_value))
        change = f"{key} was {was} in {path} and is {now} now"
        rule, has_grown = _resume_rule(key), old_value is not None and new_value is not None and new_value > old_value
        if rule == "warned":
            remarks.append(f"{change}: the run goes on, but not as it would have")
        elif rule == "may_grow" and has_grown:
            remarks.append(f"{change}: a schedule that ends with the run is stretched")
        elif rule != "ignored":
            allowed = "it can only grow" if rule == "may_grow" else "it cannot change"
            raise InputError(f"{change}: {allowed} when a run is resumed; start another run folder for it")
    return remarks


def job_to_tree(job: Job) -> dict[str, Any]:
    """A job as plain nested values for `job_from_tree`, without the settings that have no effect."""
    tree = _full_tree(job)
    drop_unused_settings(tree)
    return tree


def _full_tree(job: Job) -> dict[str, Any]:
    tree: dict[str, Any] = _without_none(job.model_dump())
    if job.optimizer.clip_norm is None:  # the one setting whose None is not its default
        tree["optimizer"]["clip_norm"] = False
    return tree


def write_run_start(path: Path, job: Job, versions: dict[str, Any]) -> None:
    """Write the resolved job and one more entry of versions.json, before any rank starts."""
    file = path / VERSIONS_FILE
    with convert_os_errors(f"write run folder {path}", "free some space or repair it"):
        write_file_atomically(path / JOB_FILE, to_toml(job_to_tree(job)).encode())
        (path / LOGS_FOLDER).mkdir(exist_ok=True)
        try:
            starts = parse_json(file.read_text(encoding="utf-8")) if file.is_file() else []
        except ValueError as error:
            raise InputError(f"{file} is damaged ({error}); remove it") from None
        check_input(isinstance(starts, list), f"{file} is damaged (it is no list of starts); remove it")
        write_file_atomically(file, (json.dumps([*starts, versions], indent=2) + "\n").encode())


def newest_checkpoint_step(path: Path) -> int | None:
    """The step of the newest complete checkpoint of a run."""
    checkpoints = complete_checkpoints(path / CHECKPOINTS_FOLDER)
    return checkpoints[-1][0] if checkpoints else None


def _next_numbered(stem: Path, first: int) -> Path:
    pattern = re.compile(re.escape(stem.name) + r"-(\d{3,})")
    taken = [int(match[1]) for path in stem.parent.iterdir() if (match := pattern.fullmatch(path.name))]
    return stem.with_name(f"{stem.name}-{max([first - 1, *taken]) + 1:03d}")


def _stored_name(path: Path) -> str | None:
    with suppress(InputError):
        return str(read_stored_tree(path.parent).get("name"))
    return None


def _resume_rule(key: str) -> ResumeRule:
    while key not in RESUME_RULES:
        key = key.rpartition(".")[0]
    return RESUME_RULES[key]


def _flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        yield from _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list | tuple) else value


def collect_provenance(ranks: int, threads: int, command_line: list[str]) -> dict[str, Any]:
    """Versions, machine and command of one start. `git` describes the current folder, None outside of a repository."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "motet": motet.__version__,
        "torch": version("torch"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "ranks": ranks,
        "threads": threads,
        "command_line": command_line,
        "git": _git_state(),
    }


def _git_state() -> dict[str, Any] | None:
    commit, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)} if commit is not None else None


def _git(*arguments: str) -> str | None:
    with suppress(OSError, subprocess.SubprocessError):
        command = ["git", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    return None
