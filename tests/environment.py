"""The environment of processes that tests start."""

import os
from functools import cache
from importlib.metadata import version

import pytest


def uncounted() -> dict[str, str]:
    """The environment of a process in which lines are not counted, which makes ranks half as slow again: those of the
    torch-free half are counted where the tests run, and in the commands that they start."""
    return {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}


@cache
def torch_is_older_than(minor: int) -> bool:
    """Whether torch is older than 2.`minor`."""
    return int(version("torch").split(".")[1]) < minor


def needs_torch_2_13(reason: str) -> pytest.MarkDecorator:
    """A mark of cases in which torch itself, and not motet, lacks something before 2.13: the reason names it. The tests
    run under torch 2.11, too (`make test-oldest`); under the pinned version no case is skipped."""
    return pytest.mark.skipif(torch_is_older_than(13), reason=f"before torch 2.13 {reason}")
