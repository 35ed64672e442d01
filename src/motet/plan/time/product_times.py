"""The time of a matrix product by its sizes.

A library cuts the result into tiles, which the compute units of a device process in rounds: the last round is rarely
full. It chooses the tile with the least time, and for few tiles also cuts the inner dimension. Each tile pays for its
prologue and epilogue as if the inner dimension were longer. Reading and writing overlap with that only in part.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, inf
from typing import NamedTuple


class ProductSizes(NamedTuple):
    """`groups` products [rows, inner] x [inner, columns]."""

    rows: float
    columns: float
    inner: float
    groups: int = 1

    @property
    def flops(self) -> float:
        return 2.0 * self.groups * self.rows * self.columns * self.inner


# Rows and columns of a tile -> the share of the rate of the largest tile. Small tiles read their inputs more often.
# Assumed, after the rates that published benchmarks of CUTLASS show for forced tile sizes.
TILES = {(256, 128): 1.0, (128, 128): 0.95, (128, 64): 0.85, (64, 64): 0.7}
INNER_PARTS = (1, 2, 4, 8)  # Into which the inner dimension is cut


@dataclass(frozen=True)
class ProductRate:
    """The rate of products on a device with inputs of one dtype."""

    flops: float  # Of very large products
    units: int  # Compute units, each of which processes one tile at a time; none: a processor, whose tiles are small
    memory_Bps: float  # noqa: N815 - a unit
    # Of a tile's prologue and epilogue, in elements of the inner dimension; on a processor of each dimension
    tile_overhead: float
    exposed_memory: float  # The part of reads and writes, or of arithmetic, that the longer of both does not hide


def product_s(sizes: ProductSizes, rate: ProductRate, moved_bytes: float) -> float:
    """Seconds of a product that reads and writes `moved_bytes`."""
    arithmetic_s, memory_s = (
        tile_flops(sizes, rate.units, rate.tile_overhead) / rate.flops,
        moved_bytes / rate.memory_Bps,
    )
    return max(arithmetic_s, memory_s) + rate.exposed_memory * min(arithmetic_s, memory_s)


@lru_cache(maxsize=1 << 18)
def tile_flops(sizes: ProductSizes, units: int, tile_overhead: float) -> float:
    """The FLOPs for which all units are busy with the best tiles, at the rate of the largest tile."""
    rows, columns, inner, groups = sizes
    if not units:
        return 2.0 * groups * (rows + tile_overhead) * (columns + tile_overhead) * (inner + tile_overhead)
    best = inf
    for (tile_rows, tile_columns), share in TILES.items():
        tiles = groups * ceil(rows / tile_rows) * ceil(columns / tile_columns)
        each = 2.0 * tile_rows * tile_columns * units / share
        for parts in INNER_PARTS:
            rounds = -(-tiles * parts // units)
            best = min(best, rounds * each * (inner / parts + tile_overhead))
            if tiles * parts > 4 * units:  # More parts only add overhead
                break
    return best
