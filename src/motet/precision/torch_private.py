"""Private names of torch that precision needs, in one file to check against each new version of torch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

__all__ = [
    "ATTENTION",
    "ATTENTION_BACKWARD",
    "GROUPED_KERNEL",
    "GROUPED_PRODUCT",
    "NormBase",
    "TorchDispatchMode",
    "tree_map",
]

GROUPED_PRODUCT: Any = torch._grouped_mm  # The kernel behind torch.nn.functional.grouped_mm
GROUPED_KERNEL: Any = torch.ops.aten._grouped_mm.default

# The kernels behind torch.nn.functional.scaled_dot_product_attention on a processor
ATTENTION: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
ATTENTION_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def active_function_modes() -> Sequence[TorchFunctionMode]:
    """The function modes of this thread, outermost first."""
    return [*_get_current_function_mode_stack()]
