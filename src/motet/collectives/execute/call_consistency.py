"""Before anything is moved, ranks make sure that they are about to do the same: one small all-gather.

Without it, a message of another size than expected ends a process under Gloo, and gives wrong numbers elsewhere.
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
    """What a rank is about to do."""

    operation: str  # The Program, and what is done to the numbers
    digest: int  # Tells Programs of one name apart
    tensor_description: str = ""  # Elements and dtype; empty where a rank has no tensor in it, and any will do
    rejection: str = ""  # Why it will not, which the others should hear too

    def __str__(self) -> str:
        return f"{self.operation} on {self.tensor_description}" if self.tensor_description else self.operation


def check_same_call(signature: CollectiveCallSignature, group: dist.ProcessGroup, timeout: timedelta | None) -> None:
    """Raises on every rank, the same sentence but for refusals, if any rank is about to do something else."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    device = _device_for_check(group)
    operation_hash = _text_hash(f"{signature.operation} {signature.digest}")
    local_hashes = torch.tensor(
        [operation_hash, _text_hash(signature.tensor_description), len(signature.rejection)], device=device
    )
    all_hashes = [torch.empty_like(local_hashes) for _ in range(world)]
    trace.count("check_bytes", (world - 1) * local_hashes.nbytes)
    try:
        work = dist.all_gather(all_hashes, local_hashes, group=group, async_op=True)
        assert work is not None
        work.wait(timeout) if timeout else work.wait()
    except RuntimeError as error:
        raise PeerTransferError(
            f"rank {rank} found the other ranks not ready for {signature}: one has ended or does something else ({error})"
        ) from error
    rows = torch.stack(all_hashes).tolist()
    tensors = {row[1] for row in rows if row[1]}
    if len({row[0] for row in rows}) == 1 and len(tensors) < 2 and not any(row[2] for row in rows):
        return
    signatures: list[CollectiveCallSignature] = [signature] * world
    dist.all_gather_object(signatures, signature, group=group)
    raise InputError(_describe_difference(signatures, rank))


def _describe_difference(signatures: list[CollectiveCallSignature], rank: int) -> str:
    rejecting_ranks = [other for other, intent in enumerate(signatures) if intent.rejection]
    if signatures[rank].rejection:
        return signatures[rank].rejection
    if rejecting_ranks:
        return f"rank {rejecting_ranks[0]} refuses: {signatures[rejecting_ranks[0]].rejection}"
    digests = {intent.digest for intent in signatures}
    groups: dict[str, list[int]] = {}
    for other, intent in enumerate(signatures):
        description = f"{intent} ({intent.digest:016x})" if len(digests) > 1 else str(intent)
        groups.setdefault(description, []).append(other)
    return "ranks must all do the same, but " + "; ".join(f"{_ranks_do(who)} {what}" for what, who in groups.items())


def _ranks_do(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} does"
    return f"ranks {', '.join(map(str, ranks))} do"


def _text_hash(text: str) -> int:
    """0 only for nothing."""
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "big") | 1 if text else 0


def _device_for_check(group: dist.ProcessGroup) -> torch.device:
    """The CPU where the group has a backend for it: the host needs the answer."""
    if "cpu" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
