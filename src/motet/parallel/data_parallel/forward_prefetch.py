"""Records which modules use which parameters, so that a module can wait for exactly the buckets that it needs.

One forward is recorded. A parameter counts as used by the innermost active module when any torch function takes it, and
by each module that owns it. A use outside of all modules, as in a loss function, counts for the module that was called
last. Parameters that were not used, or used before any module was called, are waited for at the beginning of a step.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from motet.models.torch_private import InterceptedFunctions
from motet.parallel.torch_private import is_innermost_mode


class ModuleParameterWaiter:
    """Calls `wait` before a module begins, for each bucket that the module uses."""

    def __init__(self, module: nn.Module, bucket_ids: Mapping[Tensor, int], wait: Callable[[int], None]) -> None:
        self._module, self._wait_for_bucket = module, wait
        self._bucket_ids = {id(parameter): bucket_id for parameter, bucket_id in bucket_ids.items()}
        self._recorder: _ParameterUsageRecorder | None = None
        self._waited_at_step_start: tuple[int, ...] = ()
        self.first_use_order: tuple[int, ...] = ()  # All buckets, unused ones first; empty until a forward was recorded

    def begin_step(self) -> None:
        """Begin to record if nothing was recorded yet."""
        if self._recorder is None:
            self._recorder = _ParameterUsageRecorder(self._module, self._bucket_ids)
        self.exit_recorder()
        for bucket_id in self._waited_at_step_start:
            self._wait_for_bucket(bucket_id)

    def exit_recorder(self) -> None:
        """Leave the recording mode once a forward was recorded."""
        if self._recorder is not None and self.first_use_order:
            self._recorder.exit_mode()

    def finish_recording(self) -> None:
        """End the recording of the first forward; from now on modules wait for their buckets."""
        recorder = self._recorder
        if recorder is None or self.first_use_order:
            return
        recorder.remove_hooks()
        users: dict[nn.Module | None, dict[int, None]] = {None: {}}
        for user in self._module.modules():
            owned = map(id, user.parameters(recurse=False))
            users[user] = {self._bucket_ids[key]: None for key in owned if key in self._bucket_ids}
        for user_or_none, bucket_id in recorder.uses:
            users[user_or_none][bucket_id] = None
        unused = {bucket_id for key, bucket_id in self._bucket_ids.items() if key not in recorder.used_parameters}
        self._waited_at_step_start = (*sorted(unused), *(i for i in users.pop(None) if i not in unused))
        self.first_use_order = tuple(dict.fromkeys((*self._waited_at_step_start, *(i for _, i in recorder.uses))))
        for module, bucket_ids in users.items():
            if module is not None and (bucket_ids or module is self._module):
                module.register_forward_pre_hook(partial(self._wait_before_forward, tuple(bucket_ids)))

    def _wait_before_forward(self, bucket_ids: tuple[int, ...], module: nn.Module, args: object) -> None:
        for bucket_id in (*self._waited_at_step_start, *bucket_ids):
            self._wait_for_bucket(bucket_id)


# Functions that read no values.
_METADATA_FUNCTIONS = {
    *(getattr(Tensor, n).__get__ for n in ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "grad")),
    *(Tensor.size, Tensor.numel, Tensor.dim, Tensor.data_ptr, Tensor.is_floating_point, Tensor.is_complex),
}


class _ParameterUsageRecorder:
    def __init__(self, module: nn.Module, bucket_ids: Mapping[int, int]) -> None:
        self._bucket_ids = bucket_ids
        self._active_modules: list[nn.Module] = []
        self._last_module: nn.Module | None = None  # Called last while no other module was active
        self.uses: dict[tuple[nn.Module | None, int], None] = {}
        self.used_parameters: set[int] = set()
        starts = [inner.register_forward_pre_hook(self._on_forward_start) for inner in module.modules()]
        ends = [inner.register_forward_hook(self._on_forward_end, always_call=True) for inner in module.modules()]
        self._handles: list[RemovableHandle] = starts + ends
        self._mode_stack = ExitStack()
        self._mode = self._mode_stack.enter_context(InterceptedFunctions(self._call_function))

    def _call_function(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self._handles and function not in _METADATA_FUNCTIONS:
            for tensor in _nested_tensors((*args, *kwargs.values())):
                bucket_id = self._bucket_ids.get(id(tensor))
                if bucket_id is not None:
                    self.uses[self._active_modules[-1] if self._active_modules else self._last_module, bucket_id] = None
                    self.used_parameters.add(id(tensor))
        return function(*args, **kwargs)

    def remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.exit_mode()

    def exit_mode(self) -> None:
        """Exit if no mode was entered later: modes are a stack."""
        if not self._handles and is_innermost_mode(self._mode):
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
