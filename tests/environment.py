"""The environment of processes that tests start."""

import os


def uncounted() -> dict[str, str]:
    """The environment of a process in which lines are not counted, which makes ranks half as slow again: those of the
    torch-free half are counted where the tests run, and in the commands that they start."""
    return {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
