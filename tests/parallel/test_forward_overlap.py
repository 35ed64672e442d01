"""`overlap = "forward"`: parameters arrive beside the next forward, in the order in which it needs them."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import motet
from motet.parallel.data_parallel.bucketed_zero import BucketedDataParallel
from motet.parallel.process.process_group import RankGroup
from motet.precision.float64_mode import use_float64
from motet.train.engine import TrainingEngine
from motet.train.pipeline.custom_batches import LossFunction
from ranks import Ranks

HOW = {"overlap": "forward", "bucket_mib": 0.0001, "first_bucket_mib": 0.0001}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.middle = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))
        return scores


def inside(net: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    return net(x).square().sum(), len(x)


def engine_of(zero: int, rank: int) -> TrainingEngine:
    torch.manual_seed(0)
    settings = {"optimizer": {"learning_rate": 0.01, "clip_norm": 1e9}, "communication": HOW}
    return motet.parallelize(Net().double(), f"zero={zero}", loss=inside, precision="fp64", **settings)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


def underway(group: RankGroup, zero: int) -> tuple[list[list[str]], list[Tensor]]:
    """The parameters that are underway after each of three steps, in order; and what the module is in the end."""
    engine = engine_of(zero, group.rank)
    (spread,) = engine.optimizer.sharded_parameters.engines
    assert isinstance(spread, BucketedDataParallel)
    names = [[member.name for member in bucket.members] for bucket in spread.flat_parameters.buckets]
    found = []
    for step in range(3):
        engine.step(batch(step, group.rank))
        found.append([name for number in spread._pending_gathers for name in names[number]])
    engine.synchronize()
    assert not spread._pending_gathers
    return found, [p.detach().clone() for p in engine.module.parameters()]


def alone(loss: LossFunction) -> list[Tensor]:
    torch.manual_seed(0)
    net = Net().double()
    groups = [{"params": [p], "weight_decay": 0.1 if p.ndim > 1 else 0.0} for p in net.parameters()]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
    for step in range(3):
        optimizer.zero_grad()
        total, count = loss(net, torch.cat([batch(step, 0), batch(step, 1)]))
        (total / count).backward()
        optimizer.step()
    return [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_parameters_arrive_in_the_order_of_the_forward(ranks: Ranks, zero: int) -> None:
    for found, parameters in ranks.run(2, underway, zero):
        order = [f"{layer}.{kind}" for layer in ("first", "middle", "last") for kind in ("weight", "bias")]
        assert found == [order] * 3
        torch.testing.assert_close(parameters, alone(inside), rtol=1e-12, atol=1e-14)


def uses_early(group: RankGroup) -> str:
    """A loss that from the second step on uses a weight before the module that it was seen in."""
    engine = engine_of(1, group.rank)
    engine.step(batch(0, group.rank))
    engine.loss_function = lambda module, x: F.linear(x.requires_grad_(), module.last.weight).sum() + module(x).sum()
    try:
        engine.step(batch(1, group.rank))
    except RuntimeError as error:
        return str(error)
    return ""


def outside(net: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    """It reads, before any module is called, what autograd does not keep."""
    return net(x + net.last.weight[0] + net.middle.bias).square().sum(), len(x)


def reads_outside(group: RankGroup) -> list[Tensor]:
    engine = engine_of(1, group.rank)
    engine.loss_function = outside
    for step in range(3):
        engine.step(batch(step, group.rank))
    engine.synchronize()
    return [p.detach().clone() for p in engine.module.parameters()]


def test_what_is_used_before_any_module_is_waited_for(ranks: Ranks) -> None:
    for parameters in ranks.run(2, reads_outside):
        torch.testing.assert_close(parameters, alone(outside), rtol=1e-12, atol=1e-14)


def test_what_was_used_too_early_is_noticed(ranks: Ranks) -> None:
    for said in ranks.run(2, uses_early):
        assert "modified by an inplace operation" in said


def one_step(group: RankGroup) -> int:
    """How many modes are left on torch's stack after the step in which uses are found out."""
    engine = engine_of(1, group.rank)
    with use_float64():
        engine.step(batch(0, group.rank))
        engine.synchronize()
    return torch._C._len_torch_function_stack()


def test_what_watches_the_first_step_leaves_with_it(ranks: Ranks) -> None:
    assert ranks.run(2, one_step) == [0, 0]
