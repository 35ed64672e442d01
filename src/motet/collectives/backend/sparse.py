"""Sums of sparse tensors: everybody's numbers are gathered, padded to the longest, and added in the order of ranks."""

from collections.abc import Callable

import torch
from torch import Tensor

from motet.collectives.backend.chunks import Factor, shown
from motet.collectives.backend.errors import CollectiveError
from motet.core.errors import InputError

Gather = Callable[[Tensor], Tensor]
"""What all ranks have, stacked."""


def check_sparse(how: str, factor: Factor) -> None:
    if how != "sum" or factor is not None:
        raise InputError(f"all-reduce ({how}) of a sparse tensor: sparse tensors can only be added up")


def sum_sparse(tensor: Tensor, gather: Gather) -> None:
    """The sum over all ranks into a tensor of coordinates and values."""
    own = tensor.detach().coalesce()
    facts = gather(torch.tensor([own._nnz(), own.sparse_dim(), *own.shape]))
    if (facts[:, 1:] != facts[0, 1:]).any():
        raise CollectiveError(
            f"all-reduce of sparse tensors: this rank has {shown(own)} with {own.sparse_dim()} sparse dimensions, "
            f"others have {facts[:, 2:].tolist()} with {facts[:, 1].tolist()}"
        )
    counts = facts[:, 0].tolist()
    columns = _all(own.indices().T, counts, gather)
    values = _all(own.values(), counts, gather)
    total = torch.sparse_coo_tensor(columns.T, values, own.shape, check_invariants=True).coalesce()
    with torch.no_grad():  # what detach() gives shares the numbers, but not how many there are
        tensor.copy_(total)


def _all(own: Tensor, counts: list[int], gather: Gather) -> Tensor:
    """The rows of all ranks, one after another."""
    padded = own.new_zeros(max(counts), *own.shape[1:])
    padded[: len(own)] = own
    return torch.cat([rows[:count] for rows, count in zip(gather(padded), counts, strict=True)])
