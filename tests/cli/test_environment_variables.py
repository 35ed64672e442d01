"""Variables that commands set for torch, here and in ranks."""

import os
from pathlib import Path

import pytest

from motet.cli import environment_variables
from motet.cli.environment_variables import set_compiler_variables
from refusals import refused

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Neither variable is set; the folder of temporary files."""
    for name in (VARIABLE, "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # So that it is restored
        monkeypatch.delenv(name)
    temporary = tmp_path / "temporary"
    monkeypatch.setattr(environment_variables.tempfile, "gettempdir", lambda: str(temporary))
    return temporary


def test_the_cache_keeps_compiled_code(tmp_path: Path) -> None:
    set_compiler_variables(tmp_path / "motet")
    assert os.environ[VARIABLE] == str(tmp_path / "motet/compiled") and "TRITON_CACHE_DIR" not in os.environ
    set_compiler_variables(tmp_path / "other")  # The choice of a user stays
    assert os.environ[VARIABLE] == str(tmp_path / "motet/compiled") and not (tmp_path / "other").exists()


def test_a_cache_that_cannot_be_made_is_replaced_by_a_temporary_folder(tmp_path: Path, variables: Path) -> None:
    (tmp_path / "file").touch()
    set_compiler_variables(tmp_path / "file" / "motet")
    folder = variables / f"motet-{os.getuid()}"
    assert os.environ[VARIABLE] == str(folder) and folder.stat().st_mode & 0o777 == 0o700
    assert os.environ["TRITON_CACHE_DIR"] == str(folder / "triton")


def test_a_cache_of_another_user_is_not_written(
    tmp_path: Path, variables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = tmp_path / "motet" / "compiled"
    monkeypatch.setattr(os, "access", lambda folder, mode: Path(folder) != foreign)
    set_compiler_variables(tmp_path / "motet")
    assert os.environ[VARIABLE] == str(variables / f"motet-{os.getuid()}")


def test_a_temporary_folder_of_another_user_is_not_read(
    tmp_path: Path, variables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "getuid", lambda: 12345)  # Of a user who did not make the folder
    set_compiler_variables(tmp_path / "file")
    assert VARIABLE not in os.environ  # torch decides


@pytest.mark.parametrize("name", ["file", "file/folder"])
def test_a_folder_that_a_user_names_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(VARIABLE, str(tmp_path / name))
    refused(
        f"^{VARIABLE} = '.*{name}': it cannot be made .*; name a folder that you can write, or unset it$",
        set_compiler_variables,
        tmp_path / "motet",
    )
