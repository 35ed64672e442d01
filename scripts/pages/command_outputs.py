"""Pages with commands and their output, each in a block that begins with `<!-- $ COMMAND -->` and ends with `<!-- end -->`.

`page` runs the commands of these blocks in this process: they are quick, and print the same on every machine. Blocks
that begin with `<!-- $$ COMMAND -->` train, load torch or depend on the machine. `python scripts/docs.py PAGE measure`
runs them as well, with bash, in one folder for all blocks of a page.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from typer.testing import CliRunner

from motet.cli.main import app
from pages import DOCS, ROOT

PAGES = (
    "index.md",
    "adding.md",
    "guide/symptoms.md",
    "guide/coming-from.md",
    *(f"tutorial/{path.name}" for path in sorted((DOCS / "tutorial").glob("*.md"))),
)
_BLOCK = re.compile(r"<!-- (\$\$?) (.*?) -->\n.*?<!-- end -->", re.DOTALL)


def page(name: str) -> str:
    """The text of the page; blocks of `$$` keep their output."""
    text = (DOCS / name).read_text(encoding="utf-8")
    return _BLOCK.sub(lambda block: _filled(block, quick_output(block[2])) if block[1] == "$" else block[0], text)


def measure(name: str) -> tuple[str, bool]:
    """The text of the page with the output of all of its commands now."""
    with TemporaryDirectory() as folder:
        text = _BLOCK.sub(lambda block: _filled(block, bash_output(block[2], Path(folder))), page(name))
    return text, True


def _filled(block: re.Match[str], output: str) -> str:
    return f"<!-- {block[1]} {block[2]} -->\n```text\n$ {block[2]}\n{output.rstrip()}\n```\n<!-- end -->"


def quick_output(command: str) -> str:
    """The output of a command of motet, which filters may follow after a pipe."""
    words, _, filters = command.partition(" | ")
    result = CliRunner().invoke(app, shlex.split(words)[1:])
    assert result.exit_code == 0, (command, result.output)
    return _bash(filters, ROOT, result.stdout) if filters else result.stdout


def bash_output(command: str, folder: Path) -> str:
    """The output of any command line, in a folder."""
    return _bash(command, folder, "")


def _bash(command: str, folder: Path, words: str) -> str:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, input=words, capture_output=True, text=True, check=False
    )
    assert run.stdout, (command, run.stderr)
    return run.stdout
