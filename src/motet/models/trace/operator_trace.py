"""The operators of a forward pass on the meta device, in order, with the module that calls each and its shapes."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from motet.models.torch_private import tree_leaves
from motet.models.trace.record_forward import ForwardRecorder


@dataclass(frozen=True)
class OperatorCall:
    """One operator, and the shapes of its results."""

    module: str  # The innermost running module, by its path in the block
    operator: str
    shapes: tuple[tuple[int, ...], ...]


class OperatorRecorder(ForwardRecorder):
    """Records operators by block: `run_recorded(model, size, OperatorRecorder(model.module), ...)`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.blocks = list[str]()  # In the order in which the forward enters them
        self.inside = defaultdict[str, list[OperatorCall]](list)  # Operators of each block
        self.after = defaultdict[str, list[OperatorCall]](list)  # Outside of blocks, by the block before; "" is none
        self._last_block = ""

    def observe(self, func: Any, call: tuple[tuple[Any, ...], dict[str, Any]], result: Any) -> None:
        """Record an operator."""
        shapes = (tuple(leaf.shape) for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        self._add(func.name(), tuple(shapes))

    def add_linear(self, hidden: Tensor, weight: Tensor) -> None:
        """Record the head that is fused with its loss."""
        self._add("fused head", (tuple(hidden.shape), tuple(weight.shape)))

    def add_attention(self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool) -> None:
        """Record attention that a kernel computes."""
        self._add(f"attention causal={causal} masked={mask is not None}", tuple(tuple(x.shape) for x in (q, k, v)))

    def _add(self, operator: str, shapes: tuple[tuple[int, ...], ...]) -> None:
        block = self._blocks[self._running[-1][0]] if self._running else ""
        if block and self._last_block != block:
            self.blocks.append(block)
            self._last_block = block
        inner = self._names.get(self._stack[-1], "") if self._stack else ""
        calls = self.inside[block] if block else self.after[self._last_block]
        calls.append(OperatorCall(inner.removeprefix(block).removeprefix(".") if block else inner, operator, shapes))
