"""Sums over ranks by compressed messages. Every rank gets the same bits and learns the error of its contribution.

    blockwise   encode, all-to-all, decode and add in float32, encode, all-gather
    top-k       all-gather of indices and values, or a dense and exact all-reduce if that is fewer bytes
    random-k    all-reduce of the values, whose indices every rank draws alike
    PowerSGD    all-reduce of P, then of Q. Each rank computes the result: the same bits need the same kind of
                processor, number of threads and version of torch

All ranks have to call with the same codec, shape, dtype and seed. A non-finite number makes at least one number of the
total non-finite.

Messages as flat uint8 tensors: a tensor to a message and back by any codec, and the collectives that move messages.

All messages of a collective are equally long, so that any backend takes them. The trace counts bytes to other ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from motet.collectives.compression import codecs
from motet.collectives.compression.codecs import (
    BlockwiseCodec,
    Codec,
    RandomKCodec,
    TopKCodec,
    element_bytes,
    is_top_k_smaller,
    pack_sparse,
    rank_slices,
    unpack_sparse,
)
from motet.collectives.execute import api
from motet.collectives.execute.api import RankGroupLike
from motet.collectives.torch_private import DisableTorchFunction
from motet.core import trace
from motet.core.seeds import derive_seed
from motet.core.units import dtype_name


@contextmanager
def codec_numerics() -> Iterator[None]:
    """Codecs compute in float32 under every precision recipe, and without gradients."""
    with torch.no_grad(), DisableTorchFunction():
        yield


def encode(codec: Codec, tensor: Tensor, seed: int = 0) -> Tensor:
    """A message of exactly `codec.wire_bytes(shape, dtype)`, whose random choices follow from `seed`.

    A non-finite number makes at least one decoded number non-finite.
    """
    size = codec.wire_bytes(tensor.shape, dtype_name(tensor.dtype))
    message = codec.encode(tensor.detach(), seed)
    assert (message.dtype, message.shape) == (torch.uint8, (size,))
    return message


def decode(codec: Codec, message: Tensor, shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """The tensor of a message. Random-k needs the seed of `encode`.

    `dtype` is that of the encoded tensor, or any other if the codec's bytes do not depend on it.
    """
    assert message.shape == (codec.wire_bytes(shape, dtype_name(dtype)),), "a message of another codec, shape or dtype"
    return codec.decode(message, shape, dtype, seed)


def to_accumulation_dtype(tensor: Tensor) -> Tensor:
    """The tensor in float32, or in float64 if it has that dtype: the dtypes of sums and errors."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def pad_message(message: Tensor, length: int) -> Tensor:
    return F.pad(message, (0, length - message.numel()))


def all_gather_messages(message: Tensor, ranks: RankGroupLike) -> Tensor:
    """[world, bytes]: the message of every rank."""
    arrived = message.new_empty(ranks.world, message.numel())
    trace.count("all_gather_bytes", (ranks.world - 1) * message.nbytes)
    # The variant for one tensor has another name in each version of torch.
    dist.all_gather(list(arrived), message, group=ranks.process_group)
    return arrived


def all_to_all_messages(messages: Tensor, ranks: RankGroupLike) -> Tensor:
    """[world, bytes]: the message of every rank for this rank."""
    arrived = torch.empty_like(messages)
    trace.count("all_to_all_bytes", (ranks.world - 1) * messages[0].nbytes)
    dist.all_to_all_single(arrived, messages, group=ranks.process_group)
    return arrived


# The all-reduce of uncompressed tensors, and of codes that can be added, such as the values of random-k.
DenseAllReduce = Callable[[Tensor, RankGroupLike], object]


@dataclass(frozen=True)
class CompressedSum:
    """The result of an all-reduce on one rank."""

    total: Tensor  # The approximate sum, in the shape and dtype of the input: the same bits on every rank
    error: Tensor  # This rank's part of sum - total, which error feedback adds to its next tensor; float32 at least
    basis: Tensor | None = None  # PowerSGD's Q, from which the next step may start


def all_reduce(
    tensor: Tensor,
    codec: Codec,
    ranks: RankGroupLike,
    seed: int,
    dense_all_reduce: DenseAllReduce = api.all_reduce,
) -> CompressedSum:
    """The sum over the ranks; `tensor` is not changed. A group of one rank has no error."""
    dtype = dtype_name(tensor.dtype)
    element_bytes(dtype)  # an InputError for a dtype that cannot be compressed
    tensor = tensor.detach()
    if ranks.world == 1 or tensor.numel() == 0:
        return CompressedSum(tensor.clone(), torch.zeros_like(to_accumulation_dtype(tensor)))
    match codec:
        case BlockwiseCodec():
            return _all_reduce_blockwise(tensor, codec, ranks, seed)
        case TopKCodec():
            if is_top_k_smaller(codec, tensor.numel(), dtype, world=ranks.world):
                return _all_reduce_top_k(tensor, codec, ranks)
            total = tensor.clone(memory_format=torch.contiguous_format)
            dense_all_reduce(total, ranks)
            return CompressedSum(total, torch.zeros_like(to_accumulation_dtype(tensor)))
        case RandomKCodec():
            sums = encode(codec, tensor, seed).view(tensor.dtype)
            sent = decode(codec, sums.clone().view(torch.uint8), tensor.shape, tensor.dtype, seed)
            dense_all_reduce(sums, ranks)
            total = decode(codec, sums.view(torch.uint8), tensor.shape, tensor.dtype, seed)
            return CompressedSum(total, to_accumulation_dtype(tensor) - sent)
        case codecs.PowerSGDCodec():
            return all_reduce_powersgd([tensor], codec, ranks, seed, [None], dense_all_reduce)[0]
    raise AssertionError(codec)


def all_reduce_powersgd(
    tensors: Sequence[Tensor],
    codec: codecs.PowerSGDCodec,
    ranks: RankGroupLike,
    seed: int,
    bases: Sequence[Tensor | None],
    dense_all_reduce: DenseAllReduce = api.all_reduce,
) -> list[CompressedSum]:
    """The sums of several tensors of one dtype: all P travel together, then all Q.

    Tensors that PowerSGD does not make smaller travel together, uncompressed. A basis of zeros counts as none.
    """
    sums: dict[int, CompressedSum] = {}
    matrices: dict[int, tuple[Tensor, Tensor]] = {}
    dense: dict[int, Tensor] = {}
    for index, (tensor, basis) in enumerate(zip(tensors, bases, strict=True)):
        factors = codec.factor_shape(tensor.shape, dtype_name(tensor.dtype))
        if factors is None:
            dense[index] = tensor
            continue
        rows, columns, rank = factors
        start = codecs.initial_basis((columns, rank), derive_seed(seed, index), tensor.device)
        if basis is not None:
            start = torch.where(basis.any(), basis, start)  # a step without gradients leaves a basis of zeros
        matrices[index] = codecs.as_matrix(tensor, rows, columns), start

    def sum_together(parts: Sequence[Tensor]) -> list[Tensor]:
        if not parts:
            return []
        flat = torch.cat([part.reshape(-1) for part in parts])
        dense_all_reduce(flat, ranks)
        totals = flat.split([part.numel() for part in parts])
        return [total.view(part.shape) for total, part in zip(totals, parts, strict=True)]

    for index, total in zip(dense, sum_together(list(dense.values())), strict=True):
        sums[index] = CompressedSum(total, torch.zeros_like(to_accumulation_dtype(total)))
    lefts = [codecs.orthonormalize(p) for p in sum_together([m @ q for m, q in matrices.values()])]
    local_rights = [matrix.T @ left for (matrix, _), left in zip(matrices.values(), lefts, strict=True)]
    factor_pairs = zip(matrices.items(), lefts, local_rights, sum_together(local_rights), strict=True)
    for (index, (_, start)), left, local_right, right in factor_pairs:
        tensor = tensors[index]
        total = (left @ right.T).view(tensor.shape).to(tensor.dtype)
        error = to_accumulation_dtype(tensor) - (left @ local_right.T).view(tensor.shape)
        sums[index] = CompressedSum(total, error, torch.where(right.isfinite().all(), right, start))
    return [sums[index] for index in range(len(tensors))]


def reduce_scatter(tensor: Tensor, codec: BlockwiseCodec, ranks: RankGroupLike, seed: int) -> tuple[Tensor, Tensor]:
    """(this rank's slice of the sum by `rank_slices`, the error of this rank's tensor), flat and float32 at least."""
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


def all_gather(local_slice: Tensor, codec: BlockwiseCodec, ranks: RankGroupLike, numel: int, seed: int) -> Tensor:
    """A flat tensor of `numel` elements from the slices that the ranks hold."""
    dtype = local_slice.dtype
    bounds = rank_slices(numel, ranks.world)
    message = encode(codec, local_slice, derive_seed(seed, "gather", dist.get_rank(ranks.process_group)))
    width = codec.wire_bytes([bounds[0][1]], dtype_name(dtype))
    arrived = zip(all_gather_messages(pad_message(message, width), ranks), bounds, strict=True)
    return torch.cat([_decode_slice(codec, part, stop - start, dtype) for part, (start, stop) in arrived])


def _decode_slice(codec: BlockwiseCodec, message: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    return decode(codec, message[: codec.wire_bytes([length], dtype_name(dtype))], [length], dtype)


def _all_reduce_blockwise(tensor: Tensor, codec: BlockwiseCodec, ranks: RankGroupLike, seed: int) -> CompressedSum:
    local_slice, error = reduce_scatter(tensor, codec, ranks, seed)
    total = all_gather(local_slice, codec, ranks, tensor.numel(), seed).to(tensor.dtype)
    start, stop = rank_slices(tensor.numel(), ranks.world)[dist.get_rank(ranks.process_group)]
    error[start:stop] += local_slice - total[start:stop]  # the error of the second encoding, which this rank did
    return CompressedSum(total.view(tensor.shape), error.view(tensor.shape))


def _all_reduce_top_k(tensor: Tensor, codec: TopKCodec, ranks: RankGroupLike) -> CompressedSum:
    indices, values = codec.select(tensor)
    wide = to_accumulation_dtype(tensor).reshape(-1)
    total = torch.zeros_like(wide)
    for message in all_gather_messages(pack_sparse(indices, values, tensor.numel()), ranks):
        positions, contributions = unpack_sparse(message, tensor.numel(), tensor.dtype)
        total.index_add_(0, positions, to_accumulation_dtype(contributions))
    error = wide.index_fill(0, indices, 0)
    return CompressedSum(total.to(tensor.dtype).view(tensor.shape), error.view(tensor.shape))
