"""The part of a row's dropout masks that a rank of context parallelism draws."""

from motet.core.errors import InputError
from motet.models.layout_invariant_dropout import RowSplit, Spans
from motet.parallel.context_parallel.context_partition import ContextPartition


def split_by_places(partition: ContextPartition, rank: int) -> RowSplit:
    """The split of activations outside of attention, whose tokens are those of the rank."""
    local = partition.length(rank)

    def split(shape: tuple[int, ...]) -> tuple[tuple[int, ...], Spans]:
        dim = 1 if len(shape) > 1 and shape[0] == 1 else 0
        if shape[dim] != local:
            raise InputError(
                f"dropout on a tensor with rows of shape {list(shape)}, of which a rank has {local} of "
                f"{partition.tokens} tokens: no dimension clearly holds them; set the dropout to 0"
            )
        spans: list[tuple[tuple[int, int], ...]] = [((0, length),) for length in shape]
        spans[dim] = partition.spans(rank)
        return (*shape[:dim], partition.tokens, *shape[dim + 1 :]), spans

    return split
