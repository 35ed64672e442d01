"""Recomputation of a module's blocks in backward, on the instances and without a change of their code.

A recomputed block sees the state of its forward: arguments, buffers and random generators. It leaves buffers
and generators unchanged, so a norm with running statistics counts each micro-batch once. Masks of dropout follow from
their place in the model, as in a forward (models/layout_invariant_dropout.py), also where autograd recomputes in a
thread of its device.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from motet.core.errors import check_input
from motet.memory.kept_products import KeptProducts
from motet.memory.measured_costs import MEASURED_STEPS, CostMeasurement, StepBytes, StepSeconds
from motet.memory.policy_choice import MemorySettings, fixed_policies
from motet.memory.storage_tracker import AllocatorBytes, LiveBytes, StorageTracker
from motet.memory.tiers.offloaded_activations import OffloadedActivations, SavedTensor
from motet.memory.torch_private import own_buffers, version
from motet.models.layout_invariant_dropout import repeatable_dropout
from motet.models.spec.layer_specs import BlockPolicy
from motet.models.torch_private import intercept_calls, is_in_backward, tree_leaves
from motet.models.user_module import find_blocks
from motet.precision.float64_mode import repeatable_float64

_MAX_STATISTICS_BYTES = 1 << 16
_ContextMaker = Callable[[], AbstractContextManager[object]]


class Recomputation:
    """The blocks of a module, each with a policy. With a budget, the first steps measure which policies fit."""

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        policies: Sequence[BlockPolicy],
        measurement: CostMeasurement | None = None,
        *,
        offloaded: OffloadedActivations | None = None,
    ) -> None:
        self.policies, self.offloaded = list(policies), offloaded
        self._random, self._measurement, self._measured_steps = _RandomStates(), measurement, 0
        self._recorder: StepBytes | StepSeconds | None = None
        self._restore = [intercept_calls(block, partial(self._call, i, block)) for i, block in enumerate(blocks)]

    def remove(self) -> None:
        """Let the module keep all activations again."""
        while self._restore:
            self._restore.pop()()

    def begin_step(self) -> None:
        """Called before the forwards of a step."""
        if self._measurement is not None:
            self.policies = self._measurement.policies(self._measured_steps)
            self._recorder = self._measurement.begin(self._measured_steps)
            if isinstance(self._recorder, StepBytes):
                self._recorder.begin()

    def end_backwards(self) -> None:
        """Called after the backwards of a step."""
        if isinstance(self._recorder, StepBytes):
            self._recorder.end_backwards()

    def end_step(self) -> CostMeasurement | None:
        """Called after the update; returns the measurement once it is complete."""
        measurement, recorder, self._recorder = self._measurement, self._recorder, None
        if measurement is None:
            return None
        if isinstance(recorder, StepBytes):
            recorder.end()
        elif recorder is not None:
            recorder.finish()
        measurement.end(self._measured_steps)
        self._measured_steps += 1
        if self._measured_steps < len(MEASURED_STEPS):
            return None
        self._measurement = None
        return measurement

    def _call(self, index: int, block: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or is_in_backward():
            return call(*args, **kwargs)
        recorder = self._recorder
        if recorder is None:
            return self._offloaded_forward(index, block, partial(call, *args, **kwargs))
        with recorder.forward(index):
            output = self._forward(index, block, partial(call, *args, **kwargs))
        if isinstance(recorder, StepSeconds):
            return output
        for tensor, mark in ((output, recorder.begin_backward), ((args, kwargs), recorder.end_backward)):
            differentiable = (t for t in tree_leaves(tensor) if isinstance(t, Tensor) and t.requires_grad)
            if (first := next(differentiable, None)) is not None:
                first.register_hook(partial(_ignoring_gradient, mark, index))
        return output

    def _offloaded_forward(self, index: int, block: nn.Module, call: "partial[Any]") -> Any:
        if self.offloaded is None:
            return self._forward(index, block, call)
        with self.offloaded.saving(index, (call.args, call.keywords)) as saved:
            return self._forward(index, block, call, pack=saved.pack)

    def _forward(
        self,
        index: int,
        block: nn.Module,
        call: "partial[Any]",
        *,
        pack: Callable[[Tensor], SavedTensor] | None = None,
    ) -> Any:
        """Call a block with its arguments; `pack` makes the values that are kept in place of products."""
        policy, recorder = self.policies[index], self._recorder
        if policy == "none":
            return call()
        products = KeptProducts() if policy == "selective" else None
        around: list[_ContextMaker] = [repeatable_float64(), repeatable_dropout()]
        if recorder is not None:
            around.insert(0, partial(recorder.recomputation, index))
        repeatable = _RepeatableCall(block, call.func, random=self._random.block_states(block), around=around)
        output = checkpoint(
            partial(_call_with_names, repeatable, tuple(call.keywords)),
            *(*call.args, *call.keywords.values()),  # Torch keeps arguments by name outside of autograd
            use_reentrant=False,
            context_fn=_no_contexts if products is None else products.contexts,
            preserve_rng_state=False,
        )
        if products is not None and pack is not None:
            products.pack(pack)
        return output


def _call_with_names(function: Callable[..., Any], names: Sequence[str], *values: Any) -> Any:
    """Call a function whose last arguments have names."""
    count = len(values) - len(names)
    return function(*values[:count], **dict(zip(names, values[count:], strict=True)))


def _ignoring_gradient(mark: Callable[[int], None], block: int, _: Tensor) -> None:
    mark(block)


def recompute_blocks(
    module: nn.Module,
    settings: MemorySettings,
    *,
    device: torch.device,
    known: Callable[[], Sequence[Tensor]] = list,
    stages: Sequence[range] = (),
) -> Recomputation | None:
    """Let backward recompute a module's blocks, and the host keep what they save, as `[memory]` says; None if it says
    neither. `known` are the tensors that a rank has before a step; `stages` are the blocks of a pipeline's stages."""
    if settings.recompute == "none" and settings.activations == "device":
        return None
    blocks = find_blocks(module)
    setting, use = f"memory.recompute = {settings.recompute!r}", "recompute"
    if settings.recompute == "none":
        setting, use = f"memory.activations = {settings.activations!r}", "keep the activations of"
    check_input(
        blocks,
        f"{setting}: {type(module).__name__} has no blocks (items of an nn.ModuleList or nn.Sequential that own their "
        f"parameters) to {use}; leave it out, or put the layers into blocks",
    )
    offloaded = None
    if settings.activations == "host":
        offloaded = OffloadedActivations(module, blocks, device, starts={stage.start for stage in stages})
    measurement = None
    if (budget := settings.step_budget) is not None:

        def meter() -> LiveBytes:
            return AllocatorBytes(device) if device.type == "cuda" else StorageTracker(known())

        measurement = CostMeasurement([_kind(block) for block in blocks], budget, meter=meter, device=device)
    return Recomputation(blocks, fixed_policies(settings, len(blocks)), measurement, offloaded=offloaded)


def _kind(block: nn.Module) -> tuple[type[nn.Module], tuple[torch.Size, ...]]:
    return type(block), tuple(parameter.shape for parameter in block.parameters())


def _no_contexts() -> tuple[Any, Any]:
    return nullcontext(), nullcontext()


class _Buffer(NamedTuple):
    owner: nn.Module
    name: str
    value: Tensor


class _RepeatableCall:
    """One call of a block, which recomputation repeats with the same buffers and random numbers."""

    def __init__(
        self,
        block: nn.Module,
        call: Callable[..., Any],
        *,
        random: Sequence[tuple[torch.device, Tensor]],
        around: Sequence[_ContextMaker],
    ) -> None:
        self._block, self._call, self._random, self._around = block, call, random, around
        self._before: list[_Buffer] | None = None  # Buffers that the forward changed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._before is not None:
            with ExitStack() as stack:
                for context in self._around:
                    stack.enter_context(context())
                stack.enter_context(self._as_before(self._before))
                return self._call(*args, **kwargs)
        known = [(buffer, version(buffer.value), buffer.value.clone()) for buffer in _buffers_of(self._block)]
        output = self._call(*args, **kwargs)
        self._before = [
            buffer._replace(value=value)
            for buffer, number, value in known
            if own_buffers(buffer.owner)[buffer.name] is not buffer.value
            or version(buffer.value) != number
            or _may_differ(buffer.value, value)
        ]
        return output

    @contextmanager
    def _as_before(self, buffers: Sequence[_Buffer]) -> Iterator[None]:
        current = [own_buffers(owner)[name] for owner, name, _ in buffers]
        devices = [device for device, _ in self._random if device.type != "cpu"]
        with torch.random.fork_rng(devices=devices):
            for device, state in self._random:
                if device.type == "cpu":
                    torch.set_rng_state(state)
                else:
                    torch.cuda.set_rng_state(state, device)
            try:
                for owner, name, value in buffers:
                    own_buffers(owner)[name] = value.clone()
                yield
            finally:
                for (owner, name, _), tensor in zip(buffers, current, strict=True):
                    own_buffers(owner)[name] = tensor


def _may_differ(buffer: Tensor, before: Tensor) -> bool:
    """Whether a kernel may have written to a buffer, as kernels of batch norms do without raising its version.

    To compare on a device would wait for it: small buffers, such as statistics, count as written there. Meta tensors
    have no values.
    """
    if buffer.is_meta:
        return False
    return not torch.equal(buffer, before) if buffer.device.type == "cpu" else before.nbytes <= _MAX_STATISTICS_BYTES


def _buffers_of(block: nn.Module) -> list[_Buffer]:
    return [
        _Buffer(module, name, tensor)
        for module in block.modules()
        for name, tensor in own_buffers(module).items()
        if tensor is not None
    ]


class _RandomStates:
    """States of the random generators. Blocks between which nothing drew from one share its state."""

    def __init__(self) -> None:
        self._latest = dict[torch.device, Tensor]()

    def block_states(self, block: nn.Module) -> list[tuple[torch.device, Tensor]]:
        """The states of the processor, and of the device on which the block computes."""
        parameter = next(block.parameters(), None)
        devices = {torch.device("cpu"), torch.device("cpu") if parameter is None else parameter.device}
        states = []
        for device in devices:
            if device.type not in ("cpu", "cuda"):
                continue
            state = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)
            latest = self._latest.get(device)
            if latest is None or not torch.equal(latest, state):
                self._latest[device] = latest = state
            states.append((device, latest))
        return states
