"""Kernels that overwrite their inputs: the losses of a block of logits, and the update of masters."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from gpu_checks.speed_rows import compiled, seconds_of, seconds_of_ways

_VOCABULARY = {"cuda": 128256, "cpu": 129}
_MAX_ROWS = 4096  # Of a block of logits
_WIDTH = {"cuda": 4096, "cpu": 40}  # Elements of a master for each token
MASTERS = {"cuda": 300, "cpu": 3}
_MASTER_ELEMENTS = {"cuda": 65536, "cpu": 40}  # Few: launches take longer than the kernels
_CALLS = 20
# Of the largest value: two roundings of a narrow dtype; in float32 sums over a row are in another order.
ROUNDING = {"bfloat16": 2**-6, "float16": 2**-9, "float32": 2**-16}
_BETAS, _EPS, _RATE, _DECAY, _SCALE = (0.9, 0.95), 1e-8, 1e-3, 0.1, 0.5


class _Ways(NamedTuple):
    """The work of torch and of a kernel on copies of the same tensors."""

    make: Callable[[], "list[Any]"]
    torch: Callable[["list[Any]"], object]
    triton: Callable[["list[Any]"], object]
    nbytes: int  # That have to be read and written once
    elements: int


def _losses(device: str, tokens: int) -> _Ways:
    import torch

    from motet.models.arch import loss
    from motet.models.kernels.triton_cross_entropy import losses_of_rows

    rows, entries = min(tokens, _MAX_ROWS), _VOCABULARY[device]
    logits = torch.randn(rows, entries, device=device, dtype=torch.bfloat16)
    targets = torch.randint(entries, (rows,), device=device)
    return _Ways(
        lambda: [logits.clone()],
        lambda tensors: loss._plain_losses(tensors[0], targets, overwrites=True),
        lambda tensors: losses_of_rows(tensors[0], targets, overwrites=True),
        2 * logits.nbytes,
        logits.numel(),
    )


def _update(device: str, tokens: int) -> _Ways:
    import torch
    from torch.optim.adamw import adamw

    from motet.models.kernels.triton_adamw import update_adamw

    size = tokens * _WIDTH[device]
    master, gradient, mean = (torch.randn(size, device=device) for _ in range(3))
    compute, step = master.bfloat16(), torch.ones((), device=device)
    numbers = torch.tensor([_RATE, _DECAY, *_BETAS, _EPS, _SCALE], dtype=torch.float64, device=device)
    options: dict[str, Any] = {
        "amsgrad": False, "beta1": _BETAS[0], "beta2": _BETAS[1], "lr": _RATE, "weight_decay": _DECAY, "eps": _EPS,
        "maximize": False, "fused": True,
    }  # fmt: skip

    def by_torch(tensors: "list[torch.Tensor]") -> None:
        own_master, own_gradient, own_mean, own_square, own_compute = tensors
        scaled, count = own_gradient * _SCALE, torch.zeros((), device=device)
        adamw([own_master], [scaled], [own_mean], [own_square], [], [count], **options)
        own_compute.copy_(own_master)

    def by_triton(tensors: "list[torch.Tensor]") -> None:
        own_master, own_gradient, *moments, own_compute = tensors
        update_adamw(own_master, own_gradient, moments, numbers=numbers, step=step, compute=own_compute)

    def make() -> "list[torch.Tensor]":
        return [master.clone(), gradient.clone(), mean.clone(), mean.square(), compute.clone()]

    return _Ways(make, by_torch, by_triton, size * (2 * 3 * 4 + 4 + 2), size)


IN_PLACE: dict[str, Callable[[str, int], _Ways]] = {"cross_entropy": _losses, "adamw": _update}


def worst_error(ours: "Sequence[Any]", expected: "Sequence[Any]") -> float:
    """The largest difference of tensors, where 1 is what the rounding of their dtype allows; NaN if one has a NaN."""
    import torch

    errors = []
    for a, b in zip(ours, expected, strict=True):
        allowed = ROUNDING[str(b.dtype).removeprefix("torch.")] * b.float().abs().max()
        errors.append((a.float() - b.float()).abs().max() / allowed)
    return torch.stack(errors).max().item()


def measure_in_place(device: str, kernel: str, tokens: int, compiles: bool) -> dict[str, Any]:
    """Seconds of a call in each way, the bytes that it has to read and write, and the largest error."""
    import torch

    ways = IN_PLACE[kernel](device, tokens)
    calls = {"torch": ways.torch, "triton": ways.triton}
    if compiles:
        calls["compiled"] = compiled(ways.torch, device)

    def results(way: "Callable[[list[Any]], object]") -> "list[Any]":
        tensors = ways.make()
        losses = way(tensors)
        return tensors if losses is None else [*tensors, losses]

    with torch.no_grad():
        tensors = ways.make()
        timed = {name: partial(call, tensors) for name, call in calls.items()}
        seconds, problems = seconds_of_ways(timed, device, _CALLS)
        error = worst_error(results(ways.triton), results(ways.torch)) if "triton" in seconds else math.inf
    return {
        "seconds": seconds, "problems": problems, "nbytes": ways.nbytes, "error": error, "elements": ways.elements,
    }  # fmt: skip


def measure_update(device: str) -> dict[str, Any]:
    """Seconds of an update of many masters by launches and by a graph, and whether both give the same masters."""
    import torch

    from motet.train.optimizer.one_pass_adamw import OnePassAdamW
    from motet.train.optimizer.optimizer_settings import OptimizerSettings
    from motet.train.optimizer.replayed_calls import ReplayedCalls, cuda_graph_capture

    replays = 0
    indices, shape, seconds, results = range(MASTERS[device]), (_MASTER_ELEMENTS[device],), dict[str, float](), []
    for way, capture in {"launches": None, "graph": cuda_graph_capture(torch.device(device))}.items():
        torch.manual_seed(0)
        masters, gradients = ({i: torch.randn(shape, device=device) for i in indices} for _ in range(2))
        kinds = {"exp_avg": shape, "exp_avg_sq": shape, "step": ()}
        states = {i: {kind: torch.ones(size, device=device) for kind, size in kinds.items()} for i in indices}
        optimizer = torch.optim.AdamW([*masters.values()], weight_decay=_DECAY)
        adamw = OnePassAdamW(optimizer, OptimizerSettings(), [None for _ in indices])
        adamw._calls = ReplayedCalls(capture)
        seconds[way] = seconds_of(partial(adamw.update, masters, gradients, states, scale=_SCALE), device, _CALLS)
        results.append(torch.stack([*masters.values()]))
        replays = max((each.replays for each in adamw._calls._last_calls.values()), default=0)  # Of `graph` at last
    return {"seconds": seconds, "is_same": torch.equal(*results), "replays": replays}
