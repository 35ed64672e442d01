"""A pytest plugin that records which test reaches which lines, also in the processes that tests start.

`-p parts.mutation.reach_plugin` with pytest-cov's `--cov-context=test`; durations go to the file of REACH_DURATIONS.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

import environment

environment.uncounted = lambda: dict(os.environ)
durations: dict[str, float] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The lines of torch's half count here too."""
    for item in items:
        item.own_markers[:] = [marker for marker in item.own_markers if marker.name != "no_cover"]


pytest_collection_modifyitems = pytest.hookimpl(trylast=True)(pytest_collection_modifyitems)


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" and report.passed:
        durations[report.nodeid] = round(report.duration, 3)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        Path(os.environ["REACH_DURATIONS"]).write_text(json.dumps(durations, indent=0))
