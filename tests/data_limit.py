"""A limit of the operating system for the data of a process, and the bytes of data that it has."""

import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def data_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"VmData:\s*(\d+) kB", status)[0]) << 10


@contextmanager
def data_limit(limit: float) -> Iterator[None]:
    """Inside, the process may have no more bytes of data."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(limit), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
