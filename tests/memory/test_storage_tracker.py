"""Live bytes, their peak and their categories, against cases that are counted by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from motet.core.trace import span
from motet.memory.measured_costs import StepBytes
from motet.memory.memory_timeline import Category, MemoryTimeline
from motet.memory.storage_tracker import AllocatorBytes, StepCategories, StorageTracker, tensors_reachable_from

ROWS, WIDTH = 8, 16
MATRIX, VECTOR, WEIGHT = 4 * ROWS * WIDTH, 4 * WIDTH, 4 * WIDTH * WIDTH


def tracked(module: nn.Module, x: Tensor, forward: Callable[[], Tensor], backward: bool = True) -> MemoryTimeline:
    """One step with a forward and a backward; the input exists before it."""
    tracker = StepCategories({child: name for name, child in module.named_children()})
    with tracker.watching():
        tracker.begin_step([("parameters", [*module.parameters()]), ("other state", [x])])
        with span("forward"):
            loss = forward()
        if backward:
            with span("backward"):
                loss.backward()  # type: ignore[no-untyped-call]
        tracker.assign("gradients", [p.grad for p in module.parameters() if p.grad is not None])
        return tracker.end_step()


def peaks(timeline: MemoryTimeline) -> dict[Category, int]:
    return {category: timeline.peak_of(category) for category in timeline.bytes_by_category}


def squared(module: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    return lambda: module(x).square().sum()


def test_a_linear_layer() -> None:
    """The input existed before. Forward leaves the output, which square saves, and the loss; backward makes the
    gradient of the output, and gradients of weight and bias."""
    module, x = nn.Sequential(nn.Linear(WIDTH, WIDTH)), torch.ones(ROWS, WIDTH)
    timeline = tracked(module, x, squared(module, x))
    counted = peaks(timeline)
    assert counted["parameters"] == counted["gradients"] == WEIGHT + VECTOR
    assert counted["saved activations"] == MATRIX + 4
    assert timeline.by_operator("saved activations") == {"addmm": MATRIX, "sum": 4}
    assert {life.block for life in timeline.lives if life.operator == "addmm"} == {"0"}
    assert [phase.name for phase in timeline.phases] == ["forward", "backward"]
    assert timeline.before_step("parameters") == timeline.total[0] - MATRIX == WEIGHT + VECTOR


def test_views_and_changes_in_place_count_once() -> None:
    module, x = nn.Linear(WIDTH, WIDTH, bias=False), torch.ones(ROWS, WIDTH)

    def forward() -> Tensor:
        y = module(x)
        y.view(-1)[:WIDTH].add_(1)
        result: Tensor = y.t().tanh_().view(WIDTH, ROWS)[:2].sum()
        return result

    assert tracked(module, x, forward).by_operator("saved activations") == {"mm": MATRIX, "sum": 4}


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_a_checkpointed_block(is_recomputed: bool) -> None:
    """Three activation functions keep three tensors, or recomputation makes them again."""
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Tanh(), nn.Tanh())
    module, x = nn.ModuleList([block]), torch.ones(ROWS, WIDTH, requires_grad=True)

    def forward() -> Tensor:
        h = x * 2
        y: Tensor = checkpoint(block, h, use_reentrant=False) if is_recomputed else block(h)
        return y.sum()

    counted, tanhs = peaks(tracked(module, x, forward)), 3 * MATRIX
    if is_recomputed:  # The input
        assert counted["saved activations"] == MATRIX + 4
        assert counted["recomputed activations"] >= tanhs
    else:  # The input, and the results of the functions
        assert counted["saved activations"] == MATRIX + tanhs + 4
        assert "recomputed activations" not in counted


def test_a_tensor_that_is_kept_though_it_should_not_be_is_seen() -> None:
    module, x, leak = nn.Linear(WIDTH, WIDTH), torch.ones(ROWS, WIDTH), list[Tensor]()

    def leaking() -> Tensor:
        y = module(x)
        leak.append(y + 1)
        return y.sum()

    assert peaks(tracked(module, x, lambda: module(x).sum()))["saved activations"] == 4
    assert peaks(tracked(module, x, leaking))["saved activations"] == 4 + MATRIX


def test_what_comes_and_goes_is_workspace() -> None:
    module, x = nn.Linear(WIDTH, WIDTH), torch.ones(ROWS, WIDTH)

    def forward() -> Tensor:
        with torch.no_grad():
            torch.ones(1000).sum()
        return module(x).sum()

    timeline = tracked(module, x, forward, backward=False)
    assert timeline.peak_of("workspace") == 4 * 1000 + 4 and timeline.bytes_by_category["workspace"][-1] == 0


def test_storages_that_are_resized() -> None:
    """A gathered parameter, as FSDP2 frees and allocates it without a kernel."""
    module = nn.Linear(WIDTH, WIDTH)
    tracker, tensor = StepCategories(), torch.empty(1000)
    with tracker.watching():
        tracker.begin_step([("other state", [tensor])])
        tensor.untyped_storage().resize_(0)
        torch.empty_like(tensor)
        assert tracker.live("other state") == 0
        tensor.untyped_storage().resize_(4000)
        torch.empty_like(tensor)
        assert tracker.live("other state") == 4000
        module(torch.ones(ROWS, WIDTH))
    assert tracker.end_step().bytes_by_category["other state"].count(0) > 0


def test_storages_that_are_empty_when_a_tracker_begins() -> None:
    """Parameters that were gathered before, and are gathered again without a kernel."""
    gathered = [torch.empty(1000), torch.empty(500)]
    for tensor in gathered:
        tensor.untyped_storage().resize_(0)
    with StorageTracker(tensors_reachable_from(gathered)) as tracker:
        assert tracker.live() == 0
        for tensor in gathered:
            tensor.untyped_storage().resize_(tensor.numel() * 4)
        small = torch.empty(1)
        assert tracker.live() == tracker.peak() == 6000 + small.nbytes


def test_tensors_inside_of_a_tensor() -> None:
    """A wrapper, such as moments in 8 bits with their scales, has the memory of what it holds."""
    tracker, moments = StepCategories(), TwoTensor(torch.ones(1000), torch.ones(1000))
    with tracker.watching():
        tracker.begin_step([("moments", [moments])])
        assert tracker.live("moments") == 2 * 4000
        with span("forward"):
            kept = TwoTensor(torch.ones(500), torch.ones(500)) * 2
        assert tracker.live("saved activations") == 2 * 2000
        del kept
        assert tracker.live("saved activations") == 0


def test_a_timeline_survives_json() -> None:
    module, x = nn.Linear(WIDTH, WIDTH), torch.ones(ROWS, WIDTH)
    timeline = tracked(module, x, squared(module, x))
    values: dict[str, Any] = timeline.as_json()
    assert MemoryTimeline.from_json(values) == timeline
    columns = [*timeline.columns(7)]
    assert len(columns) == 7 and max(sum(sizes.values()) for _, sizes in columns) == timeline.peak


def test_live_bytes_and_their_peak() -> None:
    """Known tensors and results of kernels count once, until they are freed."""
    known, layer = torch.ones(100), nn.Linear(WIDTH, WIDTH)
    with StorageTracker([known, known[1:], layer.weight]) as tracker, torch.no_grad():
        assert tracker.live() == tracker.peak() == 400 + WEIGHT
        known.add_(1)
        tracker.reset_peak()
        y = layer(torch.ones(ROWS, WIDTH)).relu_().view(-1)
        assert tracker.live() == 400 + WEIGHT + MATRIX
        assert tracker.peak() == 400 + WEIGHT + 2 * MATRIX
        assert tracker.made[torch.ops.aten.addmm.default] == MATRIX
        del y
        tracker.reset_peak()
        assert tracker.peak() == tracker.live() == 400 + WEIGHT
        y = torch.ones(10)
        y.resize_(1000)
        assert tracker.live() == 400 + WEIGHT + 4000
    torch.ones(1000)
    assert tracker.peak() == 400 + WEIGHT + 4000


def test_memory_that_no_kernel_makes_is_not_counted() -> None:
    """Such as that of a transport, also where a kernel writes to it and returns it."""
    outside = torch.ones(1000)
    with StorageTracker() as tracker:
        halves = [outside.add_(1).view(2, -1), *outside.split(500)]
        assert tracker.live() == 0
        halves.append(outside[:500] * 2)
        assert tracker.live() == tracker.peak() == 2000
    assert len(halves) == 4


def test_a_later_timeline_counts_what_the_first_one_knew_and_kernels_made() -> None:
    """A plain tracker, which began when the first one did, counts the same."""
    known = [torch.ones(100)]
    categories, plain = StepCategories(), StorageTracker(known)
    with plain, categories.watching():
        categories.begin_step([("parameters", known)])
        no_kernel, by_kernel = torch.frombuffer(bytearray(800), dtype=torch.int64), torch.ones(50)
        categories.begin_step([("parameters", known), ("other state", [no_kernel, by_kernel])])
        no_kernel.add_(1)
        timeline = categories.end_step()
    assert peaks(timeline) == {"parameters": 400, "other state": 200} and timeline.total[-1] == plain.live() == 600


@pytest.mark.parametrize("is_gpu", [False, True])
def test_products_of_a_block(monkeypatch: pytest.MonkeyPatch, is_gpu: bool) -> None:
    """Kernels of forwards are watched also where an allocator counts live bytes."""
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    layer, x = nn.Linear(WIDTH, WIDTH), torch.ones(ROWS, WIDTH)
    step = StepBytes(AllocatorBytes(torch.device("cuda")) if is_gpu else StorageTracker())
    step.begin()
    for block in range(2):
        with step.forward(block):
            layer(layer(x) if block else x).relu() * 2
    step.end()
    assert step.products == {0: MATRIX, 1: 2 * MATRIX}
