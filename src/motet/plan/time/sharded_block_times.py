"""Blocks whose parameters are gathered before they compute and whose gradients are reduced behind them (stage 3).

Kernels are one stream, collectives another, which executes them in the order in which they are issued. The gather of a
block is issued when the kernels of the block before it start, and its reduction when its own kernels end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class ShardedBlock:
    """Seconds of a block and of its collectives."""

    forward_s: float
    backward_s: float
    gather_s: float  # Before its forward
    gather_again_s: float  # Before its backward
    scatter_s: float


class BlockSpans(NamedTuple):
    """(Start, stop) of the computation of a block and of its collectives."""

    gather: tuple[float, float]
    compute: tuple[float, float]
    reduction: tuple[float, float]


def simulate_forward(blocks: Sequence[ShardedBlock], contention: float) -> list[BlockSpans]:
    """The spans of blocks in a forward. Collectives slow the kernels down that they overlap with."""
    return _simulate([(block.forward_s, block.gather_s, 0.0) for block in blocks], contention)


def simulate_backward(blocks: Sequence[ShardedBlock], contention: float, *, reduces: bool = True) -> list[BlockSpans]:
    """The spans of blocks in a backward, the last block first; without `reduces` it only adds gradients up."""
    order = reversed(blocks)
    return _simulate([(b.backward_s, b.gather_again_s, b.scatter_s if reduces else 0.0) for b in order], contention)


def end_s(spans: Sequence[BlockSpans]) -> float:
    """Seconds until both streams have nothing left to do."""
    return spans[-1].reduction[1] if spans else 0.0


def _simulate(blocks: Sequence[tuple[float, float, float]], contention: float) -> list[BlockSpans]:
    """The spans of blocks of (computation, gather, reduction)."""
    network = start = end = scatter_before_s = 0.0
    spans, before = list[BlockSpans](), None  # (Gather, computation) of the block before
    for compute_s, gather_s, scatter_s in (*blocks, (0.0, 0.0, 0.0)):
        issued = max(network, start)  # `start` is that of the block before
        network = gathered = issued + gather_s
        if before is not None:
            reduced = max(network, end)
            spans.append(BlockSpans(*before, (reduced, reduced + scatter_before_s)))
            network = reduced + scatter_before_s if scatter_before_s else network
        start = max(end, gathered)
        end = start + compute_s + contention * min(gather_s + scatter_s, compute_s)
        before, scatter_before_s = ((issued, gathered), (start, end)), scatter_s
    return spans
