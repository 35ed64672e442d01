"""Blocks whose parameters are gathered before they compute and whose gradients are reduced behind them (stage 3).

Kernels are one stream, collectives another, which executes them in the order in which they are issued. The gather of a
block is issued when the kernels of the block before it start, and its reduction when its own kernels end.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ShardedBlock:
    """Seconds of a block and of its collectives."""

    forward_s: float
    backward_s: float
    gather_s: float  # Before its forward
    gather_again_s: float  # Before its backward
    scatter_s: float


# (Start, stop) of the gather of a block, of its computation, and of its reduction
BlockSpans = tuple[float, float, float, float, float, float]


def simulate_forward(blocks: Sequence[ShardedBlock], contention: float) -> list[BlockSpans]:
    """The spans of blocks in a forward. Collectives slow the kernels down that they overlap with."""
    return _simulate([(block.forward_s, block.gather_s, 0.0) for block in blocks], contention)


def simulate_backward(blocks: Sequence[ShardedBlock], contention: float, *, reduces: bool = True) -> list[BlockSpans]:
    """The spans of blocks in a backward, the last block first; without `reduces` it only adds gradients up."""
    order = reversed(blocks)
    return _simulate([(b.backward_s, b.gather_again_s, b.scatter_s if reduces else 0.0) for b in order], contention)


def end_s(spans: Sequence[BlockSpans]) -> float:
    """Seconds until both streams have nothing left to do."""
    return spans[-1][-1] if spans else 0.0


def _simulate(blocks: Sequence[tuple[float, float, float]], contention: float) -> list[BlockSpans]:
    """The spans of blocks of (computation, gather, reduction)."""
    network = start = end = issued = gathered = scatter_before_s = 0.0
    spans = list[BlockSpans]()
    for compute_s, gather_s, scatter_s in (*blocks, (0.0, 0.0, 0.0)):
        before = issued, gathered, start, end  # The gather and the computation of the block before
        issued = network if network > start else start
        network = gathered = issued + gather_s
        computed = network if network > end else end
        spans.append((*before, computed, computed + scatter_before_s))
        if scatter_before_s:
            network = computed + scatter_before_s
        start = end if end > gathered else gathered
        overlap_s = gather_s + scatter_s
        end = start + compute_s + contention * (overlap_s if overlap_s < compute_s else compute_s)
        scatter_before_s = scatter_s
    return spans[1:]
