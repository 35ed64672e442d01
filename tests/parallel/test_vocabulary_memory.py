"""The loss of a large vocabulary needs little memory beside weights and gradients, as measured in fresh processes."""

import subprocess
import sys
from pathlib import Path

import pytest

TOKENS, HIDDEN, ENTRIES = 8192, 1024, 131_072
LOGITS = TOKENS * ENTRIES * 4  # 4 GiB in float32

_MEASUREMENT = """
import re, sys
import torch
from motet.models.arch.loss import linear_cross_entropy
from motet.parallel.process.launch_environment import RankEnvironment
from motet.parallel.process.process_group import start_process_group
from motet.parallel.tensor_parallel.vocabulary.rank_vocabulary import RankVocabularyShard

rank, world, tokens, hidden, entries = map(int, sys.argv[1:6])

def resident(name):
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10

torch.set_num_threads(1)
place = RankEnvironment(rank, world, rank, world, attempt=0, rendezvous="file://" + sys.argv[6])
with start_process_group(place, "cpu", 500.0) as group:
    width = entries // world
    shard = RankVocabularyShard(rank * width, rank * width + width, entries, group) if world > 1 else None
    def case(tokens, width):
        torch.manual_seed(rank)
        weight = (torch.randn(width, hidden) / 32).requires_grad_()
        torch.manual_seed(world)
        return torch.randn(tokens, hidden).requires_grad_(), weight, torch.randint(0, entries, (tokens,))
    def run(x, weight, targets):
        loss = linear_cross_entropy(x, weight, None, targets=targets % (len(weight) * world),
            weights=torch.ones(len(x)), vocabulary=shard)
        loss.backward()
        return loss.item()
    warm = case(64, width)  # so that libraries have loaded what they need
    run(*warm)
    del warm
    x, weight, targets = case(tokens, width)
    before = resident("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
    value = run(x, weight, targets)
    print(resident("VmHWM") - before - x.grad.nbytes - weight.grad.nbytes, value)
"""


def _peaks(world: int, store: Path) -> list[int]:
    arguments = [*map(str, (world, TOKENS, HIDDEN, ENTRIES)), str(store)]
    processes = [
        subprocess.Popen([sys.executable, "-c", _MEASUREMENT, str(rank), *arguments], stdout=subprocess.PIPE, text=True)
        for rank in range(world)
    ]
    outputs = [process.communicate(timeout=1200)[0].split() for process in processes]
    assert len({value for _, value in outputs}) == 1
    return [int(peak) for peak, _ in outputs]


@pytest.mark.proof
@pytest.mark.parametrize("world", [1, 2])
def test_the_peak_is_at_most_an_eighth_of_the_logits(world: int, tmp_path: Path) -> None:
    assert max(_peaks(world, tmp_path / "store")) <= LOGITS // 8
