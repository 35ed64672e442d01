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


def simulate_forward(blocks: Sequence[ShardedBlock], contention: float) -> float:
    """Seconds until the last block has computed. Collectives slow the kernels down that they overlap with."""
    return _simulate([(block.forward_s, block.gather_s, 0.0) for block in blocks], contention)


def simulate_backward(blocks: Sequence[ShardedBlock], contention: float) -> float:
    """Seconds until the last gradient is reduced."""
    return _simulate([(b.backward_s, b.gather_again_s, b.scatter_s) for b in reversed(blocks)], contention)


def _simulate(blocks: Sequence[tuple[float, float, float]], contention: float) -> float:
    """The end of both streams for blocks of (computation, gather, reduction)."""
    network = start = end = scatter_before_s = 0.0
    for compute_s, gather_s, scatter_s in blocks:
        network = gathered = max(network, start) + gather_s  # `start` is that of the block before
        network = max(network, end) + scatter_before_s if scatter_before_s else network
        start = max(end, gathered)
        end = start + compute_s + contention * min(gather_s + scatter_s, compute_s)
        scatter_before_s = scatter_s
    return max(network, end) + scatter_before_s
