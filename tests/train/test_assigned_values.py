"""Parameters that a user changes between the steps of a module that is parallelized."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import motet
from motet.core.errors import InputError
from motet.parallel.process.process_group import RankGroup
from motet.train.engine import TrainingEngine
from ranks import Ranks
from refusals import refused


def small() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Linear(3, 5))


def layer(module: nn.Module, number: int) -> nn.Linear:
    found = list(module.children())[number]
    assert isinstance(found, nn.Linear)
    return found


def squares(module: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    return module(x).square().sum(), len(x)


def scale(module: nn.Module) -> None:
    with torch.no_grad():
        layer(module, 0).weight.mul_(3)


def load(module: nn.Module) -> None:
    module.load_state_dict({name: value * 2 + 1 for name, value in module.state_dict().items()})


def assign(module: nn.Module) -> None:
    weight = layer(module, 2).weight
    weight.data = torch.full(weight.shape, 0.5, dtype=weight.dtype)


def swap(module: nn.Module) -> None:
    one, other = layer(module, 2).weight, layer(module, 3).weight
    one.data, other.data = other.data.t(), one.data.t()


def nothing(module: nn.Module) -> None:
    """Leave parameters as after an evaluation with other values that were restored."""
    kept = {name: value.clone() for name, value in module.state_dict().items()}
    load(module)
    module.load_state_dict(kept)


EDITS = {"scale": scale, "load": load, "assign": assign, "swap": swap, "nothing": nothing}
SGD = {"name": "sgd", "learning_rate": 0.01, "clip_norm": None}


def train(group: RankGroup, layout: str, precision: str, edit: str, communication: dict[str, str]) -> list[Tensor]:
    """The masters after three steps, the last of which comes after an edit, if any."""
    module = small().double() if precision == "fp64" else small()
    how = {"precision": precision, "optimizer": SGD, "communication": communication}
    engine = motet.parallelize(module, layout, loss=squares, **how)
    for step in range(3):
        rows = torch.randn(4, 4, generator=torch.Generator().manual_seed(step)).to(next(module.parameters()).dtype)
        engine.step(rows.chunk(group.world)[group.rank])
        if step == 1 and edit:
            engine.synchronize()
            EDITS[edit](module)
            engine.load_assigned_values()
    with engine.consensus_parameters():
        held = engine.optimizer.sharded_parameters.local_shards(engine.optimizer.sharded_parameters.local_masters)
        return [*(p.detach().clone() for p in module.parameters()), *(piece.values.clone() for piece in held.values())]


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("layout", ["zero=0", "zero=1", "zero=2"])
def test_training_goes_on_from_what_was_adopted(ranks: Ranks, layout: str, edit: str) -> None:
    (wanted,) = ranks.run(1, train, "", "fp64", edit, {})
    for manner in {}, {"overlap": "forward"}:
        for found in ranks.run(2, train, layout, "fp64", edit, manner):
            for ours, theirs in zip(found[:6], wanted[:6], strict=True):
                assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("layout", ["zero=0", "zero=2"])
def test_masters_apart_from_the_model_follow_it(ranks: Ranks, layout: str) -> None:
    """0.5 is far from what the weights were; one small step does not lead back. What was not changed keeps its bits."""
    for found in ranks.run(2, train, layout, "bf16", "assign", {}):
        assert (found[2] - 0.5).abs().max() < 0.1
    both = (ranks.run(2, train, layout, "bf16", edit, {}) for edit in ("nothing", ""))
    for ours, theirs in zip(*both, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def renormalised(group: RankGroup, limit: float | None) -> list[Tensor]:
    """A module that changes its own weights in forward is no edit of a user."""
    torch.manual_seed(1)
    module = nn.Embedding(5, 3, max_norm=limit)
    how = {"precision": "bf16", "optimizer": SGD, "communication": {"overlap": "forward"}}
    engine = motet.parallelize(module, "zero=1", loss=squares, **how)
    for _ in range(4):
        engine.step(torch.arange(5))
    engine.synchronize()
    return list(engine.optimizer.sharded_parameters.local_masters)


def test_a_module_may_change_its_weights_in_forward(ranks: Ranks) -> None:
    for masters in ranks.run(2, renormalised, 100.0):
        assert all(not torch.equal(master, master.bfloat16().float()) for master in masters if master.any())


def underway(group: RankGroup) -> str:
    module = small()
    engine = motet.parallelize(module, "zero=1", loss=squares, communication={"overlap": "forward"})
    for _ in range(2):
        engine.step(torch.ones(2, 4))
    scale(module)
    with pytest.raises(InputError) as refusal:
        engine.load_assigned_values()
    return str(refusal.value)


def freeze_one(group: RankGroup) -> str:
    module = small()
    engine = motet.parallelize(module, "zero=3", loss=squares)
    engine.step(torch.ones(2, 4))
    freeze(module)
    with pytest.raises(InputError) as refusal:
        engine.step(torch.ones(2, 4))
    return str(refusal.value)


@pytest.mark.parametrize(
    ("work", "sentence"),
    [
        (underway, 'load_assigned_values: with communication.overlap = "forward" some values were still arriving'),
        (freeze_one, "parameter 0.weight was replaced, added, frozen or released"),
    ],
)
def test_all_ranks_refuse_it(ranks: Ranks, work: Callable[[RankGroup], str], sentence: str) -> None:
    assert all(said.startswith(sentence) for said in ranks.run(2, work))


def parallelized() -> tuple[nn.Module, TrainingEngine]:
    module = small()
    return module, motet.parallelize(module, loss=squares)


def test_other_memory_must_be_adopted() -> None:
    module, engine = parallelized()
    assign(module)
    with pytest.raises(InputError, match=r"2.weight was given other memory .*; call engine\.load_assigned_values\(\)"):
        engine.step(torch.ones(2, 4))
    engine.load_assigned_values()
    assert engine.step(torch.ones(2, 4)).is_finite


def test_replicas_apart_do_not_adopt() -> None:
    engine = motet.parallelize(small(), loss=squares, outer={"every": 2})
    refused("load_assigned_values: independent replicas", engine.load_assigned_values)


def replace(module: nn.Module) -> None:
    layer(module, 0).weight = nn.Parameter(torch.ones(5, 4))


def freeze(module: nn.Module) -> None:
    layer(module, 0).weight.requires_grad_(False)


def add(module: nn.Module) -> None:
    module.more = nn.Parameter(torch.ones(3))


@pytest.mark.parametrize(("change", "name"), [(replace, "0.weight"), (freeze, "0.weight"), (add, "more")])
def test_other_parameters_are_refused(change: Callable[[nn.Module], None], name: str) -> None:
    module, engine = parallelized()
    engine.step(torch.ones(2, 4))
    change(module)
    refused(f"parameter {name} was replaced, added, frozen or released", engine.step, torch.ones(2, 4))


def test_another_shape_is_refused() -> None:
    module, engine = parallelized()
    layer(module, 0).weight.data = torch.ones(5, 5)
    refused(r"0.weight is \[5, 5\] on cpu, but was \[5, 4", engine.load_assigned_values)


def test_parameters_may_get_other_names() -> None:
    module, engine = parallelized()
    module.register_module("0", nn.Sequential(layer(module, 0)))
    assert engine.step(torch.ones(2, 4)).is_finite
