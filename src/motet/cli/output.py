"""Printing, progress bars and output files of the commands.

Garbage collection in commands that import much, run briefly, and end.
"""

import gc
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from motet.core.errors import convert_os_errors
from motet.core.text_files import write_file_atomically
from motet.monitor.stdout_stderr import stderr_console, stdout_console

if TYPE_CHECKING:
    from rich.text import Text

ProgressReporter = Callable[[str, int, int], None]
OutputLine: TypeAlias = "str | Text"


def log(text: str) -> None:
    """Print a message to stderr."""
    stderr_console().print(text, highlight=False)


def print_lines(*lines: OutputLine) -> None:
    """Print lines unwrapped, however narrow the terminal is, so that columns stay aligned."""
    for line in lines:
        stdout_console().print(line, highlight=False, soft_wrap=True)


def table_lines(
    rows: Iterable[Sequence[OutputLine]], *, header: Sequence[str] = (), right: Collection[int] = (), indent: int = 0
) -> Iterator[OutputLine]:
    """Lines of a table with aligned columns, as wide as they need; `right` has the columns that are aligned to the
    right. Rows may be short. A step may have thousands of events, and rich.table would take 15 times as long."""
    from rich.text import Text

    lines = [[Text(name, "bold") for name in header]] if header else []
    lines += [[Text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    widths = [max(cell.cell_len for cell in column) for column in zip_longest(*lines, fillvalue=Text())]
    for cells in lines:
        for index, cell in enumerate(cells):
            cell.align("right" if index in right else "left", widths[index])
        line = Text(" " * indent) + Text("  ").join(cells)
        line.rstrip()
        yield line


def highlight(text: str) -> Any:
    """Colour the chunks that a step of a drawn Program writes."""
    from rich.text import Text

    highlighted = Text(text)
    highlighted.highlight_regex(r"\[[0-9,\-x]+\]", "bold green")
    highlighted.highlight_regex(r"(?m)^(start|step \d+)$", "bold")
    return highlighted


@contextmanager
def show_progress() -> Iterator[ProgressReporter]:
    """Yield `(task, completed, total)`: a bar for each task on a terminal, one line for each elsewhere."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    screen = stderr_console()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    task_ids: dict[str, Any] = {}
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as progress:

        def update_bar(task: str, completed: int, total: int) -> None:
            if task not in task_ids:
                task_ids[task] = progress.add_task(task, total=total)
                if not screen.is_terminal:
                    log(task)
            progress.update(task_ids[task], completed=completed, total=total)

        yield update_bar


def check_writable(*paths: Path | None) -> None:
    """Raise before the work begins if its result cannot be written."""
    for path in filter(None, paths):
        with convert_os_errors(f"write {path}", "give another file"):
            if path.exists():
                path.open("ab").close()  # raises for a folder
            if path.is_file() or not path.exists():
                tempfile.TemporaryFile(dir=path.resolve().parent).close()


def write_output_file(path: Path, text: str) -> None:
    """Write a regular file atomically; write to a device or a pipe directly."""
    with convert_os_errors(f"write {path}", "give another file"):
        if path.is_file() or not path.exists():
            write_file_atomically(path.resolve(), text.encode())
        else:
            path.write_text(text, encoding="utf-8")


_NEW_OBJECTS = 50_000  # New objects between two searches, in place of 700


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """A context in which Python seldom searches for cycles of references. The objects that modules define are never
    garbage, and the search through them takes a tenth of the time of a short command."""
    usual = gc.get_threshold()
    gc.set_threshold(_NEW_OBJECTS, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)
