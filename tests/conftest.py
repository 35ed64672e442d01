"""Fixtures for every test: the command, the pool of rank processes, and the switch that writes golden files anew."""

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache

import pytest
import typer

from environment import uncounted
from ranks import Ranks

# Ranks and tests share few cores; torch reads these when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.pop("XDG_CACHE_HOME", None)  # Tests that need a cache of their user set HOME


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regenerate", action="store_true", help="write the golden files of tests/laws anew")


typer.main.get_command = cache(typer.main.get_command)  # Hundreds of tests run a command in their process

COMPUTING = ("parity",)
"""Folders of tests that are torch at work, also where a test does not import it."""
THREADED = "fuzzer"
"""Its tests start threads all the time, and Python 3.11 fails to trace two that start simultaneously."""
COUNTED_CASES = 1


def pytest_configure() -> None:
    """Let SIGHUP end processes, as anywhere else: `nohup` has what it starts ignore the signal."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Lines are counted of the torch-free half alone, which makes its tests take twice as long: in the first case of
    each test, not while models are trained, and not in tests marked `no_cover`, whose lines others count; in all of
    those marked `counted`."""
    cases = Counter[str]()
    for item in items:
        test = item.nodeid.partition("[")[0]
        cases[test] += 1
        folder, module = item.path.parent.name, vars(item.getparent(pytest.Module).module)
        computes = folder in COMPUTING or (folder in ("train", "models") and "torch" in module)
        if item.get_closest_marker("counted") is None and (
            computes or folder == THREADED or cases[test] > COUNTED_CASES
        ):
            item.add_marker("no_cover")


def pytest_collection_finish() -> None:
    """Measure the machine once for the runs of this process, where tests train in it."""
    if "motet.train.build" in sys.modules:
        from motet.train.forecast import step_forecast
        from one_measurement import measure_once

        measure_once(step_forecast)


@pytest.fixture(autouse=True)
def processes_count_lines_with_their_test(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that a test starts count lines where the test does."""
    if request.node.get_closest_marker("no_cover"):
        for name in {*os.environ} - {*uncounted()}:
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def regenerate(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--regenerate"))


@pytest.fixture
def motet(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command in this process, where torch has been imported; ranks are processes of their own."""
    from motet.cli.main import main

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["motet", *arguments])
        with pytest.raises(SystemExit) as done:
            main()
        code = done.value.code
        return subprocess.CompletedProcess(arguments, code if isinstance(code, int) else 0, *capfd.readouterr())

    return run


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """`ranks.run(2, function, *args)` -> the results of `function(group, *args)` on two ranks."""
    pool = Ranks()
    yield pool
    pool.close()
