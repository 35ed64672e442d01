"""The two seams that hand the attention of any module to the one core of attention, while it runs on a part of each
row: the attention registry of transformers, and a function mode for torch's `scaled_dot_product_attention`."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet.models.arch.attention_core import AttentionExchange, ScoreOptions, attention_exchange
from motet.models.arch.attention_marker import attend_in_seam, marked_mask
from motet.models.arch.attention_mask import AttentionMask
from motet.models.hf.attention_function import configs_with_core
from motet.models.mode_in_backward import BACKWARDS, backward_in_mode
from motet.models.torch_private import InterceptedFunctions
from motet.models.user_module import asks_for_field

_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


class AttentionSeams:
    """The seams of a module, in which an exchange computes its attention."""

    def __init__(self, module: nn.Module) -> None:
        parts = list(module.modules())
        packages = {package for part in parts for package in _packages(part)}
        is_foreign = bool(packages - {"motet", "torch", "builtins", "typing", "abc"})
        self._mode = InterceptedFunctions(self._call_function) if is_foreign else None
        # Attributes of a module, its config, and the copy with the core of attention
        self._configs = configs_with_core(parts) if "transformers" in packages else []
        # A user's module attends across the documents of packed rows, unless its forward asks for them
        is_known = not _packages(module).isdisjoint({"motet", "transformers"})
        self.separate_documents = is_known or asks_for_field(module, "documents")

    @contextmanager
    def exchanging(self, exchange: AttentionExchange) -> Iterator[None]:
        """Inside, also in recomputation, attention of the module goes to this exchange. It is entered after other
        function modes, such as that of dropout."""
        with ExitStack() as stack:
            stack.callback(attention_exchange.reset, attention_exchange.set(exchange))
            # A device's thread of autograd would have neither the exchange nor the mode.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            for attributes, config, changed in self._configs:
                attributes["config"] = changed
                stack.callback(attributes.__setitem__, "config", config)
            if self._mode is not None:
                stack.enter_context(self._mode)
            yield

    def _call_function(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if function in BACKWARDS and self._mode is not None:
            return backward_in_mode(self._mode, *args, **kwargs)
        if function is F.scaled_dot_product_attention and attention_exchange.get() is not None:
            return _attention(*args, **kwargs)
        return function(*args, **kwargs)


def _packages(module: nn.Module) -> set[str]:
    """The packages of the classes of a module: FSDP2 gives it a class of torch that inherits from the module's."""
    return {base.__module__.partition(".")[0] for base in type(module).__mro__}


def _attention(*args: Any, **kwargs: Any) -> Tensor:
    """A call without a mask attends to the whole row, or causally."""
    named = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
    query, mask, scale = named["query"], named.get("attn_mask"), named.get("scale")
    visible = AttentionMask(causal=named.get("is_causal", False)) if mask is None else marked_mask(mask)
    options = ScoreOptions(1 / sqrt(query.shape[-1]) if scale is None else scale, dropout=named.get("dropout_p", 0.0))
    return attend_in_seam(query, named["key"], named["value"], mask=visible, options=options)
