"""A forward pass on the meta device, in which everything that does not depend on a parameter keeps its values.
Positions, masks and indices are computed on the processor, so that code which looks at them runs as usual. Whatever an
operator makes of a parameter has no memory. Choices by value, such as the experts of a token, are spread evenly."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from motet.core.errors import InputError
from motet.models.torch_private import (
    GROUPED_PRODUCT,
    READ_NUMBER,
    TorchDispatchMode,
    aliases_input,
    storage_key,
    tree_leaves,
    tree_map,
    written_arguments,
)

MOST_KNOWN_ELEMENTS = 1 << 24  # Larger constants have no values: they would take memory
_aten: Any = torch.ops.aten
_CHOICES = {_aten.topk.default, _aten.sort.default, _aten.sort.stable, _aten.argsort.default, _aten.argmax.default}
_MADE_WITHOUT_VALUES = ("empty", "rand", "normal")  # Names of operators, by their beginning


class KnownValuesMode(TorchDispatchMode):
    """A mode around the building and the forward of a module whose parameters are on the meta device."""

    def __init__(self, observe: Callable[..., None] | None = None) -> None:
        """`observe(operator, (args, kwargs), result)` is called with each operator."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._observe = observe
        self._lost = dict[int, Any]()  # Storages on the processor that an unknown value was written to

    def is_known(self, tensor: Tensor) -> bool:
        """Whether a tensor has its values."""
        return not tensor.is_meta and storage_key(tensor) not in self._lost

    def __torch_dispatch__(self, func: Any, types: Any, *call: Any, **named: Any) -> Any:
        """Compute with values, or without; `call` is the positional arguments and those by name."""
        args, kwargs = call[0] if call else (), dict(call[1] or {}) if len(call) > 1 else {}
        result = self._compute(func, args, kwargs)
        if self._observe is not None:
            self._observe(func, (args, kwargs), result)
        return result

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not tensors:
            return _make(func, args, kwargs)
        is_known = all(map(self.is_known, tensors))
        if is_known and _is_meta(kwargs.get("device")):
            kwargs.pop("device")  # A copy to the device of activations
        if func is _aten.histc.default and not args[0].is_floating_point():  # Of integers only on accelerators
            return func(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
        if is_known or (aliases_input(func) and not any(tensor.is_meta for tensor in tensors)):
            return func(*args, **kwargs)
        return self._without_values(func, args, kwargs)

    def _without_values(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is READ_NUMBER:
            if args[0].dtype == torch.bool:
                return False  # Such as `isinf().any()`: nothing unusual happens
            raise InputError(
                "the module reads the value of a number that depends on its parameters; let its code depend on sizes, "
                "not on values"
            )
        on_meta = dict[int, Tensor]()

        def to_meta(leaf: object) -> object:
            if not isinstance(leaf, Tensor) or leaf.is_meta:
                return leaf
            return on_meta.setdefault(id(leaf), leaf.to("meta"))

        if "device" in kwargs:
            kwargs["device"] = torch.device("meta")
        if func is GROUPED_PRODUCT and args[1].ndim == 3:  # Kernels demand sizes that are multiples of 16 bytes
            return args[0].new_empty(*args[0].shape[:-1], args[1].shape[-1], device="meta")
        result = func(*tree_map(to_meta, args), **tree_map(to_meta, kwargs))
        written = [each for each in written_arguments(func, args, kwargs) if not each.is_meta]
        for tensor in written:
            self._lost[storage_key(tensor)] = tensor.untyped_storage()
        originals = {id(on_meta[id(tensor)]): tensor for tensor in written}
        result = tree_map(lambda leaf: originals.get(id(leaf), leaf), result)
        return _spread_evenly(func, args, result) if func in _CHOICES else result


def _is_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def _make(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operator without tensors as arguments, with values where it is small."""
    result = func(*args, **kwargs)
    name = func.name().removeprefix("aten::")
    is_small = isinstance(result, Tensor) and result.is_meta and result.numel() <= MOST_KNOWN_ELEMENTS
    if is_small and not name.startswith(_MADE_WITHOUT_VALUES):
        return func(*args, **{**kwargs, "device": torch.device("cpu")})
    return result


def _spread_evenly(func: Any, args: tuple[Any, ...], result: Any) -> Any:
    """The same result with indices that all appear equally often."""
    name = func.name().partition(".")[0]
    indices = result if isinstance(result, Tensor) else result[1]
    dim = args[2 if name == "aten::topk" else 1] if len(args) > (2 if name == "aten::topk" else 1) else -1
    scores: Tensor = args[0]
    if indices.ndim == 0 or not isinstance(dim, int) or isinstance(dim, bool) or scores.ndim != indices.ndim:
        known = torch.zeros(indices.shape, dtype=torch.int64)
    else:
        order = torch.arange(indices.numel()) % scores.shape[dim]
        moved = indices.movedim(dim, -1).shape
        known = order.view(moved).movedim(-1, dim).contiguous()
    return known if isinstance(result, Tensor) else (result[0], known)
