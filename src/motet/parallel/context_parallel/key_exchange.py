"""The ways in which keys and values of all ranks reach the queries of each: gathered, or in turn around a ring.

Both communicate keys again in backward, and return the gradients of keys to the ranks that own them. In backward they
travel in the dtype of keys, and each rank adds its part in float32 or float64.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from motet.collectives.execute.api import all_gather, reduce_scatter
from motet.collectives.execute.program_runner import P2PBatch, P2PChannel, P2PTensor
from motet.core import trace
from motet.models.arch.layers import accumulation_dtype
from motet.parallel.context_parallel.attention_blocks import KeyBlock
from motet.parallel.context_parallel.context_partition import ContextPartition, Spans, count_tokens, shared_slices
from motet.parallel.context_parallel.ring_schedule import RingSchedule
from motet.parallel.process.process_group import RankGroup

KeyGradients = Callable[[KeyBlock], Tensor]  # Computes the gradients of a block by the queries of this rank
Direction = Literal["forward", "backward"]
_COUNTERS: dict[Direction, str] = {"forward": "attention_forward_bytes", "backward": "attention_backward_bytes"}
_KEY_TAG, _GRADIENT_TAG = 7_001, 7_002  # Messages with keys, and with their gradients


class KeyExchange(Protocol):
    """Brings keys of all ranks to this one. All ranks take the blocks in step."""

    def blocks(self, local: KeyBlock) -> Iterator[KeyBlock]:
        """The keys that queries of this rank see, from those of this rank."""

    def gradients(self, local: KeyBlock, compute: KeyGradients) -> Tensor:
        """The gradients of this rank's keys, packed alike, from the queries of all ranks."""


def count_sent(direction: Direction, numel: int, itemsize: int) -> None:
    """Report bytes that this rank sends to others inside of attention."""
    trace.count(_COUNTERS[direction], numel * itemsize)


@dataclass(frozen=True)
class GatheredKeys:
    """An all-gather of keys, and a reduce-scatter of their gradients, of parts that are padded to the longest."""

    partition: ContextPartition
    group: RankGroup

    def blocks(self, local: KeyBlock) -> Iterator[KeyBlock]:
        """One block of complete rows."""
        yield self._gather(local, "forward")

    def gradients(self, local: KeyBlock, compute: KeyGradients) -> Tensor:
        """The sum over ranks of the gradients of this rank's keys."""
        gradients, longest = compute(self._gather(local, "backward")), self.partition.longest
        parts = local.packed.new_zeros(self.group.world, longest, *local.packed.shape[1:])
        for rank, part in enumerate(parts):
            for here, place in shared_slices(self.partition.spans(rank), ((0, self.partition.tokens),)):
                part[here] = gradients[place]
        del gradients
        total = torch.empty_like(parts[0])
        count_sent("backward", parts.numel() - total.numel(), total.itemsize)
        reduce_scatter(total.view(-1), parts.view(-1), self.group)
        return total[: len(local.packed)]

    def _gather(self, local: KeyBlock, direction: Direction) -> KeyBlock:
        packed = local.packed
        count_sent(direction, (self.group.world - 1) * self.partition.longest * packed[0].numel(), packed.itemsize)
        rows = gather_tokens(packed, self.partition, self.group)
        return KeyBlock(rows, ((0, self.partition.tokens),), local.key_dim)


def gather_tokens(part: Tensor, partition: ContextPartition, group: RankGroup) -> Tensor:
    """[t, ...] of this rank's tokens of a row -> [T, ...] of all tokens, in the order of the row."""
    padded = part.new_zeros(partition.longest, *part.shape[1:])
    padded[: len(part)] = part
    parts = padded.new_empty(group.world, *padded.shape)
    all_gather(parts, padded, group)
    rows = part.new_empty(partition.tokens, *part.shape[1:])
    for rank, gathered in enumerate(parts):
        for here, place in shared_slices(partition.spans(rank), ((0, partition.tokens),)):
            rows[place] = gathered[here]
    return rows


@dataclass(frozen=True)
class RingKeys:
    """Keys that travel from rank to rank, the next ones while a block is computed.

    Every rank starts the messages of a hop in the same order: keys before the block is computed, gradients after it.
    """

    schedule: RingSchedule
    group: RankGroup  # All ranks of context parallelism
    inner: int = 1  # Neighbours in the group that share the tokens of a rank of the ring
    overlaps: bool = True  # Otherwise a rank waits for the next keys before it computes

    @property
    def index(self) -> int:
        """The index of this rank in the ring."""
        return self.group.rank // self.inner

    def blocks(self, local: KeyBlock) -> Iterator[KeyBlock]:
        """The keys of this rank, of the one before it in the ring, and so on."""
        for _, block, wait in self._hops(local, "forward"):
            if not self.overlaps:
                wait()
            if count_tokens(block.spans):
                yield block

    def gradients(self, local: KeyBlock, compute: KeyGradients) -> Tensor:
        """The gradients of this rank's keys, which have passed each rank that sees them."""
        dtype = accumulation_dtype(local.packed)
        total = _PassingGradients(torch.zeros_like(local.packed, dtype=dtype), local.spans)
        passing, arriving, home = total, list[_PassingGradients](), list[_PassingGradients]()
        messages = self._exchange([], [], _GRADIENT_TAG)
        for hop, block, wait in self._hops(local, "backward"):
            if not self.overlaps:
                wait()
            if hop:
                spans = self.schedule.gradients_after_hop((self.index - hop) % self.schedule.ranks, hop)
                passing = _PassingGradients(_packed(local, spans, dtype).zero_(), spans)
            if count_tokens(block.spans):
                passing.add(_PassingGradients(compute(block), block.spans))
            messages.wait()
            passing.add_all(arriving)
            total.add_all(home)
            # No name for what is sent, so that it lives only while it travels
            messages, arriving, home = self._send_gradients(hop, passing.packed.to(local.packed.dtype), local)
        messages.wait()
        total.add_all(home)
        return total.packed

    def _hops(self, local: KeyBlock, direction: Direction) -> Iterator[tuple[int, KeyBlock, Callable[[], None]]]:
        """Each hop with the keys that are here, and a function that waits for those of the next hop."""
        block, ranks = local, self.schedule.ranks
        for hop in range(ranks):
            owner = (self.index - hop) % ranks
            sends, receives, coming = list[P2PTensor](), list[P2PTensor](), None
            if hop + 1 < ranks:
                spans = self.schedule.keys_in_hop(owner, hop + 1)
                if count_tokens(spans):
                    sent = _take_tokens(block, spans)
                    sends.append(P2PTensor(self._peer(1), sent.view(-1)))
                    count_sent(direction, sent.numel(), sent.itemsize)
                spans = self.schedule.keys_in_hop((owner - 1) % ranks, hop + 1)
                coming = KeyBlock(_packed(local, spans), spans, local.key_dim)
                if count_tokens(spans):
                    receives.append(P2PTensor(self._peer(-1), coming.packed.view(-1)))
            messages = self._exchange(receives, sends, _KEY_TAG)
            yield hop, block, messages.wait
            messages.wait()
            if coming is not None:
                block = coming

    def _send_gradients(
        self, hop: int, passing: Tensor, local: KeyBlock
    ) -> "tuple[P2PBatch, list[_PassingGradients], list[_PassingGradients]]":
        """Send the gradients of the block of this hop on, or home. Return the gradients of the block of the next hop,
        and those of this rank's keys, that arrive in the meantime."""
        schedule, (owner, before) = self.schedule, ((self.index - n) % self.schedule.ranks for n in (hop, hop + 1))
        sends, receives = list[P2PTensor](), list[P2PTensor]()
        arrivals = list[_PassingGradients](), list[_PassingGradients]()
        if 0 < hop <= schedule.last_hop(owner) and passing.numel():
            step = 1 if hop < schedule.last_hop(owner) else -hop
            sends.append(P2PTensor(self._peer(step), passing.view(-1)))
            count_sent("backward", passing.numel(), passing.itemsize)
        for arrived, block_owner, step, is_due in (
            (arrivals[0], before, -1, 0 < hop < schedule.last_hop(before)),
            (arrivals[1], self.index, hop, 0 < hop == schedule.last_hop(self.index)),
        ):
            spans = schedule.gradients_after_hop(block_owner, hop)
            if is_due and count_tokens(spans):
                packed = _packed(local, spans)
                receives.append(P2PTensor(self._peer(step), packed.view(-1)))
                arrived.append(_PassingGradients(packed, spans))
        return self._exchange(receives, sends, _GRADIENT_TAG), *arrivals

    def _exchange(self, receives: list[P2PTensor], sends: list[P2PTensor], tag: int) -> P2PBatch:
        assert self.group.process_group is not None
        channel = P2PChannel(self.group.process_group, None, tag)
        return P2PBatch(receives, sends, channel, context="the ring of context parallelism")

    def _peer(self, step: int) -> int:
        return (self.group.rank + step * self.inner) % self.group.world


@dataclass(frozen=True, eq=False)
class _PassingGradients:
    """Gradients of keys of one owner, for a part of each of its spans."""

    packed: Tensor
    spans: Spans

    def add_all(self, others: "Iterable[_PassingGradients]") -> None:
        """Add the gradients of several parts. None of them has a name when this returns, and so stays in memory."""
        for other in others:
            self.add(other)

    def add(self, other: "_PassingGradients") -> None:
        """Add the gradients of the tokens that both have."""
        for here, other_here in shared_slices(self.spans, other.spans):
            self.packed[here].add_(other.packed[other_here])


def _take_tokens(block: KeyBlock, spans: Spans) -> Tensor:
    """Keys of these places, a part of each span of a block."""
    if spans == block.spans:
        return block.packed
    parts = [block.packed[here] for here, _ in shared_slices(block.spans, spans)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _packed(local: KeyBlock, spans: Spans, dtype: torch.dtype | None = None) -> Tensor:
    """Memory for keys of these places."""
    return local.packed.new_empty(count_tokens(spans), *local.packed.shape[1:], dtype=dtype)
