"""The spec of any model that can be trained, from its forward and its loss on a few rows without memory.

The operators of a forward pass on the meta device, in order, with the module that calls each and its shapes.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn

from motet.core.batch import Batch
from motet.core.errors import InputError
from motet.models import build, layout_invariant_dropout
from motet.models.build import TrainableModel, build_trainable_model
from motet.models.parameter_values import set_values
from motet.models.settings import ModelSettings
from motet.models.spec.model_spec import ModelSpec
from motet.models.torch_private import tree_leaves
from motet.models.trace.record_forward import ForwardRecorder, KnownValuesMode
from motet.models.trace.record_reader import BatchSize, spec_of_records


class _Recorder(Protocol):
    """A context around a forward, which also gets the products that the loss computes in parts."""

    def of(self) -> AbstractContextManager[None]:
        """The context."""

    def add_linear(self, hidden: Tensor, weight: Tensor) -> None:
        """Note a product of the loss."""


Recorder = TypeVar("Recorder", bound=_Recorder)
_ROWS, _TOKENS = 2, 32  # Few, so that masks of all pairs are small
# Foreign code on the meta device raises any of these; each ends as one sentence that names the module.
_FAILURES = (RuntimeError, NotImplementedError, TypeError, ValueError, AssertionError, IndexError)


def trace_model(settings: ModelSettings, compute: str, *, objective: str) -> ModelSpec:
    """Trace a model in the dtype in which it computes. `objective` is that of the data: causal, spans, ..."""
    name = getattr(settings, "factory", settings.family)
    model = build_on_meta(settings, getattr(torch, compute))
    tokens = min(_TOKENS, max(1, (model.context or 2 * _TOKENS) // 2))
    size = BatchSize(_ROWS, tokens, tokens if objective == "spans" else 0)
    with explain_failures(f"model {name!r} cannot be traced"):
        forwards = [
            run_recorded(model, each, ForwardRecorder(model.module), objective=objective).records()
            for each in (size, *size.doubled())
        ]
    vocab_size = model.vocab_size or model.num_classes
    return spec_of_records(forwards, size, compute=compute, vocab_size=vocab_size)


def build_on_meta(settings: ModelSettings, dtype: torch.dtype) -> TrainableModel:
    """The model without memory for parameters, whose buffers have values."""
    name = getattr(settings, "factory", settings.family)
    with (
        explain_failures(f"model {name!r} cannot be built without memory"),
        torch.device("meta"),
        KnownValuesMode(),
    ):
        model = build_trainable_model(settings, 0, dtype, torch.device("cpu"), on_meta=True)
    for parameter in model.module.parameters():
        if not parameter.is_meta:
            set_values(parameter, torch.empty_like(parameter, device="meta"))
    return model


class UnrecordedForward:
    """Keeps nothing of a forward, which takes half the time of one whose operators are recorded."""

    @contextmanager
    def of(self) -> Iterator[None]:
        """The context of a forward without memory."""
        with KnownValuesMode():
            yield

    def add_linear(self, hidden: Tensor, weight: Tensor) -> None:
        """Keep nothing."""


def run_recorded(model: TrainableModel, size: BatchSize, recorder: Recorder, *, objective: str) -> Recorder:
    """Run a model without memory to its loss inside of a recorder, which is returned."""
    batch = _batch(size, objective)

    def linear_cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor | None, **_: Any) -> Tensor:
        recorder.add_linear(hidden, weight)
        return cast(Tensor, _FusedLinearLoss.apply(hidden, weight, bias))  # type: ignore[no-untyped-call]  # untyped in torch

    def draw_mask(keys: list[int], shape: list[int], p: float, **_: Any) -> Tensor:
        return torch.empty(len(keys), *shape, dtype=torch.bool, device="meta")

    loss = patch.object(build, "linear_cross_entropy", linear_cross_entropy)
    with (
        loss,
        patch.object(layout_invariant_dropout, "draw_mask", draw_mask),
        torch.device("meta"),
        recorder.of(),
        model.randomness(0, batch.rows),
    ):
        model.loss_sum(batch)
    return recorder


def _batch(size: BatchSize, objective: str) -> Batch:
    def tokens(length: int) -> Tensor:
        return torch.ones(size.rows, length, dtype=torch.int64)

    is_row = objective == "classify"
    targets = torch.zeros(size.rows, dtype=torch.int64) if is_row else tokens(size.tokens)
    return Batch(
        tokens=tokens(size.tokens),
        targets=targets,
        weights=torch.ones(targets.shape),
        rows=torch.arange(size.rows),
        source=tokens(size.source) if size.source else None,
    )


@contextmanager
def explain_failures(problem: str) -> Iterator[None]:
    """Turn an error of foreign code without memory into an InputError that begins with the problem."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{problem}: {error}") from error
    except _FAILURES as error:
        text = " ".join(str(error).split())[:300]
        remedy = "let its code depend on sizes, not on values, or plan a module without that part"
        raise InputError(f"{problem}: {type(error).__name__}: {text}; {remedy}") from error


class _FusedLinearLoss(torch.autograd.Function):
    """An output head with its loss (models/arch/loss.py), which keeps gradients of its input and its weights."""

    @staticmethod
    def forward(ctx: Any, *tensors: Any) -> Tensor:
        gradients = (torch.empty_like(t, device="meta") if t is not None and t.requires_grad else None for t in tensors)
        is_scaled = tensors[0].dtype == torch.float16  # Gradients are computed in backward
        ctx.save_for_backward(*(tensors if is_scaled else gradients))
        return torch.empty((), device="meta")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        raise AssertionError("a trace has no backward")


@dataclass(frozen=True)
class OperatorCall:
    """One operator, its arguments besides tensors and sizes, and the shapes of its results."""

    module: str  # The innermost running module, by its path in the block
    operator: str
    options: tuple[object, ...]  # Dimensions, flags and words
    shapes: tuple[tuple[int, ...], ...]


# For each tensor in a block's arguments: (its role in the block before, whether a later block gets it)
BlockBorder = tuple[tuple[tuple[str, int] | None, bool], ...]


class OperatorRecorder(ForwardRecorder):
    """Records operators by block: `run_recorded(model, size, OperatorRecorder(model.module), ...)`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.blocks = list[str]()  # Blocks in the order in which the forward enters them
        self.inside = defaultdict[str, list[OperatorCall]](list)  # Operators of each block
        self.after = defaultdict[str, list[OperatorCall]](list)  # Those outside of blocks, by the block before or ""
        self._last_block = ""
        self._received = dict[str, list[Tensor]]()  # The tensors in the arguments of each block's first call
        self._returned = dict[str, list[Tensor]]()

    def border(self, block: str) -> BlockBorder:
        """Tell for each tensor that a block gets which argument or output of the block before it is, and whether a
        later block gets it, too."""
        order = list(self._received)
        at = order.index(block)
        before = order[at - 1] if at else ""
        earlier = {
            id(tensor): (kind, index)
            for kind, tensors in (("argument", self._received), ("output", self._returned))
            for index, tensor in enumerate(tensors.get(before, ()))
        }
        later = {id(tensor) for name in order[at + 1 :] for tensor in self._received[name]}
        return tuple((earlier.get(id(tensor)), id(tensor) in later) for tensor in self._received[block])

    def _note_arguments(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super()._note_arguments(block, args, kwargs)
        self._received.setdefault(self._blocks[block], _tensors_in((args, kwargs)))

    def _leave(self, module: nn.Module, *call: Any) -> None:
        super()._leave(module, *call)
        if module in self._blocks:
            self._returned.setdefault(self._blocks[module], _tensors_in(call[-1]))

    def observe(self, func: Any, call: tuple[tuple[Any, ...], dict[str, Any]], result: Any) -> None:
        """Record an operator."""
        self._add(func.name(), tuple(tuple(tensor.shape) for tensor in _tensors_in(result)), _options(func, *call))

    def add_linear(self, hidden: Tensor, weight: Tensor) -> None:
        """Record the head that is fused with its loss."""
        self._add("fused head", (tuple(hidden.shape), tuple(weight.shape)))

    def add_attention(self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool) -> None:
        """Record attention that a kernel computes."""
        self._add(f"attention causal={causal} masked={mask is not None}", tuple(tuple(x.shape) for x in (q, k, v)))

    def _add(self, operator: str, shapes: tuple[tuple[int, ...], ...], options: tuple[object, ...] = ()) -> None:
        block = self._blocks[self._running[-1][0]] if self._running else ""
        if block and self._last_block != block:
            self.blocks.append(block)
            self._last_block = block
        inner = self._names.get(self._stack[-1], "") if self._stack else ""
        calls = self.inside[block] if block else self.after[self._last_block]
        path = inner.removeprefix(block).removeprefix(".") if block else inner
        calls.append(OperatorCall(path, operator, options, shapes))


def _options(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[object, ...]:
    """The dimensions, flags and words among the arguments of an operator; sizes and other numbers differ in a twin."""
    names = [argument.name for argument in func._schema.arguments]
    values = {**dict(zip(names, args, strict=False)), **kwargs}
    return tuple(
        (name, tuple(value) if isinstance(value, list) else value)
        for name, value in values.items()
        if isinstance(value, bool | str) or "dim" in name
    )


def _tensors_in(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
