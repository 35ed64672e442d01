"""What a start of a run was made with: for `versions.json`, so that a number can be traced to its makers."""

import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import motet


def collect_provenance(ranks: int, threads: int, command_line: list[str]) -> dict[str, Any]:
    """Versions, place and command of one start. `git` is about the current folder, None outside of a repository."""
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
    """What git says; None when there is no git, no repository, or no answer in time."""
    try:
        completed = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return completed.stdout.strip()
