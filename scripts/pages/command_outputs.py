"""Pages with commands and their output, in blocks from `<!-- $ COMMAND -->` to `<!-- end -->`.

`page` runs these commands in this process: they are quick, and print the same on every machine. A block that begins
with `<!-- $$ COMMAND -->` trains, loads torch or depends on the machine. `python scripts/docs.py PAGE` runs it too,
with bash, in one folder for all blocks of a page. A block `<!-- held-out -->` has the planner's error.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from typer.testing import CliRunner

from motet.cli.main import app
from pages import DOCS, ROOT, fill_blocks, planning_constants

README = "../README.md"
PAGES = (
    README,
    "index.md",
    "quickstart.md",
    "guide/symptoms.md",
    "guide/coming-from.md",
    "guide/planning.md",
    *(f"tutorial/{path.name}" for path in sorted((DOCS / "tutorial").glob("*.md"))),
)
HELD_OUT = "<!-- held-out -->"
_BLOCK = re.compile(r"<!-- (\$\$?) (.*?) -->\n.*?<!-- end -->", re.DOTALL)


def page(name: str) -> str:
    """The text of the page; blocks of `$$` keep their output."""
    text = (DOCS / name).read_text(encoding="utf-8")
    if HELD_OUT in text:
        text = fill_blocks(name, {"held-out": planning_constants.held_out_table()})
    return _BLOCK.sub(lambda block: _filled(block, quick_output(block[2])) if block[1] == "$" else block[0], text)


def measure(name: str, _words: list[str]) -> tuple[str, bool]:
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


def stages_picture() -> str:
    """The four stages of ZeRO side by side, as `motet plan` draws them."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "stages.svg")
        quick_output(f"motet plan tiny-wide --cluster cpu --gpus 4 --compare zero=0 zero=1 zero=2 zero=3 --svg {path}")
        return path.read_text(encoding="utf-8")


def _bash(command: str, folder: Path, words: str) -> str:
    settings = f"export PATH={Path(sys.executable).parent}:$PATH COLUMNS=200 OMP_NUM_THREADS=1; {command}"
    run = subprocess.run(["bash", "-c", settings], cwd=folder, input=words, capture_output=True, text=True, check=False)
    assert run.stdout, (command, run.stderr)
    return run.stdout
