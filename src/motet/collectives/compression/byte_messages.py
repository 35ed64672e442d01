"""Messages as flat uint8 tensors: a tensor to a message and back by any codec, and the collectives that move messages.

All messages of a collective are equally long, so that any backend takes them. The trace counts bytes to other ranks.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from motet.collectives.compression.codec_base import Codec
from motet.collectives.execute.api import RankGroupLike
from motet.core import trace
from motet.core.dtypes import dtype_name


@contextmanager
def codec_numerics() -> Iterator[None]:
    """Codecs compute in float32 under every precision recipe, and without gradients."""
    with torch.no_grad(), torch._C.DisableTorchFunction():
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
