"""Messages between two ranks, alone or several as one operation; nobody else in the group has to know.

Within one operation sends and receives never wait for each other, whatever their order. Between two of them the usual
care is needed: a rank that waits for a receive before it sends must have a peer that does it the other way round.
"""

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from motet.collectives.lane import Done, Pending, Work
from motet.collectives.transport import Channel, Messages, Parcel, flat, kind
from motet.core.errors import InputError

_TAG = 0x6D7000
_CHECK_TAG = 0x6D7001
_HEADER_BYTES = 64


class Send(NamedTuple):
    """A tensor for another rank of the group."""

    tensor: Tensor
    peer: int


class Receive(NamedTuple):
    """A tensor that another rank of the group fills."""

    tensor: Tensor
    peer: int


def exchange(
    parts: Sequence[Send | Receive],
    group: dist.ProcessGroup,
    async_op: bool = False,
    check: bool = True,
    timeout_s: float | None = None,
) -> Work:
    """Several sends and receives as one operation.

    With `check` the two ends of each first tell each other what they expect; not if it is asynchronous, since the other
    end may then not have come yet.
    """
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    rank = dist.get_rank(group)
    flats = [part._replace(tensor=flat(part.tensor, f"rank {rank}")) for part in parts]
    if check and not async_op:
        _agree(flats, Channel(group, timeout, _CHECK_TAG, checks=True))
    full = [part for part in flats if part.tensor.numel()]
    receives = [Parcel(part.peer, part.tensor) for part in full if isinstance(part, Receive)]
    sends = [Parcel(part.peer, part.tensor) for part in full if isinstance(part, Send)]
    messages = Messages(receives, sends, Channel(group, timeout, _TAG), "an exchange")
    if not async_op:
        messages.wait()
        return Done()
    if any(part.tensor.is_cuda for part in full):
        return messages
    pending = Pending()
    threading.Thread(target=pending.carry_out, args=(messages.wait,), name="motet-exchange", daemon=True).start()
    return pending


def _agree(parts: Sequence[Send | Receive], channel: Channel) -> None:
    """Raises on both ends of a message if they do not expect the same."""
    sends: list[Send | Receive] = [part for part in parts if isinstance(part, Send)]
    receives: list[Send | Receive] = [part for part in parts if isinstance(part, Receive)]
    said = [Parcel(part.peer, _header(part.tensor)) for part in (*sends, *receives)]
    # A peer's sends are our receives, so these come first from there.
    heard = [Parcel(part.peer, torch.empty_like(_header(part.tensor))) for part in (*receives, *sends)]
    Messages(heard, said, channel, "an exchange, before anything was sent").wait()
    rank = dist.get_rank(channel.group)
    for part, parcel in zip((*receives, *sends), heard, strict=True):
        ours, theirs = _text(_header(part.tensor)), _text(parcel.tensor)
        if ours != theirs:
            ends = ((rank, ours), (part.peer, theirs))
            (src, sent), (dst, expected) = ends if isinstance(part, Send) else ends[::-1]
            raise InputError(
                f"rank {src} sends {sent} to rank {dst}, which expects {expected}; give tensors of one kind"
            )


def _header(tensor: Tensor) -> Tensor:
    """What is about to travel, as text of a fixed length."""
    text = f"{tensor.numel()} {kind(tensor)}".encode().ljust(_HEADER_BYTES)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(tensor.device)


def _text(header: Tensor) -> str:
    return bytes(header.tolist()).decode().rstrip()


def send(tensor: Tensor, group: dist.ProcessGroup, dst: int, async_op: bool = False) -> Work:
    return exchange([Send(tensor, dst)], group, async_op)


def receive(tensor: Tensor, group: dist.ProcessGroup, src: int, async_op: bool = False) -> Work:
    return exchange([Receive(tensor, src)], group, async_op)


def copy(tensor: Tensor, group: dist.ProcessGroup, src: int, dst: int, async_op: bool = False) -> Work:
    """What one rank has appears on another. Others may call too, and have nothing to do."""
    rank = dist.get_rank(group)
    parts = [Send(tensor, dst)] * (rank == src) + [Receive(tensor, src)] * (rank == dst)
    return exchange(parts, group, async_op)


def signal(group: dist.ProcessGroup, dst: int, device: torch.device | str = "cpu") -> Work:
    """Let another rank go on that waits for it."""
    return exchange([Send(torch.zeros(1, dtype=torch.uint8, device=device), dst)], group, check=False)


def wait_for_signal(group: dist.ProcessGroup, src: int, device: torch.device | str = "cpu") -> Work:
    return exchange([Receive(torch.zeros(1, dtype=torch.uint8, device=device), src)], group, check=False)
