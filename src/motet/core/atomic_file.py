"""Files that are replaced completely or not at all."""

import os
from pathlib import Path


def write_file_atomically(path: Path, content: bytes) -> None:
    """Write all of the new content, or leave the file unchanged."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
