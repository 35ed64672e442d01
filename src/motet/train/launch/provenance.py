"""The versions and the machine of a start of a run, for `versions.json`, so that results can be traced."""

import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import motet


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
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": bool(changes) if changes is not None else None}


def _git(*arguments: str) -> str | None:
    try:
        completed = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return completed.stdout.strip()
