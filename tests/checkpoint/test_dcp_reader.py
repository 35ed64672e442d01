"""torch's Distributed Checkpoint loads a checkpoint of motet, whole and sharded, with equal bits."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

import motet
from checkpoint.forged import State, save_state
from checkpoint.test_saving import STRANGE
from motet.parallel.process.process_group import RankGroup
from ranks import Ranks


def load(state: dict[str, Any], where: Path, **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It warns of a single process
        dcp.load(state, storage_reader=motet.checkpoint_dcp_reader(where), no_dist=True, **options)


def make_training() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    model[2].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), 1e-3, fused=True)
    for _ in range(3):
        model(torch.randn(5, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """The tensors under motet's names."""
    trained = dict(model.named_parameters())
    state = {("master/" if p.requires_grad else "frozen/") + name: p.detach() for name, p in trained.items()}
    state |= {f"buffer/{name}": buffer for name, buffer in model.named_buffers()}
    for name, parameter in trained.items():
        moments = optimizer.state.get(parameter, {})
        state |= {f"{kind}/{name}": moments[kind] for kind in ("exp_avg", "exp_avg_sq") if kind in moments}
    return {name: tensor.clone() for name, tensor in state.items()} | {"step": torch.tensor(3.0)}


def test_tensors_of_any_kind_are_loaded_by_their_names(tmp_path: Path) -> None:
    where = save_state(tmp_path, 4, STRANGE)
    state = {name: torch.zeros_like(tensor) for name, tensor in STRANGE.items()}
    load(state, where)
    assert all(state[name].equal(tensor) for name, tensor in STRANGE.items())


def test_a_module_and_its_optimizer_are_loaded(tmp_path: Path) -> None:
    trained = state_of(*make_training())
    save_state(tmp_path, 3, trained)
    model, optimizer = make_training()
    load(
        state := {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)},
        tmp_path,
        planner=dcp.DefaultLoadPlanner(allow_partial_load=True),
    )
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    assert all(tensor.equal(trained[name]) for name, tensor in state_of(model, optimizer).items())
    assert len(trained) == 20 and all(each["step"] == 3 for each in optimizer.state.values())


def test_the_state_dict_of_a_module_alone_is_loaded(tmp_path: Path) -> None:
    trained = state_of(*make_training())
    where = save_state(tmp_path, 3, trained)
    model, _ = make_training()
    load(model.state_dict(), where)
    assert model[0].weight.equal(trained["master/0.weight"]) and model[2].bias.equal(trained["frozen/2.bias"])


def _load_sharded(group: RankGroup, where: str) -> list[torch.Tensor]:
    """Rows and columns, of which ranks hold unequal numbers."""
    mesh = init_device_mesh("cpu", (group.world,))
    state = {
        "master/a": distribute_tensor(torch.zeros(7, 5), mesh, [Shard(0)]),
        "master/b": distribute_tensor(torch.zeros(4, 7), mesh, [Shard(1)]),
    }
    dcp.load(state, storage_reader=motet.checkpoint_dcp_reader(where))
    assert all(isinstance(tensor, DTensor) for tensor in state.values())
    return [tensor.full_tensor() for tensor in state.values()]


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_load_their_shards(ranks: Ranks, tmp_path: Path, world: int) -> None:
    saved = {"master/a": torch.randn(7, 5), "master/b": torch.randn(4, 7)}
    where = save_state(tmp_path, 1, saved)
    for loaded in ranks.run(world, _load_sharded, str(where)):
        assert all(tensor.equal(saved[name]) for name, tensor in zip(saved, loaded, strict=True))
