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

from motet.collectives.compression import powersgd, sparsify
from motet.collectives.compression.byte_messages import (
    all_gather_messages,
    all_to_all_messages,
    dtype_name,
    pad_message,
    read_numbers,
    to_accumulation_dtype,
)
from motet.collectives.compression.codec_options import (
    BlockwiseCodecOptions,
    CodecOptions,
    PowerSGDCodecOptions,
    RandomKCodecOptions,
    TopKCodecOptions,
    element_bytes,
    index_bytes,
    is_sparse_smaller,
    rank_slices,
)
from motet.collectives.compression.encode_decode import decode, encode
from motet.collectives.execute import api
from motet.collectives.execute.api import RankGroupLike
from motet.core.seeds import derive_seed

# An all-reduce in place of what travels as it is, or is coded so that it can be added: the values of random-k, say.
DenseAllReduce = Callable[[Tensor, RankGroupLike], object]


@dataclass(frozen=True)
class CompressedSum:
    """What an all-reduce gives one rank."""

    total: Tensor  # The sum, nearly: in the shape and dtype of what was given, the same bits on every rank
    # What this rank should give again. Those of all ranks add up to what the total lacks. float32 at least.
    error: Tensor
    basis: Tensor | None = None  # PowerSGD's Q, from which the next step may start


def all_reduce(
    tensor: Tensor,
    codec: CodecOptions,
    ranks: RankGroupLike,
    seed: int,
    basis: Tensor | None = None,
    dense_all_reduce: DenseAllReduce = api.all_reduce,
) -> CompressedSum:
    """The sum over the ranks; `tensor` stays as it is. A group of one rank loses nothing."""
    element_bytes(dtype_name(tensor.dtype))  # refuses what cannot be compressed
    tensor = tensor.detach()
    if ranks.world == 1 or tensor.numel() == 0:
        return CompressedSum(tensor.clone(), torch.zeros_like(to_accumulation_dtype(tensor)), basis)
    match codec:
        case BlockwiseCodecOptions():
            return _all_reduce_blockwise(tensor, codec, ranks, seed)
        case TopKCodecOptions():
            return _all_reduce_top_k(tensor, codec, ranks, dense_all_reduce)
        case RandomKCodecOptions():
            return _all_reduce_random_k(tensor, codec, ranks, seed, dense_all_reduce)
        case PowerSGDCodecOptions():
            return all_reduce_powersgd([tensor], codec, ranks, seed, [basis], dense_all_reduce)[0]
    raise AssertionError(codec)


def all_reduce_powersgd(
    tensors: Sequence[Tensor],
    codec: PowerSGDCodecOptions,
    ranks: RankGroupLike,
    seed: int,
    bases: Sequence[Tensor | None],
    dense_all_reduce: DenseAllReduce = api.all_reduce,
) -> list[CompressedSum]:
    """The sums of several tensors of one dtype: all P travel as one, and then all Q.

    What PowerSGD does not make smaller travels as one too, as it is. A basis of zeros is none.
    """
    sums: dict[int, CompressedSum] = {}
    matrices: dict[int, tuple[Tensor, Tensor]] = {}
    uncompressed: list[int] = []
    for index, (tensor, basis) in enumerate(zip(tensors, bases, strict=True)):
        factors = codec.factor_shape(tensor.shape, dtype_name(tensor.dtype))
        if factors is None:
            uncompressed.append(index)
            continue
        rows, columns, rank = factors
        start = powersgd.initial_basis((columns, rank), derive_seed(seed, index), tensor.device)
        if basis is not None:
            start = torch.where(basis.any(), basis, start)  # a step without gradients leaves a basis of zeros
        matrices[index] = powersgd.as_matrix(tensor, rows, columns), start
    for index, total in zip(
        uncompressed,
        _all_reduce_concatenated([tensors[number] for number in uncompressed], ranks, dense_all_reduce),
        strict=True,
    ):
        sums[index] = CompressedSum(total, torch.zeros_like(to_accumulation_dtype(total)))
    lefts = [
        powersgd.orthonormalize(p)
        for p in _all_reduce_concatenated([m @ q for m, q in matrices.values()], ranks, dense_all_reduce)
    ]
    local_rights = [matrix.T @ left for (matrix, _), left in zip(matrices.values(), lefts, strict=True)]
    rights = _all_reduce_concatenated(local_rights, ranks, dense_all_reduce)
    for (index, (_, start)), left, local_right, right in zip(
        matrices.items(), lefts, local_rights, rights, strict=True
    ):
        tensor = tensors[index]
        total = (left @ right.T).view(tensor.shape).to(tensor.dtype)
        error = to_accumulation_dtype(tensor) - (left @ local_right.T).view(tensor.shape)
        sums[index] = CompressedSum(total, error, torch.where(right.isfinite().all(), right, start))
    return [sums[number] for number in range(len(tensors))]


def _all_reduce_concatenated(
    tensors: Sequence[Tensor], ranks: RankGroupLike, dense_all_reduce: DenseAllReduce
) -> list[Tensor]:
    """The sums of some tensors, by one all-reduce."""
    if not tensors:
        return []
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dense_all_reduce(flat, ranks)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def reduce_scatter(
    tensor: Tensor, codec: BlockwiseCodecOptions, ranks: RankGroupLike, seed: int
) -> tuple[Tensor, Tensor]:
    """(this rank's slice of the sum, what this rank's tensor lost), flat and float32 at least; `slices` tells which."""
    me = dist.get_rank(ranks.process_group)
    flat = to_accumulation_dtype(tensor).reshape(-1)
    bounds = rank_slices(flat.numel(), ranks.world)
    width = codec.wire_bytes([bounds[0][1]], dtype_name(flat.dtype))
    error, messages = flat.clone(), []
    for owner, (start, stop) in enumerate(bounds):
        message = encode(codec, flat[start:stop], derive_seed(seed, "give", me, owner))
        error[start:stop] -= decode(codec, message, [stop - start], flat.dtype)
        messages.append(pad_message(message, width))
    length = bounds[me][1] - bounds[me][0]
    local_slice = flat.new_zeros(length)
    for message in all_to_all_messages(torch.stack(messages), ranks):
        local_slice += _decode_slice(codec, message, length, flat.dtype)
    return local_slice, error


def all_gather(
    local_slice: Tensor, codec: BlockwiseCodecOptions, ranks: RankGroupLike, numel: int, seed: int
) -> Tensor:
    """A flat tensor of so many elements from the slices that the ranks hold."""
    bounds = rank_slices(numel, ranks.world)
    message = encode(codec, local_slice, derive_seed(seed, "gather", dist.get_rank(ranks.process_group)))
    arrived = all_gather_messages(
        pad_message(message, codec.wire_bytes([bounds[0][1]], dtype_name(local_slice.dtype))), ranks
    )
    parts = zip(arrived, bounds, strict=True)
    return torch.cat([_decode_slice(codec, part, stop - start, local_slice.dtype) for part, (start, stop) in parts])


def sum_sparse(indices: Tensor, values: Tensor, numel: int, ranks: RankGroupLike) -> Tensor:
    """The sum of flat tensors that are zero but for some elements: on each rank as many as it has.

    Values with the same index are added. The ranks tell each other their counts first, eight bytes each.
    """
    if ranks.world == 1:
        return sparsify.scatter_to_dense(indices, to_accumulation_dtype(values), numel).to(values.dtype)
    counts = all_gather_messages(torch.tensor([indices.numel()], device=indices.device).view(torch.uint8), ranks)
    counts_of_ranks = read_numbers(counts.view(-1), 0, counts.numel(), torch.int64).tolist()
    if not is_sparse_smaller(counts_of_ranks, numel, dtype_name(values.dtype)):
        return _all_reduce_dense(
            sparsify.scatter_to_dense(indices, to_accumulation_dtype(values), numel).to(values.dtype),
            ranks,
            api.all_reduce,
        ).total
    return _sum_sparse(indices, values, numel, counts_of_ranks, ranks)


def _decode_slice(codec: BlockwiseCodecOptions, message: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    return decode(codec, message[: codec.wire_bytes([length], dtype_name(dtype))], [length], dtype)


def _all_reduce_blockwise(
    tensor: Tensor, codec: BlockwiseCodecOptions, ranks: RankGroupLike, seed: int
) -> CompressedSum:
    local_slice, error = reduce_scatter(tensor, codec, ranks, seed)
    total = all_gather(local_slice, codec, ranks, tensor.numel(), seed).to(tensor.dtype)
    start, stop = rank_slices(tensor.numel(), ranks.world)[dist.get_rank(ranks.process_group)]
    error[start:stop] += (
        local_slice - total[start:stop]
    )  # what the second encoding lost is given again by who encoded it
    return CompressedSum(total.view(tensor.shape), error.view(tensor.shape))


def _all_reduce_dense(tensor: Tensor, ranks: RankGroupLike, dense_all_reduce: DenseAllReduce) -> CompressedSum:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dense_all_reduce(total, ranks)
    return CompressedSum(total, torch.zeros_like(to_accumulation_dtype(tensor)))


def _all_reduce_top_k(
    tensor: Tensor, codec: TopKCodecOptions, ranks: RankGroupLike, dense_all_reduce: DenseAllReduce
) -> CompressedSum:
    counts = [codec.kept_elements(tensor.numel())] * ranks.world
    if not is_sparse_smaller(counts, tensor.numel(), dtype_name(tensor.dtype)):
        return _all_reduce_dense(tensor, ranks, dense_all_reduce)
    indices, values = sparsify.select_top_k(codec, tensor)
    total = _sum_sparse(indices, values, tensor.numel(), counts, ranks)
    error = to_accumulation_dtype(tensor).reshape(-1).index_fill(0, indices, 0)
    return CompressedSum(total.view(tensor.shape), error.view(tensor.shape))


def _sum_sparse(indices: Tensor, values: Tensor, numel: int, counts: list[int], ranks: RankGroupLike) -> Tensor:
    element_wire_bytes = index_bytes(numel) + element_bytes(dtype_name(values.dtype))
    total = to_accumulation_dtype(values).new_zeros(numel)
    if max(counts):
        arrived = all_gather_messages(
            pad_message(sparsify.pack_message(indices, values, numel), max(counts) * element_wire_bytes), ranks
        )
        for message, count in zip(arrived, counts, strict=True):
            positions, contributions = sparsify.unpack_message(
                message[: count * element_wire_bytes], numel, values.dtype
            )
            total.index_add_(0, positions, to_accumulation_dtype(contributions))
    return total.to(values.dtype)


def _all_reduce_random_k(
    tensor: Tensor, codec: RandomKCodecOptions, ranks: RankGroupLike, seed: int, dense_all_reduce: DenseAllReduce
) -> CompressedSum:
    sums = encode(codec, tensor, seed).view(tensor.dtype)
    sent = decode(codec, sums.clone().view(torch.uint8), tensor.shape, tensor.dtype, seed)
    dense_all_reduce(sums, ranks)
    total = decode(codec, sums.view(torch.uint8), tensor.shape, tensor.dtype, seed)
    return CompressedSum(total, to_accumulation_dtype(tensor) - sent)
