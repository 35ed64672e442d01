"""The time of a matrix product by its sizes.

A library cuts the result into tiles, which the compute units of a device process in rounds: the last round is rarely
full. It chooses the tile with the least time, and for few tiles also cuts the inner dimension. Each tile pays for its
prologue and epilogue as if the inner dimension were longer. Reading and writing overlap with that only in part.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import ceil
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
OVERHEAD_INNER = 140.0  # Of a tile's prologue and epilogue, in elements of the inner dimension: fitted
MEMORY_SHARE = 0.63  # Of reads and writes that arithmetic does not hide: fitted


@dataclass(frozen=True)
class ProductRate:
    """What products reach on a device with inputs of one dtype."""

    flops: float  # Of very large products
    units: int  # Compute units, each of which processes one tile at a time
    memory_Bps: float  # noqa: N815 - a unit


@lru_cache(maxsize=65536)
def product_s(sizes: ProductSizes, rate: ProductRate, moved_bytes: float) -> float:
    """Seconds of a product that reads and writes `moved_bytes`."""
    arithmetic_s = min(
        _rounds(sizes, rate.units, tile, parts)
        * 2.0
        * tile[0]
        * tile[1]
        * (sizes.inner / parts + OVERHEAD_INNER)
        * rate.units
        / (rate.flops * share)
        for (tile, share), parts in product(TILES.items(), INNER_PARTS)
    )
    memory_s = moved_bytes / rate.memory_Bps
    return max(arithmetic_s, memory_s) + MEMORY_SHARE * min(arithmetic_s, memory_s)


def _rounds(sizes: ProductSizes, units: int, tile: tuple[int, int], parts: int) -> int:
    tiles = sizes.groups * ceil(sizes.rows / tile[0]) * ceil(sizes.columns / tile[1])
    return ceil(tiles * parts / units)
