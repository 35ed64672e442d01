"""Messages as they travel: bytes in flat uint8 tensors, and the two collectives that carry them.

All messages of a collective are equally long, so that any backend takes them. The trace counts what goes to others.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from motet.collectives.execute.api import RankGroupLike
from motet.core import trace


@contextmanager
def codec_numerics() -> Iterator[None]:
    """Codecs compute in float32 whatever the recipe is, and without gradients."""
    with torch.no_grad(), torch._C.DisableTorchFunction():
        yield


def dtype_name(dtype: torch.dtype) -> str:
    """As the pure half calls it."""
    return str(dtype).removeprefix("torch.")


def to_accumulation_dtype(tensor: Tensor) -> Tensor:
    """In float32, or float64 where it is that already: what sums and errors are kept in."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def read_numbers(message: Tensor, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Bytes of a message as numbers. They are copied, since a view has to start on a multiple of its element's size."""
    return message[start:stop].clone().view(dtype)


def pad_message(message: Tensor, length: int) -> Tensor:
    return F.pad(message, (0, length - message.numel()))


def all_gather_messages(message: Tensor, ranks: RankGroupLike) -> Tensor:
    """[world, bytes]: the message of every rank."""
    arrived = message.new_empty(ranks.world, message.numel())
    trace.count("all_gather_bytes", (ranks.world - 1) * message.nbytes)
    dist.all_gather(list(arrived), message, group=ranks.process_group)  # torch renames the one that takes a tensor
    return arrived


def all_to_all_messages(messages: Tensor, ranks: RankGroupLike) -> Tensor:
    """[world, bytes]: what every rank has for this one, of what each has for each."""
    arrived = torch.empty_like(messages)
    trace.count("all_to_all_bytes", (ranks.world - 1) * messages[0].nbytes)
    dist.all_to_all_single(arrived, messages, group=ranks.process_group)
    return arrived
