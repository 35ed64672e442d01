"""Private names of torch that compilation needs, in one file to check against each new version of torch.

The compiler is imported where it is used, since that takes as long as to import the rest of torch.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from motet.core.errors import InputError

GRAPHS_OF_A_BLOCK = 64  # Kinds of blocks, shapes of micro-batches and dtypes; torch's limit of 8 is for one function
_RANDOM_CALLS = frozenset(
    "bernoulli bernoulli_ exponential_ multinomial normal normal_ rand rand_like randint randint_like randn randn_like "
    "randperm uniform_".split()
)


def has_kernel_modes() -> bool:
    """Whether a dispatch mode watches the kernels of this thread, which compiled code would not show to it."""
    return torch._C._len_torch_dispatch_stack() > 0


def without_function_modes() -> AbstractContextManager[None]:
    """A context in which no function mode is active."""
    return torch._C.DisableTorchFunction()


class GraphCompiler:
    """Compiles functions to one graph of fixed shapes each, when they are first called."""

    def __init__(self, around: Callable[[GraphModule], AbstractContextManager[None]]) -> None:
        """`around(graph)` is a context in which a graph is compiled; it may refuse the graph."""
        import torch._dynamo.config
        import torch._inductor.config

        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS_OF_A_BLOCK)
        if not torch.cuda.is_available():  # Ranks that compile share the cores of the machine
            torch._inductor.config.compile_threads = torch.get_num_threads()
        self._around = around

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Functions of one code object share graphs, as they have one backend."""
        compiled: Callable[..., Any] = torch.compile(function, fullgraph=True, dynamic=False, backend=self._backend)
        return compiled

    def _backend(self, graph: GraphModule, inputs: list[torch.Tensor], **options: Any) -> Any:
        with self._around(graph):
            return generate_code(graph, inputs, **options)


def generate_code(graph: GraphModule, inputs: list[torch.Tensor], **options: Any) -> Callable[..., Any]:
    """Code of torch's compiler for a graph."""
    from torch._inductor.compile_fx import compile_fx

    code: Callable[..., Any] = compile_fx(graph, inputs, **options)
    return code


def compile_problem(error: BaseException) -> str | None:
    """What torch.compile says about a function that it cannot compile, in one line; None for an error of the code."""
    from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException

    if isinstance(error, BackendCompilerFailed) and isinstance(error.inner_exception, InputError):
        return str(error.inner_exception)
    if not isinstance(error, TorchDynamoException):
        return None
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    places = [line for line in lines if line.startswith("File ")]
    return f"{lines[0]}, {places[-1][0].lower() + places[-1][1:]}" if places else lines[0]


def random_call(graph: GraphModule) -> str | None:
    """The name of a function in a graph that draws random numbers; None without one."""
    return next((name for node in graph.graph.nodes if (name := _random_name(node))), None)


def _random_name(node: Node) -> str | None:
    if node.op not in ("call_function", "call_method"):
        return None
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    values = dict(zip(("input", "p", "training"), node.args, strict=False)) | node.kwargs
    if name == F.scaled_dot_product_attention.__name__:
        is_random = bool(node.kwargs.get("dropout_p") or (len(node.args) > 4 and node.args[4]))
    elif "dropout" in name:
        is_random = values.get("p", 0.5) != 0 and values.get("training", True) is not False
    else:
        is_random = name in _RANDOM_CALLS
    return name if is_random else None
