"""The memory check: needs against sums by hand, limits of every kind, and ranks that refuse together."""

import re
import resource
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import pytest
import torch
from torch import nn

from motet.cluster import host_limits
from motet.cluster.host_limits import TORCH_PROCESS_BYTES, MemoryLimit, read_memory_limits
from motet.core.errors import InputError, PeerFailedError
from motet.core.units import format_bytes
from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.parallel.layout import parse_layout, resolve_layout
from motet.parallel.model_sharding import ModelInventory, TensorInfo
from motet.parallel.process.process_group import RankGroup
from motet.parallel.step_plan.memory import ModelStateMemory, model_state_memory
from motet.parallel.step_plan.plan import StepPlan, make_step_plan
from motet.precision.recipe import RECIPES
from motet.train.build import build_components
from motet.train.job import Job, load_job
from motet.train.job_step_plan import predicted_stages
from motet.train.launch import preflight
from motet.train.memory_check.rank_memory import check_rank_memory
from motet.train.memory_check.step_prediction import layout_memory_problem, memory_problem
from motet.train.optimizer.module_plan import model_inventory
from motet.train.optimizer.optimizer_settings import OptimizerSettings
from motet.train.proof.proposed_sharding import sharding_of_job
from ranks import Ranks
from train.runs import small_job

Result = TypeVar("Result")
WIDTH, BLOCKS = 256, 32
BLOCK = 2 * WIDTH * WIDTH
NUMEL = BLOCKS * BLOCK + WIDTH * WIDTH  # All multiples of 512 x 8, so that nothing is padded
WEIGHTS = 4 * NUMEL  # Bytes of the whole weights in float32


def inventory(frozen_blocks: int = 0) -> ModelInventory:
    tensors = [TensorInfo("embed", (WIDTH, WIDTH), "float32", "trained")]
    for block in range(BLOCKS):
        kind = "frozen" if block < frozen_blocks else "trained"
        for name in ("up", "down"):
            tensors.append(TensorInfo(f"blocks.{block}.{name}", (WIDTH, WIDTH), "float32", kind, block=block))
        tensors.append(TensorInfo(f"blocks.{block}.count", (3,), "int64", "statistics", block=block))
    return ModelInventory(tuple(tensors))


def plan_of(words: str, recipe: str, frozen_blocks: int = 0) -> StepPlan:
    layout = resolve_layout(parse_layout(words), parse_layout(words).dims.ranks, 64)
    made = inventory(frozen_blocks)
    return make_step_plan(made, layout, RECIPES[recipe], settings=CommunicationSettings(), batch_sequences=64)


ADAMW, SGD, MOMENTUM = 2, 0, 1
FROZEN = 2 * BLOCK  # Elements of two frozen blocks
TRAINED = NUMEL - FROZEN
BUFFERS = BLOCKS * 3 * 8
# (layout, recipe, moments, frozen blocks) -> parameters, masters, gradients, moments of a rank, by hand
BY_HAND: list[tuple[str, str, int, int, tuple[float, float, float, float]]] = [
    ("dp=1", "fp32", ADAMW, 0, (WEIGHTS, 0, WEIGHTS, 2 * WEIGHTS)),
    ("dp=8", "fp32", ADAMW, 0, (WEIGHTS, 0, WEIGHTS, 2 * WEIGHTS)),
    ("dp=8 zero=1", "fp32", ADAMW, 0, (WEIGHTS, 0, WEIGHTS, 2 * WEIGHTS / 8)),
    ("dp=8 zero=2", "fp32", ADAMW, 0, (WEIGHTS, 0, WEIGHTS / 8, 2 * WEIGHTS / 8)),
    ("dp=8 zero=3", "fp32", ADAMW, 0, (0, WEIGHTS / 8, WEIGHTS / 8, 2 * WEIGHTS / 8)),
    ("dp=8 zero=3 shard_group=4", "fp32", ADAMW, 0, (0, WEIGHTS / 4, WEIGHTS / 4, 2 * WEIGHTS / 4)),
    ("dp=8 zero=2", "fp32", SGD, 0, (WEIGHTS, 0, WEIGHTS / 8, 0)),
    ("dp=8 zero=1", "fp32", MOMENTUM, 0, (WEIGHTS, 0, WEIGHTS, WEIGHTS / 8)),
    ("dp=1", "bf16", ADAMW, 0, (WEIGHTS / 2, WEIGHTS, WEIGHTS, 2 * WEIGHTS)),
    ("dp=8 zero=1", "bf16", ADAMW, 0, (WEIGHTS / 2, WEIGHTS / 8, WEIGHTS, 2 * WEIGHTS / 8)),
    ("dp=8 zero=2", "bf16", SGD, 0, (WEIGHTS / 2, WEIGHTS / 8, WEIGHTS / 8, 0)),
    ("dp=8 zero=3", "bf16", ADAMW, 0, (0, WEIGHTS / 8, WEIGHTS / 8, 2 * WEIGHTS / 8)),
    ("dp=8", "fp64", ADAMW, 0, (2 * WEIGHTS, 0, 2 * WEIGHTS, 4 * WEIGHTS)),
    ("dp=8", "fp32", ADAMW, 2, (WEIGHTS, 0, 4 * TRAINED, 8 * TRAINED)),
    ("dp=8 zero=2", "bf16", ADAMW, 2, (WEIGHTS / 2, TRAINED / 2, TRAINED / 2, TRAINED)),
    ("dp=8 zero=3", "bf16", ADAMW, 2, (2 * FROZEN / 8, TRAINED / 2, TRAINED / 2, TRAINED)),
    ("dp=8 zero=3", "fp32", ADAMW, BLOCKS, (4 * BLOCKS * BLOCK / 8, *(WIDTH * WIDTH * n / 8 for n in (4, 4, 8)))),
]


@pytest.mark.parametrize(("words", "recipe", "moments", "frozen", "wanted"), BY_HAND)
def test_the_state_of_a_rank_by_hand(
    words: str, recipe: str, moments: int, frozen: int, wanted: tuple[float, float, float, float]
) -> None:
    plan = plan_of(words, recipe, frozen)
    parameters, *others = wanted
    for rank in {0, plan.dims.ranks - 1}:
        found = model_state_memory(plan, RECIPES[recipe], moments_per_parameter=moments, rank=rank)
        assert found == ModelStateMemory(int(parameters) + BUFFERS, *map(int, others))


def problem(words: str, limit: MemoryLimit, local: int = 8, recipe: str = "fp32") -> str:
    plan, layout = plan_of(words, recipe), resolve_layout(parse_layout(words), parse_layout(words).dims.ranks, 64)
    optimizer = OptimizerSettings()
    return layout_memory_problem(
        plan, layout, RECIPES[recipe], optimizer=optimizer, local_ranks=range(local), limits=[limit]
    )


IDLE = 300 << 20
OWN = MemoryLimit("RLIMIT_DATA (ulimit -d) allows", IDLE + WEIGHTS * 3 // 4, is_shared=False, process_bytes=IDLE)


def test_three_quarters_of_the_weights_are_enough_at_stage_3_alone() -> None:
    assert problem("dp=8 zero=3", OWN) == ""
    largest, stage_3 = 4 * WIDTH * WIDTH, OWN.total_bytes - IDLE
    needed = format_bytes(IDLE + 4 * WEIGHTS + largest + BUFFERS)
    said = problem("dp=8", OWN)
    assert said.startswith(
        f"layout 'dp=8 zero=0' takes {needed} of memory at least: {format_bytes(WEIGHTS + BUFFERS)} of parameters, "
        f"{format_bytes(WEIGHTS)} of gradients, {format_bytes(2 * WEIGHTS)} of moments, {format_bytes(largest)} of "
        f"gathered and unreduced tensors, 300 MiB of the process itself; RLIMIT_DATA (ulimit -d) allows "
        f"{format_bytes(OWN.total_bytes)}; use layout.zero=3, where a rank takes "
    )
    assert said.endswith(" besides the process or take a smaller model")
    (proposed,) = re.findall(r"a rank takes ([\d.]+) MiB", said)
    assert WEIGHTS / 2 < float(proposed) * 2**20 < stage_3


@pytest.mark.parametrize(("words", "least"), [("dp=8 zero=1", 2.25), ("dp=8 zero=2", 2.375), ("dp=8 zero=3", 0.5)])
def test_a_limit_below_the_state_is_refused_and_one_above_its_peak_is_not(words: str, least: float) -> None:
    """At stage 2 the peak has a bucket more, which holds the whole model."""
    assert problem(words, OWN._replace(total_bytes=IDLE + int(least * WEIGHTS))) != ""
    assert problem(words, OWN._replace(total_bytes=IDLE + int((least + 0.2) * WEIGHTS))) == ""


def test_more_ranks_are_proposed_where_stage_3_does_not_fit_on_these() -> None:
    said = problem("dp=2", OWN, local=2)
    assert re.search(r"use layout.zero=3 on 8 ranks, where a rank takes [\d.]+ MiB besides the process or take", said)
    assert "use layout.zero=3" not in problem("dp=2", OWN._replace(total_bytes=IDLE + (1 << 20)), local=2)


def test_local_ranks_share_the_machine_and_control_groups() -> None:
    each = 4 * WEIGHTS + 4 * WIDTH * WIDTH + BUFFERS + TORCH_PROCESS_BYTES
    shared = MemoryLimit("memory.max of /pod allows", 8 * each - 1, is_shared=True)
    said = problem("dp=8", shared)
    assert f"takes {format_bytes(8 * each)} of memory at least in 8 processes: in each " in said
    assert "; memory.max of /pod allows " in said and "or start 7 on each machine at most" not in said
    assert ", start 7 on each machine at most or take a smaller model" in said
    assert problem("dp=8", shared._replace(total_bytes=8 * each)) == ""
    assert problem("dp=8", shared, local=7) == ""


def test_the_limit_that_is_exceeded_most_is_named_and_the_largest_process() -> None:
    limits = [MemoryLimit(name, total, False, 0) for name, total in (("a is", 90), ("b is", 10), ("c is", 50))]
    said = memory_problem("this", [{"state": 30}, {"state": 70, "errors": 0}], limits)
    assert (
        said == "this takes 70 B of memory at least: 70 B of state, 0 B of the process itself; b is 10 B; take a "
        "smaller model"
    )
    shared = memory_problem("this", [{"state": 30}, {"state": 70}], [MemoryLimit("m has", 99, True, 0)])
    assert shared.startswith("this takes 100 B of memory at least in 2 processes: in the largest 70 B of state, ")
    assert memory_problem("this", [{"state": 30}, {"state": 70}], [limits[2]], index=0) == ""


# --- in the supervisor, without torch ----------------------------------------------------------------
SIZES = ["model.hidden=512", "model.layers=24", "model.heads=8", "model.kv_heads=8", "model.ffn_hidden=2048"]
JOB_WEIGHTS = 4 * (4096 * 512 + 24 * (4 * 512**2 + 3 * 512 * 2048 + 2 * 512) + 512)  # Embedding, blocks, last norm


def limited(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(host_limits, "_GPU_DEVICE_FILES", ())
    limit = MemoryLimit("RLIMIT_DATA (ulimit -d) allows", size, is_shared=False)
    monkeypatch.setattr(preflight, "read_memory_limits", lambda: [limit])


def refusal(*overrides: str, ranks: int = 8, processes: range | None = None) -> str:
    job = load_job("tiny", [*SIZES, "data.batch_sequences=64", *overrides])
    try:
        preflight.check_memory(job, processes or range(ranks), ranks)
    except InputError as error:
        return str(error)
    return ""


def test_the_supervisor_checks_models_that_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, IDLE + JOB_WEIGHTS * 3 // 4)
    assert refusal("layout.zero=3") == ""
    assert re.match(r"layout 'dp=8 zero=0' takes .* RLIMIT_DATA .*; use layout.zero=3, where a rank takes", refusal())
    assert refusal("model={factory='nowhere:Model'}") == ""
    limited(monkeypatch, JOB_WEIGHTS * 2)
    assert refusal() != ""
    assert refusal("model.frozen=['*']").startswith("nothing is left to train")
    assert refusal("model.adapters={rank=1}") == ""  # Frozen parameters have neither gradients nor moments


def test_a_control_group_limits_the_ranks_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A fake folder of control groups, in which eight ranks of stage 3 fit, and eight of stage 0 do not."""
    monkeypatch.setattr(host_limits, "_GPU_DEVICE_FILES", ())
    (tmp_path / "own").write_text("0::/pod/box\n")
    (tmp_path / "pod/box").mkdir(parents=True)
    (tmp_path / "pod/memory.max").write_text(f"{8 * (TORCH_PROCESS_BYTES + JOB_WEIGHTS)}\n")
    limits = partial(read_memory_limits, cgroup_root=tmp_path, own_cgroup_file=tmp_path / "own")
    monkeypatch.setattr(preflight, "read_memory_limits", limits)
    assert refusal("layout.zero=3") == ""
    said = refusal()
    assert f"at least in 8 processes: in each {format_bytes(JOB_WEIGHTS)} of parameters, " in said
    allowed = format_bytes(8 * (TORCH_PROCESS_BYTES + JOB_WEIGHTS))
    assert f"; memory.max of {tmp_path}/pod allows {allowed}; use layout.zero=3, where a rank takes " in said
    assert said.endswith(" besides the process, start 2 on each machine at most or take a smaller model")


@pytest.mark.parametrize("words", [["layout.pp=2"], ["layout.pp=2", "layout.chunks=2", "layout.schedule=zb-v"]])
def test_ranks_of_a_pipeline_are_charged_for_their_stages(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The stages that the check predicts are those that ranks prove; without ties they hold the same tensors."""
    sizes = ["model.layers=4", "model.tied=false"]
    job = load_job("tiny", [*SIZES, "data.batch_sequences=64", *sizes, *words])
    layout = preflight.check_job(job, 2)
    tensors, proven = sharding_of_job(job, layout)
    predicted = predicted_stages(job, layout)
    assert (predicted.stages, predicted.stage_ranks) == (proven.stages, proven.stage_ranks)
    held = [0, 0]
    for tensor in tensors.tensors:
        for rank in {proven.stage_ranks[stage] for stage in proven.stages_of(tensor)}:
            held[rank] += 4 * prod(tensor.shape) * (tensor.kind == "trained")
    limited(monkeypatch, TORCH_PROCESS_BYTES + 5 * max(held))  # Parameters, gradients, two moments, and a rest
    assert refusal(*sizes, *words, ranks=2) == "" != refusal(*sizes, ranks=2)
    limited(monkeypatch, TORCH_PROCESS_BYTES + 4 * max(held) - 2)
    assert refusal(*sizes, *words, ranks=2).startswith("layout 'dp=1 zero=0 ")


def test_processes_of_a_parameter_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Process 0 coordinates, 1 and 2 serve, others work: by hand, W each for parameters, gradients and each moment."""
    server = ["layout.data=parameter_server", "layout.server.count=2"]
    weights = JOB_WEIGHTS
    for process, needed in {0: 3 * weights, 1: 1.5 * weights, 2: 1.5 * weights, 3: 2 * weights}.items():
        limited(monkeypatch, int(needed * 1.001) + TORCH_PROCESS_BYTES)
        assert refusal(*server, processes=range(process, process + 1)) == "", process
        limited(monkeypatch, int(needed) + TORCH_PROCESS_BYTES - 1)
        said = refusal(*server, processes=range(process, process + 1))
        assert said.startswith("layout.data = 'parameter_server' takes "), process
    limited(monkeypatch, int(3.499 * weights) + TORCH_PROCESS_BYTES)
    colocated = [*server, "layout.server.placement=colocated"]
    assert refusal(*colocated, processes=range(1, 2)) and not refusal(*colocated, processes=range(3, 4))


def test_under_ulimit_the_command_refuses_stage_0(tmp_path: Path) -> None:
    limit = (IDLE + JOB_WEIGHTS * 3 // 4) >> 10
    command = ["train", "tiny", *SIZES, "data.batch_sequences=64", "run.device=cpu", "--ranks", "8"]
    words = " ".join(f"'{word}'" for word in [sys.executable, "-m", "motet", *command])
    done = subprocess.run(
        ["bash", "-c", f"ulimit -d {limit}; exec {words}"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert re.search(
        r"motet: layout 'dp=8 zero=0' takes .*RLIMIT_DATA \(ulimit -d\)\s+allows", " ".join(done.stderr.split())
    )
    assert list(tmp_path.iterdir()) == []


def under(limit: int, call: Callable[[], Result]) -> Result:
    """The result of a call under an RLIMIT_DATA of this process."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
    try:
        return call()
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def used_bytes() -> int:
    """Bytes that this process uses of its RLIMIT_DATA."""
    limits = under(1 << 50, lambda: [*read_memory_limits(0)])
    return next(each.process_bytes for each in limits if "RLIMIT_DATA" in each.name)


# --- in ranks ----------------------------------------------------------------------------------------
class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)) for _ in range(BLOCKS)
        )


def refused_in_ranks(group: RankGroup, words: str, limit: float, on: int | None) -> tuple[str, str]:
    """The error of a rank that may take `limit` times the weights beyond what it uses, on one rank or on all."""
    with torch.device("meta"):
        module = Net()
    optimizer, recipe = OptimizerSettings(), RECIPES["fp32"]
    layout = resolve_layout(parse_layout(words), group.world, 64)
    plan = make_step_plan(
        model_inventory(module, optimizer), layout, recipe, settings=CommunicationSettings(), batch_sequences=64
    )

    def check() -> tuple[str, str]:
        try:
            check_rank_memory(module, plan, layout, recipe=recipe, optimizer=optimizer, group=group)
        except (InputError, PeerFailedError) as error:
            return type(error).__name__, str(error)
        return "", ""

    return under(used_bytes() + int(limit * WEIGHTS) if on in (None, group.rank) else 1 << 50, check)


@pytest.mark.parametrize("on", [None, 2])
def test_ranks_refuse_together(on: int | None, ranks: Ranks) -> None:
    first = on or 0
    found = ranks.run(4, refused_in_ranks, "zero=0", 0.95, on)
    assert [name for name, _ in found] == ["InputError" if r == first else "PeerFailedError" for r in range(4)]
    assert re.match(r"layout 'dp=4 zero=0' takes .*; RLIMIT_DATA \(ulimit -d\) allows .*zero=3,? ", found[first][1])
    assert {text for r, (_, text) in enumerate(found) if r != first} == {f"rank {first} refuses the run; see its error"}
    assert ranks.run(4, refused_in_ranks, "zero=3", 1.6, on) == [("", "")] * 4


def test_what_a_module_holds_already_is_not_counted_twice() -> None:
    """A module on the CPU is what its parameters will be: at least its bytes are free again or used."""
    module, group = Net(), RankGroup(0, 1, None, torch.device("cpu"))
    optimizer = OptimizerSettings(name="sgd")
    layout = resolve_layout(parse_layout("dp=1"), 1, 64)
    plan = make_step_plan(
        model_inventory(module, optimizer),
        layout,
        RECIPES["fp32"],
        settings=CommunicationSettings(),
        batch_sequences=64,
    )
    held = sum(prod(p.shape) * 4 for p in module.parameters())
    assert held == WEIGHTS
    used, needed = used_bytes(), 2 * WEIGHTS + 4 * WIDTH * WIDTH

    def is_refused() -> bool:
        try:
            check_rank_memory(module, plan, layout, recipe=RECIPES["fp32"], optimizer=optimizer, group=group)
        except InputError:
            return True
        return False

    assert not under(used + needed - held + (8 << 20), is_refused)
    assert under(used + needed - held - (8 << 20), is_refused)


def memory_at_the_check(group: RankGroup, job: Job) -> int:
    """Elements of the module that have memory when its layout is checked."""
    seen: list[int] = []

    def check(module: nn.Module, *_: object, **__: object) -> None:
        seen.append(sum(0 if p.is_meta else p.numel() for p in module.parameters()))

    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        patch.setattr("motet.train.optimizer.module_plan.check_rank_memory", check)
        build_components(job, group, Path(folder))
    (numel,) = seen
    return numel


TABLES = ["model={factory='train.trainable_user_models:WithTables'}", "precision.recipe=fp32"]


@pytest.mark.parametrize("model", ["decoder", "bert", "llama", "user"])
def test_nothing_is_allocated_before_the_check(model: str, ranks: Ranks, tmp_path: Path) -> None:
    job = small_job(tmp_path, *TABLES) if model == "user" else small_job(tmp_path, model=model)
    first, *others = ranks.run(2, memory_at_the_check, job)
    assert others == [0] and (first > 0) == (model in ("llama", "user"))  # Values of a module that only it can make
