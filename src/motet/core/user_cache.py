"""The folder in which motet keeps what it can compute again."""

import os
from pathlib import Path


def user_cache_folder() -> Path | None:
    """The folder of motet in this user's cache; None for a user without a home. It may not exist."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or "")  # noqa: TID251  (the convention of all programs)
        folder = folder if folder.is_absolute() else Path("~/.cache").expanduser()
    except RuntimeError:
        return None
    return folder / "motet" if folder.is_absolute() else None
