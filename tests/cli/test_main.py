"""The `motet` command itself: help, version, and how errors end it."""

import subprocess
import sys
from collections.abc import Callable

import pytest

import motet
from motet.cli.main import main

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run a command in this process: (exit code, stdout, stderr)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["motet", *arguments])
        with pytest.raises(SystemExit) as done:
            main()
        code = done.value.code
        return (code if isinstance(code, int) else 0, *capsys.readouterr())

    return run


def test_help_names_every_command(cli: Cli) -> None:
    code, out, _ = cli("--help")
    assert code == 0
    assert all(f"\n  {name} " in out for name in ("train", "data", "show"))
    assert cli("-h")[1] == out


def test_version(cli: Cli) -> None:
    assert cli("--version") == (0, f"motet {motet.__version__}\n", "")


@pytest.mark.parametrize(
    "arguments", [["nothing"], ["train", "--nothing"], ["train", "--ranks", "0"], ["train", "--ranks", "x"]]
)
def test_wrong_usage_ends_with_2(cli: Cli, arguments: list[str]) -> None:
    code, out, err = cli(*arguments)
    assert (code, out) == (2, "")
    assert "Traceback" not in err


def test_an_error_for_the_user_is_one_sentence(cli: Cli) -> None:
    code, out, err = cli("train", "tinny")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("motet: no job 'tinny': did you mean 'tiny'? ")


@pytest.mark.parametrize("variable", ["LOCAL_RANK", "SLURM_LOCALID"])
def test_of_many_ranks_one_on_each_machine_complains(cli: Cli, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "1")
    assert cli("train", "tinny") == (2, "", "")
    monkeypatch.setenv(variable, "0")
    assert cli("train", "tinny")[2] != ""


def test_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "motet", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"motet {motet.__version__}\n"
