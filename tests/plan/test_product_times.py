"""The time of matrix products by tiles, and of blocks whose parameters are gathered."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.plan.time.kernel_times import ProductRate, ProductSizes, product_s, tile_flops
from motet.plan.time.stage_times import ShardedBlock, end_s, simulate_backward, simulate_forward

UNITS = 108
RATE = ProductRate(200e12, UNITS, 1.8e12, tile_overhead=140, exposed_memory=0.6)


@given(st.integers(1, 20000), st.integers(1, 20000), st.integers(1, 20000), st.integers(1, 64))
def test_tiles_take_no_less_than_the_product(rows: int, columns: int, inner: int, groups: int) -> None:
    sizes = ProductSizes(rows, columns, inner, groups)
    assert tile_flops(sizes, UNITS, 140) >= sizes.flops
    assert tile_flops(sizes, UNITS, 140) <= tile_flops(sizes._replace(rows=rows + 256), UNITS, 140)


def test_full_rounds_pay_for_the_overhead_of_tiles_alone() -> None:
    sizes = ProductSizes(256 * 12, 128 * 9 * 5, 8192)  # 540 tiles: five rounds of 108
    assert tile_flops(sizes, UNITS, 140) == pytest.approx(sizes.flops * (1 + 140 / 8192))
    assert tile_flops(sizes._replace(rows=256 * 12 + 1), UNITS, 140) > 1.05 * tile_flops(sizes, UNITS, 140)


def test_few_tiles_leave_units_idle() -> None:
    small, large = ProductSizes(1024, 256, 1024), ProductSizes(8192, 8192, 1024)
    assert small.flops / tile_flops(small, UNITS, 140) < 0.5 < 0.8 < large.flops / tile_flops(large, UNITS, 140)
    # Four tiles with a long inner dimension, which parts of it distribute over the units
    long = ProductSizes(256, 256, 65536)
    assert tile_flops(long, UNITS, 140) < 0.05 * UNITS * 2 * 256 * 128 * 65536


def test_each_group_has_its_tiles() -> None:
    many, single = ProductSizes(8, 4096, 1024, groups=64), ProductSizes(8 * 64, 4096, 1024)
    assert many.flops == single.flops
    assert tile_flops(many, UNITS, 140) > 5 * tile_flops(single, UNITS, 140)


def test_reads_and_writes_are_hidden_in_part() -> None:
    sizes = ProductSizes(4096, 4096, 4096)
    arithmetic = product_s(sizes, RATE, 0.0)
    assert arithmetic == pytest.approx(tile_flops(sizes, UNITS, 140) / 200e12)
    assert product_s(sizes, RATE, 1.8e12 * arithmetic / 2) == pytest.approx(1.3 * arithmetic)
    assert product_s(sizes, RATE, 1.8e12 * arithmetic * 2) == pytest.approx(2.6 * arithmetic)


def block(forward: float, backward: float, gather: float, scatter: float, *, reshards: bool = True) -> ShardedBlock:
    return ShardedBlock(forward, backward, gather, gather * reshards, scatter)


def forward_s(blocks: list[ShardedBlock], contention: float) -> float:
    return end_s(simulate_forward(blocks, contention))


def backward_s(blocks: list[ShardedBlock], contention: float) -> float:
    return end_s(simulate_backward(blocks, contention))


def test_gathers_hide_behind_long_kernels() -> None:
    blocks = [block(10, 20, 2, 3)] * 4
    assert forward_s(blocks, 0.0) == 2 + 4 * 10
    assert backward_s(blocks, 0.0) == 2 + 4 * 20 + 3
    assert backward_s([block(10, 20, 2, 3, reshards=False)] * 4, 0.0) == 4 * 20 + 3
    assert end_s(simulate_backward(blocks, 0.0, reduces=False)) == 2 + 4 * 20
    assert forward_s(blocks, 0.5) == 2 + 4 * (10 + 0.5 * 2)
    assert backward_s(blocks, 0.5) == 2 + 4 * (20 + 0.5 * 5) + 3


def test_long_collectives_bound_a_pass() -> None:
    blocks = [block(1, 1, 10, 20)] * 3
    assert forward_s(blocks, 0.0) == 3 * 10 + 1
    # Gathers of the first two blocks, a reduction, the third gather, and two reductions: the network never waits
    assert backward_s(blocks, 0.0) == 3 * 10 + 3 * 20


def test_a_gather_is_issued_one_block_ahead() -> None:
    blocks = [block(10, 0, 1, 0), block(1, 0, 1, 0), block(0, 0, 20, 0)]
    assert forward_s(blocks, 0.0) == 1 + 10 + 20  # The last gather starts with the kernels of the second block


def test_a_reduction_delays_the_gather_behind_it() -> None:
    blocks = [block(0, 4, 1, 0), block(0, 4, 1, 0), block(0, 4, 1, 30)]  # Backward begins with the last one
    # Gather 0-1, kernels 1-5, gather of the next 1-2, reduction 5-35, kernels 5-9, the last gather 35-36, kernels 36-40
    assert backward_s(blocks, 0.0) == 40
