"""Shows the preparation of data: a bar for each part on a terminal, one line for each part elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from motet.monitor.console import stderr_console

if TYPE_CHECKING:
    from rich.progress import TaskID


@contextmanager
def show_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Hands out `(what, done, total)`; the bars vanish at the end."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    screen = stderr_console()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    task_ids: dict[str, TaskID] = {}
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as progress:

        def update_bar(task: str, done: int, total: int) -> None:
            if task not in task_ids:
                task_ids[task] = progress.add_task(task, total=total)
                if not screen.is_terminal:
                    screen.print(task, highlight=False)
            progress.update(task_ids[task], completed=done, total=total)

        yield update_bar
