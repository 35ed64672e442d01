"""Training with compiled blocks computes the numbers of eager blocks, with each technique."""

import warnings
from collections import Counter
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from motet.models import torch_private
from motet.models.build import build_module
from motet.models.compilation.compiled_blocks import CompiledBlocks
from motet.parallel.process.process_group import RankGroup
from motet.parallel.techniques import technique_pairs, used_techniques
from motet.parity.shrink_job import make_small_job
from motet.train.build import build_components
from motet.train.compiled_job import compile_blocks_of_job
from motet.train.config_rules import effective_settings
from motet.train.job import Job
from motet.train.launch.preflight import check_compiler
from ranks import Ranks
from refusals import refused
from train.compiled_runs import CompiledRun, as_traced, train_as_settings_say, train_code, train_compiled
from train.runs import Trained, worst_difference
from train.tensor_parallel_runs import job_of_model, train_and_reassemble

ALONE = RankGroup(0, 1, None, torch.device("cpu"))
STEPS = 3
TOLERANCE, TOLERANCE_OF_ROUNDED_MOMENTS = 1e-12, 1e-4
FP32 = "precision.recipe=fp32"
ADAPTERS = "model.adapters={rank=4, targets=['*qkv', '*output', '*up']}"
# Name -> model, ranks, settings, and the graphs of a rank.
CASES: dict[str, tuple[str, int, list[str], int]] = {
    "stage 0": ("decoder", 2, ["layout.zero=0"], 1),
    "stage 1": ("decoder", 2, ["layout.zero=1"], 1),
    "stage 2": ("gpt2-like", 2, ["layout.zero=2", "layout.microbatches=2"], 1),
    "stage 3": ("grouped decoder", 2, ["layout.zero=3"], 1),
    "tp": ("gpt2-like", 2, ["layout.tp=2"], 1),
    "tp with sp": ("gpt2-like", 2, ["layout.tp=2", "layout.sp=true"], 1),
    "tp with sp and a window": (
        "grouped decoder",
        2,
        ["layout.tp=2", "layout.sp=true", "model.sliding_window=16", "data.restart_documents=false"],
        1,
    ),
    "tp of other sizes": ("grouped decoder", 3, ["layout.tp=3"], 1),
    "pp": ("decoder", 2, ["layout.pp=2", "layout.microbatches=4", "model.layers=4"], 1),
    "split backward": (
        "decoder",
        2,
        ["layout.pp=2", "layout.microbatches=4", "layout.schedule=zb-v", "layout.chunks=2", "model.layers=4"],
        1,
    ),
    "recomputation": ("decoder", 1, ["memory.recompute=full"], 1),
    "adapters": ("decoder", 2, [ADAPTERS, "layout.tp=2", "layout.sp=true"], 2),
    "all": (
        "grouped decoder",
        8,
        [
            "layout.tp=2",
            "layout.sp=true",
            "layout.pp=2",
            "layout.zero=3",
            "layout.microbatches=2",
            "memory.recompute=full",
        ],
        1,
    ),
    "encoder": ("bert", 2, ["layout.tp=2"], 1),
    "encoder and decoder": ("t5", 2, ["layout.tp=2", "layout.sp=true"], 2),
    "gathered again": ("decoder", 2, ["layout.zero=2", "communication.compress_gradients=int8"], 1),
    "numerics monitor": ("decoder", 2, ["layout.tp=2", "monitor.numerics_every=2"], 1),
    "replica checks": ("decoder", 2, ["layout.zero=0", "monitor.replica_check_every=2"], 1),
    "secondary shards": ("decoder", 4, ["layout.zero=3", "layout.secondary_group=2"], 1),
    "compressed parameters": ("decoder", 2, ["layout.zero=1", "communication.compress_parameters=int8"], 1),
    "server": ("decoder", 2, ["layout.data=parameter_server", "layout.server.transport=collectives"], 1),
    "states on the host": ("decoder", 2, ["layout.zero=1", "memory.optimizer=host"], 1),
    "overlap at stage 3": (
        "decoder",
        2,
        ["layout.zero=3", "memory.optimizer=host", "communication.overlap=forward"],
        1,
    ),
    "every other block": ("decoder", 1, ["memory.recompute=every-k", "memory.every=2", "model.layers=4"], 1),
    "dualpipe": (
        "decoder",
        2,
        ["layout.pp=2", "layout.schedule=dualpipe-v", "layout.chunks=2", "model.layers=4", "layout.microbatches=4"],
        1,
    ),
    "host": ("decoder", 2, ["layout.zero=3", "memory.parameters=host", "memory.optimizer=host"], 1),
    "shard groups": ("decoder", 4, ["layout.zero=3", "layout.shard_group=2"], 1),
    "independent replicas": ("decoder", 2, ["outer.every=2"], 1),
    "compact moments": ("decoder", 2, [FP32, "precision.moment_dtype=bfloat16"], 1),
    "states on disk": ("decoder", 2, ["layout.zero=1", "memory.optimizer=disk"], 1),
    "delayed updates": ("decoder", 2, ["layout.zero=1", "memory.optimizer=host", "memory.update=delayed"], 1),
    "parameters on disk": ("decoder", 2, ["layout.zero=3", "memory.parameters=disk", "memory.optimizer=disk"], 1),
}
LOSS_SCALING = "loss scaling"  # Float16 rounds: see the test of recipes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


def job_of_case(folder: Path, name: str, *more: str) -> Job:
    model, _, settings, _ = CASES[name]
    disk = [f"memory.folder={folder}"] if any("disk" in setting for setting in settings) else []
    return job_of_model(folder, model, *settings, *disk, *more)


@cache
def eager(ranks: Ranks, folder: Path, name: str) -> Trained:
    trained: Trained = ranks.run(CASES[name][1], train_as_settings_say, job_of_case(folder, name), STEPS)[0]
    return trained


QUICK = ["stage 3", "tp with sp and a window"]


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.proof) for n in CASES])
def test_compiled_blocks_compute_the_same(ranks: Ranks, folder: Path, name: str) -> None:
    job, count = job_of_case(folder, name, "run.compile=blocks"), CASES[name][1]
    runs: list[CompiledRun] = ranks.run(count, train_compiled, job, STEPS, timeout_s=300)
    assert [run.reason for run in runs] == [None] * count
    assert [run.graphs for run in runs] == [CASES[name][3]] * count
    assert runs[0].trained is not None
    tolerance = TOLERANCE_OF_ROUNDED_MOMENTS if name == "compact moments" else TOLERANCE
    assert worst_difference(runs[0].trained, eager(ranks, folder, name)) < tolerance


def test_each_technique_that_goes_with_compiled_blocks_has_a_case(folder: Path) -> None:
    techniques = {
        each for name in CASES for each in used_techniques(effective_settings(dict(job_of_case(folder, name))))
    }
    row = {other for technique, other, cell in technique_pairs() if technique == "compiled blocks" and cell == "+"}
    assert row - {"compiled blocks"} <= techniques | {LOSS_SCALING}


@pytest.mark.proof
@pytest.mark.parametrize("recipe", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("model", ["grouped decoder", "gpt2-like"])
def test_code_is_as_near_to_float64_as_eager_blocks(ranks: Ranks, folder: Path, recipe: str, model: str) -> None:
    """Another order of sums, as splits over ranks make it, changes losses as much as the code of torch's compiler."""
    exact = train_and_reassemble(ALONE, job_of_model(folder, model), STEPS)
    assert exact is not None

    def error(trained: Trained | None) -> float:
        assert trained is not None
        return max(abs(a - b) for a, b in zip(trained.losses, exact.losses, strict=True))

    setting, errors = f"precision.recipe={recipe}", []
    for count, layout in ((1, []), (1, ["layout.microbatches=4"]), (2, ["layout.tp=2"]), (4, ["layout.tp=4"])):
        job = job_of_model(folder, model, setting, *layout)
        errors.append(error(ranks.run(count, train_and_reassemble, job, STEPS, timeout_s=300)[0]))
    job = job_of_model(folder, model, setting, "run.compile=blocks")
    run: CompiledRun = ranks.run(1, train_code, job, STEPS, timeout_s=600)[0]
    assert run.graphs == 1 and run.reason is None
    assert error(run.trained) <= 2 * max(errors)


def test_steps_of_the_numerics_monitor_have_all_rows(folder: Path) -> None:
    """Hooks that stay for one step are no part of a graph: such a step runs eagerly, and others compile."""
    with patch.object(torch_private, "generate_code", as_traced), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        job = job_of_model(folder, "decoder", "precision.recipe=fp32", "monitor.numerics_every=2", "run.compile=blocks")
        parts = build_components(job, ALONE, folder / "numerics")
        step = parts.make_train_step(job)
        measured = [step.step(number, 0.01).numerics for number in range(4)]
    kinds = [None if each is None else Counter(tensor.kind for tensor in each.tensors) for each in measured]
    assert kinds[0] is kinds[2] is None and kinds[1] == kinds[3]
    assert kinds[1] is not None and kinds[1]["activations"] == kinds[1]["activation_gradients"] == 10
    assert parts.engine.compiled is not None and parts.engine.compiled.graphs == 1


def test_float64_and_verify_compile_nothing(folder: Path) -> None:
    blocks = build_of(job_of_model(folder, "decoder", "run.compile=blocks"))
    assert blocks is not None and blocks.reason is not None and blocks.reason.startswith("float64 is for comparisons")
    job = job_of_model(folder, "decoder", "run.compile=blocks", "precision.recipe=bf16")
    assert make_small_job(job, 8, STEPS).run.compile == "auto"  # Verifying trains on CPU ranks


def test_ranks_that_compile_need_a_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-compiler")
    refused(
        "no-compiler is not on the PATH", check_compiler, job_of_model(folder, "decoder", "run.compile=blocks", FP32)
    )
    check_compiler(job_of_model(folder, "decoder", "run.compile=blocks"))  # Float64 compiles nothing
    monkeypatch.setenv("CXX", "")
    refused(
        "the empty CXX is not on the PATH", check_compiler, job_of_model(folder, "decoder", "run.compile=blocks", FP32)
    )


@pytest.mark.parametrize("variable", ["TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"])
def test_variables_of_torch_switch_its_compiler_off(
    folder: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    job = job_of_model(folder, "decoder", "run.compile=blocks", FP32)
    monkeypatch.setenv(variable, "0")
    check_compiler(job)
    monkeypatch.setenv(variable, "1")
    problem = f"^run.compile = 'blocks': the variable {variable} = 1 switches torch.compile off; "
    refused(problem, check_compiler, job)  # Before ranks start
    refused(problem, build_of, job)
    auto = job.model_copy(update={"run": job.run.model_copy(update={"compile": "auto"})})
    compiled = compile_blocks_of_job(torch.nn.Linear(2, 2), auto, torch.device("cuda"))
    assert compiled is not None and compiled.reason == f"the variable {variable} = 1 switches torch.compile off"


def test_dropout_and_choices(folder: Path) -> None:
    fp32, on = FP32, "run.compile=blocks"
    off = "; set run.compile=off$"
    refused(
        f"^run.compile = 'blocks': model.dropout = 0.1: masks of .*{off}",
        build_of,
        job_of_model(folder, "decoder", fp32, on, dropout=0.1),
    )
    refused(
        f"has layers of dropout, such as '.*drop': masks .*{off}",
        build_of,
        job_of_model(folder, "gpt2", fp32, on, dropout=0.1),
    )
    refused(
        "^run.compile = 'blocks': model.dropout = 0.1: masks .*; set model.dropout=0, or set run.compile=off$",
        check_compiler,
        job_of_model(folder, "decoder", fp32, on, dropout=0.1),
    )
    emulated = job_of_model(folder, "decoder", "precision.recipe=bf16", "precision.emulate=true", on)
    refused(f"^run.compile = 'blocks': precision.emulate = true rounds .*{off}", build_of, emulated)
    assert build_of(job_of_model(folder, "decoder", fp32)) is None  # `auto` on a CPU
    blocks = build_of(job_of_model(folder, "decoder", fp32, on))
    assert blocks is not None and blocks.reason is None


def build_of(job: Job) -> CompiledBlocks | None:
    """The blocks that a rank would compile."""
    return compile_blocks_of_job(build_module(job.model), job, ALONE.device)
