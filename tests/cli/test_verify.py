"""`motet verify` as a person uses it: what it prints, how it ends, and what is left."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from motet.core.errors import EXIT_CODES
from ranks import uncounted

TEXT = Path(__file__).parent.parent / "data" / "small.txt"
JOB = f"""
name = "small"
[model]
factory = "model:Model"
[data]
source = "{TEXT}"
tokenizer = "bytes"
sequence_length = 16
cache = "cache"
workers = 1
[monitor]
sample_tokens = 0
[run]
steps = 100
"""
MODEL = """
import torch.distributed as dist
from torch import nn

print("a model is made")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.inner, self.head = nn.Embedding(260, 8), nn.Linear(8, 8), nn.Linear(8, 260)

    def forward(self, tokens):
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if ranks == 3:
            raise ValueError("not with three")
        return self.head(self.inner(self.embedding(tokens)) * (1.0 if ranks == 1 or not WRONG else 1.001))
"""


def command(folder: Path, *words: str, wrong: bool = False) -> list[str]:
    (folder / "small.toml").write_text(JOB)
    (folder / "model.py").write_text(MODEL + f"\n\nWRONG = {wrong}\n")
    return [sys.executable, "-m", "motet", "verify", "small.toml", *words]


def run(folder: Path, *words: str, wrong: bool = False) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command(folder, *words, wrong=wrong), cwd=folder, env=uncounted(), capture_output=True, text=True, timeout=120
    )


def test_it_is_the_same_and_a_rank_that_fails_is_no_difference(tmp_path: Path) -> None:
    done = run(tmp_path, "--layout", "dp=2 zero=1", "--layout", "dp=3 zero=1", "--layout", "dp=2 zero=3", "--json")
    found: list[dict[str, Any]] = json.loads(done.stdout)["layouts"]
    by_layout = {each["layout"]: each for each in found}
    assert list(by_layout) == ["dp=2 zero=1", "dp=2 zero=3", "dp=3 zero=1"]
    for layout in ("dp=2 zero=1", "dp=2 zero=3"):
        assert by_layout[layout]["ok"], by_layout
        assert 0 < by_layout[layout]["worst_relative"] < 1e-12
        assert not by_layout[layout]["failed"]
    failed = by_layout["dp=3 zero=1"]
    assert failed["failed"]
    assert not failed["ok"]
    assert "ValueError: not with three" in failed["cause"]
    assert done.returncode == 3, done.stderr
    assert "same   dp=2 zero=1" in done.stderr
    assert "model.py" in done.stderr, "the traceback"


def test_it_is_wrong(tmp_path: Path) -> None:
    done = run(tmp_path, "--layout", "dp=2", wrong=True)
    last = done.stdout.splitlines()[-1]
    assert last.startswith("WRONG  dp=2: first in activation head, step 1 on rank ")
    assert done.returncode == 6, done.stderr
    assert "motet verify" in EXIT_CODES[6]


@pytest.mark.parametrize("layout", ["dp=2 zero=2", "dp=2 data=parameter_server server.count=1"])
def test_ctrl_c_ends_it(tmp_path: Path, layout: str) -> None:
    words = ("--layout", layout, "--layout", "dp=2 zero=1", "--json")
    output = tmp_path / "stderr.txt"
    with output.open("wb") as stderr:
        process = subprocess.Popen(
            command(tmp_path, *words), cwd=tmp_path, env=uncounted(), stdout=subprocess.PIPE, stderr=stderr
        )
    end = time.monotonic() + 60
    while "one device:" not in output.read_text() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output.read_text()
    assert json.loads(out)["layouts"] == [] or layout.endswith("=1"), out
    assert "of 2 layouts were verified" in output.read_text()
    assert "Traceback" not in output.read_text()
