"""A page of the docs whose results a script writes between its marks, with their origin."""

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs/benchmarks"
STORE = "MOTET_BENCHMARK_RESULTS"


def fill(page: Path, parts: Sequence[str]) -> None:
    """Put paragraphs and tables between the marks of a page, with the command, the commit and the machine above them;
    text outside of the marks stays."""
    before, rest = page.read_text(encoding="utf-8").split("<!-- results -->\n")
    _, after = rest.split("<!-- end -->", 1)
    content = "\n\n".join(part.strip() for part in (provenance(), *parts))
    page.write_text(f"{before}<!-- results -->\n\n{content}\n\n<!-- end -->{after}", encoding="utf-8")


def provenance() -> str:
    """The first line of every page's results."""
    script = Path(sys.argv[0]).resolve().relative_to(ROOT)
    command = " ".join(["python", str(script), *sys.argv[1:]])
    return f"Written by `{command}` at commit `{commit()}` on {machine()}."


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def commit() -> str:
    """The commit of the code that runs; `+` where files of the repository differ from it."""
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", "src", "benchmarks")
    return _git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def machine() -> str:
    """The machine and the version of torch, in words."""
    import psutil
    import torch

    from motet.cluster.local_device import discover_device

    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{os.cpu_count()} cores, {discover_device('cpu').name}, {memory:.0f} GiB, {platform.system()}, "
        f"torch {torch.__version__.partition('+')[0]}"
    )


def load_of_machine() -> str:
    """A sentence on the load of other programs when the benchmark began."""
    return f"When it began, {os.getloadavg()[0]:.1f} other processes wanted a core."


# --- from the rank processes to the one that writes the page -------------------------------------------


@contextmanager
def collected_results() -> Iterator[list[Any]]:
    """A list that is filled, when the block ends, with the values of `store_result` in processes started in it."""
    results: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ[STORE] = str(file := Path(folder, "results.jsonl"))
        yield results
        if file.exists():
            results += map(json.loads, file.read_text(encoding="utf-8").splitlines())
        del os.environ[STORE]


def store_result(value: Any) -> None:
    with Path(os.environ[STORE]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(value) + "\n")
