"""Views of a tensor as boxes of it, which are read from a checkpoint without the rest of the tensor."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from motet.export.stored_parameters import StoredParameters


@dataclass(frozen=True)
class ViewedBox:
    """Elements of a tensor that are a box of another one, whose dimensions may be in another order."""

    offsets: list[int]
    lengths: list[int]
    order: list[int]  # For each dimension of the box that is longer than 1, that of the other tensor


def find_box(target: Tensor, source: Tensor) -> ViewedBox | None:
    """The elements of a contiguous tensor that a view shows; None if they are not a box."""
    offset, strides, offsets = target.storage_offset(), source.stride(), list[int]()
    for stride in strides:
        offsets.append(offset // stride)
        offset %= stride
    lengths, order = [1] * source.ndim, list[int]()
    for size, stride in zip(target.shape, target.stride(), strict=True):
        if size == 1:
            continue
        dims = [dim for dim in range(source.ndim) if strides[dim] == stride and source.shape[dim] > 1]
        if not dims or dims[0] in order or offsets[dims[0]] + size > source.shape[dims[0]]:
            return None
        lengths[dims[0]] = size
        order.append(dims[0])
    return ViewedBox(offsets, lengths, order)


def read_view(parameters: StoredParameters, source: str, box: ViewedBox) -> Iterator[Tensor]:
    """The elements of a view in its row-major order, in pieces."""
    if not box.offsets:
        yield parameters.cast(source, parameters.complete(source))
        return
    # Rows of the source are rows of the target, or all that the target needs of them are read together
    has_same_rows = box.order[:1] == [0] or box.lengths[0] == 1
    first, stop = box.offsets[0], box.offsets[0] + box.lengths[0]
    inner = tuple(slice(at, at + n) for at, n in zip(box.offsets[1:], box.lengths[1:], strict=True))
    unit = 1 if has_same_rows else stop - first
    others = [dim for dim in range(len(box.offsets)) if dim not in box.order]
    for rows in parameters.pieces(source, first, stop, unit=unit, inner=inner):
        yield parameters.cast(source, rows.permute(*others, *box.order))
