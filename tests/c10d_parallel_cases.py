"""More calls of torch's c10d API: autograd, functional collectives, tensor subclasses, modes, DDP, FSDP2, failures."""

import tempfile
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed import ReduceOp
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from c10d_cases import case, is_close, ones, total

_FUNCTIONAL, _AUTOGRAD = "functional collectives", "autograd"
_LISTENERS, _FAILURES = "tensor subclasses, modes and the profiler", "failures"
_DDP, _SHARDED = "DistributedDataParallel", "FSDP2, DTensor and checkpoints"


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def gradient_of(model: nn.Module, rank: int) -> Tensor:
    model(ones(2, 8) * (rank + 1)).sum().backward()
    return next(p.grad for p in model.parameters() if p.grad is not None)


def expected_gradient(world: int) -> Tensor:
    gradients = [gradient_of(network(), rank) for rank in range(world)]
    return torch.stack(gradients).mean(0)


@case(_AUTOGRAD, "a collective leaves version counters alone")
def version_counters(rank: int, world: int) -> None:
    leaf = ones(3).requires_grad_()
    activation = torch.relu(leaf * 2)
    dist.all_reduce(activation)
    activation.sum().backward()
    is_close(leaf.grad, [2.0] * 3)
    tensor, out = ones(3), torch.empty(3 * world)
    dist.broadcast(tensor, 0)
    dist.all_gather_into_tensor(out, tensor)
    strided = ones(2, 3).t()
    dist.all_reduce(strided)
    work = dist.isend(tensor, (rank + 1) % world)
    received = torch.empty(3)
    dist.recv(received, (rank - 1) % world)
    work.wait()
    assert [each._version for each in (tensor, out, strided, received)] == [0] * 4


@case(_AUTOGRAD, "a loss of a parameter that is distributed afterwards can still be differentiated")
def losses_of_replicas(rank: int, world: int) -> None:
    weight = ones(4, 4).requires_grad_()
    loss = (weight.view(16)[:8] * weight.view(16)[:8]).sum()
    distribute_tensor(weight, init_device_mesh("cpu", (world,)), [Replicate()])
    loss.backward()
    is_close(weight.grad, [[2.0] * 4] * 2 + [[0.0] * 4] * 2)


@case(_AUTOGRAD, "waiting outside of the `no_grad` or `inference_mode` of the call")
def waiting_outside(rank: int, world: int) -> None:
    parameter = nn.Parameter(ones(2, 3).t())
    with torch.no_grad():
        works = [dist.all_reduce(parameter, async_op=True)]
    with torch.inference_mode():
        tensors = [ones(3), ones(3, 2).t()]
        works += [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
    dist.all_reduce(tensors[0])
    for tensor, value in ((parameter, world), (tensors[0], world**2), (tensors[1], world)):
        assert (tensor == value).all()


@case(_AUTOGRAD, "messages in inference mode")
def messages_in_inference(rank: int, world: int) -> None:
    with torch.inference_mode():
        tensor, received = ones(3) * rank, torch.empty(3)
        work = dist.isend(tensor, (rank + 1) % world)
    dist.recv(received, (rank - 1) % world)
    work.wait()
    assert (received == (rank - 1) % world).all()


@case(_FUNCTIONAL, "all-reduce, all-gather, reduce-scatter, broadcast, all-to-all, coalesced ones")
def functional_collectives(rank: int, world: int) -> None:
    group: Any = dist.group.WORLD
    tensor = ones(2 * world) * (rank + 1)
    is_close(functional.all_reduce(tensor, "sum", group), [float(total(world))] * 2 * world)
    is_close(functional.all_gather_tensor(tensor, 0, group)[:: 2 * world], torch.arange(1.0, world + 1))
    is_close(functional.reduce_scatter_tensor(tensor, "sum", 0, group), [float(total(world))] * 2)
    is_close(functional.broadcast(tensor, 1, group), [2.0] * 2 * world)
    is_close(functional.all_to_all_single(tensor, None, None, group)[::2], torch.arange(1.0, world + 1))
    for each in functional.all_reduce_coalesced([tensor, tensor], "sum", group):
        is_close(each, [float(total(world))] * 2 * world)


@case(_FUNCTIONAL, "with autograd: all-reduce, all-gather, reduce-scatter, all-to-all")
def functional_autograd(rank: int, world: int) -> None:
    group: Any = dist.group.WORLD
    tensor = ones(world, 2).requires_grad_()
    gathered = functional.all_gather_tensor_autograd(tensor, 0, group)
    part = functional.reduce_scatter_tensor_autograd(tensor * 2, "sum", 0, group)
    exchanged = functional.all_to_all_single_autograd(tensor * 3, None, None, group)
    (gathered.sum() + part.sum() + exchanged.sum()).backward()
    is_close(tensor.grad, [[float(world + 2 + 3)] * 2] * world)
    tensor.grad = None
    functional.all_reduce(tensor * 2, "sum", group).sum().backward()
    is_close(tensor.grad, [[2.0 * world] * 2] * world)


@case(_FUNCTIONAL, "`all_gather_into_tensor_out`")
def functional_out(rank: int, world: int) -> None:
    operators, group, out = torch.ops._c10d_functional, dist.group.WORLD, torch.empty(2 * world)
    assert group is not None
    started = operators.all_gather_into_tensor_out(ones(2) * rank, world, group.group_name, out=out)
    is_close(operators.wait_tensor(started)[::2], torch.arange(float(world)))


@case(_FUNCTIONAL, "`torch.distributed.nn`: all-reduce, all-gather, broadcast, reduce, all-to-all with gradients")
def differentiable_collectives(rank: int, world: int) -> None:
    tensor = ones(world).requires_grad_()
    results = [
        differentiable.all_reduce(tensor * (rank + 1)),
        torch.cat(differentiable.all_gather(tensor)),
        differentiable.broadcast(tensor * 1, 0),
        differentiable.all_to_all_single(torch.empty(world), tensor * 3),
    ]
    torch.cat(results).sum().backward()
    is_close(tensor.grad, [float(world * (rank + 1) + world + world * (rank == 0) + 3)] * world)


def two(first: float, second: float, numel: int = 2) -> Any:
    return TwoTensor(torch.full((numel,), first), torch.full((numel,), second))


def is_two(value: Any, first: Any, second: Any) -> None:
    assert isinstance(value, TwoTensor)
    is_close(value.a, first)
    is_close(value.b, second)


_ONE_WAIT = "not always: torch waits for one of the inner tensors"


@case(_LISTENERS, "subclass with two inner tensors: all-reduce, broadcast", _ONE_WAIT)
def two_in_place(rank: int, world: int) -> None:
    tensor = two(1, 3)
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, ReduceOp.MAX, async_op=True).wait()
    is_two(tensor, [float(world)] * 2, [3.0 * world] * 2)
    tensor = two(rank, rank + 3)
    dist.broadcast(tensor, 1)
    is_two(tensor, [1.0] * 2, [4.0] * 2)


@case(_LISTENERS, "subclass: scatter, all-gather, all-to-all, messages", _ONE_WAIT)
def two_with_outputs(rank: int, world: int) -> None:
    out = two(-1, -1)
    dist.scatter(out, [two(each, each + 5) for each in range(world)] if rank == 0 else None, 0)
    is_two(out, [float(rank)] * 2, [rank + 5.0] * 2)
    out, ranks = two(-1, -1, 2 * world), torch.arange(float(world)).repeat_interleave(2)
    dist.all_gather_into_tensor(out, two(rank, rank + 3))
    is_two(out, ranks, ranks + 3)
    out = two(-1, -1, 2 * world)
    dist.all_to_all_single(out, two(rank, rank + 3, 2 * world))
    is_two(out, ranks, ranks + 3)
    if rank == 0:
        dist.send(two(6, 7), 1)
    elif rank == 1:
        dist.recv(out := two(0, 0), 0)
        is_two(out, [6.0] * 2, [7.0] * 2)


@case(_LISTENERS, "subclass in `distribute_tensor`", _ONE_WAIT)
def two_distributed(rank: int, world: int) -> None:
    whole: Any = TwoTensor(torch.arange(2.0 * world), torch.arange(2.0 * world) + 10)
    local = distribute_tensor(whole, init_device_mesh("cpu", (world,)), [Shard(0)])._local_tensor
    is_two(local, [2.0 * rank, 2 * rank + 1], [2.0 * rank + 10, 2 * rank + 11])


class Refusing(Tensor):
    """A wrapper without memory of its own, whose class handles no operator."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The case is about this refusal: torch's own subclasses raise it for operators that they do not know.
        raise NotImplementedError(f"{cls.__name__} does not handle {func}")


@case(_LISTENERS, "a subclass that handles no collective is refused by its class")
def refusing_subclass(rank: int, world: int) -> None:
    for call in (dist.all_reduce, lambda t: dist.broadcast(t, 0)):
        try:
            call(Refusing(ones(3)))
        except NotImplementedError as error:
            assert "c10d" in str(error)
            continue
        raise AssertionError("was not refused")


@case(_LISTENERS, "a subclass that only has another name")
def renamed_subclass(rank: int, world: int) -> None:
    class Renamed(Tensor):
        pass

    tensor, out = ones(3).as_subclass(Renamed), torch.empty(3 * world).as_subclass(Renamed)
    dist.all_reduce(tensor)
    dist.all_gather_into_tensor(out, tensor)
    assert out.tolist() == [world] * 3 * world and isinstance(out, Renamed)


@case(_LISTENERS, "`FakeTensorMode`: collectives and messages move nothing and do not wait")
def fake_tensors(rank: int, world: int) -> None:
    with FakeTensorMode():
        tensor, out = ones(3), torch.empty(3 * world)
        dist.all_reduce(tensor)
        dist.all_gather_into_tensor(out, tensor)
        dist.reduce_scatter_tensor(tensor, out, async_op=True).wait()
        dist.broadcast(tensor, 0)
        dist.barrier()
        if rank == 0:
            dist.send(tensor, 1)
    dist.all_reduce(tensor)
    dist.all_reduce(torch.ones(3, device="meta"))


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


@case(_LISTENERS, "dispatch modes see each collective and message, and nothing of how it is done")
def dispatch_modes(rank: int, world: int) -> None:
    following, received = (rank + 1) % world, torch.empty(4)
    tensor, out, part = ones(4), torch.empty(4 * world), torch.empty(4)
    with Seen() as seen:
        dist.all_reduce(tensor, async_op=True).wait()
        dist.broadcast(tensor, 0)
        dist.all_gather_into_tensor(out, tensor)
        dist.reduce_scatter_tensor(part, out, ReduceOp.MAX)
        work = dist.isend(part, following)
        dist.recv(received, (rank - 1) % world)
        work.wait()
    expected = ["allreduce_", "broadcast_", "_allgather_base_", "_reduce_scatter_base_", "send", "recv_"]
    assert seen.operators == [f"c10d.{name}" for name in expected], seen.operators
    is_close(received, [float(world)] * 4)


@case(_LISTENERS, "`CommDebugMode` counts collectives")
def comm_debug_mode(rank: int, world: int) -> None:
    with CommDebugMode() as counts:
        tensor, out = ones(4), torch.empty(4 * world)
        dist.all_reduce(tensor)
        dist.all_gather_into_tensor(out, tensor)
        dist.all_to_all_single(torch.empty(4 * world), out)
        functional.all_reduce(tensor, "sum", dist.group.WORLD)
    assert counts.get_total_counts() == 4 and tensor[0] == world


@case(_LISTENERS, "the profiler names collectives")
def profiler_events(rank: int, world: int) -> None:
    with profile() as profiler:
        dist.all_reduce(ones(4))
        dist.all_gather_into_tensor(torch.empty(4 * world), ones(4))
    names = {event.key for event in profiler.key_averages()}
    backend = dist.get_backend().rpartition(":")[-1]
    expected = {"c10d::allreduce_", "c10d::_allgather_base_", f"{backend}:all_reduce", f"{backend}:all_gather"}
    assert expected <= names, names


@case(_DDP, "gradients; with `no_sync`; with unused parameters")
def replicas(rank: int, world: int) -> None:
    is_close(gradient_of(DistributedDataParallel(network()), rank), expected_gradient(world))
    replica = DistributedDataParallel(network())
    with replica.no_sync():
        gradient_of(replica, rank)
    is_close(gradient_of(replica, rank), 2 * expected_gradient(world))


@case(_DDP, "the built-in float16 hook, in C++")
def built_in_float16_hook(rank: int, world: int) -> None:
    replica = DistributedDataParallel(network())
    replica._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    torch.testing.assert_close(gradient_of(replica, rank), expected_gradient(world), rtol=2e-3, atol=1e-3)


@case(_DDP, "hooks: float16, PowerSGD, a wrapped all-reduce")
def python_hooks(rank: int, world: int) -> None:
    power = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
    for state, hook in (
        (None, default_hooks.fp16_compress_hook),
        (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
        (power, powerSGD_hook.powerSGD_hook),
    ):
        replica = DistributedDataParallel(network())
        replica.register_comm_hook(state, hook)
        torch.testing.assert_close(gradient_of(replica, rank), expected_gradient(world), rtol=2e-3, atol=1e-3)


@case(_DDP, "`join` of uneven inputs")
def join(rank: int, world: int) -> None:
    replica = DistributedDataParallel(network())
    with replica.join():
        for _ in range(1 + rank):
            gradient_of(replica, 0)


def failure_of(call: Callable[[], object]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("nothing failed")


def short_group() -> Any:
    return dist.new_group(timeout=timedelta(seconds=2))


def is_named(message: str, words: Iterable[str]) -> None:
    if "gloo" not in dist.get_backend():
        assert all(word in message for word in words), message


@case(_FAILURES, "DDP's backward raises if a rank sleeps beyond the time limit")
def backward_without_a_rank(rank: int, world: int) -> None:
    replica = DistributedDataParallel(network(), process_group=short_group())
    if rank:
        time.sleep(4)
        return
    is_named(failure_of(lambda: gradient_of(replica, rank)), ["rank 0 in all-reduce", "rank 1 did not take part"])


@case(_FAILURES, "DDP's backward raises if a rank is in another collective")
def backward_beside_another_collective(rank: int, world: int) -> None:
    group = short_group()
    replica = DistributedDataParallel(network(), process_group=group)
    if rank:
        failure_of(lambda: dist.all_gather_into_tensor(torch.empty(2 * world), ones(2), group))
        return
    message = failure_of(lambda: gradient_of(replica, rank))
    is_named(message, ["rank 0 called all-reduce", "rank 1 called all-gather"])


@case(_FAILURES, "a future has the error of its collective")
def failed_future(rank: int, world: int) -> None:
    group = short_group()
    if rank:
        time.sleep(3)
        return
    future = dist.all_reduce(ones(2), group=group, async_op=True).get_future()
    is_named(failure_of(future.wait), ["rank 0 in all-reduce"])


@case(_FAILURES, "a time limit of one call")
def timeout_of_one_call(rank: int, world: int) -> None:
    group: Any = dist.new_group()
    if rank:
        time.sleep(3)
        return
    start = time.monotonic()
    failure_of(lambda: group.allreduce(ones(2), timeout=timedelta(seconds=1)).wait())
    assert time.monotonic() - start < 2.5


@case(_SHARDED, "FSDP2 with a mesh")
def sharded(rank: int, world: int) -> None:
    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    gradient = gradient_of(model, rank)
    assert isinstance(gradient, DTensor)
    is_close(gradient.full_tensor(), expected_gradient(world))


@case(_SHARDED, "FSDP2's `set_allocate_memory_from_process_group_for_comm`")
def sharded_with_memory_of_the_group(rank: int, world: int) -> None:
    model: Any = network()
    fully_shard(model)
    model.set_allocate_memory_from_process_group_for_comm(True)
    gradient: Any = gradient_of(model, rank)
    is_close(gradient.full_tensor(), expected_gradient(world))


@case(_SHARDED, "states of models and optimizers, broadcast from rank 0")
def broadcast_states(rank: int, world: int) -> None:
    model = network()
    full = {name: value.clone() + 1 for name, value in model.state_dict().items()}
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    gradient_of(model, rank)
    optimizer.step()
    options = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    states.set_model_state_dict(model, dict(full) if rank == 0 else {}, options=options)
    whole = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    optimizer_state = states.get_optimizer_state_dict(model, optimizer, options=whole)
    states.set_optimizer_state_dict(model, optimizer, optimizer_state if rank == 0 else {}, options=options)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        is_close(parameter.full_tensor(), full[name])


def shared_folder() -> str:
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, 0)
    return str(folder[0])


@case(_SHARDED, "checkpoints of torch, written while the ranks go on")
def asynchronous_checkpoints(rank: int, world: int) -> None:
    mesh, folder = init_device_mesh("cpu", (world,)), shared_folder()
    saved = {"x": distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])}
    started: Any = dcp.async_save(saved, checkpoint_id=folder)
    started.result()
    loaded = {"x": distribute_tensor(torch.zeros(8), mesh, [Shard(0)])}
    dcp.load(loaded, checkpoint_id=folder)
    is_close(loaded["x"].full_tensor(), torch.arange(8.0))
