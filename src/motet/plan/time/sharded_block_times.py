"""Blocks whose parameters are gathered before they compute and whose gradients are reduced behind them (stage 3).

Kernels are one stream, collectives another. A gather is issued one block ahead.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ShardedBlock:
    """Seconds of a block and of its collectives."""

    forward_s: float
    backward_s: float
    gather_s: float
    scatter_s: float


def simulate_forward(blocks: Sequence[ShardedBlock], contention: float) -> float:
    """Seconds until the last block has computed. Collectives slow the kernels down that they overlap with."""
    network = kernels = 0.0
    starts = [0.0]  # Of kernels
    for block in blocks:
        # The gather of a block starts when the kernels of the block before the last one are done.
        network = max(network, starts[-2] if len(starts) > 1 else 0.0) + block.gather_s
        start = max(kernels, network)
        starts.append(start)
        kernels = start + block.forward_s + contention * min(block.gather_s, block.forward_s)
    return kernels


def simulate_backward(blocks: Sequence[ShardedBlock], contention: float, *, reshards: bool) -> float:
    """Seconds until the last gradient is reduced."""
    network = kernels = 0.0
    starts, reduce_at = [0.0], list[tuple[float, float]]()
    for block in reversed(blocks):
        gather = block.gather_s if reshards else 0.0
        network = max(network, starts[-2] if len(starts) > 1 else 0.0) + gather
        while reduce_at:
            ready, seconds = reduce_at.pop(0)
            network = max(network, ready) + seconds
        start = max(kernels, network - block.scatter_s if not gather else network - 0.0) if gather else kernels
        starts.append(start)
        busy = gather + block.scatter_s
        kernels = start + block.backward_s + contention * min(busy, block.backward_s)
        reduce_at.append((kernels, block.scatter_s))
    for ready, seconds in reduce_at:
        network = max(network, ready) + seconds
    return max(network, kernels)
