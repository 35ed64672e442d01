"""Sums over ranks by compressed messages. Every rank gets the same bits and learns what its own contribution lost.

    blockwise   encode, all-to-all, decode and add in float32, encode, all-gather
    top-k       all-gather of indices and values; a dense all-reduce where that is fewer bytes, and then nothing is lost
    random-k    all-reduce of the values, whose indices every rank draws alike
    PowerSGD    all-reduce of P, then of Q. It is computed on each rank: ranks need the same kind of processor, number
                of threads and version of torch to get the same bits

All ranks have to call with the same codec, shape, dtype and seed. A number that is not finite makes at least one number
of the total not finite.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from motet.collectives import execute
from motet.collectives.codecs import low_rank, sparse
from motet.collectives.codecs.message import decode, encode
from motet.collectives.codecs.wire import exchange, gather, name_of, padded, take, wide
from motet.collectives.compress import (
    Blockwise,
    Codec,
    PowerSGD,
    RandomK,
    TopK,
    element_bytes,
    index_bytes,
    slices,
    sparse_pays,
)
from motet.collectives.execute import Ranks
from motet.core.seeds import derive_seed

Dense = Callable[[Tensor, Ranks], object]
"""An all-reduce in place of what travels as it is, or is coded so that it can be added: the values of random-k, say."""


@dataclass(frozen=True)
class Reduced:
    """What an all-reduce gives one rank."""

    total: Tensor
    """The sum, nearly: in the shape and dtype of what was given, the same bits on every rank."""
    error: Tensor
    """What this rank should give again. Those of all ranks add up to what the total lacks. float32 at least."""
    basis: Tensor | None = None
    """PowerSGD's Q, from which the next step may start."""


def all_reduce(
    tensor: Tensor,
    codec: Codec,
    ranks: Ranks,
    seed: int,
    basis: Tensor | None = None,
    dense: Dense = execute.all_reduce,
) -> Reduced:
    """The sum over the ranks; `tensor` stays as it is. A group of one rank loses nothing."""
    element_bytes(name_of(tensor.dtype))  # refuses what cannot be compressed
    tensor = tensor.detach()
    if ranks.world == 1 or tensor.numel() == 0:
        return Reduced(tensor.clone(), torch.zeros_like(wide(tensor)), basis)
    match codec:
        case Blockwise():
            return _blockwise(tensor, codec, ranks, seed)
        case TopK():
            return _top_k(tensor, codec, ranks, dense)
        case RandomK():
            return _random_k(tensor, codec, ranks, seed, dense)
        case PowerSGD():
            return all_reduce_low_rank([tensor], codec, ranks, seed, [basis], dense)[0]
    raise AssertionError(codec)


def all_reduce_low_rank(
    tensors: Sequence[Tensor],
    codec: PowerSGD,
    ranks: Ranks,
    seed: int,
    bases: Sequence[Tensor | None],
    dense: Dense = execute.all_reduce,
) -> list[Reduced]:
    """The sums of several tensors of one dtype: all P travel as one, and then all Q.

    What PowerSGD does not make smaller travels as one too, as it is. A basis of zeros is none.
    """
    found: dict[int, Reduced] = {}
    matrices: dict[int, tuple[Tensor, Tensor]] = {}
    rest: list[int] = []
    for number, (tensor, basis) in enumerate(zip(tensors, bases, strict=True)):
        factors = codec.factors(tensor.shape, name_of(tensor.dtype))
        if factors is None:
            rest.append(number)
            continue
        rows, columns, rank = factors
        start = low_rank.first_basis((columns, rank), derive_seed(seed, number), tensor.device)
        if basis is not None:
            start = torch.where(basis.any(), basis, start)  # a step without gradients leaves a basis of zeros
        matrices[number] = low_rank.as_matrix(tensor, rows, columns), start
    for number, total in zip(rest, _together([tensors[number] for number in rest], ranks, dense), strict=True):
        found[number] = Reduced(total, torch.zeros_like(wide(total)))
    lefts = [low_rank.orthonormal(p) for p in _together([m @ q for m, q in matrices.values()], ranks, dense)]
    owns = [matrix.T @ left for (matrix, _), left in zip(matrices.values(), lefts, strict=True)]
    rights = _together(owns, ranks, dense)
    for (number, (_, start)), left, own, right in zip(matrices.items(), lefts, owns, rights, strict=True):
        tensor = tensors[number]
        total = (left @ right.T).view(tensor.shape).to(tensor.dtype)
        error = wide(tensor) - (left @ own.T).view(tensor.shape)
        found[number] = Reduced(total, error, torch.where(right.isfinite().all(), right, start))
    return [found[number] for number in range(len(tensors))]


def _together(tensors: Sequence[Tensor], ranks: Ranks, dense: Dense) -> list[Tensor]:
    """The sums of some tensors, by one all-reduce."""
    if not tensors:
        return []
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dense(flat, ranks)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def reduce_scatter(tensor: Tensor, codec: Blockwise, ranks: Ranks, seed: int) -> tuple[Tensor, Tensor]:
    """(this rank's slice of the sum, what this rank's tensor lost), flat and float32 at least; `slices` tells which."""
    me = dist.get_rank(ranks.process_group)
    flat = wide(tensor).reshape(-1)
    bounds = slices(flat.numel(), ranks.world)
    width = codec.wire_bytes([bounds[0][1]], name_of(flat.dtype))
    lost, messages = flat.clone(), []
    for owner, (start, stop) in enumerate(bounds):
        message = encode(codec, flat[start:stop], derive_seed(seed, "give", me, owner))
        lost[start:stop] -= decode(codec, message, [stop - start], flat.dtype)
        messages.append(padded(message, width))
    length = bounds[me][1] - bounds[me][0]
    mine = flat.new_zeros(length)
    for message in exchange(torch.stack(messages), ranks):
        mine += _decode_slice(codec, message, length, flat.dtype)
    return mine, lost


def all_gather(mine: Tensor, codec: Blockwise, ranks: Ranks, numel: int, seed: int) -> Tensor:
    """A flat tensor of so many elements from the slices that the ranks hold."""
    bounds = slices(numel, ranks.world)
    message = encode(codec, mine, derive_seed(seed, "gather", dist.get_rank(ranks.process_group)))
    arrived = gather(padded(message, codec.wire_bytes([bounds[0][1]], name_of(mine.dtype))), ranks)
    parts = zip(arrived, bounds, strict=True)
    return torch.cat([_decode_slice(codec, part, stop - start, mine.dtype) for part, (start, stop) in parts])


def sum_sparse(indices: Tensor, values: Tensor, numel: int, ranks: Ranks) -> Tensor:
    """The sum of flat tensors that are zero but for some elements: on each rank as many as it has.

    Values with the same index are added. The ranks tell each other their counts first, eight bytes each.
    """
    if ranks.world == 1:
        return sparse.spread(indices, wide(values), numel).to(values.dtype)
    counts = gather(torch.tensor([indices.numel()], device=indices.device).view(torch.uint8), ranks)
    everyones = take(counts.view(-1), 0, counts.numel(), torch.int64).tolist()
    if not sparse_pays(everyones, numel, name_of(values.dtype)):
        return _dense(sparse.spread(indices, wide(values), numel).to(values.dtype), ranks, execute.all_reduce).total
    return _sum_sparse(indices, values, numel, everyones, ranks)


def _decode_slice(codec: Blockwise, message: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    return decode(codec, message[: codec.wire_bytes([length], name_of(dtype))], [length], dtype)


def _blockwise(tensor: Tensor, codec: Blockwise, ranks: Ranks, seed: int) -> Reduced:
    mine, error = reduce_scatter(tensor, codec, ranks, seed)
    total = all_gather(mine, codec, ranks, tensor.numel(), seed).to(tensor.dtype)
    start, stop = slices(tensor.numel(), ranks.world)[dist.get_rank(ranks.process_group)]
    error[start:stop] += mine - total[start:stop]  # what the second encoding lost is given again by who encoded it
    return Reduced(total.view(tensor.shape), error.view(tensor.shape))


def _dense(tensor: Tensor, ranks: Ranks, dense: Dense) -> Reduced:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dense(total, ranks)
    return Reduced(total, torch.zeros_like(wide(tensor)))


def _top_k(tensor: Tensor, codec: TopK, ranks: Ranks, dense: Dense) -> Reduced:
    counts = [codec.kept(tensor.numel())] * ranks.world
    if not sparse_pays(counts, tensor.numel(), name_of(tensor.dtype)):
        return _dense(tensor, ranks, dense)
    indices, values = sparse.top(codec, tensor)
    total = _sum_sparse(indices, values, tensor.numel(), counts, ranks)
    error = wide(tensor).reshape(-1).index_fill(0, indices, 0)
    return Reduced(total.view(tensor.shape), error.view(tensor.shape))


def _sum_sparse(indices: Tensor, values: Tensor, numel: int, counts: list[int], ranks: Ranks) -> Tensor:
    each = index_bytes(numel) + element_bytes(name_of(values.dtype))
    total = wide(values).new_zeros(numel)
    if max(counts):
        arrived = gather(padded(sparse.join(indices, values, numel), max(counts) * each), ranks)
        for message, count in zip(arrived, counts, strict=True):
            where, what = sparse.split(message[: count * each], numel, values.dtype)
            total.index_add_(0, where, wide(what))
    return total.to(values.dtype)


def _random_k(tensor: Tensor, codec: RandomK, ranks: Ranks, seed: int, dense: Dense) -> Reduced:
    sums = encode(codec, tensor, seed).view(tensor.dtype)
    sent = decode(codec, sums.clone().view(torch.uint8), tensor.shape, tensor.dtype, seed)
    dense(sums, ranks)
    total = decode(codec, sums.view(torch.uint8), tensor.shape, tensor.dtype, seed)
    return Reduced(total, wide(tensor) - sent)
