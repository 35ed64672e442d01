"""The tensors in arguments and results of modules, with names."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from motet.models.arch.attention_marker import is_marker
from motet.models.arch.attention_mask import AttentionMask, AttentionTokens


def named_float_tensors(output: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The floating-point tensors in the output of a module."""
    if isinstance(output, Tensor) and output.is_floating_point():
        yield name, output
    elif isinstance(output, Mapping | list | tuple):
        for key, value in output.items() if isinstance(output, Mapping) else enumerate(output):
            yield from named_float_tensors(value, f"{name}[{key}]")


def named_conditions(value: Any, name: str, is_pair: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Integers and masks in the arguments of a block, and pairs of numbers that follow from positions."""
    if isinstance(value, Tensor):
        if is_marker(value):  # One device has the mask itself
            return
        is_pair = is_pair or (value.ndim > 3 and value.shape[-1] == 2)  # Cosines and sines
        if not value.requires_grad and (is_pair or not value.is_floating_point()):
            yield name, torch.view_as_real(value) if value.is_complex() else value
    elif isinstance(value, AttentionMask | AttentionTokens):
        for key, inner in vars(value).items():
            if key != "places" and not key.startswith("_"):  # Only a part of a row has places
                yield from named_conditions(inner, f"{name}[{key}]")
    elif isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else ((str(n), each) for n, each in enumerate(value))
        for key, inner in items:
            yield from named_conditions(inner, f"{name}[{key}]", not isinstance(value, Mapping))
