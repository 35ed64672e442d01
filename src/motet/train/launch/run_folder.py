"""The folder of a run: its choice for a job, the rules for resuming there, and the files written at the start.
A run without `run.folder` gets `runs/NAME-001`, `-002` and so on. A folder that holds a run is resumed if one table of
rules allows it; otherwise a sentence says why not.

The lock of a run folder, which one run holds. As long as it does, a thread looks whether the folder can still take
checkpoints: a run whose folder was removed, renamed, made read-only or taken over by another would train in vain.

The end of a run, recorded by the supervisor, since killed ranks cannot report it; and undoing a refused start.

A job is code: it can name a function of the user, which training calls. So motet asks for --trust before it runs such
a job from a folder that other users can change.
"""

import errno
import fcntl
import json
import os
import platform
import re
import secrets
import shutil
import socket
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import motet
from motet.checkpoint.checkpoint_folders import complete_checkpoints
from motet.checkpoint.manifest import read_manifest
from motet.core.errors import CheckpointSaveError, InputError, check_input, convert_os_errors
from motet.core.text_files import parse_json, parse_toml, to_toml, write_file_atomically
from motet.models.settings import UserModuleSettings
from motet.monitor.events import EVENTS_FILE, RUN_END_REASONS, RunEnded, StepDone, parse_event, read_events
from motet.monitor.sinks import JsonlSink, SummarySink
from motet.monitor.summary import SUMMARY_FILE, read_summary, summarize
from motet.train.config_rules import drop_unused_settings
from motet.train.job import Job, is_existing_file, job_from_tree, overridden_job
from motet.train.launch.supervisor import LaunchExitStatus

LOCK_FILE = "run.lock"
CHECKPOINTS_FOLDER = "checkpoints"

CHECK_S = 0.5
FAILED_CHECKS = 3  # Consecutive failures: a network file system may fail once, and a folder may be moved away and back
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)  # Errors of some network file systems
_MAX_OWNER_BYTES = 512
_REMEDY = "earlier checkpoints are as they were left; repair the folder, then --resume-from it"


@contextmanager
def lock_run_folder(path: Path, on_problem: Callable[[str], None]) -> Iterator[None]:
    """No other process trains in this folder while the block runs. `on_problem` gets a sentence, from another thread,
    when the run cannot go on there."""
    path = path.absolute()
    descriptor, block_ended = _open_lock(path), threading.Event()
    try:
        _take_lock(path, descriptor)
        owner = f"process {os.getpid()} on {socket.gethostname()}, {secrets.token_hex(8)}\n".encode()
        with convert_os_errors(f"write run folder {path}", "free some space or repair it"):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, owner, 0)

        def watch() -> None:
            problem, failed_checks = "", 0
            while failed_checks < FAILED_CHECKS and not block_ended.wait(CHECK_S):
                problem = find_problem(path, descriptor, owner)
                failed_checks = failed_checks + 1 if problem else 0
            if problem and not block_ended.is_set():
                on_problem(f"{problem}; {_REMEDY}")

        threading.Thread(target=watch, name="run folder", daemon=True).start()
        try:
            yield
        finally:
            block_ended.set()
            with suppress(OSError):
                if os.pread(descriptor, _MAX_OWNER_BYTES, 0) == owner:
                    os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _open_lock(path: Path) -> int:
    file = path / LOCK_FILE
    check_input(not file.is_symlink(), f"{file} is a symbolic link, which motet does not follow; remove it")
    with convert_os_errors(f"lock run folder {path}", f"remove {LOCK_FILE} or give another folder"):
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InputError(f"{file} is not a regular file; remove it")
    return descriptor


def _take_lock(path: Path, descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(descriptor, _MAX_OWNER_BYTES, 0).decode(errors="replace").partition(",")[0]
        by = f" ({owner})" if owner.startswith("process ") else ""
        raise InputError(f"run folder {path} is in use by another motet{by}; wait for it, or stop it") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise InputError(f"cannot lock run folder {path}: {error.strerror}; give another folder") from None


def find_problem(path: Path, descriptor: int, owner: bytes) -> str:
    """Why a run cannot go on in its folder, or an empty text."""
    try:
        is_same = os.path.samestat((path / LOCK_FILE).lstat(), os.fstat(descriptor))
        if not is_same or os.pread(descriptor, _MAX_OWNER_BYTES, 0) != owner:
            return f"run folder {path} is no longer that of this run: another one took its place"
    except (FileNotFoundError, NotADirectoryError):
        return f"run folder {path} is gone: it, or its {LOCK_FILE}, was removed or renamed while the run was training"
    except OSError as error:
        return f"run folder {path} cannot be read any more: {error.strerror}"
    for folder in (path, path / CHECKPOINTS_FOLDER):
        has_effective_ids = os.access in os.supports_effective_ids
        if folder.exists() and not os.access(folder, os.W_OK | os.X_OK, effective_ids=has_effective_ids):
            return f"{folder} cannot be written any more: it was made read-only while the run was training"
    return ""


RUNS_FOLDER = Path("runs")
JOB_FILE = "job.toml"
VERSIONS_FILE = "versions.json"
# A start that is killed before it has written the job leaves only these, and the next start is the first.
_FILES_BEFORE_JOB = {LOCK_FILE, f".{JOB_FILE}.partial"}
LOGS_FOLDER = "logs"

ResumeRule = Literal["ignored", "warned", "may_grow", "fixed"]

# Settings that may change when a run is resumed; the longest name that fits counts. `ignored` does not change the
# computation (a checkpoint itself reports other ranks, threads or versions, which change the last bits), `warned` does
# and is reported, `may_grow` may only grow, and `fixed` would make it another run.
RESUME_RULES: dict[str, ResumeRule] = {
    "": "fixed",
    **dict.fromkeys(
        ("checkpoint", "monitor", "data.prefetch", "data.workers", "data.cache", "run", "memory"), "ignored"
    ),
    **dict.fromkeys(("run.steps", "run.epochs"), "may_grow"),
    **dict.fromkeys(("run.seed", "optimizer.name", "optimizer.momentum"), "fixed"),
    **dict.fromkeys(("layout", "communication", "outer", "optimizer"), "warned"),
    **dict.fromkeys(("run.device", "precision.reduce_dtype", "precision.emulate", "precision.attention"), "warned"),
    **dict.fromkeys(("precision.loss_scale", "precision.loss_scale_growth_steps"), "warned"),
    # A warning about the checkpoint names masters in another dtype
    **dict.fromkeys(("precision.loss_scale_initial", "precision.master_dtype"), "ignored"),
    **dict.fromkeys(("layout.server.send_order", "layout.server.copies", "layout.server.snapshot_every"), "ignored"),
    **dict.fromkeys(("layout.server.listen", "layout.server.eviction_timeout_s"), "ignored"),
    "layout.server.max_process_restarts": "ignored",
}


@dataclass(frozen=True)
class RunFolderChoice:
    """The folder that a job will run in; nothing is created yet."""

    path: Path  # The folder, without its number if `is_numbered`
    is_numbered: bool = False
    first_number: int = 1
    remarks: tuple[str, ...] = ()  # Remarks for the user about resuming there

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
        read_manifest(newest)  # Refuses another format before data is prepared and ranks start
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
    clause = f"of job {name!r} " if name else ""
    check_input(run_folders, f"no run {clause}to resume in {runs}/; start one, or name its folder with --resume-from")
    return max(run_folders, key=lambda path: ((path / JOB_FILE).stat().st_mtime_ns, path.name))


def read_stored_job(path: Path, overrides: list[str] | None = None) -> Job:
    """The resolved job of a run folder; with overrides, a setting that they leave without effect is refused."""
    tree, source = read_stored_tree(path), str(path / JOB_FILE)
    return job_from_tree(tree, source) if overrides is None else overridden_job(tree, overrides, source)


def job_of_checkpoint(checkpoint: Path) -> Job:
    """The job of the run in whose folder a checkpoint lies."""
    run_folder = checkpoint.absolute().parent.parent
    check_input(
        (run_folder / JOB_FILE).is_file(),
        f"{checkpoint} is in no run: {run_folder} has no {JOB_FILE}, which says of what model it is; put it "
        "back into the checkpoints of its run",
    )
    return read_stored_job(run_folder)


def read_stored_tree(path: Path) -> dict[str, Any]:
    """The resolved job of a run folder as plain nested values."""
    try:
        return parse_toml((path / JOB_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} is not a run folder: it has no {JOB_FILE}; give another folder") from None
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
        check_input(isinstance(starts, list), f"{file} is damaged (it is not a list of starts); remove it")
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


_OVERWRITTEN_FILES = (JOB_FILE, VERSIONS_FILE, SUMMARY_FILE)


def record_run_end(path: Path, exit_status: LaunchExitStatus) -> None:
    """Write a failure to `logs/failure.txt`, and its cause as the last event if rank 0 could not know it.
    If that fails, or an old file is damaged, the caller still reports the cause."""
    failure_file, message = path / LOGS_FOLDER / "failure.txt", exit_status.message
    with suppress(OSError, InputError, CheckpointSaveError):
        failure_file.unlink(missing_ok=True)
        if exit_status.traceback:
            failure_file.write_text(f"{message}\n{exit_status.traceback}\n", encoding="utf-8")
        events = read_events(path / EVENTS_FILE) if message and (path / EVENTS_FILE).is_file() else []
        if events and not (isinstance(events[-1], RunEnded) and events[-1].message in message):
            reason = RUN_END_REASONS.get(exit_status.exit_code, "failed")
            run_ended = RunEnded(reason=reason, steps=summarize(events).steps, message=message)
            with closing(JsonlSink(path)) as events_file:
                events_file.on_event(run_ended)
            SummarySink(path).on_event(run_ended)


@dataclass(frozen=True)
class RunFolderSnapshot:
    """A run folder before a start, so that bad input can leave it unchanged."""

    path: Path
    contents: dict[str, bytes]  # The files that a start overwrites; without a job.toml it was no run yet
    events_bytes: int

    @property
    def had_run(self) -> bool:
        return JOB_FILE in self.contents

    def restore_unless_trained(self) -> bool:
        """Undo a start without a completed step: restore the earlier run, or remove the new one."""
        file = self.path / EVENTS_FILE
        lines = file.read_bytes()[self.events_bytes :].splitlines(keepends=True) if file.is_file() else []
        if any(isinstance(parse_event(line), StepDone) for line in lines if line.endswith(b"\n")):
            return False
        if not self.had_run:
            shutil.rmtree(self.path, ignore_errors=True)
            return True
        with suppress(OSError):  # a failure to restore must not hide why the start was refused
            for name in _OVERWRITTEN_FILES:
                if name in self.contents:
                    write_file_atomically(self.path / name, self.contents[name])
                else:
                    (self.path / name).unlink(missing_ok=True)
            if file.is_file():
                os.truncate(file, self.events_bytes)
        return True


def snapshot_run_folder(path: Path) -> RunFolderSnapshot:
    """Read a run folder before anything is written there."""
    names = [name for name in (*_OVERWRITTEN_FILES, EVENTS_FILE) if (path / name).is_file()]
    try:
        contents = {name: (path / name).read_bytes() for name in names}
    except OSError as error:
        raise InputError(f"cannot read {error.filename}: {error.strerror}; repair it or give another folder") from None
    events = contents.pop(EVENTS_FILE, b"")
    # An incomplete line is cut off by the next writer.
    return RunFolderSnapshot(path, contents, events.rfind(b"\n") + 1)


_ROOT_ID = 0  # Root can change everything anyway


def check_trusted(job: Job, folder: Path, *, is_trusted: bool) -> None:
    """Refuse a job that calls a function, if its run folder belongs to another user or everybody can change it."""
    settings = job.model
    if is_trusted or not isinstance(settings, UserModuleSettings) or settings.hf_path is not None:
        return
    risk = (
        f"its job calls model.factory = {settings.factory!r}, which can do whatever you can do; look at the job, then "
        "give --trust, or copy the folder and resume the copy"
    )
    for path in (folder, folder / JOB_FILE):
        if not path.exists():
            continue
        status = path.stat()
        owner = f"{path} belongs to another user (id {status.st_uid}; you have {os.geteuid()})"
        check_input(status.st_uid in (_ROOT_ID, os.geteuid()), f"{owner}, and {risk}")
        mode = f"every user can change {path} (mode {stat.S_IMODE(status.st_mode):04o})"
        check_input(not status.st_mode & stat.S_IWOTH, f"{mode}, and {risk}")
