"""The examples of `parallelize` in docs/guide/data-parallelism.md, as they are written there, on one and two ranks."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from environment import uncounted
from guide_blocks import run_script
from motet.parallel.process.launch_environment import RankEnvironment
from ranks import Ranks

PAGE = Path(__file__).parents[2] / "docs/guide/data-parallelism.md"
READERS = """
import torch
from torch import nn


class MyModel(nn.Sequential):
    def __init__(self):
        torch.manual_seed(3)
        super().__init__(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def my_batches(rank):
    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        x, y = torch.randn(12, 8, generator=generator), torch.randint(4, (12,), generator=generator)
        yield {"x": x[rank :: dist.get_world_size()].double(), "y": y[rank :: dist.get_world_size()]}


"""
STEP_BY_HAND = """
learning_rate, microbatches = 3e-4, [batch]
with torch.no_grad():
    total = torch.stack([value.double(), torch.tensor(float(count))])
dist.all_reduce(total)
total_loss, total_count = total.tolist()
"""


@pytest.fixture(scope="module")
def examples() -> list[str]:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2 and blocks[0].count('precision="bf16"') == 1
    return [blocks[0].replace('precision="bf16"', 'precision="fp64"'), blocks[1]]


def run(folder: Path, ranks: int, text: str) -> list[list[str]]:
    folder.mkdir(exist_ok=True)
    (folder / "example.py").write_text(READERS + text + "\ndist.destroy_process_group()\n")
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--local-ranks-filter=0"]
    command, environment = [sys.executable, *command, "example.py"], {**uncounted(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def run_alone(place: RankEnvironment, folder: Path, text: str) -> list[list[str]]:
    """Run the example as torchrun would on one rank."""
    folder.mkdir(exist_ok=True)
    output = run_script(place, folder, READERS + text + "\ndist.destroy_process_group()\n", 0)
    return [line.split() for line in output.splitlines()]


def test_the_example_trains_the_same_on_two_ranks_and_goes_on(
    ranks: Ranks, tmp_path: Path, examples: list[str]
) -> None:
    text, by_hand = examples
    (one,) = ranks.run_places(1, run_alone, tmp_path / "one", text)
    two = run(tmp_path / "two", 2, text)
    assert [line[0] for line in one] == ["0", "1", "2"]
    for (_, *alone), (_, *divided) in zip(one, two, strict=True):
        assert [float(word) for word in divided] == pytest.approx([float(word) for word in alone], rel=1e-12, abs=0)
    # The run goes on, on one rank, and then does another step on the last batch by its parts.
    value = "value, count = loss(model, batch)"
    goes_on = text.replace("engine.save", "assert first == 3 and engine.save")
    (more,) = ranks.run_places(1, run_alone, tmp_path / "two", goes_on + value + STEP_BY_HAND + by_hand)
    assert [line[0] for line in more] == ["3", "4", "5"]
    assert float(more[0][1]) < float(two[0][1])  # the batches are the same, the parameters are not
