"""Selective recomputation: matrix products with weights are kept, and everything else is computed again.

Torch's own selective checkpoint refuses results that are changed in place, as a sum over tensor-parallel ranks or an
activation function does. Here such a result is copied before it is changed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from motet.core.errors import InputError
from motet.memory.tiers.offloaded_activations import SavedTensor
from motet.memory.torch_private import SCALED_PRODUCT, detach_with_version, version
from motet.models.kept_results import results_in_use
from motet.models.torch_private import TorchDispatchMode, storage_key, tree_leaves, written_arguments

# Products of matrices, which in a transformer are those with weights; the products of attention are batched.
KEPT_OPERATORS: frozenset[Any] = frozenset([torch.ops.aten.mm.default, torch.ops.aten.addmm.default, SCALED_PRODUCT])


class KeptProducts:
    """The products of one call of a block, in their order."""

    def __init__(self) -> None:
        self._kept: list[Tensor | SavedTensor] = []
        self._versions: list[int] = []
        self._next = 0
        self.is_replaying = self.is_paused = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, products are kept."""
        self.is_replaying = False
        with _in_use(self), _ProductsMode(self):
            yield

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Inside, products are read from the kept ones."""
        self.is_replaying, self._next = True, 0
        with _in_use(self), _ProductsMode(self):
            yield

    def contexts(self) -> tuple[Any, Any]:
        """The contexts of forward and of recomputation, as torch.utils.checkpoint takes them."""
        return self.recording(), _Reusable(self.replaying)

    def product(self, compute: Callable[[], Tensor]) -> Tensor:
        """The result of `compute`; in recomputation, the result of the forward."""
        if not self.is_replaying:
            result = compute()
            self._kept.append(detach_with_version(result))
            self._versions.append(version(result))
            return result
        index, self._next = self._next, self._next + 1
        kept = self._kept[index]
        if isinstance(kept, SavedTensor):
            return kept.unpack().detach()
        if version(kept) != self._versions[index]:
            raise InputError(
                "memory.recompute=selective keeps the result of a matrix product, which the model changed in place "
                "after the block that made it; use memory.recompute=full"
            )
        return kept.detach()

    def pack(self, pack: Callable[[Tensor], SavedTensor]) -> None:
        """Keep the values of `pack` in place of the products, after the forward."""
        self._kept = [
            pack(kept) if isinstance(kept, Tensor) and version(kept) == number else kept
            for kept, number in zip(self._kept, self._versions, strict=True)
        ]

    def copy_before_writing(self, tensors: list[Tensor]) -> None:
        """Called before these tensors are written to."""
        written = {storage_key(tensor) for tensor in tensors}
        for index, each in enumerate(self._kept):
            kept = each.on_device if isinstance(each, SavedTensor) else each
            if kept is not None and storage_key(kept) in written:
                copy = kept.clone()
                self._kept[index], self._versions[index] = copy, version(copy)


@contextmanager
def _in_use(kept: KeptProducts) -> Iterator[None]:
    token = results_in_use.set(kept)
    try:
        yield
    finally:
        results_in_use.reset(token)


class _Reusable:
    """A context that can be entered several times, one after the other."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._entered = make, list[Any]()

    def __enter__(self) -> None:
        self._entered.append(self._make())
        self._entered[-1].__enter__()

    def __exit__(self, *problem: Any) -> Any:
        return self._entered.pop().__exit__(*problem)


class _ProductsMode(TorchDispatchMode):
    """Hands products to `KeptProducts`, which records or replays them."""

    def __init__(self, products: KeptProducts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._products = products

    def __torch_dispatch__(self, func: Any, types: Any, *call: Any, **named: Any) -> Any:
        """Call a kernel of torch; `call` is its positional arguments and those by name."""
        args, kwargs, products = call[0], dict(call[1] or {}), self._products
        if func in KEPT_OPERATORS and not products.is_paused:
            return products.product(lambda: func(*args, **kwargs))
        if written := _written_tensors(func, args, kwargs):  # In recomputation too: it may be repeated
            products.copy_before_writing(written)
        return func(*args, **kwargs)


def _written_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    if func.namespace == "c10d":  # Their schemas do not mark the tensors that they write to
        return [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    return written_arguments(func, args, kwargs) if func._schema.is_mutable else []
