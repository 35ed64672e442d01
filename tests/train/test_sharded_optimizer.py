"""Updates on flat tensors equal torch's own optimizers on the parameters one by one."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from motet.core.errors import InputError
from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.parallel.data_parallel.flat_parameters import LocalShard
from motet.parallel.layout import LayoutSettings, resolve_layout
from motet.parallel.process.process_group import RankGroup
from motet.parallel.step_plan.plan import make_step_plan
from motet.precision.recipe import RECIPES
from motet.train.build import build_components, precision_context
from motet.train.job import Job
from motet.train.optimizer.compact_moments_optimizer import BitwiseReproducibleOptimizer
from motet.train.optimizer.module_plan import group_parameters, model_inventory
from motet.train.optimizer.optimizer_settings import OptimizerSettings
from motet.train.optimizer.sharded_optimizer import ShardedOptimizer, build_sharded_optimizer, make_torch_optimizer
from ranks import Ranks
from train.runs import small_job


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 5)
        self.norm = nn.LayerNorm(5)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(5, 7)
        self.head.weight = self.table.weight  # tied

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.table(tokens))).square().sum()


def _net() -> _Net:
    torch.manual_seed(1)
    return _Net().double()


def _settings(**changes: object) -> OptimizerSettings:
    return OptimizerSettings.model_validate({"learning_rate": 0.01, **changes})


def _updater(net: nn.Module, settings: OptimizerSettings, recipe: str = "fp64") -> ShardedOptimizer:
    alone, communication = RankGroup(0, 1, None, torch.device("cpu")), CommunicationSettings()
    layout, inventory = resolve_layout(LayoutSettings(), 1, 1), model_inventory(net, settings)
    plan = make_step_plan(inventory, layout, RECIPES[recipe], settings=communication, batch_sequences=1)
    return build_sharded_optimizer(net, plan, settings, RECIPES[recipe], group=alone, communication=communication)


def _begin(updater: ShardedOptimizer) -> None:
    updater.sharded_parameters.begin_step()
    updater.sharded_parameters.begin_backward(is_first=True, is_last=True)


def _torch_optimizer(net: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    wide = [p for p in net.parameters() if p.ndim > 1]
    narrow = [p for p in net.parameters() if p.ndim == 1]
    groups = [{"params": wide, "weight_decay": settings.weight_decay}, {"params": narrow, "weight_decay": 0.0}]
    if settings.name == "adamw":
        return torch.optim.AdamW(groups, lr=0.01, betas=settings.betas, eps=settings.eps)
    return torch.optim.SGD(groups, lr=0.01, momentum=settings.momentum, nesterov=settings.nesterov)


@pytest.mark.parametrize("changes", [{}, {"momentum": 0.0}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}])
def test_equals_torch_over_several_steps(changes: dict[str, object]) -> None:
    settings = _settings(**changes, name="sgd" if changes else "adamw")
    ours, theirs = _net(), _net()
    updater, optimizer = _updater(ours, settings), _torch_optimizer(theirs, settings)
    for step in range(4):
        tokens = torch.arange(step, step + 3)
        _begin(updater)
        for _ in range(2):  # two micro-batches
            ours(tokens).backward()
        updater.sharded_parameters.end_backward()
        optimizer.zero_grad(set_to_none=False)
        for parameter in theirs.parameters():
            parameter.grad = torch.zeros_like(parameter)
        (2 * theirs(tokens)).backward()
        expected = math.sqrt(sum(p.grad.norm().item() ** 2 for p in theirs.parameters() if p.grad is not None))
        assert math.sqrt(updater.squared_norm()) == pytest.approx(expected, rel=1e-14)
        updater.update(0.01)
        optimizer.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-15)


def test_a_gradient_of_the_step_before_is_not_used_again() -> None:
    net = _net()
    updater = _updater(net, _settings())
    for module in (net, net.unused):
        _begin(updater)
        (net(torch.arange(3)) if module is net else net.unused(torch.ones(3, dtype=torch.float64)).sum()).backward()
        updater.sharded_parameters.end_backward()
    grads = updater.sharded_parameters.local_shards(updater.sharded_parameters.local_gradients())
    assert grads["table.weight"].values.abs().max() == 0 and grads["unused.weight"].values.abs().min() == 1


def test_bfloat16_keeps_small_updates_in_the_master() -> None:
    net = nn.Linear(4, 4, bias=False)
    nn.init.ones_(net.weight)
    updater = _updater(net, _settings(weight_decay=0.0), "bf16")
    assert net.weight.dtype == torch.bfloat16
    for _ in range(4):
        _begin(updater)
        net(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        updater.sharded_parameters.end_backward()
        updater.update(1e-3)  # below half a unit in the last place of bfloat16 at 1.0
    master = updater.sharded_parameters.local_shards(updater.sharded_parameters.local_masters)["weight"].values
    torch.testing.assert_close(master, torch.full((16,), 1 - 4e-3), rtol=0, atol=1e-6)
    assert net.weight.dtype == torch.bfloat16 and net.weight.max() < 1  # four of them together are seen
    assert updater.sharded_parameters.local_gradients()[0].dtype == torch.float32


def _values(part: LocalShard | torch.Tensor) -> torch.Tensor:
    return part if isinstance(part, torch.Tensor) else part.values


def test_state_restores_bit_for_bit() -> None:
    settings, net = _settings(), _net()
    updater = _updater(net, settings)

    def step(module: nn.Module, its: ShardedOptimizer) -> None:
        _begin(its)
        module(torch.arange(4)).backward()
        its.sharded_parameters.end_backward()
        its.update(0.01)

    step(net, updater)
    saved = {name: _values(part).clone() for name, part in updater.state().items()}
    step(net, updater)
    other = _net()
    fresh = _updater(other, settings)
    state = fresh.state()
    assert state.keys() == saved.keys()
    for name, part in state.items():
        _values(part).copy_(saved[name])
    fresh.sync_parameters()
    step(other, fresh)
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_groups_by_pattern_first_match_counts() -> None:
    norms = {"match": ("norm.*",), "weight_decay": 0.5, "learning_rate_scale": 2.0}
    groups = group_parameters(_net(), _settings(groups=(norms, {"match": ("*.bias",), "learning_rate_scale": 3.0})))
    assert {key: list(members) for key, members in groups.items()} == {
        (1.0, 0.1): ["table.weight", "unused.weight"],
        (2.0, 0.5): ["norm.weight", "norm.bias"],
        (3.0, 0.1): ["unused.bias", "head.bias"],
    }


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(InputError, match=r"matches 'nomr\.\*'; names look like table\.weight"):
        group_parameters(_net(), _settings(groups=({"match": ("nomr.*",)},)))


KINDS = {
    "adamw": OptimizerSettings(weight_decay=0.1),
    "sgd": OptimizerSettings(name="sgd", weight_decay=0.1),
    "momentum": OptimizerSettings(name="sgd", momentum=0.9),
    "nesterov": OptimizerSettings(name="sgd", momentum=0.9, nesterov=True),
}
COUNT, STEPS = 140_003, 4


def stepped(kind: str, dtype: torch.dtype, cuts: Sequence[int] = (), *, torchs: bool = False) -> torch.Tensor:
    settings, draw = KINDS[kind], torch.Generator().manual_seed(5)
    start, *gradients = (torch.randn(COUNT, generator=draw, dtype=dtype) for _ in range(1 + STEPS))
    parameters = [torch.nn.Parameter(part.clone()) for part in start.tensor_split(list(cuts))]
    group = [{"params": parameters, "weight_decay": settings.weight_decay, "lr": 0.003}]
    optimizer = make_torch_optimizer(group, settings) if torchs else BitwiseReproducibleOptimizer(group, settings)
    for parameter in [] if torchs else parameters:
        names = ["momentum_buffer"] if settings.name == "sgd" else ["exp_avg", "exp_avg_sq"]
        optimizer.state[parameter].update({name: torch.zeros_like(parameter) for name in names}, step=torch.zeros(()))
    for gradient in gradients:
        for parameter, part in zip(parameters, gradient.tensor_split(list(cuts)), strict=True):
            parameter.grad = part.clone()
        optimizer.step()
    return torch.cat([parameter.detach() for parameter in parameters])


@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_torchs(kind: str) -> None:
    ours, theirs = (stepped(kind, torch.float64, torchs=which) for which in (False, True))
    assert (ours - theirs).norm() < 1e-14 * theirs.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_cuts_change_no_bit(kind: str, dtype: torch.dtype) -> None:
    whole = stepped(kind, dtype)
    for cuts in ([1], [7, 8, 1000], list(range(3, COUNT, 371))):
        assert torch.equal(stepped(kind, dtype, cuts), whole)


def test_fused_kernels_read_the_count_of_steps_in_float32(ranks: Ranks, tmp_path: Path) -> None:
    (dtypes,) = ranks.run(1, _dtypes_of_counts, small_job(tmp_path))
    assert dtypes == {torch.float32}  # The job computes in float64


def _dtypes_of_counts(group: RankGroup, job: Job) -> set[torch.dtype]:
    with precision_context(job):
        parts = build_components(job, group, Path(job.data.cache or "") / "run")
        parts.make_train_step(job).step(0, 0.001)
        states = parts.engine.optimizer._optimizer.state.values()
        return {state["step"].dtype for state in states}
