"""The operators of a forward pass on the meta device, in order, with the module that calls each and its shapes."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from motet.models.torch_private import tree_leaves
from motet.models.trace.record_forward import ForwardRecorder


@dataclass(frozen=True)
class OperatorCall:
    """One operator, what it is told besides tensors and sizes, and the shapes of its results."""

    module: str  # The innermost running module, by its path in the block
    operator: str
    options: tuple[object, ...]  # Dimensions, flags and words
    shapes: tuple[tuple[int, ...], ...]


# For each tensor in a block's arguments: (what it was to the block before, whether a later block gets it)
BlockBorder = tuple[tuple[tuple[str, int] | None, bool], ...]


class OperatorRecorder(ForwardRecorder):
    """Records operators by block: `run_recorded(model, size, OperatorRecorder(model.module), ...)`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.blocks = list[str]()  # In the order in which the forward enters them
        self.inside = defaultdict[str, list[OperatorCall]](list)  # Operators of each block
        self.after = defaultdict[str, list[OperatorCall]](list)  # Outside of blocks, by the block before; "" is none
        self._last_block = ""
        self._received = dict[str, list[Tensor]]()  # The tensors in the arguments of each block's first call
        self._returned = dict[str, list[Tensor]]()

    def border(self, block: str) -> BlockBorder:
        """Say of each tensor that a block gets which argument or output of the block before it is, and whether a later
        block gets it, too."""
        order = list(self._received)
        at = order.index(block)
        before = order[at - 1] if at else ""
        earlier = {
            id(tensor): (kind, index)
            for kind, of_blocks in (("argument", self._received), ("output", self._returned))
            for index, tensor in enumerate(of_blocks.get(before, ()))
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
