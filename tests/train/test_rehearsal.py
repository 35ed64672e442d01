"""The rehearsal of a rank: the numbers of a real run, the refusals of a start, and nothing written."""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from typer.testing import CliRunner

from motet.cli.main import app
from motet.core import trace
from motet.core.errors import InputError
from motet.models.arch import layers
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.process.process_group import RankGroup
from motet.train.job import Job, load_job
from motet.train.memory_check.step_memory import measure_on_group
from motet.train.memory_check.step_prediction import StepMemory
from motet.train.rehearsal import rehearsal
from motet.train.rehearsal.rank_kinds import ranks_of_each_kind
from motet.train.rehearsal.rehearsal import (
    PhaseRecorder,
    RankRehearsal,
    compare_with_plan,
    prepare_rehearsal,
    rehearse,
    rehearse_rank,
)
from ranks import Ranks

DATA = [
    *("data.source=tests/data/small.txt", "data.tokenizer=bytes", "data.sequence_length=32", "data.batch_sequences=8"),
    *("data.restart_documents=false", "data.workers=1", "model.vocab_size=300", "model.context=32", "run.device=cpu"),
]
SMALL = ["model.layers=2", "model.hidden=64", "model.heads=4", "model.ffn_hidden=96"]
RUNS = {
    "zero 0": ["layout.zero=0"],
    "zero 1, fp16": ["layout.zero=1", "precision.recipe=fp16"],
    "zero 2, bf16, micro-batches": ["layout.zero=2", "precision.recipe=bf16", "layout.microbatches=2"],
    "zero 3, bf16, recomputed, dropout": [
        *("layout.zero=3", "precision.recipe=bf16", "memory.recompute=full", "model.dropout=0.1"),
    ],
    "two stages": ["layout.pp=2", "layout.microbatches=4"],
    "split layers and sequence": ["layout.tp=2", "layout.sp=true"],
}


def job_of(*overrides: str, ranks: int = 2, name: str = "tiny") -> Job:
    return load_job(name, [*DATA, *SMALL, f"run.ranks={ranks}", *overrides])


def rehearsed(job: Job, rank: int) -> RankRehearsal:
    return rehearse(job, job.run.ranks, rank, all_kinds=False, log=lambda text: None).rehearsed[0]


def peaks(memory: StepMemory) -> dict[str, int | None]:
    """Measured peaks, without those of the transport, and of the small tensors that only a CPU makes."""
    return {each.name: each.measured for each in memory.comparisons() if each.predicted is not None}


def measured_on_ranks(group: RankGroup, job: Job, folder: Path) -> dict[str, int | None]:
    return peaks(measure_on_group(job, group, folder))


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(each, marks=pytest.mark.proof if name.startswith("zero 0") else (), id=name)
        for name, each in RUNS.items()
    ],
)
def test_memory_is_that_of_real_ranks(ranks: Ranks, tmp_path: Path, overrides: list[str]) -> None:
    job = job_of(*overrides)
    for rank, real in enumerate(ranks.run(2, measured_on_ranks, job, tmp_path)):
        for name, size in peaks(rehearsed(job, rank).memory).items():
            # On a real rank a batch has its rows, and recomputation the states of random generators (5,056 bytes).
            assert size == pytest.approx(real[name], rel=0.01, abs=5500), name


LIMITED = "model.experts={count=4,per_token=2,hidden=24,capacity=1.2,drop='last',first_dense_layers=1}"
LAYOUTS = [
    *(f"layout.zero={zero} layout.microbatches=2" for zero in range(4)),
    *(f"layout.zero={zero} precision.recipe=bf16" for zero in range(4)),
    "layout.zero=3 layout.shard_group=2",
    "layout.zero=2 layout.shard_group=2",
    "layout.tp=2 layout.zero=1",
    "layout.tp=2 layout.pp=2 layout.microbatches=4",
    "layout.tp=2 layout.pp=2 layout.microbatches=4 layout.sp=true model.tied=false",
    "layout.zero=1 memory.optimizer=host communication.overlap=forward",
    "layout.zero=2 memory.optimizer=host memory.update=delayed",
    "layout.zero=1 memory.optimizer=host memory.update=delayed communication.overlap=forward",
    "layout.zero=3 memory.optimizer=host memory.update=delayed communication.overlap=forward",
    # FSDP2 by itself would gather a block in the first backward that no backward of its micro-batch uses.
    "layout.pp=2 layout.zero=3 layout.microbatches=4 model.layers=4",
    "layout.cp=2 layout.zero=3 model.kv_heads=2 data.sequence_length=31",
    "layout.cp=4 layout.cp_kind=ring layout.zero=1",
    "layout.cp=2 layout.tp=2 layout.cp_kind=all-to-all precision.recipe=bf16",
]


@pytest.mark.parametrize("overrides", LAYOUTS)
def test_memory_and_collectives_are_as_planned(overrides: str) -> None:
    job = job_of(*overrides.split(), ranks=4)
    for each in rehearse(job, 4, None, all_kinds=True, log=lambda text: None).rehearsed:
        for count in each.collectives:
            assert count.is_as_planned, count
        for compared in each.memory.comparisons():
            assert compared.name == "all of these" or abs(compared.difference or 0.0) <= 0.03, compared


QUICK_RECOMPUTED = (
    "layout.tp=2 layout.sp=true memory.recompute=selective",
    f"layout.cp=2 layout.pp=2 data.sequence_length=31 {LIMITED} model.balance.kind=row memory.recompute=full",
)
RECOMPUTED_AND_CHOICES = [
    *QUICK_RECOMPUTED,
    *(f"layout.tp=2 layout.sp={sp} memory.recompute=full" for sp in ("true", "false")),
    "layout.tp=2 layout.sp=true memory.recompute=every-k memory.every=2 model.layers=4",
    f"layout.cp=2 layout.tp=2 layout.sp=true {LIMITED} model.balance.kind=row",
    f"layout.cp=2 layout.tp=2 layout.sp=true {LIMITED} model.balance.kind=row memory.recompute=selective",
]


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(each, marks=() if each in QUICK_RECOMPUTED else pytest.mark.proof)
        for each in RECOMPUTED_AND_CHOICES
    ],
)
def test_collectives_of_recomputed_blocks_and_of_choices_are_as_planned(overrides: str) -> None:
    for each in rehearse(job_of(*overrides.split(), ranks=4), 4, None, all_kinds=True, log=lambda text: None).rehearsed:
        assert all(count.is_as_planned for count in each.collectives), each.collectives


@pytest.mark.proof
@pytest.mark.parametrize(
    "overrides", ["layout.tp=2 layout.pp=2 layout.microbatches=4 layout.sp=true", "layout.cp=2 memory.recompute=full"]
)
def test_counts_of_rows_of_a_mixture_are_planned(overrides: str) -> None:
    experts = "model.experts={count=128,per_token=2,hidden=8,first_dense_layers=1}"
    settings = [experts, "model.layers=4", "model.balance={kind='row'}", "model.tied=false"]
    job = job_of(*settings, *overrides.split(), ranks=4)
    for each in rehearse(job, 4, None, all_kinds=True, log=lambda text: None).rehearsed:
        assert all(count.is_as_planned for count in each.collectives)
        agreed = sum(count.bytes for count in each.collectives if count.planned_bytes is None)
        assert agreed < 4096, f"rank {each.rank}"  # The counts of one mixture alone take 8192 bytes


def test_agreements_are_told_from_a_loss_in_blocks_of_rows() -> None:
    """Tensor-parallel ranks alone agree over the group of their layers, whose loss the plan has as one collective."""
    dims, group = ParallelDims((("dp", 1), ("tp", 4))), ("all-reduce", (0, 1, 2, 3))
    planned = Counter({(group, 1 << 20): 8, (group, 3000): 1})
    started = Counter({(group, 1 << 20): 8, (group, 1000): 3, (group, 104): 1})
    plan_collectives, agreed = compare_with_plan(started, planned, dims)
    assert (plan_collectives.count, plan_collectives.is_as_planned) == (11, True)
    assert (agreed.bytes, agreed.planned_bytes) == (104, None)
    for wrong in ({(group, 1000): 1}, {(group, 1 << 20): 1}, {(group, 8 << 20): 1}):
        counts = compare_with_plan(started + Counter(wrong), planned, dims)
        assert not all(each.is_as_planned for each in counts), wrong


HUGGING_FACE = ["layout.zero=1", "layout.zero=3", "layout.tp=2", "layout.pp=2 layout.microbatches=4"]


@pytest.mark.parametrize("overrides", HUGGING_FACE)
def test_a_model_of_transformers(tmp_path: Path, overrides: str) -> None:
    """Its masks follow from values of positions, which are known without a device."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaConfig(**sizes, vocab_size=300, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    data = [each for each in DATA if not each.startswith("model.")]
    text = f'[model]\nfamily = "module"\nfactory = "hf:{tmp_path}"\n[run]\nsteps = 1\n'
    (tmp_path / "job.toml").write_text(text, encoding="utf-8")
    job = load_job(str(tmp_path / "job.toml"), [*data, *overrides.split(), "run.ranks=4"])
    (each,) = rehearse(job, 4, 3, all_kinds=False, log=lambda text: None).rehearsed
    assert all(count.is_as_planned for count in each.collectives)
    for compared in each.memory.comparisons():  # Plans count a gradient of autograd that small stages do not have
        assert (compared.difference or 0.0) <= 0.03, compared


def test_the_peak_of_long_sequences_is_as_planned() -> None:
    """Keys of all ranks and their gradients are the largest tensors of narrow layers with few entries."""
    narrow = "model.layers=1 model.heads=8 model.ffn_hidden=8 model.context=16384 data.sequence_length=16384"
    memory = rehearsed(job_of(*f"{narrow} data.batch_sequences=1 layout.cp=4".split(), ranks=4), 0).memory
    assert memory.measured is not None
    assert memory.predicted.peak == pytest.approx(memory.measured.peak, rel=0.05)  # Without these tensors, 13 % off


def test_ranks_of_each_kind() -> None:
    prepared = prepare_rehearsal(job_of("layout.pp=4", "model.layers=4", ranks=8), 8, PhaseRecorder(print))
    _, plan = rehearse_rank(prepared, 0, PhaseRecorder(print))
    assert ranks_of_each_kind(plan, prepared.job) == [0, 4, 6]  # First, middle and last stage


@contextmanager
def _waiting_norm() -> Iterator[None]:
    plain = layers.rms_norm

    def waiting(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return plain(x, weight, eps + 0.0 * x.sum().item())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "rms_norm", waiting)
        yield


@pytest.mark.parametrize("overrides", ["layout.zero=0", "layout.zero=3", "precision.recipe=fp16"])
def test_a_step_that_waits_for_the_device_fails(overrides: str) -> None:
    with _waiting_norm(), pytest.raises(InputError, match=r"reads a value of a tensor .*test_rehearsal.py"):
        rehearsed(job_of(overrides), 0)


def command(*words: str, **environment: str) -> Any:
    return CliRunner().invoke(app, ["train", *words], env=environment)


def files_of(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def test_it_writes_nothing_and_ignores_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = Path("tests/data/small.txt").resolve()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    words = [*DATA[1:], *SMALL, f"data.source={data}", "--ranks", "4", "--rehearse", "--rank", "2", "--json"]
    result = command("tiny", *words, RANK="7", WORLD_SIZE="9", SLURM_PROCID="1")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["ranks"], [each["rank"] for each in report["rehearsed"]]) == (4, [2])
    assert files_of(tmp_path) == set()
    assert not torch.distributed.is_initialized()


def test_other_collectives_than_the_plan_have_an_exit_code_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    right = command("tiny", *DATA, *SMALL, "--ranks", "2", "--rehearse")
    assert right.exit_code == 0 and right.stdout.endswith("Rank 0 would start and take its first step.\n")
    plan = rehearsal.planned_collectives
    twice: Any = lambda *given, **named: (plan_collectives := plan(*given, **named)) + plan_collectives  # noqa: E731
    monkeypatch.setattr(rehearsal, "planned_collectives", twice)
    wrong = command("tiny", *DATA, *SMALL, "--ranks", "2", "--rehearse")
    assert wrong.exit_code == 1 and "Rank 0 starts other collectives than its plan: a fault of motet" in wrong.stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--rehearse", "--rank", "4"], "--rank 4 is beyond the last of 4 ranks"),
        (["--rehearse", "--rank", "1", "--all-kinds"], "give one of them"),
        (["--all-kinds"], "have no effect without --rehearse"),
        (["--rehearse", "layout.dp=3"], "dp = 3 does not match 4 ranks"),
        (["--rehearse", "data.source=missing.txt"], "missing.txt"),
        (["--rehearse", "model.vocab_size=100"], "model.vocab_size = 100 is less than the"),
        (["--rehearse", "data.tokenizer=missing.json"], "there is no missing.json"),
        (["--rehearse", "outer.every=2"], "--rehearse: outer.every"),
        (["--rehearse", "communication.compress_gradients=int8"], "--rehearse: communication.compress_gradients"),
        (["--rehearse", "communication.all_reduce=ring"], "--rehearse: a named algorithm"),
        (["--rehearse", "run.reproducible=layout"], "--rehearse: run.reproducible"),
        (["--rehearse", "layout.tp=3"], "tp"),
    ],
)
def test_refusals(words: list[str], sentence: str) -> None:
    result = command("tiny", *DATA, *SMALL, "--ranks", "4", *words)
    assert isinstance(result.exception, InputError)
    assert sentence in str(result.exception)


def test_a_long_phase_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "SLOW_S", 0.0)
    lines = list[str]()
    recorder = PhaseRecorder(lines.append)
    with recorder.phase("proof"):
        while not lines:
            pass
    assert lines == ["rehearsal: proof ..."]
    assert [phase.name for phase in recorder.phases] == ["proof"]
