"""Checks that backward repeats the numbers of forward, by checksums of buffers, masks and outputs of modules.

Recomputation repeats the kernels of the forward, so their bits are the same.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from motet.models.torch_private import is_in_backward
from motet.parallel.process.module_inventory import load_buffers

LEFT_CHANGED = "is changed by backward"
_Digests = Mapping[str, int]


def digest(value: Tensor) -> int:
    """A checksum of the bits of all elements."""
    copy = value.detach().cpu().clone(memory_format=torch.contiguous_format)  # FSDP2 cannot free one that numpy saw
    as_bytes: Any = copy.view(-1).view(torch.uint8).numpy()
    return crc32(as_bytes)


@dataclass
class RecomputedBuffers:
    """The buffers of each module when it is called, in forward and again in backward.

    Recomputation must see the buffers that the forward of its micro-batch saw, and leave them unchanged.
    """

    current_microbatch: Callable[[], int]
    report: Callable[[str, Tensor], None]  # Called with a description of a buffer, and the buffer
    _at_call: dict[str, dict[int, list[_Digests]]] = field(default_factory=dict)  # Module -> micro-batch -> calls
    _after_forward: dict[str, _Digests] = field(default_factory=dict)

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Watch the modules that have buffers."""
        with_buffers = {name: m for name, m in module.named_modules() if any(True for _ in m.buffers(recurse=False))}
        hooks = [m.register_forward_pre_hook(partial(self._on_call, name)) for name, m in with_buffers.items()]
        hooks += [m.register_forward_hook(partial(self._on_return, name)) for name, m in with_buffers.items()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def check_unchanged(self, module: nn.Module) -> None:
        """Report buffers that backward has changed, after a step, whose update changes loads of experts."""
        loads = load_buffers(module)
        for name, after_forward in self._after_forward.items():
            owner = module.get_submodule(name)
            for buffer, now in _digests(owner).items():
                if now != after_forward.get(buffer, now) and f"{name}.{buffer}".lstrip(".") not in loads:
                    self.report(f"{_full_name(name, buffer)} {LEFT_CHANGED}", owner.get_buffer(buffer))

    def _on_call(self, name: str, module: nn.Module, _: Any) -> None:
        if not torch.is_grad_enabled():
            return
        microbatch, now, by_microbatch = self.current_microbatch(), _digests(module), self._at_call.setdefault(name, {})
        if not is_in_backward():
            by_microbatch.setdefault(microbatch, []).append(now)
            return
        if len(calls := by_microbatch.get(microbatch, [])) != 1:  # Which call it repeats is not known
            return
        for buffer, value in now.items():
            if value != calls[0].get(buffer):
                others = [m for m, each in by_microbatch.items() if m != microbatch and each[0].get(buffer) == value]
                words = f"is that of micro-batch {others[0]}" if others else "is not that of its forward"
                self.report(f"{_full_name(name, buffer)} {words}", module.get_buffer(buffer))

    def _on_return(self, name: str, module: nn.Module, *_: Any) -> None:
        if torch.is_grad_enabled() and not is_in_backward():
            self._after_forward[name] = _digests(module)


def _digests(module: nn.Module) -> dict[str, int]:
    return {name: digest(buffer) for name, buffer in module.named_buffers(recurse=False)}


def _full_name(module: str, buffer: str) -> str:
    return "buffer " + f"{module}.{buffer}".lstrip(".")
