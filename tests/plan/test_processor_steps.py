"""Steps on processors: measured rates of a cluster file, Programs of the backend, and ranks that share cores."""

from dataclasses import replace
from pathlib import Path

import pytest

from motet.core.errors import InputError
from motet.core.toml_writer import to_toml
from motet.models.settings import DecoderSettings, EncoderSettings
from motet.plan.planned_cluster import PlannedCluster, load_planned_cluster
from motet.plan.planned_layout import PlannedLayout
from motet.plan.planned_step import PlannedStep
from motet.plan.search.parse_plan_layout import with_balanced_stages
from motet.plan.software_stack import STACKS
from motet.plan.time.kernel_times import DeviceRates
from motet.plan.time.product_times import ProductSizes, tile_flops
from motet.plan.time.program_costs import ProgramCosts
from motet.precision.recipe import RECIPES

MODEL = DecoderSettings(vocab_size=1024, context=128, layers=4, hidden=128, heads=4, ffn_hidden=512)
RATES = {
    "products": {"float32": 80e9},
    "attention": 30e9,
    "attention_backward": 30e9,
    "memory_Bps": 20e9,
    "launch_s": 5e-6,
    "cores": 2,
    "busy_factor": 1.25,
}
PORT = {"kind": "bus", "alpha_s": 1e-5, "bandwidth_Bps": 1e9, "bus_Bps": 4e9}


def cluster(folder: Path, ranks: int, **rates: object) -> PlannedCluster:
    values = {"device": "CPU", "devices_per_host": 4, "gamma_s_per_byte": 0.0, "inside": PORT}
    file = folder / "box.toml"
    file.write_text(to_toml(values | {"rates": RATES | rates}), encoding="utf-8")
    return load_planned_cluster(str(file), ranks)


def step(**sizes: object) -> PlannedStep:
    layout = PlannedLayout(**sizes)  # type: ignore[arg-type]  # sizes by name
    return PlannedStep(MODEL, 128, 16, layout, RECIPES["fp32"], "float32", STACKS["motet-cpu"])


def test_collectives_take_the_steps_of_the_programs_that_ranks_execute(tmp_path: Path) -> None:
    costs = cluster(tmp_path, 4).step_times.costs
    assert isinstance(costs, ProgramCosts)
    size = 1 << 20
    # Two steps, in each of which a rank sends half; the bus carries both halves.
    whole = costs.seconds("all-reduce", size, ranks=2, ranks_per_host=2)
    assert whole == pytest.approx(2 * (1e-5 + size / 2 / 1e9))
    assert costs.seconds("send-receive", size, ranks=2, ranks_per_host=2) == pytest.approx(1e-5 + size / 1e9)
    gathered = costs.seconds("all-gather", size, ranks=4, ranks_per_host=4)
    assert gathered == pytest.approx(3e-5 + 3 * size / 4e9)  # All messages together fill the bus: 12 quarters
    with pytest.raises(InputError, match="does not fit cluster"):
        costs.seconds("all-reduce", size, ranks=8, ranks_per_host=8)


def test_ranks_that_share_cores_wait_for_each_other(tmp_path: Path) -> None:
    times = cluster(tmp_path, 4).step_times
    rates: DeviceRates = times.rates
    assert [rates.slowdown(*pair) for pair in ((1, 1), (2, 2), (4, 4), (4, 1))] == [1.0, 1.25, 2.5, 1.25]
    alone, pair, four = (times.predict(step(dp=ranks)).seconds for ranks in (1, 2, 4))
    assert 0.5 * 1.25 * alone < pair < alone < 2 * pair
    assert four > pair  # Two cores do no more work, and messages are added
    deep = step(pp=4, microbatches=16)
    enough = cluster(tmp_path, 4, cores=4).step_times
    assert times.predict(deep).seconds > 1.3 * enough.predict(deep).seconds  # The work of all stages fills the cores


def test_narrow_products_are_slower_than_wide_ones(tmp_path: Path) -> None:
    plain, edged = (cluster(tmp_path, 1, product_edge=edge, launch_s=0).step_times for edge in (0.0, 16.0))
    assert edged.predict(step()).seconds > plain.predict(step()).seconds
    narrow, wide = (ProductSizes(rows, 256, 256) for rows in (64, 1024))
    assert [tile_flops(sizes, 0, 0.0) / sizes.flops for sizes in (narrow, wide)] == [1, 1]
    assert tile_flops(narrow, 0, 16.0) / narrow.flops > tile_flops(wide, 0, 16.0) / wide.flops > 1


def test_absurd_rates_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="busy_factor"):
        cluster(tmp_path, 1, busy_factor=0.5)
    with pytest.raises(InputError, match="memory_Bps"):
        cluster(tmp_path, 1, memory_Bps=0)


def test_stages_of_motet_are_balanced_by_time() -> None:
    encoder = EncoderSettings(vocab_size=4096, context=128, layers=6, hidden=192, heads=6, ffn_hidden=768)
    planned = replace(step(), model=encoder)
    layout = PlannedLayout(pp=2, microbatches=4)
    assert with_balanced_stages(planned, layout).stages == "0-3,4-5"  # The head predicts all tokens
    few = replace(planned, masked_fraction=0.15)
    assert with_balanced_stages(few, layout).stages == "0-2,3-5"
    assert with_balanced_stages(replace(few, stack=STACKS["megatron"]), layout) == layout
    with pytest.raises(InputError, match="use 6 stages at most"):
        with_balanced_stages(few, PlannedLayout(pp=8))
