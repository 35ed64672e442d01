"""The tensors that cross the border between two pipeline stages, and the form of the output of a block."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class StageWire:
    """A tensor that crosses the border between two pipeline stages: an argument of the first block after it.

    A dimension is a number of elements, or a text such as `rows`, `tokens`, `source tokens` or `rows * tokens + 1`. One
    such as `tokens / 2` is split over two ranks, or whole where they cannot split it.
    """

    argument: int | str  # Its index or name
    dims: tuple[int | str, ...]
    dtype: str
    path: tuple[int | str, ...] = ()  # Items, keys or attributes that lead to the tensor inside of the argument
    needs_gradient: bool = True
    is_constant: bool = False  # Later blocks get the same tensor
    is_written: bool = False  # The module writes into it
    is_replicated: bool = True  # All tensor-parallel ranks have the same tensor

    @property
    def place(self) -> tuple[int | str, ...]:
        """The path to the tensor in all arguments of the block."""
        return (self.argument, *self.path)

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Its shape for a micro-batch of these sizes, such as `{"rows": 2, "tokens": 128}`."""
        return tuple(dim if isinstance(dim, int) else _size_of_dim(dim, sizes) for dim in self.dims)

    def split_lengths(self, sizes: Mapping[str, int]) -> list[int]:
        """The lengths of dimensions that tensor-parallel ranks split, on all ranks together."""
        texts = [dim.partition(" / ") for dim in self.dims if isinstance(dim, str)]
        return [_size_of_dim(text, sizes) for text, is_split, _ in texts if is_split]


def _size_of_dim(dim: str, sizes: Mapping[str, int]) -> int:
    """The value of a text such as `2 * tokens + 1`."""
    whole_text, _, ranks = dim.partition(" / ")
    size = sum(
        prod(sizes[word] if word in sizes else int(word) for word in term.split(" * "))
        for term in whole_text.split(" + ")
    )
    return size // int(ranks) if ranks and size % int(ranks) == 0 else size


@dataclass(frozen=True)
class BlockOutput:
    """The form of a block's output, which a stage that skips the block returns without its values.

    It is a tensor like an argument of the block, perhaps of another shape; or a non-tensor argument; or a plain value;
    or a container.
    """

    argument: tuple[int | str, ...] = ()  # The path to an argument
    dims: tuple[int | tuple[int | str, ...], ...] | None = None  # A size, or the path to an argument and its dimension
    dtype: str = ""  # If it differs from that of the argument
    value: bool | int | float | str | None = None
    container: str = ""  # `tuple`, `list`, `dict`, or a class as `package.module:Class`
    items: tuple[tuple[int | str, "BlockOutput"], ...] = ()
