"""Shows the preparation of data: a bar for each part on a terminal, one line for each part elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from motet.monitor.console import stderr_console

if TYPE_CHECKING:
    from rich.progress import TaskID


@contextmanager
def shown_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Hands out `(what, done, total)`; the bars vanish at the end."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    screen = stderr_console()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    parts: dict[str, TaskID] = {}
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bars:

        def tell(what: str, done: int, total: int) -> None:
            if what not in parts:
                parts[what] = bars.add_task(what, total=total)
                if not screen.is_terminal:
                    screen.print(what, highlight=False)
            bars.update(parts[what], completed=done, total=total)

        yield tell
