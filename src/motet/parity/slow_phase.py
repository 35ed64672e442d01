"""A line of progress for what takes long."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

from motet.train.launch.entry_points import LogFunction

SLOW_S = 3.0


@contextmanager
def log_if_slow(log: LogFunction, text: str) -> Iterator[None]:
    """Log the text if the block takes over three seconds, while it runs."""
    timer = Timer(SLOW_S, log, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
