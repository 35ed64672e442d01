"""Repeated results of kernels on the meta device have the sizes, strides and dtypes that the kernels give them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from motet.models.torch_private import TorchDispatchMode, storage_key, tree_leaves
from motet.models.trace import meta_kernels
from motet.models.trace.meta_kernels import MetaKernels


class RepeatingMode(TorchDispatchMode):
    """Calls kernels through `MetaKernels`, and counts those that torch runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.kernels, self.run = MetaKernels(), list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, *call: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.run.append(str(func))
            return func(*args, **kwargs)

        return self.kernels.call(CountedKernel(func, counted), call[0], dict(call[1] or {}))


class CountedKernel:
    """A kernel whose calls are counted. Kernels of one name are equal, as in torch."""

    def __init__(self, kernel: Any, call: Callable[..., Any]) -> None:
        self.kernel, self.call = kernel, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def __hash__(self) -> int:
        return hash(self.kernel)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CountedKernel) and self.kernel is other.kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def norm_gradients(x: Tensor) -> Any:
    statistics = meta(*x.shape[:-1], 1)
    weight = meta(x.shape[-1])
    return torch.ops.aten.native_layer_norm_backward(
        x, x, weight.shape, statistics, statistics, weight, None, [True, True, False]
    )


KERNELS: dict[str, Callable[[Tensor], Any]] = {
    "a product": lambda x: x @ x.mT,
    "a sum in another dtype": lambda x: x.sum(-1, dtype=torch.float64),
    "a comparison": lambda x: x > 0,
    "several results": lambda x: x.topk(2),
    "results that are missing": norm_gradients,
    "a list of views": lambda x: x.split(2),
    "a view": lambda x: x.flatten(),
    "a concatenation": lambda x: torch.cat([x, x], 1),
    "a copy with other strides": lambda x: x.mT.clone(memory_format=torch.contiguous_format),
    "a function": F.silu,
    "in place": lambda x: x.mul_(2),
    "into another": lambda x: torch.mul(x, 2, out=torch.empty_like(x)),
    "made from sizes": lambda x: x.new_empty(3, 5),
    "a random one": lambda x: x.clone().normal_(),
}


def described(result: Any, x: Tensor) -> list[Any]:
    tensors = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
    return [
        (t.shape, t.stride(), t.dtype, t.storage_offset(), t.untyped_storage().nbytes(), storage_key(t) == key)
        for t in tensors
        for key in [storage_key(x)]
    ]


def differences(mode: RepeatingMode) -> list[str]:
    """The kernels whose repeated results differ from those of torch, over other sizes, strides and dtypes."""
    wrong = []
    inputs = [
        lambda: meta(4, 6),
        lambda: meta(6, 4).mT,
        lambda: meta(4, 6, dtype=torch.bfloat16),
        lambda: meta(6, 4),
        lambda: meta(4, 12)[:, ::2],
        lambda: meta(4, 7)[:, 1:],
    ]
    for name, kernel in KERNELS.items():
        for make in inputs * 2:
            expected, actual = (make(), make())
            with mode:
                result = kernel(actual)
            if described(result, actual) != described(kernel(expected), expected):
                wrong.append(name)
    return wrong


def test_repeated_results_are_those_of_torch() -> None:
    assert differences(RepeatingMode()) == []


def test_arguments_of_other_types_are_not_taken_for_each_other() -> None:
    mode = RepeatingMode()
    x = meta(4, dtype=torch.int64)
    with mode:
        dtypes = [(x * factor).dtype for factor in (1, 1.0, True, 1)]
    assert dtypes == [torch.int64, torch.float32, torch.int64, torch.int64]


def test_a_repeated_call_runs_no_kernel() -> None:
    mode = RepeatingMode()
    x = meta(4, 6)
    with mode:
        first, second = F.silu(x), F.silu(meta(4, 6))
        in_place = first.add_(1), second.add_(1)
    assert mode.run.count("aten.silu.default") == 1 and mode.run.count("aten.add_.Tensor") == 1
    assert in_place[0] is first and in_place[1] is second and storage_key(first) != storage_key(second)


def test_tensors_with_values_are_computed_each_time() -> None:
    mode = RepeatingMode()
    with mode:
        results = [F.relu(torch.tensor([value])).item() for value in (1.0, -1.0, 2.0)]
    assert results == [1.0, 0.0, 2.0]


@pytest.mark.parametrize("mistake", ["strides", "dtypes", "views"])
def test_a_mistake_is_seen(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    describe, results = meta_kernels._description, meta_kernels._results

    def without(value: Any) -> object:
        description = describe(value)
        if isinstance(value, Tensor):
            return (value.shape, value.dtype) if mistake == "strides" else (value.shape, value.stride())
        return tuple(map(without, value)) if isinstance(value, list | tuple) else description

    if mistake == "views":
        monkeypatch.setattr(meta_kernels, "_written_argument", lambda kernel: "")
        monkeypatch.setattr(meta_kernels, "_results", lambda result, target, _: results(result, target, []))
    else:
        monkeypatch.setattr(meta_kernels, "_description", without)
    assert differences(RepeatingMode())
