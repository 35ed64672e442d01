"""The blocks of a module compiled by torch.compile: one graph for each kind of block, which its blocks share.

The forward of a block is compiled, after its layers are split and before FSDP2 shards it. Hooks of the block itself,
recomputation and gathering of parameters surround the graph; hooks of its layers, which communicate activations, are
part of it. Without gradients, and inside of torch modes that watch kernels, a block runs eagerly.
"""

from collections.abc import Callable, Hashable, Sequence
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
    is_compiled_by_its_module,
    random_call,
    tree_leaves,
    without_function_modes,
)
from motet.models.user_module import find_blocks

# Graphs of blocks of one class: kinds of blocks, shapes of micro-batches and dtypes. Without a request there are fewer,
# because a model whose micro-batches have ever new shapes would compile in each step.
MAX_GRAPHS, MAX_GRAPHS_OF_AUTO = 64, 16


class CompiledBlocks:
    """The blocks of a module, whose forwards are compiled when they are first called."""

    def __init__(self, blocks: Sequence[nn.Module], *, falls_back: bool) -> None:
        """Compile the forwards of blocks. With `falls_back`, calls that cannot become one graph run eagerly, for a
        `reason`."""
        self.reason: str | None = None
        self.graphs = 0  # Made so far: one for each kind of block, and for each shape of its inputs
        self.log: Callable[[str], None] = lambda text: None  # Called with a line where compilation takes long
        self.is_paused = False  # Blocks run eagerly
        self._falls_back, self._unshared = falls_back, blocks
        self._failed = set[Hashable]()  # Calls that run eagerly, also where backward recomputes them
        if not blocks:
            return
        self._max_graphs = MAX_GRAPHS_OF_AUTO if falls_back else MAX_GRAPHS
        compiler = GraphCompiler(self._around_compilation, max_graphs=self._max_graphs)
        for block in blocks:
            if is_compiled_by_its_module(block):
                name = type(block).__name__
                self._refuse(f"the code of {name} compiles its forward, or keeps torch.compile away from it")
                continue
            written: Callable[..., Any] = block.forward
            call = partial(self._call, block, written, compiler.compile(written))
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

    def _refuse(self, reason: str, error: Exception | None = None) -> None:
        """Raise an error, or keep the reason where blocks may run eagerly."""
        if not self._falls_back:
            raise InputError(f"run.compile = 'blocks': {reason}; set run.compile=off") from error
        self.reason = self.reason or reason

    def _call(
        self, block: nn.Module, written: Callable[..., Any], compiled: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        if self.is_paused or not torch.is_grad_enabled() or has_kernel_modes():
            return written(*args, **kwargs)
        arguments = (*args, *kwargs.values())
        if self._failed and _kind_of_call(block, arguments) in self._failed:
            return written(*args, **kwargs)
        for each in self._unshared:
            _let_graphs_be_shared(each)
        self._unshared = ()
        try:
            with without_function_modes():
                return compiled(*args, **kwargs)
        except Exception as error:
            problem = compile_problem(error, max_graphs=self._max_graphs)
            if problem is None:
                raise
            self._refuse(f"torch.compile cannot make one graph of {type(block).__name__}.forward: {problem}", error)
            self._failed.add(_kind_of_call(block, arguments))
        return written(*args, **kwargs)


def _kind_of_call(block: nn.Module, arguments: Sequence[Any]) -> Hashable:
    """A call of a block, by the shapes of its arguments. Blocks of one class may differ: dense ones, and experts."""
    sequences = [each.sequence for each in arguments if isinstance(each, AttentionMask)]
    tensors = tree_leaves([*arguments, *(each.starts for each in sequences if each is not None)])
    return block, *((t.shape, t.dtype, t.requires_grad) for t in tensors if isinstance(t, Tensor))


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
