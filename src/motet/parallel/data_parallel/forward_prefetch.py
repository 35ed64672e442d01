"""Which modules use which parameters, so that a module can wait for what it is about to use.

It is found out by watching one forward. A parameter counts as used by the innermost module that is at work when any
function of torch is given it, whoever owns it; and by the modules that own it, whether they were called or not. What is
used while no module is at work, as by a loss function, counts for the module that was called last before. What was not
seen to be used, or was before any module was called, is waited for when a step begins.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils.hooks import RemovableHandle


class ParameterUsageTracker:
    """`numbers`: what each parameter is a part of. `needed` is told, before a module begins, of what it will use."""

    def __init__(
        self, module: nn.Module, bucket_ids: Mapping[Tensor, int], wait_for_bucket: Callable[[int], None]
    ) -> None:
        self._module = module
        self._wait_for_bucket = wait_for_bucket
        self._bucket_ids = {id(parameter): number for parameter, number in bucket_ids.items()}
        self._recorder: _ParameterUsageRecorder | None = None
        self._waited_at_step_start: tuple[int, ...] = ()  # What a step waits for when it begins
        # All numbers, by the first use; what was not used comes first. Empty until a forward was watched.
        self.first_use_order: tuple[int, ...] = ()

    def begin_step(self) -> None:
        """Of a step. Watch what comes, if nothing was watched yet."""
        if self._recorder is None:
            self._recorder = _ParameterUsageRecorder(self._module, self._bucket_ids)
        self.exit_recorder()
        for bucket_id in self._waited_at_step_start:
            self._wait_for_bucket(bucket_id)

    def exit_recorder(self) -> None:
        """What watched, if it has seen a forward and is not in the middle of something."""
        if self._recorder is not None and self.first_use_order:
            self._recorder.exit_mode()

    def finish_recording(self) -> None:
        """Of the forward that is watched. From now on modules wait."""
        recorder = self._recorder
        if recorder is None or self.first_use_order:
            return
        recorder.remove_hooks()
        users: dict[nn.Module, dict[int, None]] = {}
        for user in self._module.modules():
            owned_ids = (self._bucket_ids.get(id(p)) for p in user.parameters(recurse=False))
            users[user] = dict.fromkeys(bucket_id for bucket_id in owned_ids if bucket_id is not None)
        used_before_modules: dict[int, None] = {}
        for user_or_none, number in recorder.uses:
            (used_before_modules if user_or_none is None else users[user_or_none])[number] = None
        unused_ids = {
            number for parameter, number in self._bucket_ids.items() if parameter not in recorder.used_parameters
        }
        self._waited_at_step_start = (
            *sorted(unused_ids),
            *(number for number in used_before_modules if number not in unused_ids),
        )
        self.first_use_order = tuple(
            dict.fromkeys((*self._waited_at_step_start, *(number for _, number in recorder.uses)))
        )
        for user, used in users.items():
            if used or user is self._module:
                user.register_forward_pre_hook(self._make_wait_hook(tuple(used)))

    def _make_wait_hook(self, used: tuple[int, ...]) -> Callable[..., None]:
        def wait_before_forward(module: nn.Module, args: object) -> None:
            for bucket_id in chain(self._waited_at_step_start, used):
                self._wait_for_bucket(bucket_id)

        return wait_before_forward


# They see no values.
_METADATA_FUNCTIONS = {
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "grad")
    ),
    *(Tensor.size, Tensor.numel, Tensor.dim, Tensor.data_ptr, Tensor.is_floating_point, Tensor.is_complex),
}


class _ParameterUsageRecorder(TorchFunctionMode):
    """Sees the arguments of all functions of torch that are called."""

    def __init__(self, module: nn.Module, bucket_ids: Mapping[int, int]) -> None:
        super().__init__()
        self._bucket_ids = bucket_ids
        self._active_modules: list[nn.Module] = []
        self._last_module: nn.Module | None = None  # That was called while no other was at work
        self.uses: dict[tuple[nn.Module | None, int], None] = {}
        self.used_parameters: set[int] = set()
        self._handles: list[RemovableHandle] = []
        for inner in module.modules():
            self._handles.append(inner.register_forward_pre_hook(self._on_forward_start))
            self._handles.append(inner.register_forward_hook(self._on_forward_end, always_call=True))
        self._mode_stack = ExitStack()
        self._mode_stack.enter_context(self)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._handles and func not in _METADATA_FUNCTIONS:
            for tensor in _nested_tensors((*args, *kwargs.values())):
                bucket_id = self._bucket_ids.get(id(tensor))
                if bucket_id is not None:
                    self.uses[self._active_modules[-1] if self._active_modules else self._last_module, bucket_id] = None
                    self.used_parameters.add(id(tensor))
        return func(*args, **kwargs)

    def remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.exit_mode()

    def exit_mode(self) -> None:
        """As soon as nothing that was entered later is in the way: modes are a stack."""
        if not self._handles and _get_current_function_mode() is self:
            self._mode_stack.close()

    def _on_forward_start(self, module: nn.Module, args: object) -> None:
        if not self._active_modules:
            self._last_module = module
        self._active_modules.append(module)

    def _on_forward_end(self, module: nn.Module, args: object, output: object) -> None:
        self._active_modules.pop()


def _nested_tensors(nested: Iterable[Any]) -> Iterator[Tensor]:
    for item in nested:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, list | tuple):
            yield from _nested_tensors(item)
