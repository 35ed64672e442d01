"""Sums of sparse tensors: gathered from all ranks, padded to the longest, and added in order of rank."""

from collections.abc import Callable

import torch
from torch import Tensor

from motet.collectives.errors import CollectiveError
from motet.collectives.shm_backend.tensor_views import Factor, describe_tensor
from motet.core.errors import InputError

GatherStacked = Callable[[Tensor], Tensor]  # The tensors of all ranks, stacked


def check_sparse(reduction: str, factor: Factor) -> None:
    if reduction != "sum" or factor is not None:
        raise InputError(f"all-reduce ({reduction}) of a sparse tensor: sparse tensors can only be added up")


def all_reduce_sparse(tensor: Tensor, gather: GatherStacked) -> None:
    """Sum a COO tensor over all ranks, in place."""
    local = tensor.detach().coalesce()
    shapes = gather(torch.tensor([local._nnz(), local.sparse_dim(), *local.shape]))
    if (shapes[:, 1:] != shapes[0, 1:]).any():
        raise CollectiveError(
            f"all-reduce of sparse tensors: this rank has {describe_tensor(local)} with {local.sparse_dim()} sparse "
            f"dimensions, others have {shapes[:, 2:].tolist()} with {shapes[:, 1].tolist()}"
        )
    counts = shapes[:, 0].tolist()
    indices = _gather_rows(local.indices().T, counts, gather)
    values = _gather_rows(local.values(), counts, gather)
    total = torch.sparse_coo_tensor(indices.T, values, local.shape, check_invariants=True).coalesce()
    with torch.no_grad():  # detach() shares the values, but not their count
        tensor.copy_(total)


def _gather_rows(local_rows: Tensor, counts: list[int], gather: GatherStacked) -> Tensor:
    padded = local_rows.new_zeros(max(counts), *local_rows.shape[1:])
    padded[: len(local_rows)] = local_rows
    return torch.cat([rows[:count] for rows, count in zip(gather(padded), counts, strict=True)])
