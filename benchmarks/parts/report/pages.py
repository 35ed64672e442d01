"""A page of the docs whose results are written by a script: between its marks, with where they come from."""

import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs/benchmarks"


def fill(page: Path, parts: Sequence[str]) -> None:
    """Put paragraphs and tables between the marks of a page; what stands outside of them stays."""
    before, rest = page.read_text(encoding="utf-8").split("<!-- results -->\n")
    _, after = rest.split("<!-- end -->", 1)
    content = "\n\n".join(part.strip() for part in parts)
    page.write_text(f"{before}<!-- results -->\n\n{content}\n\n<!-- end -->{after}", encoding="utf-8")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def machine() -> str:
    """The machine, the version of torch and the commit, in words."""
    import psutil
    import torch

    from motet.cluster.local_device import discover_device

    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, cwd=DOCS, capture_output=True, text=True, check=True).stdout.strip()
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{os.cpu_count()} cores, {discover_device('cpu').name}, {memory:.0f} GiB, {platform.system()}, "
        f"torch {torch.__version__.partition('+')[0]}, commit {commit}"
    )
