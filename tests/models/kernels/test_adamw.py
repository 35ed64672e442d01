"""AdamW in Triton, under its interpreter, against the definition of its authors in float64."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from math import sqrt
from typing import Any
from unittest.mock import patch

import pytest
import torch
from gpu_checks.kernel_patches import kernels_forced, launches_replaced, recorded_launches
from torch import Tensor, nn

from kernel_recorder import KernelRecorder
from motet.models.kernels import choice
from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.parallel.data_parallel.flat_parameters import LocalShard
from motet.parallel.layout import LayoutSettings, resolve_layout
from motet.parallel.process.process_group import RankGroup
from motet.parallel.step_plan.plan import make_step_plan
from motet.precision.recipe import RECIPES
from motet.train.optimizer import one_pass_adamw, replayed_calls
from motet.train.optimizer.module_plan import model_inventory
from motet.train.optimizer.optimizer_settings import OptimizerSettings
from motet.train.optimizer.replayed_calls import Capture
from motet.train.optimizer.sharded_optimizer import ShardedOptimizer, build_sharded_optimizer
from triton_interpreter import Interpreted

RATE, DECAY, BETAS, EPS = 0.01, 0.1, (0.9, 0.999), 1e-8


def definition(numbers: list[float], step: int, *, rate: float, decay: float) -> list[float]:
    """The parameter, mean and square after one step of Loshchilov and Hutter's algorithm 2, in Python's float64."""
    p, g, m, v = numbers
    m = BETAS[0] * m + (1 - BETAS[0]) * g
    v = BETAS[1] * v + (1 - BETAS[1]) * g * g
    unbiased, unbiased_square = m / (1 - BETAS[0] ** step), v / (1 - BETAS[1] ** step)
    return [p - rate * unbiased / (sqrt(unbiased_square) + EPS) - rate * decay * p, m, v]


def check_one_update(size: int, step: int, gradient_dtype: torch.dtype, master_dtype: torch.dtype) -> None:
    from motet.models.kernels.triton_adamw import update_adamw

    scale, error = 0.25, {torch.float64: 1e-12, torch.float32: 4e-6}[master_dtype]
    master, mean, square = (torch.randn(size, dtype=master_dtype) for _ in range(3))
    gradient, square = torch.randn(size, dtype=torch.float64).to(gradient_dtype), square.square()
    mean, square = (torch.zeros_like(mean), torch.zeros_like(square)) if step == 1 else (mean, square)
    columns = (master.double(), gradient.double() * scale, mean.double(), square.double())
    rows = [definition([*numbers], step, rate=RATE, decay=DECAY) for numbers in zip(*map(Tensor.tolist, columns))]  # noqa: B905
    expected = torch.tensor(rows, dtype=torch.float64).T
    compute = torch.zeros(size, dtype=torch.float16)
    hyperparameters = torch.tensor([RATE, DECAY, *BETAS, EPS, scale], dtype=torch.float64)
    update_adamw(
        master, gradient, [mean, square], numbers=hyperparameters, step=torch.tensor(float(step)), compute=compute
    )
    for ours, theirs in zip((master, mean, square), expected, strict=True):
        assert (ours - theirs).abs().max() <= error * max(1.0, theirs.abs().max())
    assert torch.equal(compute, master.to(torch.float16))


@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize("size", [1, 5, 1001, 3000])
def test_an_update_equals_the_definition(interpreted: Interpreted, size: int, step: int) -> None:
    interpreted(check_one_update, size, step, torch.float64, torch.float64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("step", [1, 1000])
def test_gradients_have_any_dtype(interpreted: Interpreted, dtype: torch.dtype, step: int) -> None:
    interpreted(check_one_update, 77, step, dtype, torch.float32)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm, self.last = nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)


def forward_and_backward(optimizer: ShardedOptimizer, net: nn.Module, step: int) -> None:
    """Begin a step whose gradients differ by element and step."""
    optimizer.begin_step()
    optimizer.sharded_parameters.begin_backward(is_first=True, is_last=True)
    for parameter in net.parameters():
        ramp = torch.arange(parameter.numel(), dtype=torch.float64).view_as(parameter)
        ((0.5 + ramp / 7).to(parameter.dtype) * step * parameter).sum().backward()
    optimizer.sharded_parameters.end_backward()


def optimizer_of(net: nn.Module, recipe: str, zero: int) -> ShardedOptimizer:
    groups = ({"match": ("last.*",), "learning_rate_scale": 0.5, "weight_decay": 0.3},)
    tree: dict[str, Any] = {"learning_rate": RATE, "betas": BETAS, "weight_decay": DECAY, "groups": groups}
    settings = OptimizerSettings.model_validate(tree)
    alone, communication = RankGroup(0, 1, None, torch.device("cpu")), CommunicationSettings()
    layout, inventory = resolve_layout(LayoutSettings(zero=zero), 1, 1), model_inventory(net, settings)
    plan = make_step_plan(inventory, layout, RECIPES[recipe], settings=communication, batch_sequences=1)
    return build_sharded_optimizer(net, plan, settings, RECIPES[recipe], group=alone, communication=communication)


def expected_after(values: Tensor, steps: int, *, rate: float, decay: float) -> Tensor:
    """Parameters after steps with the gradients of `check_steps`."""
    results = []
    for index, value in enumerate(values.flatten().tolist()):
        p, m, v = value, 0.0, 0.0
        for step in range(1, steps + 1):
            gradient = (0.5 + index / 7) * step * 0.25
            p, m, v = definition([p, gradient, m, v], step, rate=rate, decay=decay)
        results.append(p)
    return torch.tensor(results, dtype=torch.float64).view_as(values)


def check_steps(recipe: str, zero: int) -> None:
    """Several groups, decays and steps through the optimizer of a rank; parameters compute in another dtype."""
    net = Net().to(getattr(torch, RECIPES[recipe].master))
    before = {name: parameter.detach().double() for name, parameter in net.named_parameters()}
    with kernels_forced("triton"):
        optimizer = optimizer_of(net, recipe, zero)
    sharded = optimizer.sharded_parameters
    cast = [engine.flat_parameters for engine in sharded.engines]
    for flat in cast:
        flat.cast_masters = None  # type: ignore[assignment]  # The update writes parameters, and nothing casts
    for step in range(1, 4):
        forward_and_backward(optimizer, net, step)
        with recorded_launches() as launches, optimizer.capture_gradients() as captured:
            optimizer.update(RATE, gradient_scale=0.25)
        assert len(launches) == len(sharded.optimizer_groups) == len(captured)
    state, wide = optimizer.state(), RECIPES[recipe].compute == "float64"
    for name, values in before.items():
        scale, decay = (0.5, 0.3) if name.startswith("last") else (1.0, DECAY if values.ndim > 1 else 0.0)
        expected = expected_after(values, 3, rate=RATE * scale, decay=decay)
        shard = state[f"master/{name}"]
        assert isinstance(shard, LocalShard)
        master = shard.values.view_as(expected)
        assert (master - expected).abs().max() <= (1e-12 if wide else 3e-4)
        parameter = net.get_parameter(name)
        assert parameter.dtype == getattr(torch, RECIPES[recipe].compute)
        if recipe == "bf16":  # The interpreter cuts bits off where a device rounds
            torch.testing.assert_close(parameter.detach().float(), master, rtol=2**-7, atol=0)
        else:
            assert torch.equal(parameter, master.to(parameter.dtype))


@pytest.mark.parametrize(("recipe", "zero"), [("fp64", 0), ("bf16", 0), ("fp16", 2), ("fp64", 1)])
def test_the_optimizer_of_a_rank_updates_and_casts_in_one_pass(
    interpreted: Interpreted, recipe: str, zero: int
) -> None:
    interpreted(check_steps, recipe, zero)


def test_a_gpu_takes_the_kernel_for_large_masters() -> None:
    rows = choice._matching_rows("adamw", "cuda", "float32", name="")
    assert next(name for least, name in rows if least <= 2**22) == "triton"
    assert choice.chosen("adamw", torch.zeros(2**20)) == "torch"


def test_numbers_go_to_a_gpu_without_a_wait_of_the_host() -> None:
    """A copy from memory that is not pinned waits. There is no GPU here: the calls of the tensor are noted."""
    calls = list[Any]()

    class Numbers:
        device = torch.device("cuda")

        def pin_memory(self) -> "Numbers":
            calls.append("pinned")
            return self

        def copy_(self, numbers: Any, **options: bool) -> None:
            calls.append((numbers, options))

    target: Any = Numbers()
    numbers: Any = Numbers()
    one_pass_adamw._fill(target, numbers)
    assert calls == ["pinned", (numbers, {"non_blocking": True})]
    one_pass_adamw._fill(target := torch.zeros(2), torch.ones(2))
    assert target.tolist() == [1, 1]


# --- updates that are replayed -----------------------------------------------------------------------

STEPS = 8


def state_after(
    recipe: str, zero: int, event: str, capture: Capture | None, recorder: KernelRecorder
) -> dict[str, Tensor]:
    """Parameters, masters, moments and counts after steps of which each has another rate and scale."""
    net = Net().to(getattr(torch, RECIPES[recipe].master))
    with (
        kernels_forced("triton"),
        launches_replaced(recorder.launch),
        patch.object(one_pass_adamw, "cuda_graph_capture", lambda device: capture),
    ):
        optimizer = optimizer_of(net, recipe, zero)
        sharded, moved = optimizer.sharded_parameters, list[Tensor]()

        def update_elsewhere(gradients: Mapping[int, Tensor]) -> None:
            moved.extend(gradient.clone() for gradient in gradients.values())
            optimizer._update_masters(dict(zip(gradients, moved[-len(gradients) :], strict=True)))

        for step in range(1, STEPS + 1):
            forward_and_backward(optimizer, net, step)
            if event == "load" and step == 4:
                for shard in optimizer.state().values():
                    (shard.values if isinstance(shard, LocalShard) else shard).mul_(2)
                optimizer.sync_parameters()
            moves = event == "move" and step == 4
            sharded.set_optimizer(update_elsewhere if moves else optimizer._update_masters)
            optimizer.update(RATE * step, gradient_scale=1 / (1 + step))
    counted = {
        name: shard.values if isinstance(shard, LocalShard) else shard for name, shard in optimizer.state().items()
    }
    assert counted["step"] == (STEPS + 3 if event == "load" else STEPS)  # 3 is doubled before update 4
    return {**counted, **{f"parameter {name}": values.detach() for name, values in net.named_parameters()}}


def check_replays(recipe: str, zero: int, event: str) -> tuple[int, int]:
    """The numbers of captures and replays of steps with the bits of steps without them."""
    recorder = KernelRecorder()

    def fail(function: Callable[[], None]) -> Callable[[], None]:
        recorder.capture(function)
        raise RuntimeError("no capture")

    with pytest.warns(match="no capture") if event == "fail" else nullcontext():
        replayed = state_after(recipe, zero, event, fail if event == "fail" else recorder.capture, recorder)
    expected = state_after(recipe, zero, event, None, KernelRecorder())
    assert replayed.keys() == expected.keys()
    assert all(torch.equal(values, expected[name]) for name, values in replayed.items())
    return recorder.captures, recorder.replays


@pytest.mark.parametrize(("event", "captures", "replays"), [("", 1, 7), ("load", 1, 7), ("move", 2, 5), ("fail", 1, 0)])
@pytest.mark.parametrize(("recipe", "zero"), [("fp64", 0), ("bf16", 2)])
def test_updates_are_replayed_with_the_same_bits(
    interpreted: Interpreted, recipe: str, zero: int, event: str, captures: int, replays: int
) -> None:
    assert interpreted(check_replays, recipe, zero, event) == (captures, replays)


def check_measured_update() -> None:
    from gpu_checks.in_place_kernels import measure_update

    recorder = KernelRecorder()
    with (
        patch.object(one_pass_adamw, "_update_adamw", partial(recorder.start, one_pass_adamw._update_adamw)),
        patch.object(replayed_calls, "cuda_graph_capture", lambda device: recorder.capture),
    ):
        assert measure_update("cpu")["is_same"] and recorder.captures == 1 and recorder.replays


def test_the_gpu_script_compares_a_replayed_update(interpreted: Interpreted) -> None:
    interpreted(check_measured_update)
