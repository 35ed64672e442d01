"""Codecs that make tensors small for the wire, one file each, and the collectives that send their messages."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch as lazy_torch
else:

    class _LazyTorch:
        """Imported at its first use, since settings and plans use options and lengths of codecs without torch."""

        def __getattr__(self, name):
            return getattr(import_module("torch"), name)

    lazy_torch = _LazyTorch()

__all__ = ["lazy_torch"]
