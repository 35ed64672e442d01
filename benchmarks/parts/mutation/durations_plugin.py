"""A pytest plugin that writes the duration of each test into the file of DURATIONS."""

import json
import os
from pathlib import Path

import pytest

durations: dict[str, float] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
        durations[report.nodeid] = round(report.duration, 3)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        Path(os.environ["DURATIONS"]).write_text(json.dumps(durations, indent=0))
