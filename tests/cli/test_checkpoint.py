"""`motet checkpoint verify`: what it says of whole, damaged and interrupted checkpoints."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from checkpoint.forged import save_state
from motet.checkpoint import verification
from motet.checkpoint.manifest import CheckpointManifest
from motet.checkpoint.tensor_index import TensorIndex
from motet.checkpoint.verification import verify_files
from motet.cli.main import app


def verify(*arguments: str | Path) -> tuple[bool, str]:
    """Whether it ends with 0, and what it prints."""
    result = CliRunner().invoke(app, ["checkpoint", "verify", *map(str, arguments)])
    return result.exception is None, result.stdout + str(result.exception or "")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (2, 4, 6):
        (tmp_path / "run").mkdir(exist_ok=True)
        save_state(tmp_path / "run/checkpoints", step, {"w": torch.ones(3)}, keep=3)
    return tmp_path / "run"


def test_a_row_for_each_checkpoint(run: Path) -> None:
    for folder in (run, run / "checkpoints"):
        passed, text = verify(folder)
        assert passed and text.count("4 files") == text.count("whole") == 3 and "step 6" in text
    passed, text = verify(run / "checkpoints/step-00000004")
    assert passed and text.split()[:2] == ["step", "4"] and text.count("\n") == 1


def test_damage_is_named_and_the_others_are_read(run: Path) -> None:
    checkpoints = run / "checkpoints"
    data = checkpoints / "step-00000004/rank-00000.safetensors"
    data.write_bytes(data.read_bytes()[:-4] + bytes(4))
    shutil.copytree(checkpoints / "step-00000002", checkpoints / "step-00000008.partial")
    passed, text = verify(run)
    assert not passed and text.count("whole") == 2 and "(rank-00000.safetensors has changed)" in text
    assert "step-00000008.partial is not read" in text and "of 3 checkpoints in" in text
    passed, text = verify(run, "--json")
    rows: list[dict[str, Any]] = json.loads(text[: text.rindex("]") + 1])
    assert not passed and [(row["step"], row["problem"] is None) for row in rows] == [
        *((2, True), (4, False), (6, True), (None, True)),
    ]
    assert all(row["files"] == 4 and row["size_bytes"] > 12 for row in rows)
    assert not verify(data.parent)[0]


def test_a_checkpoint_that_a_run_deletes_meanwhile_is_left_out(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def delete_first(folder: Path, manifest: CheckpointManifest, index: TensorIndex) -> None:
        if folder.name == "step-00000002":
            shutil.rmtree(folder)
        verify_files(folder, manifest, index)

    monkeypatch.setattr(verification, "verify_files", delete_first)
    passed, text = verify(run)
    assert passed and text.count("whole") == 2


def test_a_replaced_checkpoint_counts_as_long_as_its_successor_is_missing(run: Path) -> None:
    newest = run / "checkpoints/step-00000006"
    newest.rename(newest.with_name("step-00000006.old"))
    assert verify(run)[1].count("whole") == 3
    shutil.copytree(newest.with_name("step-00000006.old"), newest)
    passed, text = verify(run)
    assert passed and text.count("whole") == 3 and "step-00000006.old is not read" in text
