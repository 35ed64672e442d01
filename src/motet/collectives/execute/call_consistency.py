"""The check that all ranks are about to make the same call: one small all-gather before any data moves.

Without it, a message of an unexpected size ends a process under Gloo, and gives wrong numbers elsewhere.
"""

from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b

import torch
import torch.distributed as dist

from motet.collectives.execute.p2p import PeerTransferError
from motet.core import trace
from motet.core.errors import InputError


@dataclass(frozen=True)
class CollectiveCallSignature:
    """The call that a rank is about to make."""

    operation: str  # The Program, and the reduction if it has one
    digest: int  # Distinguishes Programs of one name
    tensor_description: str = ""  # Elements and dtype; empty on a rank without a tensor, where any will do
    rejection: str = ""  # Why this rank will not make the call, for the other ranks

    def __str__(self) -> str:
        return f"{self.operation} on {self.tensor_description}" if self.tensor_description else self.operation


def check_same_call(signature: CollectiveCallSignature, group: dist.ProcessGroup, timeout: timedelta | None) -> None:
    """Raise InputError on every rank if the calls differ or a rank rejects its call."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    hashes = [_text_hash(f"{signature.operation} {signature.digest}"), _text_hash(signature.tensor_description)]
    device = "cpu" if "cpu" in dist.get_backend_config(group) else "cuda"  # The host needs the answer
    local_hashes = torch.tensor([*hashes, len(signature.rejection)], device=device)
    all_hashes = [torch.empty_like(local_hashes) for _ in range(world)]
    trace.count("check_bytes", (world - 1) * local_hashes.nbytes)
    try:
        work = dist.all_gather(all_hashes, local_hashes, group=group, async_op=True)
        assert work is not None
        work.wait(timeout) if timeout else work.wait()
    except RuntimeError as error:
        raise PeerTransferError(
            f"rank {rank}: not all ranks are ready for {signature}: one has ended or does something else ({error})"
        ) from error
    calls, tensors, rejections = map(set, zip(*torch.stack(all_hashes).tolist(), strict=True))
    if len(calls) > 1 or len(tensors - {0}) > 1 or any(rejections):
        signatures: list[CollectiveCallSignature] = [signature] * world
        dist.all_gather_object(signatures, signature, group=group)
        raise InputError(_describe_difference(signatures, rank))


def _describe_difference(signatures: list[CollectiveCallSignature], rank: int) -> str:
    if rejection := signatures[rank].rejection:
        return rejection
    for other, signature in enumerate(signatures):
        if signature.rejection:
            return f"rank {other} rejects the call: {signature.rejection}"
    have_one_digest = len({signature.digest for signature in signatures}) == 1
    callers: dict[str, list[str]] = {}
    for other, signature in enumerate(signatures):
        description = str(signature) if have_one_digest else f"{signature} ({signature.digest:016x})"
        callers.setdefault(description, []).append(str(other))
    calls = [
        f"ranks {', '.join(ranks)} do {call}" if len(ranks) > 1 else f"rank {ranks[0]} does {call}"
        for call, ranks in callers.items()
    ]
    return f"ranks must all do the same, but {'; '.join(calls)}"


def _text_hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "big") | 1 if text else 0
