"""Private names of torch that recomputation needs, in one file to check against each new version of torch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

SCALED_PRODUCT: Any = torch.ops.aten._scaled_mm.default


def storage_and_key(tensor: Tensor) -> tuple[Any, int]:
    """A storage, and a number that is the same for all of its views, as long as it lives."""
    storage = tensor.untyped_storage()
    return storage, storage._cdata


def detach_with_version(tensor: Tensor) -> Tensor:
    """A detached tensor that sees writes to the original; inside of a dispatch mode `detach` alone does not."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """The buffers that a module itself holds, by name."""
    return module._buffers


def version(tensor: Tensor) -> int:
    """A number that each write to a tensor or its views raises."""
    return tensor._version


@contextmanager
def watch_module_calls(on_enter: Callable[[nn.Module], None], on_exit: Callable[[nn.Module], None]) -> Iterator[None]:
    """Inside, functions are called before and after the forward of every module, recomputation included."""
    hooks = [
        nn.modules.module.register_module_forward_pre_hook(lambda module, _: on_enter(module)),
        nn.modules.module.register_module_forward_hook(lambda module, *_: on_exit(module), always_call=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def tensors_with_memory(leaf: object, *, on_meta: bool = False) -> Iterator[Tensor]:
    """The tensor, if it has memory, or the tensors that a wrapper holds, such as the local part of a DTensor. With
    `on_meta`, only tensors on the meta device, where a storage has a size and no memory."""
    if not isinstance(leaf, Tensor):
        return
    wrapper: Any = leaf
    if is_traceable_wrapper_subclass(wrapper):
        for name in wrapper.__tensor_flatten__()[0]:
            yield from tensors_with_memory(getattr(wrapper, name), on_meta=on_meta)
    elif leaf.layout == torch.strided and leaf.is_meta == on_meta:
        yield leaf
