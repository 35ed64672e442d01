"""`motet verify` as a person uses it: what it prints, how it ends, and what is left."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from environment import uncounted
from motet.core.errors import EXIT_CODES
from motet.parity.layout_verdict import LayoutVerdict, exit_code_for, failed_verdict
from waiting import until

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
SERVED = "dp=2 data=parameter_server server.count=1"
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
        return self.head(self.inner(self.embedding(tokens)) * (1.001 if ranks == 2 else 1.0))
"""


LARGE_MODEL = """
from dataclasses import replace
from torch import nn
from motet.parallel.tensor_parallel.vocabulary.rank_vocabulary import RankVocabularyShard

from_spec = RankVocabularyShard.from_spec

def in_15_bits(spec, dim, *, group):
    shard = from_spec(spec, dim, group=group)
    shift = shard.start - shard.start % 2**15
    return replace(shard, start=shard.start - shift, stop=shard.stop - shift)

RankVocabularyShard.from_spec = staticmethod(in_15_bits)

class Large(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.embedding, self.inner = nn.Embedding(vocab_size, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, vocab_size)

    def forward(self, tokens):
        return self.head(self.inner(self.embedding(tokens)))
"""


def command(folder: Path, *words: str) -> list[str]:
    (folder / "small.toml").write_text(JOB)
    (folder / "model.py").write_text(MODEL)
    return [sys.executable, "-m", "motet", "verify", "small.toml", *words, "--json"]


def test_what_is_the_same_what_is_wrong_and_what_fails(tmp_path: Path) -> None:
    layouts = ["dp=2", "dp=3 zero=1", "dp=1 microbatches=2", "dp=1 shard_group=2"]
    words = command(tmp_path, *(word for layout in layouts for word in ("--layout", layout)))
    done = subprocess.run(words, cwd=tmp_path, env=uncounted(), capture_output=True, text=True, timeout=120)
    found: list[dict[str, Any]] = json.loads(done.stdout)["layouts"]
    refused, *found = found
    assert refused["layout"] == "dp=1 shard_group=2" and refused["failed"]
    assert [each["layout"] for each in found] == ["dp=1 microbatches=2", "dp=2", "dp=3 zero=1"]
    assert [(each["ok"], each["failed"]) for each in found] == [(True, False), (False, False), (False, True)]
    same, wrong, fails = found
    assert 0 < same["worst_relative"] < 1e-12 and "ValueError: not with three" in fails["cause"]
    assert wrong["first_difference"] == "activation head, step 1"
    assert done.returncode == 6, done.stderr
    assert "motet verify" in EXIT_CODES[6] and "same   dp=1 microbatches=2" in done.stderr
    assert "model.py" in done.stderr, "the traceback"


@pytest.mark.proof  # The same mistake is planted in one process in tests/parity/test_small_vocabulary.py
def test_a_mistake_that_needs_a_large_vocabulary_is_found_in_the_head_alone(tmp_path: Path) -> None:
    words = [*command(tmp_path, "--layout", "dp=1 tp=2"), "data.tokenizer=bpe:70001"]
    settings = 'factory = "large:Large"\narguments = {vocab_size = 70001}'
    (tmp_path / "small.toml").write_text(JOB.replace('factory = "model:Model"', settings))
    (tmp_path / "large.py").write_text(LARGE_MODEL)
    done = subprocess.run(words, cwd=tmp_path, env=uncounted(), capture_output=True, text=True, timeout=120)
    report = json.loads(done.stdout)
    ((layout,), (head,)) = report["layouts"], report["heads"]
    assert layout["ok"] and layout["layout"] == "dp=1 tp=2", done.stderr
    assert not head["ok"] and (head["entries"], head["ranks"]) == (70_001, 2), done.stderr
    assert "with a vocabulary of 513 entries in place of 70,001" in done.stderr
    assert "WRONG  head of 70,001 entries on tp=2: first in vectors" in done.stderr
    assert done.returncode == 6, done.stderr


def test_how_it_is_told() -> None:
    same = LayoutVerdict("dp=2", True, 1e-16, "loss, step 1", worst_bound=1e-12, activations=70)
    broken = failed_verdict("dp=3", "rank 1 failed: no", 3)
    wrong = LayoutVerdict("dp=4", False, 0.5, "loss, step 1", "loss, step 1", 2, "halved")
    assert [exit_code_for(each) for each in ([same], [same, broken], [broken, wrong])] == [0, 3, 6]
    assert str(same).startswith("same   dp=2: largest difference 1.0e-16 of 1e-12 allowed (")
    in_bf16 = replace(same, worst_z=3.21, worst_z_tensor="loss", recipe="bf16")
    assert "of 1e-12 allowed; in bf16 3.2 of 8 allowed (" in str(in_bf16)
    assert in_bf16.details() == ["largest difference: loss, step 1", "largest in bf16: loss"]
    assert str(broken).startswith("FAILED dp=3: rank 1 failed: no (")
    assert str(wrong).startswith("WRONG  dp=4: first in loss, step 1 on rank 2: halved (")
    noisy = replace(same, noise_dominated=("a", "b"))
    assert "; 68 of 70 activations compared (why not the others: --verbose) (" in str(noisy)
    assert noisy.details()[1:] == [f"not compared, since rounding alone changes it: {name}" for name in "ab"]


@pytest.mark.parametrize(
    ("layout", "number", "after"),
    [
        ("dp=2 zero=2", signal.SIGINT, "one device:"),
        pytest.param("dp=2 zero=2", signal.SIGTERM, "a model is made", marks=pytest.mark.proof),
        pytest.param(SERVED, signal.SIGINT, "one device:", marks=pytest.mark.proof),
    ],
)
def test_ctrl_c_ends_it(tmp_path: Path, layout: str, number: signal.Signals, after: str) -> None:
    words = ("--layout", layout, "--layout", "dp=2 zero=1")
    output, left = tmp_path / "stderr.txt", tmp_path / "left"
    left.mkdir()
    environment = {**uncounted(), "TMPDIR": str(left)}
    verify, pipe = command(tmp_path, *words), subprocess.PIPE
    with output.open("wb") as stderr:
        process = subprocess.Popen(verify, cwd=tmp_path, env=environment, stdout=pipe, stderr=stderr)
    end = time.monotonic() + 60
    while after not in output.read_text() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.1)
    started = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output.read_text()
    assert json.loads(out)["layouts"] == [] or layout.endswith("=1"), out
    assert "of 2 layouts were verified" in output.read_text() and "Traceback" not in output.read_text()
    assert list(left.glob("motet-*")) == []  # torch has a cache of its own there
    until(lambda: not any(each.is_running() for each in started))
