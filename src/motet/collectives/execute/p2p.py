"""Messages over torch.distributed: several sends and receives as one operation, counted, and waited for one by one.

Whatever a backend does with tags, messages from one rank to another arrive in the order in which they were sent.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from motet.core import trace
from motet.core.errors import InputError, RankFailedError


class PeerTransferError(RankFailedError):
    """A rank waited for another in vain."""


class P2PTensor(NamedTuple):
    """A flat tensor on its way to or from another rank of the group."""

    peer: int
    tensor: Tensor


@dataclass(frozen=True)
class P2PChannel:
    """Where messages of one kind travel."""

    group: dist.ProcessGroup
    timeout: timedelta | None  # For each wait on a CPU. None: as long as the group waits.
    tag: int  # Keeps them apart from what others send in the group, on backends that know tags
    is_check_traffic: bool = False  # The messages are not what the caller wants moved, and are counted apart


def flatten_contiguous(tensor: Tensor, owner: str) -> Tensor:
    """Its elements in a row, in the same memory."""
    if not tensor.is_contiguous():
        raise InputError(
            f"{owner} gave a tensor of shape {tuple(tensor.shape)} that is not contiguous; give its contiguous()"
        )
    return tensor.detach().view(-1)


def dtype_and_device(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device.type}"


class P2PBatch:
    """Some receives and sends, all underway. A Work, though on Gloo it does not know before it is waited for."""

    def __init__(
        self, receives: Sequence[P2PTensor], sends: Sequence[P2PTensor], channel: P2PChannel, context: str
    ) -> None:
        self._channel = channel
        self._context = context
        self._peers = [parcel.peer for parcel in (*receives, *sends)]
        self._receive_count = len(receives)
        # Bytes, since backends do not know all dtypes.
        byte_views = [parcel.tensor.view(torch.uint8) for parcel in (*receives, *sends)]
        trace.count(
            "check_bytes" if channel.is_check_traffic else "sent_bytes",
            sum(map(torch.numel, byte_views[self._receive_count :])),
        )
        trace.count("check_messages" if channel.is_check_traffic else "messages", len(sends))
        uses_one_operation = any(wire.device.type == "cuda" for wire in byte_views)
        self._works: list[dist.Work | None] = (
            self._start_as_one_operation(byte_views) if uses_one_operation else self._start_separately(byte_views)
        )

    def wait_for_receive(self, receive_index: int) -> None:
        """Wait for one of the receives."""
        self._wait_for_message(receive_index)

    def wait_for_sends(self) -> None:
        """Wait for all sends."""
        for message in range(self._receive_count, len(self._peers)):
            self._wait_for_message(message)

    def wait(self) -> None:
        for message in range(len(self._peers)):
            self._wait_for_message(message)

    def is_completed(self) -> bool:
        return all(work is None or work.is_completed() for work in self._works)

    def _start_as_one_operation(self, byte_views: list[Tensor]) -> list[dist.Work | None]:
        """One operation for the backend: in NCCL one message would wait for the other."""
        group = self._channel.group
        ops = [
            dist.P2POp(dist.irecv if i < self._receive_count else dist.isend, wire, group=group, group_peer=peer)
            for i, (wire, peer) in enumerate(zip(byte_views, self._peers, strict=True))
        ]
        works = dist.batch_isend_irecv(ops)
        # One work for all of them, or one for each.
        return [works[min(i, len(works) - 1)] for i in range(len(byte_views))]

    def _start_separately(self, byte_views: list[Tensor]) -> list[dist.Work | None]:
        works: list[dist.Work | None] = []
        group, tag = self._channel.group, self._channel.tag
        for i, (wire, peer) in enumerate(zip(byte_views, self._peers, strict=True)):
            with self._explain_errors(peer):
                if i < self._receive_count:
                    works.append(dist.irecv(wire, group=group, group_src=peer, tag=tag))
                else:
                    works.append(dist.isend(wire, group=group, group_dst=peer, tag=tag))
        return works

    def _wait_for_message(self, message: int) -> None:
        work, timeout = self._works[message], self._channel.timeout
        if work is not None:
            with self._explain_errors(self._peers[message]):
                work.wait(timeout) if timeout else work.wait()
            self._works[message] = None

    @contextmanager
    def _explain_errors(self, peer: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            rank = dist.get_rank(self._channel.group)
            raise PeerTransferError(
                f"rank {rank} waited for rank {peer} in vain in {self._context}: it has ended, is late or does something "
                f"else ({str(error).strip().splitlines()[0]}); start the group again"
            ) from error
