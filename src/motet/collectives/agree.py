"""Before anything is moved, ranks make sure that they are about to do the same: one small all-gather.

Without it, a message of another size than expected ends a process under Gloo, and gives wrong numbers elsewhere.
"""

from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b

import torch
import torch.distributed as dist

from motet.collectives.transport import TransferError
from motet.core import trace
from motet.core.errors import InputError


@dataclass(frozen=True)
class Intent:
    """What a rank is about to do."""

    what: str
    """The Program, and what is done to the numbers."""
    digest: int
    """Tells Programs of one name apart."""
    tensor: str = ""
    """Elements and dtype; empty where a rank has no tensor in it, and any will do."""
    refusal: str = ""
    """Why it will not, which the others should hear too."""

    def __str__(self) -> str:
        return f"{self.what} on {self.tensor}" if self.tensor else self.what


def agree(intent: Intent, group: dist.ProcessGroup, timeout: timedelta | None) -> None:
    """Raises on every rank, the same sentence but for refusals, if any rank is about to do something else."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    device = _device(group)
    what = _number(f"{intent.what} {intent.digest}")
    mine = torch.tensor([what, _number(intent.tensor), len(intent.refusal)], device=device)
    everyone = [torch.empty_like(mine) for _ in range(world)]
    trace.count("check_bytes", (world - 1) * mine.nbytes)
    try:
        work = dist.all_gather(everyone, mine, group=group, async_op=True)
        assert work is not None
        work.wait(timeout) if timeout else work.wait()
    except RuntimeError as error:
        raise TransferError(
            f"rank {rank} found the other ranks not ready for {intent}: one has ended or does something else ({error})"
        ) from error
    rows = torch.stack(everyone).tolist()
    tensors = {row[1] for row in rows if row[1]}
    if len({row[0] for row in rows}) == 1 and len(tensors) < 2 and not any(row[2] for row in rows):
        return
    intents: list[Intent] = [intent] * world
    dist.all_gather_object(intents, intent, group=group)
    raise InputError(_difference(intents, rank))


def _difference(intents: list[Intent], rank: int) -> str:
    refusing = [other for other, intent in enumerate(intents) if intent.refusal]
    if intents[rank].refusal:
        return intents[rank].refusal
    if refusing:
        return f"rank {refusing[0]} refuses: {intents[refusing[0]].refusal}"
    digests = {intent.digest for intent in intents}
    groups: dict[str, list[int]] = {}
    for other, intent in enumerate(intents):
        said = f"{intent} ({intent.digest:016x})" if len(digests) > 1 else str(intent)
        groups.setdefault(said, []).append(other)
    return "ranks must all do the same, but " + "; ".join(f"{_ranks(who)} {what}" for what, who in groups.items())


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} does"
    return f"ranks {', '.join(map(str, ranks))} do"


def _number(text: str) -> int:
    """0 only for nothing."""
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "big") | 1 if text else 0


def _device(group: dist.ProcessGroup) -> torch.device:
    """The CPU where the group has a backend for it: the host needs the answer."""
    if "cpu" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
