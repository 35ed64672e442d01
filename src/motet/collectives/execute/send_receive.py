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

from motet.collectives.execute.p2p import P2PBatch, P2PChannel, P2PTensor, dtype_and_device, flatten_contiguous
from motet.collectives.execute.work_queue import CompletedWork, ThreadWork, WorkHandle
from motet.core.errors import InputError

_DATA_TAG = 0x6D7000
_CHECK_TAG = 0x6D7001
_HEADER_BYTES = 64


class TensorSend(NamedTuple):
    """A tensor for another rank of the group."""

    tensor: Tensor
    peer: int


class TensorReceive(NamedTuple):
    """A tensor that another rank of the group fills."""

    tensor: Tensor
    peer: int


def batch_send_receive(
    operations: Sequence[TensorSend | TensorReceive],
    group: dist.ProcessGroup,
    async_op: bool = False,
    check: bool = True,
    timeout_s: float | None = None,
) -> WorkHandle:
    """Several sends and receives as one operation.

    With `check` the two ends of each first tell each other what they expect; not if it is asynchronous, since the other
    end may then not have come yet.
    """
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    rank = dist.get_rank(group)
    flat_operations = [part._replace(tensor=flatten_contiguous(part.tensor, f"rank {rank}")) for part in operations]
    if check and not async_op:
        _check_both_ends(flat_operations, P2PChannel(group, timeout, _CHECK_TAG, is_check_traffic=True))
    non_empty = [part for part in flat_operations if part.tensor.numel()]
    receives = [P2PTensor(part.peer, part.tensor) for part in non_empty if isinstance(part, TensorReceive)]
    sends = [P2PTensor(part.peer, part.tensor) for part in non_empty if isinstance(part, TensorSend)]
    batch = P2PBatch(receives, sends, P2PChannel(group, timeout, _DATA_TAG), "an exchange")
    if not async_op:
        batch.wait()
        return CompletedWork()
    if any(part.tensor.is_cuda for part in non_empty):
        return batch
    work = ThreadWork()
    threading.Thread(target=work.run, args=(batch.wait,), name="motet-exchange", daemon=True).start()
    return work


def _check_both_ends(operations: Sequence[TensorSend | TensorReceive], channel: P2PChannel) -> None:
    """Raises on both ends of a message if they do not expect the same."""
    sends: list[TensorSend | TensorReceive] = [part for part in operations if isinstance(part, TensorSend)]
    receives: list[TensorSend | TensorReceive] = [part for part in operations if isinstance(part, TensorReceive)]
    local_headers = [P2PTensor(part.peer, _header(part.tensor)) for part in (*sends, *receives)]
    # A peer's sends are our receives, so these come first from there.
    peer_headers = [P2PTensor(part.peer, torch.empty_like(_header(part.tensor))) for part in (*receives, *sends)]
    P2PBatch(peer_headers, local_headers, channel, "an exchange, before anything was sent").wait()
    rank = dist.get_rank(channel.group)
    for part, parcel in zip((*receives, *sends), peer_headers, strict=True):
        local_text, peer_text = _header_text(_header(part.tensor)), _header_text(parcel.tensor)
        if local_text != peer_text:
            ends = ((rank, local_text), (part.peer, peer_text))
            (src, sent), (dst, expected) = ends if isinstance(part, TensorSend) else ends[::-1]
            raise InputError(
                f"rank {src} sends {sent} to rank {dst}, which expects {expected}; give tensors of one kind"
            )


def _header(tensor: Tensor) -> Tensor:
    """What is about to travel, as text of a fixed length."""
    text = f"{tensor.numel()} {dtype_and_device(tensor)}".encode().ljust(_HEADER_BYTES)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(tensor.device)


def _header_text(header: Tensor) -> str:
    return bytes(header.tolist()).decode().rstrip()


def send(tensor: Tensor, group: dist.ProcessGroup, dst: int, async_op: bool = False) -> WorkHandle:
    return batch_send_receive([TensorSend(tensor, dst)], group, async_op)


def receive(tensor: Tensor, group: dist.ProcessGroup, src: int, async_op: bool = False) -> WorkHandle:
    return batch_send_receive([TensorReceive(tensor, src)], group, async_op)


def copy_between_ranks(
    tensor: Tensor, group: dist.ProcessGroup, src: int, dst: int, async_op: bool = False
) -> WorkHandle:
    """What one rank has appears on another. Others may call too, and have nothing to do."""
    rank = dist.get_rank(group)
    operations = [TensorSend(tensor, dst)] * (rank == src) + [TensorReceive(tensor, src)] * (rank == dst)
    return batch_send_receive(operations, group, async_op)


def signal(group: dist.ProcessGroup, dst: int, device: torch.device | str = "cpu") -> WorkHandle:
    """Let another rank go on that waits for it."""
    return batch_send_receive([TensorSend(torch.zeros(1, dtype=torch.uint8, device=device), dst)], group, check=False)


def wait_for_signal(group: dist.ProcessGroup, src: int, device: torch.device | str = "cpu") -> WorkHandle:
    return batch_send_receive(
        [TensorReceive(torch.zeros(1, dtype=torch.uint8, device=device), src)], group, check=False
    )
