"""Which part of a row of an activation a rank has where dropout draws its mask, from the shape of the row there."""

from collections.abc import Sequence

from motet.core.errors import InputError
from motet.models.dropout_mask import RowSplit, Spans


def split_by_units(width: int, spans: Sequence[tuple[int, int]], padding: int) -> RowSplit:
    """The split inside of a region whose last layer reads `width` elements, of which this rank has these
    spans and padding: of inner activations [T, width], or of the heads of attention probabilities [heads, T, S]."""
    local = padding + sum(stop - first for first, stop in spans)

    def split(shape: tuple[int, ...]) -> tuple[tuple[int, ...], Spans]:
        is_inner = shape[-1] == local and (len(shape) == 2 or (len(shape) == 3 and shape[0] == 1))
        dim = len(shape) - 1 if is_inner else 1 if len(shape) == 4 and shape[0] == 1 else 0
        units, is_unclear = shape[dim], not local or len(shape) < 2 or (not is_inner and len(shape) not in (3, 4))
        bounds = [bound * units for of_span in spans for bound in (*of_span, width)]
        if is_unclear or any(bound % local for bound in bounds):
            raise InputError(
                f"dropout on a tensor whose rows here have shape {list(shape)}, between layers that ranks split: which "
                f"of its dimensions holds this rank's {local} of {width} elements is not known; set the dropout to 0"
            )
        here = [(first * units // local, stop * units // local) for first, stop in spans]
        filler = [(0, padding * units // local)] if padding else []  # The mask of zeros does not matter
        return _replace_dim(shape, dim, width * units // local, spans=[*here, *filler])

    return split


def split_by_tokens(ranks: int, index: int) -> RowSplit:
    """The split of the residual stream over the sequence: each rank has as many tokens."""

    def split(shape: tuple[int, ...]) -> tuple[tuple[int, ...], Spans]:
        dim = 1 if len(shape) > 2 and shape[0] == 1 else 0
        tokens = shape[dim]
        return _replace_dim(shape, dim, ranks * tokens, spans=[(index * tokens, (index + 1) * tokens)])

    return split


def _replace_dim(
    shape: tuple[int, ...], dim: int, length: int, *, spans: list[tuple[int, int]]
) -> tuple[tuple[int, ...], Spans]:
    all_spans = [[(0, local)] for local in shape]
    all_spans[dim] = spans
    return (*shape[:dim], length, *shape[dim + 1 :]), all_spans
