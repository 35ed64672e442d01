"""Private names of torch that models need, in one file to check against each new version of torch."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, partial
from inspect import signature
from typing import Any, cast

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn.attention import _cur_sdpa_kernel_backends
from torch.nn.modules.module import _has_any_global_hook
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import CheckpointPolicy

from motet.core.errors import InputError

__all__ = ["TorchDispatchMode", "tree_leaves", "tree_map"]

READ_NUMBER: Any = torch.ops.aten._local_scalar_dense.default
COPY_TO: Any = torch.ops.aten._to_copy.default
GROUPED_PRODUCT: Any = torch.ops.aten._grouped_mm.default
_CPU_FLASH_FORWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_CPU_FLASH_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_CUDA_FLASH_FORWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention.default
_CUDA_FLASH_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_backward.default


def is_in_backward() -> bool:
    """Whether autograd runs a backward in this thread: a forward inside of it is recomputation."""
    return torch._C._current_graph_task_id() != -1


def runs_forward_alone(module: nn.Module) -> bool:
    """Whether a call of a module runs the forward of its class and nothing else: no hooks, no replaced forward."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return not (any(hooks) or "forward" in vars(module) or _has_any_global_hook())


def is_active_mode(mode: TorchFunctionMode) -> bool:
    """Whether a function mode is active in this thread."""
    return any(each is mode for each in _get_current_function_mode_stack())


def intercept_calls(module: nn.Module, around: Callable[..., Any]) -> Callable[[], None]:
    """Let `around(call, *arguments)` be called in place of a module, before its hooks; returns its remover."""
    before = module._compiled_call_impl
    module._compiled_call_impl = partial(around, before or module._call_impl)

    def restore() -> None:
        module._compiled_call_impl = before

    return restore


class InterceptedFunctions(TorchFunctionMode):
    """A context in which `around(function, *arguments)` is called in place of each function of torch."""

    def __init__(self, around: Callable[..., Any]) -> None:
        super().__init__()
        self._around = around

    def __torch_function__(self, func: Callable[..., Any], types: Any, *call: Any) -> Any:
        """Call `around`; `call` is the positional arguments and those by name."""
        args, kwargs = (*call, None)[:2]
        return self._around(func, *args, **(kwargs or {}))


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The parameters that a module itself holds, without the cost of `named_parameters`."""
    return module._parameters


def softmax_backward(grad: Tensor, probabilities: Tensor) -> Tensor:
    """The gradient of the input of a softmax over the last dimension, from that of its output."""
    return torch._softmax_backward_data(grad, probabilities, -1, probabilities.dtype)


def softmax_or_zeros(scores: Tensor) -> Tensor:
    """Softmax over the last dimension, with zeros where all scores are -inf, as in scaled_dot_product_attention."""
    return torch._safe_softmax(scores, -1)


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """q [R, h, t, D], k and v [R, kv, s, D], an additive mask -> output [R, h, t, D] and log-sum-exp [R, h, t]. A query
    that sees no key has the output 0 and the log-sum-exp 0. What the kernels of CUDA take is assumed from their
    sources, and has not run."""
    if q.is_cuda:
        output, log_sum_exp, *_ = _CUDA_FLASH_FORWARD(q, k, v, 0.0, is_causal, False, scale=scale)
    else:
        output, log_sum_exp = _CPU_FLASH_FORWARD(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)
    return output, log_sum_exp


def flash_backward(
    grad: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    *,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values of a block. `results`: the output and the log-sum-exp over all blocks."""
    known = (grad, *inputs, *results)
    if grad.is_cuda:
        unused = torch.empty((), dtype=torch.int64, device=grad.device)  # Random numbers of dropout
        lengths = None, None, inputs[0].shape[2], inputs[1].shape[2]  # No offsets of rows of other lengths
        gradients = _CUDA_FLASH_BACKWARD(*known, *lengths, 0.0, is_causal, unused, unused, scale=scale)
    else:
        gradients = _CPU_FLASH_BACKWARD(*known, 0.0, is_causal, attn_mask=mask, scale=scale)
    grad_q, grad_k, grad_v = gradients
    return grad_q, grad_k, grad_v


@cache
def is_amx_supported() -> bool:
    """Whether this CPU has matrix tiles."""
    return bool(torch.cpu._is_amx_tile_supported())


def storage_key(tensor: Tensor) -> int:
    """The same number for all views of a storage, as long as it lives; also of one without memory."""
    return int(tensor.untyped_storage()._cdata)


def aliases_input(operator: Any) -> bool:
    """Whether the result of an operator is a view of its argument."""
    returns = operator._schema.returns
    return any(each.alias_info is not None and not each.alias_info.is_write for each in returns)


def written_arguments(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operator writes to."""
    named = zip(operator._schema.arguments, args, strict=False)
    by_name = {**{argument.name: value for argument, value in named}, **kwargs}
    written = (by_name.get(a.name) for a in operator._schema.arguments if a.alias_info and a.alias_info.is_write)
    return [each for each in tree_leaves(list(written)) if isinstance(each, Tensor)]


# --- compilation, whose modules are imported where they are used: as slow as the rest of torch ---------

_RANDOM_CALLS = {f"{name}{suffix}" for name in ("rand", "randint", "randn") for suffix in ("", "_like")} | {
    *("bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "gumbel_softmax", "log_normal_"),
    *("multinomial", "normal", "normal_", "poisson", "random_", "randperm", "uniform_"),
    *("binomial", "_standard_gamma", "_sample_dirichlet"),  # Distributions of torch call them
}
_CHANCES = "p", "dropout_p", "train", "training"  # Arguments of operators; one that is zero or false draws nothing
# Functions that draw where an argument at this place, `dropout_p` or `training`, is neither zero nor false
_RANDOM_BY_ARGUMENT = {"scaled_dot_product_attention": 4, "multi_head_attention_forward": 10, "rrelu": 3}


def has_kernel_modes() -> bool:
    """Whether a dispatch mode watches the kernels of this thread, which compiled code would not show to it."""
    return torch._C._len_torch_dispatch_stack() > 0


def without_function_modes() -> AbstractContextManager[None]:
    """A context in which no function mode is active."""
    return torch._C.DisableTorchFunction()


def is_compiled_by_its_module(module: nn.Module) -> bool:
    """Whether a module compiles its forward itself, or is kept from being compiled."""
    call: Any = module._compiled_call_impl
    while isinstance(call, partial):  # Of `intercept_calls`
        call = call.args[0]
    functions = call, getattr(module.forward, "__func__", module.forward)
    return any(hasattr(each, "_torchdynamo_orig_callable") for each in functions)


def constant_in_graphs(function: Any) -> Any:
    """A function whose result a graph keeps, as `torch.compiler.assume_constant_result` makes it; that one imports the
    compiler, which takes seconds."""
    function._dynamo_marked_constant = True
    return function


class GraphCompiler:
    """Compiles functions to one graph of fixed shapes each, when they are first called."""

    def __init__(
        self, around: Callable[[torch.fx.GraphModule], AbstractContextManager[None]], *, max_graphs: int
    ) -> None:
        """`around(graph)` is a context in which a graph is compiled; it may refuse the graph. torch's own limit on the
        graphs of a function is 8."""
        import torch._dynamo.config
        import torch._inductor.config

        self._options: dict[str, Any] = {"backend": self._backend, "recompile_limit": max_graphs}
        if "recompile_limit" not in signature(torch.compile).parameters:  # Before torch 2.13 the process has one limit
            torch._dynamo.config.recompile_limit = self._options.pop("recompile_limit")
        is_chosen = "TORCHINDUCTOR_COMPILE_THREADS" in os.environ  # noqa: TID251  (a variable of torch)
        if not torch.cuda.is_available() and not is_chosen:  # Ranks that compile share the cores of the machine
            torch._inductor.config.compile_threads = torch.get_num_threads()
        self._around = around

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Functions of one code object share graphs, as they have one backend."""
        compile_by: Any = torch.compile
        return cast(Callable[..., Any], compile_by(function, fullgraph=True, dynamic=False, **self._options))

    def _backend(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **options: Any) -> Any:
        import torch._functorch.config
        import torch._inductor.config

        _tag_recomputed_nodes(graph)
        config: Any = torch.compiler.config
        # torch chooses a kernel of attention while it traces, after it has made the key of its cache.
        tag = f"{config.cache_key_tag}{_cur_sdpa_kernel_backends(with_priority=True)}"
        with (
            self._around(graph),
            config.patch(cache_key_tag=tag),
            # Else torch compiles a backward when it is first called, where a block cannot run eagerly any more.
            torch._functorch.config.patch(force_non_lazy_backward_lowering=True),
            # Where sizes differ between ranks, this pass could move collectives to other places on each of them.
            torch._inductor.config.patch(reorder_for_peak_memory=False),
        ):
            return generate_code(graph, inputs, **options)


def _tag_recomputed_nodes(graph: torch.fx.GraphModule) -> None:
    """Let backward compute again the results of operators that were called with `is_recomputed=True`, by the tag of
    selective checkpointing, which torch's partitioner of forward and backward reads. Caches of compiled code do not see
    tags, and tell graphs by the argument."""
    graphs = (module for module in graph.modules() if isinstance(module, torch.fx.GraphModule))
    for node in (node for each in graphs for node in each.graph.nodes):  # A function of autograd is a graph inside
        if node.kwargs.get("is_recomputed"):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def generate_code(graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **options: Any) -> Callable[..., Any]:
    """Code of torch's compiler for a graph."""
    from torch._inductor.compile_fx import compile_fx

    code: Any = compile_fx(graph, inputs, **options)
    return cast(Callable[..., Any], code)


def compile_problem(error: BaseException, *, max_graphs: int) -> str | None:
    """The problem of torch.compile with a function, in one line; None for an error of the code."""
    from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit, TorchDynamoException

    if isinstance(error, FailOnRecompileLimitHit):
        return (
            f"{max_graphs} graphs were made before, for other shapes of its inputs, or other values that its code "
            "reads, such as an attribute that it counts"
        )
    if isinstance(error, BackendCompilerFailed) and isinstance(error.inner_exception, InputError):
        return str(error.inner_exception)
    if isinstance(error, BackendCompilerFailed) and isinstance(error.inner_exception, OSError):
        cause = error.inner_exception
        place = cause.filename or os.environ.get("TORCHINDUCTOR_CACHE_DIR")  # noqa: TID251  (a variable of torch)
        return (
            f"its code cannot be written ({place}: {cause.strerror}); free some space there, or name another folder by "
            "the variable TORCHINDUCTOR_CACHE_DIR"
        )
    if isinstance(error, RuntimeError) and "found no compiled frames" in str(error):
        return "torch skips its code"
    if not isinstance(error, TorchDynamoException):
        return None
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("backend=")]
    lines = lines or [type(error).__name__]
    places = [line for line in lines if line.startswith("File ")]
    return f"{lines[0]}, {places[-1][0].lower() + places[-1][1:]}" if places else lines[0]


def random_call(graph: torch.fx.GraphModule) -> str | None:
    """The name of a function that draws random numbers in a graph, or in a graph inside of it; None without one."""
    graphs = (each.graph for each in graph.modules() if isinstance(each, torch.fx.GraphModule))
    return next((name for each in graphs for node in each.nodes if (name := _random_name(node))), None)


def _random_name(node: torch.fx.Node) -> str | None:
    if node.op not in ("call_function", "call_method"):
        return None
    if isinstance(node.target, torch._ops.OpOverload):
        return _random_operator(node.target, node)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    values = dict(zip(("input", "p", "training"), node.args, strict=False)) | node.kwargs
    if name in _RANDOM_BY_ARGUMENT:
        named = node.kwargs.get("dropout_p", node.kwargs.get("training"))
        is_random = bool(dict(enumerate(node.args)).get(_RANDOM_BY_ARGUMENT[name], named))
    elif "dropout" in name:
        is_random = values.get("p", 0.5) not in (0, 0.0) and values.get("training", True) is not False
    else:
        is_random = name in _RANDOM_CALLS
    return name if is_random else None


def _random_operator(operator: Any, node: torch.fx.Node) -> str | None:
    values = {each.name: each.default_value for each in operator._schema.arguments if each.has_default_value()}
    values |= dict(zip((each.name for each in operator._schema.arguments), node.args, strict=False)) | node.kwargs
    is_off = any(values.get(name) in (0, False) for name in _CHANCES)  # None, which is a default, is on
    return str(operator) if torch.Tag.nondeterministic_seeded in operator.tags and not is_off else None
