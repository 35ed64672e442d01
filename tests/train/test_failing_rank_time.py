"""A rank that fails ends the run within five seconds, while the other waits for it in a collective."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from environment import uncounted
from train.runs import TEXT

MODULE = """
import os, signal, time
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head, self.calls = nn.Embedding(260, 16), nn.Linear(16, 260), 0
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, tokens):
        self.calls += 1
        if self.calls == 4 and os.environ["MOTET_RANK"] == "1":
            open("failed", "w").write(str(time.time()))
            HOW
        hidden = self.table(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)
"""
HOW = {
    "an exception": ("raise KeyError('planted')", "KeyError: 'planted'"),
    "a signal": ("os.kill(os.getpid(), signal.SIGKILL)", "signal 9"),
}


UNENDING = """
import os, sys, threading, time
from motet.parallel.process.launch_environment import RankEnvironment
from motet.train.launch.rank_process import run_supervised_rank

def fail(*_):
    threading.Thread(target=time.sleep, args=(600,)).start()
    raise KeyError("planted")

sys.modules["unending"] = sys.modules["__main__"]
rank = RankEnvironment(0, 1, 0, 1, 0, f"file://{os.getcwd()}/store")
sys.exit(run_supervised_rank(rank, os.getppid(), "unending:fail", []))
"""


def test_a_rank_that_fails_ends_although_a_thread_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, "-c", UNENDING]
    assert subprocess.run(command, cwd=tmp_path, env=uncounted(), timeout=120).returncode == 3


@pytest.mark.parametrize(
    ("how", "layout"),
    [
        pytest.param("a signal", "layout.dp=2", marks=pytest.mark.proof),
        *(pytest.param(how, "layout.pp=2", marks=pytest.mark.proof) for how in HOW),
        pytest.param("an exception", "layout.dp=2", marks=pytest.mark.proof),
    ],
)
def test_a_failing_rank_ends_the_run_soon(tmp_path: Path, how: str, layout: str) -> None:
    code, reason = HOW[how]
    (tmp_path / "their_model.py").write_text(MODULE.replace("HOW", code))
    command = [
        *(sys.executable, "-m", "motet", "train", "tiny", "model={factory='their_model:Model', vocab_size=260}"),
        *(f"data.source={TEXT}", "data.tokenizer=bytes", "data.sequence_length=32", "run.ranks=2", "run.threads=1"),
        *(layout, "run.device=cpu", "monitor.sample_tokens=0", "monitor.tensorboard=false", "run.folder=run"),
    ]
    done = subprocess.run(command, cwd=tmp_path, env=uncounted(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 3, done.stderr
    seconds = time.time() - float((tmp_path / "failed").read_text())
    assert done.returncode == 3, done.stderr
    assert "rank 1" in done.stderr and reason in done.stderr and seconds < 5.0
