"""The `motet` command itself: help, version, and how errors end it."""

import subprocess
import sys
from collections.abc import Callable

import pytest

from motet import __version__

Motet = Callable[..., subprocess.CompletedProcess[str]]


def answer(done: subprocess.CompletedProcess[str]) -> tuple[int, str, str]:
    return done.returncode, done.stdout, done.stderr


def test_help_names_every_command_and_the_version_is_told(motet: Motet) -> None:
    code, out, _ = answer(motet("--help"))
    assert code == 0 and all(f"\n  {name} " in out for name in ("train", "data", "show")) and motet("-h").stdout == out
    assert answer(motet("--version")) == (0, f"motet {__version__}\n", "")


@pytest.mark.parametrize("words", ["nothing", "train --nothing", "train --ranks 0", "train --ranks x"])
def test_wrong_usage_ends_with_2(motet: Motet, words: str) -> None:
    code, out, err = answer(motet(*words.split()))
    assert (code, out) == (2, "") and "Traceback" not in err


def test_an_error_for_the_user_is_one_sentence(motet: Motet) -> None:
    code, out, err = answer(motet("train", "tinny"))
    assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith("motet: no job 'tinny': did you mean 'tiny'? ")


@pytest.mark.parametrize("variable", ["LOCAL_RANK", "SLURM_LOCALID"])
def test_one_rank_on_each_machine_complains(motet: Motet, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "1")
    assert answer(motet("train", "tinny")) == (2, "", "")
    monkeypatch.setenv(variable, "0")
    assert motet("train", "tinny").stderr != ""


def test_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "motet", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"motet {__version__}\n"
