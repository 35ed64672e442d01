"""The rates of motet's own kernels on GPUs: eager and compiled blocks, and whether a file has measured them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from motet.cli.job_arguments import load_job_or_config
from motet.cli.main import app
from motet.collectives.cost.cluster_fabric import VendorCosts
from motet.core.errors import InputError
from motet.core.text_files import to_toml
from motet.models.spec.layer_specs import BlockSpec, LayerSpec, MicroBatchShape, SavedActivation
from motet.parallel.layout import layout_of_sizes
from motet.plan.frameworks import STACKS
from motet.plan.planned_cluster import PlannedCluster, load_planned_cluster, rates_of
from motet.plan.search.layout_space import with_layout
from motet.plan.time.kernel_times import DeviceRates, KernelTimes
from motet.train.forecast.planned_job import own_stack, planned_step

RATES = {
    "products": {"bfloat16": 700e12},
    "attention": 500e12,
    "attention_backward": 400e12,
    "memory_Bps": 3e12,
    "launch_s": 4e-6,
}
PORT = {"kind": "switch", "alpha_s": 1e-6, "bandwidth_Bps": 450e9}
BLOCKS_SENTENCE = "The bytes and the number of kernels of compiled blocks are assumed, from steps of torchtitan."
NO_RATE = "has measured [rates]. It has none for products in float32."  # Those of `tiny`
SENTENCE = "The rates of motet's own kernels on GPUs are assumed, from steps of torchtitan and Megatron, until"


def cluster_file(folder: Path, **sections: object) -> str:
    values = {"device": "H100", "devices_per_host": 8, "gamma_s_per_byte": 0.0, "inside": PORT, **sections}
    (file := folder / "box.toml").write_text(to_toml(values), encoding="utf-8")
    return str(file)


def h100(folder: Path, **rates: object) -> PlannedCluster:
    return load_planned_cluster(cluster_file(folder, rates={**RATES, **rates}), 8)


def block_times(rates: DeviceRates, stack: str) -> tuple[float, float]:
    """Seconds of the streaming kernels of a block without products, and of its launches."""
    saved = (SavedActivation("input", 1000),)
    block = BlockSpec("block", LayerSpec(saved=saved), input=saved[0])
    times = KernelTimes(rates, STACKS[stack], "bfloat16", "bfloat16")
    return times.block(block, MicroBatchShape(2, 64), "none").forward_s, times.launch_s(block)


def test_compiled_blocks_move_fewer_bytes_in_fewer_kernels(tmp_path: Path) -> None:
    rates = h100(tmp_path).step_times.rates
    (eager_s, eager_launch_s), (compiled_s, compiled_launch_s) = (
        block_times(rates, stack) for stack in ("motet", "motet-compiled")
    )
    assert eager_s == pytest.approx(2.5 * 2 * 2 * 64 * 1000 / 3e12)  # Passes, bytes of bfloat16, tokens, features
    assert compiled_s == pytest.approx(0.55 * eager_s)
    assert (eager_launch_s, compiled_launch_s) == pytest.approx((45 * 4e-6, 15 * 4e-6))


def test_a_gpu_takes_the_measured_rates_of_a_file_and_the_rest_of_its_datasheet(tmp_path: Path) -> None:
    cluster = h100(tmp_path)
    rates, assumed = cluster.step_times.rates, rates_of(cluster.device)
    assert rates.product_flops == {**assumed.product_flops, "bfloat16": 700e12}
    assert {*rates.attention_flops.values()} == {500e12} and {*rates.attention_backward_flops.values()} == {400e12}
    assert (rates.memory_Bps, rates.launch_s) == (3e12, 4e-6)
    same = ("units", "attention_ramp", "head_overhead", "tile_overhead", "exposed_memory", "cores")
    assert all(getattr(rates, name) == getattr(assumed, name) for name in same) and rates.units > 0
    assert not cluster.is_processor and isinstance(cluster.step_times.costs, VendorCosts)


def test_a_gpu_with_measured_rates_keeps_its_limits_of_links(tmp_path: Path) -> None:
    slow = {**PORT, "bandwidth_Bps": 1}
    with pytest.raises(InputError, match=r"\[inside\] gives each device 1 byte/s, out of the range"):
        load_planned_cluster(cluster_file(tmp_path, inside=slow, rates=RATES), 8)


def test_rates_that_only_processors_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"\[rates\] with device = 'H100' has product_edge and cores, which only the"):
        h100(tmp_path, cores=2, product_edge=16.0)


def printed(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


@pytest.mark.parametrize(
    ("words", "is_said", "are_blocks_assumed"),
    [
        (["plan", "tiny", "--gpus", "8", "--layout", "zero=1"], True, True),
        (["plan", "tiny", "--gpus", "8", "--layout", "zero=1", "--stack", "motet-compiled"], True, True),
        (["plan", "tiny", "run.compile=off", "--gpus", "8", "--layout", "zero=1"], True, False),
        (["plan", "tiny", "--gpus", "8", "--layout", "zero=1", "--stack", "megatron"], False, False),
        (["plan", "tiny", "--gpus", "8", "--compare", "zero=1", "zero=2"], True, True),
        (["show", "step", "tiny", "--ranks", "8", "--layout", "zero=1"], True, True),
    ],
)
def test_plans_say_once_what_is_assumed_of_motet_on_gpus(
    tmp_path: Path, words: list[str], is_said: bool, are_blocks_assumed: bool
) -> None:
    assert printed(*words, "--cluster", "h100").count(SENTENCE) == is_said
    assert printed(*words, "--cluster", cluster_file(tmp_path, rates=RATES)).count(NO_RATE) == is_said
    both = RATES | {"products": {"bfloat16": 700e12, "float32": 60e12}}
    measured = printed(*words, "--cluster", cluster_file(tmp_path, rates=both))
    assert NO_RATE not in measured
    assert (measured.count(SENTENCE), measured.count(BLOCKS_SENTENCE)) == (0, are_blocks_assumed)
    if "--stack" not in words:
        assert printed(*words, "--cluster", "cpu").count(SENTENCE) == 0


def test_a_dtype_that_motet_does_not_know_has_no_rate(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the key rates.products.bf16 must be 'float64', 'float32', "):
        h100(tmp_path, products={"bf16": 700e12})


@pytest.mark.parametrize(
    ("words", "framework"),
    [
        (("--layout", "zero=1"), "'motet-compiled'"),
        (("--layout", "zero=1 cp=2"), "'motet'"),
        (("--layout", "zero=1", "--stack", "motet"), "'motet'"),
        (("--compare", "zero=1", "zero=1 cp=2", "zero=2"), "'motet-compiled' (layouts 1, 3) or 'motet' (layouts 2)"),
    ],
)
def test_the_framework_of_a_plan_is_that_of_its_blocks(words: tuple[str, ...], framework: str) -> None:
    plan = ("plan", "tiny", "--gpus", "8", "--cluster", "h100")
    assert f"the framework {framework}, products in" in printed(*plan, *words)
    frameworks = [each["framework"] for each in json.loads(printed(*plan, *words, "--json"))["plans"]]
    assert {*frameworks} == {name for name in ("motet", "motet-compiled") if f"'{name}'" in framework}


def test_both_stacks_differ_only_in_their_blocks() -> None:
    """Loss, memory and communication are those of the same code."""
    eager, compiled = STACKS["motet"], STACKS["motet-compiled"]
    blocks = {name: getattr(eager, name) for name in ("name", "elementwise_passes", "kernels_per_block", "as_written")}
    assert replace(compiled, **blocks) == eager


FORWARD = "communication.overlap=forward"


@pytest.mark.parametrize(
    ("overrides", "layout", "is_compiled"),
    [
        ("", "zero=1", True),
        ("", "zero=1 cp=2", False),
        ("", "zero=1 recompute=selective", False),
        ("", "zero=1 recompute=full", True),
        ("layout.cp=2", "zero=1", True),
        ("layout.cp=2", "zero=1 cp=2", False),
        ("memory.recompute=selective", "zero=1", True),
        (f"layout.zero=1 {FORWARD}", "zero=0", False),
        (f"layout.zero=1 {FORWARD}", "zero=1", False),
        (f"layout.zero=1 {FORWARD}", "zero=3", True),
        ("run.reproducible=layout", "zero=1", False),
        ("model.dropout=0.1", "zero=1", False),
        ("precision.recipe=fp64", "zero=1", False),
        ("memory.device_limit=64GiB", "zero=1", False),
        ("model.experts.count=4 model.experts.per_token=2 model.experts.hidden=128", "zero=1", False),
        ("run.compile=off", "zero=1", False),
    ],
)
def test_each_step_takes_compiled_blocks_where_its_layout_and_the_job_allow_them(
    overrides: str, layout: str, is_compiled: bool
) -> None:
    job, times = load_job_or_config("tiny", overrides.split()), load_planned_cluster("h100", 8).step_times
    step = with_layout(planned_step(job, layout_of_sizes(), stack=own_stack(job)), layout, 8)
    compiled, written = (
        times.predict(replace(step, stack=replace(STACKS[name], as_written=""))).seconds
        for name in ("motet-compiled", "motet")
    )
    assert compiled < written
    assert times.predict(step).seconds == (compiled if is_compiled else written)
