"""The blocks of a module compiled by torch.compile: one graph for each kind of block, which its blocks share.

The forward of a block is compiled, after its layers are split and before FSDP2 shards it. Hooks of the block itself,
recomputation and gathering of parameters surround the graph; hooks of its layers, which communicate activations, are
part of it. Without gradients, and inside of torch modes that watch kernels, a block runs as written.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn

from motet.core.errors import InputError
from motet.core.trace import log_if_slow
from motet.models.arch.attention_mask import AttentionMask
from motet.models.torch_private import (
    GraphCompiler,
    compile_problem,
    has_kernel_modes,
    random_call,
    without_function_modes,
)
from motet.models.user_module import find_blocks


class CompiledBlocks:
    """The blocks of a module, whose forwards are compiled when they are first called."""

    def __init__(self, blocks: Sequence[nn.Module], *, falls_back: bool) -> None:
        """Compile the forwards of blocks. With `falls_back`, blocks that cannot become one graph run as written, for a
        `reason`."""
        self.reason: str | None = None
        self.graphs = 0  # Made so far: one for each kind of block, and for each shape of its inputs
        self.log: Callable[[str], None] = lambda text: None  # Called with a line where compilation takes long
        self._falls_back, self._unshared = falls_back, blocks
        if not blocks:
            return
        compiler = GraphCompiler(self._around_compilation)
        for block in blocks:
            written: Callable[..., Any] = block.forward
            call = partial(self._call, type(block).__name__, written, compiler.compile(written))
            block.forward = update_wrapper(call, written)

    @classmethod
    def none(cls, reason: str) -> "CompiledBlocks":
        """No blocks are compiled, for a reason."""
        compiled = cls((), falls_back=True)
        compiled.reason = reason
        return compiled

    def _around_compilation(self, graph: torch.fx.GraphModule) -> AbstractContextManager[None]:
        """Refuse random numbers: masks must not depend on the layout, which code in a graph cannot promise."""
        drawn = random_call(graph)
        if drawn is not None:
            raise InputError(f"it calls {drawn}, whose random numbers motet draws outside of compiled code")
        self.graphs += 1
        return log_if_slow(self.log, "compiling a kind of block; later runs read its code from the cache ...")

    def _call(
        self, name: str, written: Callable[..., Any], compiled: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        if self.reason is not None or not torch.is_grad_enabled() or has_kernel_modes():
            return written(*args, **kwargs)
        if self._unshared:
            for block in self._unshared:
                _let_graphs_be_shared(block)
            self._unshared = ()
        _prepare_masks((*args, *kwargs.values()))
        try:
            with without_function_modes():
                return compiled(*args, **kwargs)
        except Exception as error:
            problem = compile_problem(error)
            if problem is None:
                raise
            reason = f"torch.compile cannot make one graph of {name}.forward: {problem}"
            if not self._falls_back:
                raise InputError(f"run.compile = 'blocks': {reason}; set run.compile=off") from error
            self.reason = reason
        return written(*args, **kwargs)


def _let_graphs_be_shared(block: nn.Module) -> None:
    """Move forwards that were set on layers to classes of them: a graph with a function of a layer is for it alone."""
    for layer in block.modules():
        if layer is not block and "forward" in vars(layer):
            layer.replaced_forward = vars(layer).pop("forward")
            kind: Any = type(layer)
            layer.__class__ = _class_with_replaced_forward(kind)


@cache
def _class_with_replaced_forward(kind: Any) -> Any:
    return type(kind)(kind.__name__, (kind,), {"forward": _replaced_forward, "__module__": kind.__module__})


def _replaced_forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
    return layer.replaced_forward(*args, **kwargs)


def _prepare_masks(arguments: Sequence[Any]) -> None:
    """Let masks make their tensors before a graph, which then reads them as the graphs of all blocks do."""
    x = next((each for each in arguments if isinstance(each, Tensor)), None)
    for each in arguments:
        if isinstance(each, AttentionMask) and x is not None:
            each.prepare(x)


def compile_blocks(module: nn.Module, *, falls_back: bool) -> CompiledBlocks:
    """Let the blocks of a module be compiled when they are first called with gradients."""
    compiled = CompiledBlocks(blocks := find_blocks(module), falls_back=falls_back)
    if not blocks:
        problem = (
            f"{type(module).__name__} has no blocks (items of an nn.ModuleList or nn.Sequential that own their "
            "parameters) to compile"
        )
        if not falls_back:
            raise InputError(f"run.compile = 'blocks': {problem}; set run.compile=off, or put the layers into blocks")
        compiled.reason = problem
    return compiled
