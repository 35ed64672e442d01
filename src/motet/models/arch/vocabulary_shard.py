"""The vocabulary entries that a rank holds, where tensor-parallel ranks split them."""

from typing import Literal, Protocol
from weakref import WeakKeyDictionary

import torch.nn.functional as F
from torch import Tensor, nn


class VocabularyShard(Protocol):
    """A rank's entries of a vocabulary, and the communication with the ranks that hold the others."""

    @property
    def start(self) -> int:
        """The first entry of this rank."""
        ...

    @property
    def stop(self) -> int:
        """The end of its entries; a rank whose share is all padding has start == stop."""
        ...

    @property
    def size(self) -> int:
        """Entries of the whole vocabulary; a local tensor has ceil(size / ranks), with padding after the last."""
        ...

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"]) -> Tensor:
        """Reduce in place over the ranks, without a gradient."""
        ...

    def gather_logits(self, local_logits: Tensor) -> Tensor:
        """[..., size] on every rank, from the local logits of all ranks, without a gradient or padding."""
        ...


_SHARDS: WeakKeyDictionary[nn.Module, VocabularyShard] = WeakKeyDictionary()


def set_vocabulary_shard(module: nn.Module, shard: VocabularyShard | None) -> None:
    """Let the logits of a module be those of its rank's entries, or of all with None."""
    _SHARDS.pop(module, None)
    if shard is not None:
        _SHARDS[module] = shard


def vocabulary_shard_of(module: nn.Module) -> VocabularyShard | None:
    """The entries that the logits of a module are for; None: all of them."""
    return _SHARDS.get(module)


def gather_whole_logits(logits: Tensor, module: nn.Module) -> Tensor:
    """The logits of all entries, from the logits of a module on this rank; without a gradient if ranks split them."""
    shard = vocabulary_shard_of(module)
    return logits if shard is None else shard.gather_logits(logits)


class LogitsProjection(nn.Module):
    """The product of a head whose tensors belong to other modules, so that ranks can communicate at its input."""

    def forward(self, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """[..., H] -> logits [..., V]."""
        return F.linear(hidden, weight, bias)
