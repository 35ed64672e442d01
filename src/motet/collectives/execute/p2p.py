"""Batches of sends and receives over torch.distributed, waited for one by one.

Messages from one rank to another arrive in the order in which they were sent, whether or not a backend knows tags.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from motet.core.dtypes import dtype_name
from motet.core.errors import RankFailedError, check_input


class PeerTransferError(RankFailedError):
    """Another rank did not send or receive."""


class P2PTensor(NamedTuple):
    """A flat tensor on its way to or from another rank of the group."""

    peer: int
    tensor: Tensor


_P2PCall = tuple[Callable[..., Any], Tensor, int]  # `dist.irecv` or `dist.isend`, a view as bytes, the peer


@dataclass(frozen=True)
class P2PChannel:
    """The group, timeout and tag of messages of one kind."""

    group: dist.ProcessGroup
    timeout: timedelta | None  # For each wait on a CPU; None waits as long as the group does
    tag: int  # Separates them from other messages of the group, on backends that know tags


def flatten_contiguous(tensor: Tensor, owner: str) -> Tensor:
    """A view of all elements in one dimension."""
    problem = f"{owner} gave a tensor of shape {tuple(tensor.shape)} that is not contiguous; give its contiguous()"
    check_input(tensor.is_contiguous(), problem)
    return tensor.detach().view(-1)


def dtype_and_device(tensor: Tensor) -> str:
    return f"{dtype_name(tensor.dtype)} on {tensor.device.type}"


class P2PBatch:
    """Receives and sends that were started together; `context` names the operation in errors."""

    def __init__(
        self, receives: Sequence[P2PTensor], sends: Sequence[P2PTensor], channel: P2PChannel, *, context: str
    ) -> None:
        self._channel, self._context = channel, context
        self._peers = [message.peer for message in (*receives, *sends)]
        self._receive_count = len(receives)
        functions = [dist.irecv] * len(receives) + [dist.isend] * len(sends)
        # Bytes, since backends do not know all dtypes.
        byte_views = [message.tensor.view(torch.uint8) for message in (*receives, *sends)]
        start = self._start_as_one_operation if any(v.is_cuda for v in byte_views) else self._start_separately
        self._works = start([*zip(functions, byte_views, self._peers, strict=True)])

    def wait_for_message(self, message: int) -> None:
        """Wait for a message by its index; the receives come before the sends."""
        work, timeout = self._works[message], self._channel.timeout
        if work is not None:
            with self._explain_errors(self._peers[message]):
                work.wait(timeout) if timeout else work.wait()
            self._works[message] = None

    def wait(self, *, only_sends: bool = False) -> None:
        for message in range(self._receive_count if only_sends else 0, len(self._peers)):
            self.wait_for_message(message)

    def _start_as_one_operation(self, calls: list[_P2PCall]) -> list[dist.Work | None]:
        """Start one grouped operation: NCCL would run one message after the other."""
        group = self._channel.group
        ops = [dist.P2POp(function, view, group=group, group_peer=peer) for function, view, peer in calls]
        works = dist.batch_isend_irecv(ops)
        # One handle for all messages, or one for each.
        return [works[min(i, len(works) - 1)] for i in range(len(calls))]

    def _start_separately(self, calls: list[_P2PCall]) -> list[dist.Work | None]:
        works: list[dist.Work | None] = []
        for function, view, peer in calls:
            with self._explain_errors(peer):
                end = {"group_src" if function is dist.irecv else "group_dst": peer}
                works.append(function(view, group=self._channel.group, tag=self._channel.tag, **end))
        return works

    @contextmanager
    def _explain_errors(self, peer: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise PeerTransferError(
                f"rank {dist.get_rank(self._channel.group)} waited in vain for rank {peer} in {self._context}: that "
                "rank has ended, is late or does something else "
                f"({str(error).strip().splitlines()[0]}); start the group again"
            ) from error
