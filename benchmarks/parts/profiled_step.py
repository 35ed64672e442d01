"""The time of the kernels of a step on one CPU rank, by kind."""

import statistics
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch.autograd.profiler_util import FunctionEvent

    from motet.train.step import TrainStep

_PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm")
_ATTENTION = "aten::_scaled_dot_product"
_LOSS = "_FusedLinearCrossEntropy"
_OPTIMIZER = "Optimizer.step"


class KernelSeconds(NamedTuple):
    """Seconds of one step."""

    products: float  # Products and fused attention
    loss: float  # The loss without its products
    optimizer: float
    others: float


def profiled_times(step: "TrainStep", rounds: int) -> KernelSeconds:
    """The fastest quarter of some steps after the first two."""
    from torch.profiler import ProfilerActivity, profile

    times = list[KernelSeconds]()
    for round_ in range(rounds + 2):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            step.step(round_, 1e-4)
        times.append(_by_kind(profiler.events()))
    return KernelSeconds(*(statistics.quantiles(each, n=4)[0] for each in zip(*times[2:], strict=True)))


def _by_kind(events: "list[FunctionEvent]") -> KernelSeconds:
    seconds = dict.fromkeys(KernelSeconds._fields, 0.0)
    for event in events:
        seconds[_kind(event)] += event.self_cpu_time_total * 1e-6
    return KernelSeconds(**seconds)


def _kind(event: "FunctionEvent") -> str:
    if event.name in _PRODUCTS or event.name.startswith(_ATTENTION):
        return "products"
    above: FunctionEvent | None = event
    while above is not None:
        if above.name.startswith(_OPTIMIZER):
            return "optimizer"
        if above.name == _LOSS:
            return "loss"
        above = above.cpu_parent
    return "others"
