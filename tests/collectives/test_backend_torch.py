"""torch's own parallelism gives on the backend `motet` what it gives on Gloo, at 2, 3 and 4 ranks, in float64."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import motet.collectives.shm_backend  # noqa: F401  (registers it)
from environment import needs_torch_2_13
from motet.parallel.process.launch_environment import RankEnvironment
from ranks import Ranks

Results = dict[str, Tensor]


def model(width: int = 12, layers: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, 24), nn.Tanh(), nn.Linear(24, width)) for _ in range(layers)]
    return nn.Sequential(*blocks).double()


def batch(rank: int, width: int = 12, rows: int = 6) -> Tensor:
    return torch.randn(rows, width, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def trained(parallel: nn.Module, given: Tensor, steps: int = 2) -> Results:
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
    for _ in range(steps):
        parallel(given).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    parameters = parallel.named_parameters()
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for name, p in parameters}


def replicated(rank: int, world: int) -> Results:
    ddp = DistributedDataParallel(model(), bucket_cap_mb=0.001)
    with ddp.no_sync():
        ddp(batch(rank + world)).square().mean().backward()
    return trained(ddp, batch(rank))


def sharded(rank: int, world: int, reshard: bool | int, hybrid: bool) -> Results:
    mesh = init_device_mesh("cpu", (world // 2, 2) if hybrid else (world,), mesh_dim_names=("a", "b")[: 1 + hybrid])
    whole = model()
    for block in whole:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(whole, mesh=mesh, reshard_after_forward=reshard)
    results = trained(whole, batch(rank))
    whole(batch(rank)).sum().backward()
    results["norm"] = nn.utils.clip_grad_norm_(whole.parameters(), 1.0).full_tensor()
    return results


def split_tensors(rank: int, world: int) -> Results:
    mesh, whole = init_device_mesh("cpu", (world,)), model()
    plan = {f"{i}.{j}": kind() for i in range(2) for j, kind in ((0, ColwiseParallel), (2, RowwiseParallel))}
    results = trained(parallelize_module(whole, mesh, plan), batch(0))
    spread = distribute_tensor(torch.arange(35.0).view(7, 5), mesh, [Shard(0)])
    results["resharded"] = spread.redistribute(placements=[Shard(1)]).full_tensor() @ torch.eye(5)
    return results


def pipelined(rank: int, world: int, name: str) -> Results:
    kind: Any = schedules.get_schedule_class(name)
    v_shaped = name in ("ZBVZeroBubble", "DualPipeV")
    local = 1 if issubclass(kind, schedules.PipelineScheduleSingle) else 2
    numbers = [rank, 2 * world - 1 - rank] if v_shaped else [rank + i * world for i in range(local)]
    blocks, device = model(layers=local * world), torch.device("cpu")
    stages = [PipelineStage(blocks[number], number, local * world, device) for number in numbers]
    all_stages = stages[0] if local == 1 else stages
    schedule: Any = kind(all_stages, 2 * world, loss_fn=lambda out, target: (out - target).square().mean())
    given, target = batch(0, rows=4 * world), batch(1, rows=4 * world)
    losses: list[Tensor] = []
    results: Results = {}
    arguments = (given,) if 0 in numbers else ()
    schedule.step(*arguments, **({"target": target, "losses": losses} if local * world - 1 in numbers else {}))
    for number in numbers:
        results |= {f"{number}.{name}": p.grad.clone() for name, p in blocks[number].named_parameters()}
    return results | {"losses": torch.stack([loss.detach() for loss in losses])} if losses else results


def saved_and_loaded(rank: int, world: int, folder: str) -> Results:
    mesh = init_device_mesh("cpu", (world,))
    state = {"x": distribute_tensor(batch(0), mesh, [Shard(0)]), "step": torch.tensor(3)}
    folder = f"{folder}/{dist.get_backend()}".replace(":", "-")
    if rank == 0:
        Path(folder).mkdir()
    dist.barrier()
    dcp.save(state, checkpoint_id=folder)
    x, step = distribute_tensor(torch.zeros(6, 12, dtype=torch.float64), mesh, [Shard(1)]), torch.tensor(0)
    dcp.load({"x": x, "step": step}, checkpoint_id=folder)
    assert torch.equal(x.full_tensor(), batch(0))
    return {"x": x.to_local(), "step": step}


def on_both(place: RankEnvironment, function: Callable[..., Results], *args: Any) -> None:
    found = {}
    for backend in ("gloo", "cpu:motet"):
        store = dist.FileStore(f"{place.rendezvous.removeprefix('file://')}-{backend[-5:]}", place.world)
        timeout = timedelta(seconds=40)
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world, timeout=timeout)
        try:
            found[backend] = function(place.rank, place.world, *args)
            dist.barrier()
        finally:
            dist.destroy_process_group()
    assert found["gloo"].keys() == found["cpu:motet"].keys() and found["gloo"]
    for name, expected in found["gloo"].items():
        torch.testing.assert_close(found["cpu:motet"][name], expected, rtol=1e-12, atol=1e-13)


_TO_ITSELF = needs_torch_2_13("a pipeline over Gloo cannot send from a rank to itself")
CASES = [
    *((world, function, ()) for function in (replicated, split_tensors) for world in (2, 3)),
    *(pytest.param(4, function, (), marks=pytest.mark.proof) for function in (replicated, split_tensors)),
    *((2, sharded, (True, False)), (3, sharded, (False, False)), (4, sharded, (2, False))),
    *(pytest.param(4, sharded, how, marks=pytest.mark.proof) for how in ((True, True), (False, True))),
    *((2, pipelined, (name,)) for name in ("GPipe", "LoopedBFS", "InterleavedZeroBubble")),
    *(pytest.param(2, pipelined, (name,), marks=_TO_ITSELF) for name in ("ZBVZeroBubble", "DualPipeV")),
    *((3, pipelined, ("1F1B",)), (4, pipelined, ("Interleaved1F1B",))),
]


@pytest.mark.parametrize(("world", "function", "arguments"), CASES)
def test_replicas_split_tensors_sharding_and_pipelines(
    ranks: Ranks, world: int, function: Callable[..., Results], arguments: tuple[Any, ...]
) -> None:
    ranks.run_places(world, on_both, function, *arguments)


@pytest.mark.parametrize("world", [2, 3])
def test_checkpoints(ranks: Ranks, tmp_path: Path, world: int) -> None:
    ranks.run_places(world, on_both, saved_and_loaded, str(tmp_path))
