"""The `motet` command in this process."""

import subprocess
import sys
from collections.abc import Callable

import pytest

from motet.cli.main import main


@pytest.fixture
def motet(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command in this process; ranks are processes of their own."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["motet", *arguments])
        with pytest.raises(SystemExit) as done:
            main()
        code = done.value.code
        return subprocess.CompletedProcess(arguments, code if isinstance(code, int) else 0, *capfd.readouterr())

    return run
