"""Private names of torch that precision needs, in one file to check against each new version of torch."""

from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase as NormBase

__all__ = ["GROUPED_PRODUCT", "NormBase"]

GROUPED_PRODUCT: Any = torch._grouped_mm  # To which torch.nn.functional.grouped_mm leads
