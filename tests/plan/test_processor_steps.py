"""Steps on processors: measured rates of a cluster file, Programs of the backend, and ranks that share cores."""

from dataclasses import replace
from pathlib import Path

import pytest

from motet.cluster import local_device
from motet.core.errors import InputError
from motet.core.text_files import to_toml
from motet.models.settings import DecoderSettings, EncoderSettings
from motet.models.spec.layer_specs import AttentionSpec, BlockSpec, LayerSpec, MicroBatchShape, SavedActivation
from motet.plan.frameworks import STACKS
from motet.plan.planned_cluster import PlannedCluster, ProgramCosts, load_planned_cluster
from motet.plan.planned_step import PlannedStep
from motet.plan.search.layout_space import with_balanced_stages
from motet.plan.time.kernel_times import DeviceRates, KernelTimes, ProductSizes, tile_flops
from motet.plan.time.stage_times import GroupTimes
from motet.precision.recipe import RECIPES
from plan.sized_layouts import sized, sized_layout

MODEL = DecoderSettings(vocab_size=1024, context=128, layers=4, hidden=128, heads=4, ffn_hidden=512)
RATES = {
    "products": {"float32": 80e9},
    "attention": 30e9,
    "attention_backward": 30e9,
    "memory_Bps": 20e9,
    "launch_s": 5e-6,
    "cores": 2,
    "busy_factor": 1.25,
    "busy_memory_factor": 1.5,
}
PORT = {"kind": "bus", "alpha_s": 1e-5, "bandwidth_Bps": 1e9, "bus_Bps": 4e9}


def cluster(folder: Path, ranks: int, **rates: object) -> PlannedCluster:
    values = {"device": "CPU", "devices_per_host": 4, "gamma_s_per_byte": 0.0, "inside": PORT}
    file = folder / "box.toml"
    file.write_text(to_toml(values | {"rates": RATES | rates}), encoding="utf-8")
    return load_planned_cluster(str(file), ranks)


def step(**sizes: object) -> PlannedStep:
    rest = {"recipe": RECIPES["fp32"], "matmul": "float32", "stack": STACKS["motet-cpu"]}
    return PlannedStep(MODEL, 128, 16, **sized(**sizes), **rest)


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
    shared = [rates.for_ranks(*pair) for pair in ((1, 1), (2, 2), (4, 4), (4, 1))]
    assert [80e9 / each.product_flops["float32"] for each in shared] == [1.0, 1.25, 2.5, 1.25]
    assert [30e9 / each.attention_backward_flops["flash-2"] for each in shared] == [1.0, 1.25, 2.5, 1.25]
    assert [20e9 / each.memory_Bps for each in shared] == [1.0, 1.5, 3.0, 1.5]
    assert [each.launch_s / 5e-6 for each in shared] == [1.0, 1.0, 2.0, 1.0]
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


@pytest.mark.parametrize(("tokens", "share"), [(256, 1.0), (512, 1.0), (1024, 0.75), (768, 7 / 9), (1536, 2 / 3)])
def test_attention_of_processors_computes_whole_tiles_of_512_keys(tmp_path: Path, tokens: int, share: float) -> None:
    rates = cluster(tmp_path, 1).step_times.rates
    causal = AttentionSpec("attention", heads=4, key_dim=32, value_dim=32, causal=True)
    shape = MicroBatchShape(2, tokens)
    seconds = {
        name: [
            time_of_attention(replace(rates, attention_tile=tile), attention, shape)
            for attention in (causal, replace(causal, causal=False), replace(causal, window=64))
        ]
        for name, tile in (("processor", 512), ("exact", 1))
    }
    own, full, windowed = seconds["processor"]
    assert own / full == pytest.approx(share)
    assert windowed == full  # A kernel that reads a mask
    assert full == pytest.approx(2 * tokens**2 * 4 * 4 * 32 / 30e9)
    exact = seconds["exact"]
    assert exact[0] / exact[1] == pytest.approx(0.5)
    assert exact[2] < exact[0]


def time_of_attention(rates: DeviceRates, attention: AttentionSpec, shape: MicroBatchShape) -> float:
    block = BlockSpec("block", LayerSpec(operations=(attention,)), input=SavedActivation("input", 128))
    still = replace(STACKS["motet-cpu"], kernels_per_block=0, elementwise_passes=0)
    return KernelTimes(rates, still, "float32", "float32").block(block, shape, "none").forward_s


def test_launches_are_not_hidden_by_kernels(tmp_path: Path) -> None:
    """A block launches its kernels in forward, again when it is recomputed, and twice as many in backward."""
    fast, slow = (replace(cluster(tmp_path, 1).step_times.rates, launch_s=each) for each in (0.0, 5e-6))
    attention = AttentionSpec("attention", heads=4, key_dim=32, value_dim=32, causal=True)
    block = BlockSpec("block", LayerSpec(operations=(attention,)), input=SavedActivation("input", 128))
    launches = STACKS["motet-cpu"].kernels_per_block * 5e-6
    for recompute, again in (("none", 0), ("full", 1)):
        without, times = (
            KernelTimes(rates, STACKS["motet-cpu"], "float32", "float32").block(
                block, MicroBatchShape(2, 64), recompute
            )
            for rates in (fast, slow)
        )
        assert times.forward_s - without.forward_s == pytest.approx(launches)
        assert times.backward_s - without.backward_s == pytest.approx(2 * launches)
        assert times.recomputed_s - without.recomputed_s == pytest.approx(again * launches)


def test_narrow_heads_compute_fewer_flops_in_a_second(tmp_path: Path) -> None:
    rates = cluster(tmp_path, 1, attention_overhead=16.0).step_times.rates
    shape, narrow = MicroBatchShape(2, 256), AttentionSpec("attention", heads=8, key_dim=16, value_dim=16)
    wide = replace(narrow, heads=1, key_dim=128, value_dim=128)  # As many FLOPs
    ratio = time_of_attention(rates, narrow, shape) / time_of_attention(rates, wide, shape)
    assert ratio == pytest.approx((1 + 16 / 16) / (1 + 16 / 128))


def test_measured_rates_of_kernels_are_those_of_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    flops = 4.0 * 16 * 256 * 256
    attention = {features: flops * (features + 16) / 50e9 for features in (32, 128)}
    seconds = {"products": 0.02, "narrow products": 0.003, "stream": 1e-4, "launch": 1e-3}
    for features, time_s in attention.items():
        seconds |= {f"attention of {features} features": time_s}
        seconds |= {f"attention and backward of {features} features": 3.5 * time_s}
    monkeypatch.setattr(local_device, "rate_kernels", lambda dtype: dict(zip(seconds, seconds, strict=True)))
    monkeypatch.setattr(local_device, "_seconds", seconds.__getitem__)
    rates = local_device.measure_rates(repeats=3)
    assert rates["attention_overhead"] == pytest.approx(16.0)
    assert rates["attention"]["value"] == pytest.approx(50e9 * 128 / 144)
    assert rates["attention_backward"]["value"] == pytest.approx(50e9 * 128 / 144)


def test_absurd_rates_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="busy_factor"):
        cluster(tmp_path, 1, busy_factor=0.5)
    with pytest.raises(InputError, match="memory_Bps"):
        cluster(tmp_path, 1, memory_Bps=0)


def test_stages_of_motet_are_balanced_by_time() -> None:
    encoder = EncoderSettings(vocab_size=4096, context=128, layers=6, hidden=192, heads=6, ffn_hidden=768)
    planned = replace(step(), model=encoder)
    layout = sized_layout(pp=2, microbatches=4)
    assert with_balanced_stages(planned, layout).stages == (range(4), range(4, 6))  # The head predicts all tokens
    few = replace(planned, masked_fraction=0.15)
    assert with_balanced_stages(few, layout).stages == (range(3), range(3, 6))
    assert with_balanced_stages(replace(few, stack=STACKS["megatron"]), layout) == layout
    with pytest.raises(InputError, match="use 6 stages at most"):
        with_balanced_stages(few, sized_layout(pp=8))


def test_a_processor_with_another_datasheet_stays_a_processor(tmp_path: Path) -> None:
    values = {"device": "CPU", "devices_per_host": 4, "inside": PORT}
    file = tmp_path / "box.toml"

    def planned(**sections: object) -> PlannedCluster:
        file.write_text(to_toml(values | sections), encoding="utf-8")
        return load_planned_cluster(str(file), 4)

    sheet = {"memory_bytes": 64e9, "bandwidth_Bps": 10e9, "flops": {"float32": 1e11}}
    for described in (planned(datasheet={"memory_bytes": 64e9}), planned(device="X", datasheet=sheet, rates=RATES)):
        assert described.is_processor and isinstance(described.step_times.costs, ProgramCosts)
    assert not planned(device="X", datasheet=sheet).is_processor
    no_cores = {name: value for name, value in RATES.items() if name != "cores"}
    with pytest.raises(InputError, match=r"\[rates\] with device = 'CPU' has no cores; add the ranks of a host"):
        planned(rates=no_cores)


def test_groups_are_not_on_more_hosts_than_there_are() -> None:
    """Three ranks of tensor parallelism are on two of the hosts, whose sizes they do not divide."""
    hosts = load_planned_cluster("cpu-hosts", 24)
    model = MODEL.model_copy(update={"heads": 6, "hidden": 96})
    for size in ({"dp": 8, "tp": 3}, {"dp": 2, "tp": 3, "cp": 4}, {"dp": 2, "pp": 4, "tp": 3, "microbatches": 4}):
        planned = replace(step(**size), model=model, sequence=96)
        assert hosts.step_times.predict(planned).seconds > 0
    groups = GroupTimes(sized_layout(dp=8, tp=3), 8, hosts.step_times.costs)
    assert [groups.placement(name) for name in ("tp", "dp")] == [(3, 3), (8, 3)]
