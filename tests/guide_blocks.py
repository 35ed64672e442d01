"""The code blocks of a page, and running them as they are written there."""

import contextlib
import io
import re
import runpy
from pathlib import Path
from typing import NamedTuple

import pytest

from motet.parallel.process.launch_environment import RankEnvironment

GUIDES = Path(__file__).parents[1] / "docs/guide"
FENCE = "`" * 3


class Blocks(NamedTuple):
    """The Python of a part of a page as one file, and the output that stands after its blocks."""

    script: str
    output: str


def blocks_of(text: str) -> Blocks:
    """The blocks of a page or of a part of it, in order."""
    return Blocks(_joined("python", text), _joined("text", text))


def _joined(kind: str, text: str) -> str:
    return "".join(re.findall(rf"{FENCE}{kind}\n(.*?){FENCE}", text, re.DOTALL))


def run_script(place: RankEnvironment, folder: Path, text: str, port: int) -> str:
    """Run a file on this rank as torchrun does; returns its output."""
    variables = {"RANK": place.rank, "WORLD_SIZE": place.world, "LOCAL_RANK": place.local_rank, "MASTER_PORT": port}
    (script := folder / f"rank-{place.rank}.py").write_text(text, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as output:
        patch.chdir(folder)
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        for name, value in variables.items():
            patch.setenv(name, str(value))
        runpy.run_path(str(script))
    return output.getvalue()
