"""Jobs with `memory.device_limit`: it counts as `motet show memory` measures, and is refused before ranks start."""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import motet
from motet.core.errors import DeviceMemoryError, InputError
from motet.core.units import format_bytes
from motet.memory.tiers.device_limit import DeviceLimit
from motet.parallel.process.process_group import RankGroup
from motet.train.build import build_components, precision_context
from motet.train.job import Job
from motet.train.launch.preflight import check_memory
from motet.train.memory_check.predicted_ranks import check_device_limit, predict_step_memory
from motet.train.memory_check.step_memory import measure_on_group
from ranks import Ranks
from train.runs import small_job

STEPS = 2
SIZES = ["precision.recipe=fp32", "data.batch_sequences=4"]


def measured_and_limited(group: RankGroup, job: Job) -> tuple[int, int, str]:
    """The measured peak of the second step, the peak under that limit, and the error with one byte less."""
    with precision_context(job, group.device), tempfile.TemporaryDirectory() as folder:
        measured = measure_on_group(job, group, Path(folder)).measured
        assert measured is not None
        moved = [life for life in measured.lives if life.operator == "moved to the device"]
        tokens = job.data.batch_sequences * job.data.sequence_length // group.world
        assert sum(life.size for life in moved if life.category == "saved activations") >= 2 * 8 * tokens  # And targets

        def run(limit: int) -> int:
            parts = build_components(job, group, Path(folder))
            step, known = parts.make_train_step(job), parts.engine.recomputation.known_tensors
            with (limited := DeviceLimit(limit, group.device, known=known)).active():
                for number in range(STEPS):
                    step.step(number, job.optimizer.learning_rate)
            return limited.peak()

        peak = run(measured.peak)
        try:
            run(measured.peak - 1)
        except DeviceMemoryError as error:
            return measured.peak, peak, str(error)
        return measured.peak, peak, ""


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (1, ["memory.recompute=selective"]),
        (2, ["layout.zero=1"]),
        (2, ["layout.zero=3"]),
        pytest.param(1, ["layout.microbatches=2"], marks=pytest.mark.proof),
        pytest.param(2, ["layout.zero=2", "precision.recipe=bf16", "precision.emulate=true"], marks=pytest.mark.proof),
        pytest.param(2, ["layout.zero=3", "memory.recompute=full"], marks=pytest.mark.proof),
        pytest.param(2, ["layout.tp=2"], marks=pytest.mark.proof),
    ],
)
def test_the_measured_peak_passes_and_one_byte_less_does_not(
    ranks: Ranks, tmp_path: Path, world: int, settings: list[str]
) -> None:
    job = small_job(tmp_path, *SIZES, *settings)
    for peak, limited, sentence in ranks.run(world, measured_and_limited, job, timeout_s=120):
        assert limited == peak
        assert sentence.startswith(f"memory.device_limit = {peak - 1} (") and f"({peak} bytes) are alive" in sentence


def losses(folder: Path) -> list[float]:
    return [step.loss for step in motet.read_steps(folder / "events.jsonl")]


def test_a_job_within_its_limit_trains_as_without_and_ends_in_a_sentence_otherwise(tmp_path: Path) -> None:
    """Evaluation, checkpoints and a sample are within the limit too."""
    settings = [*SIZES, "run.steps=3", "monitor.sample_tokens=4"]
    free, _ = motet.run(small_job(tmp_path, *settings, f"run.folder={tmp_path / 'free'}"))
    predicted = predict_step_memory(job := small_job(tmp_path, *settings), job.layout_for(1))[0].predicted.peak
    limit, sentence = predicted, ""
    while limit < 2 * predicted:  # The prediction leaves small tensors out
        name = f"run.folder={tmp_path / str(limit)}"
        try:
            within, _ = motet.run(small_job(tmp_path, *settings, f"memory.device_limit={limit}", name))
            break
        except DeviceMemoryError as error:
            sentence = str(error)
            limit = int(sentence.rpartition(" bytes) are alive")[0].rpartition("(")[2])
    assert losses(within) == losses(free) and len(losses(free)) == 3
    assert limit < 1.05 * predicted and sentence.startswith("memory.device_limit = ")


def test_a_limit_below_the_prediction_is_refused_before_ranks_start(tmp_path: Path) -> None:
    job = small_job(tmp_path, *SIZES, "run.ranks=2")
    memory = predict_step_memory(job, job.layout_for(2))[0].predicted

    def limited(limit: int, *more: str) -> Job:
        return small_job(tmp_path, *SIZES, "run.ranks=2", f"memory.device_limit={limit}", *more)

    check_memory(limited(memory.peak), range(2), 2)
    with pytest.raises(InputError) as refused:
        check_memory(limited(memory.peak - 1), range(2), 2)
    sentence, parts = str(refused.value), sorted(memory.at_peak().items(), key=lambda part: -part[1])
    assert sentence.startswith(f"memory.device_limit = {memory.peak - 1} (") and f"({memory.peak} bytes)" in sentence
    for name, size in parts[:2]:
        assert f"{format_bytes(size)} of {name}" in sentence
    for remedy in ("memory.recompute=full", "layout.zero=3", "layout.microbatches=2", "layout.tp=2"):
        settings = [*remedy.split(), f"memory.device_limit={memory.peak - 1}"]
        lower = small_job(tmp_path, *SIZES, "run.ranks=2", *settings)
        peak = predict_step_memory(lower, lower.layout_for(2))[0].predicted.peak
        assert (f"set {remedy}, which takes {format_bytes(peak)}" in sentence) == (peak < memory.peak)
    with pytest.raises(InputError, match=r"with memory.recompute=full and .* it takes .* still; raise the limit, use"):
        check_device_limit(limited(1000), 2)
    with pytest.raises(InputError, match=r"1000 \(1000 B\) is less"):
        motet.run(limited(1000, f"run.folder={tmp_path / 'refused'}"))
    assert not (tmp_path / "refused").exists()


def test_settings_that_fit_together_are_named(tmp_path: Path) -> None:
    settings = [*SIZES, "model.layers=8", "data.batch_sequences=16"]
    together = ["memory.recompute=full", "layout.microbatches=16", "memory.optimizer=host"]
    job = small_job(tmp_path, *settings, *together)
    peak = predict_step_memory(job, job.layout_for(1))[0].predicted.peak
    with pytest.raises(InputError, match=f"set {' and '.join(together)}, which together take"):
        check_device_limit(small_job(tmp_path, *settings, f"memory.device_limit={peak}"), 1)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def loss_of(module: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    return module(x).square().sum(), len(x)


def in_custom_loop(limit: int | None) -> tuple[list[float], int]:
    """Losses of a custom loop, and the peak."""
    torch.manual_seed(0)
    memory = {} if limit is None else {"device_limit": limit}
    engine = motet.parallelize(Tower(), loss=loss_of, memory=memory)
    found = [engine.step(torch.ones(256, 64)).loss for _ in range(2)]
    engine.begin_step()
    loss, count = loss_of(engine.module, torch.ones(256, 64))
    engine.backward(loss)
    del loss
    found.append(engine.update(1e-3, 1.0, count).loss)
    return found, 0 if engine.step_limit is None else engine.step_limit.peak()


def test_a_custom_loop_has_a_limit_in_its_steps() -> None:
    free, _ = in_custom_loop(None)
    limited, peak = in_custom_loop(2**40)
    assert limited == free
    activations = 8 * 256 * 64 * 4
    assert activations < peak < 2 * activations
    assert in_custom_loop(peak) == (free, peak)
    with pytest.raises(DeviceMemoryError, match=f"memory.device_limit = {peak - 1} "):
        in_custom_loop(peak - 1)
    assert torch.ones(10 * peak).numel() == 10 * peak  # After a failed step nothing is limited


@pytest.mark.proof
@pytest.mark.parametrize(
    ("settings", "least", "most"),
    [
        (["run.ranks=1"], 438_919_324, 442_000_000),  # The measured peak of the page on memory, on one rank
        (["run.ranks=2", "layout.zero=3"], 222_589_632, 240_000_000),
    ],
)
def test_tiny_on_the_command_line(tmp_path: Path, settings: list[str], least: int, most: int) -> None:
    def train(name: str, *more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "motet", "train", "tiny", *settings, "run.steps=3", "run.threads=1", *more]
        command += [f"run.folder={tmp_path / name}", "run.cpu_backend=motet", "run.device=cpu"]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)

    assert train("free").returncode == 0
    assert train("within", f"memory.device_limit={most}").returncode == 0
    assert losses(tmp_path / "within") == losses(tmp_path / "free")
    passed = train("passed", f"memory.device_limit={least - 20_000}")
    assert passed.returncode == 3 and "Traceback" not in passed.stderr
    assert passed.stderr.count(" failed: memory.device_limit = ") == 1
    refused = train("refused", "memory.device_limit=64MiB")
    assert refused.returncode == 2 and not (tmp_path / "refused").exists()
    assert refused.stderr.startswith("motet: memory.device_limit = 67108864 (64 MiB) is less than")


def test_a_rehearsal_refuses_a_limit_that_a_run_would_pass(
    motet: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    words = ["train", "tiny", "--rehearse", "--ranks", "4", "layout.zero=2", "memory.device_limit=100MiB"]
    done = motet(*words)
    assert done.returncode == 2 and "memory.device_limit = 104857600 (100 MiB) is less than the" in done.stderr


@pytest.mark.parametrize(("head_dim", "has_mask"), [(16, False), (20, True), (264, True)])
def test_a_gpu_makes_the_mask_of_documents_where_heads_do_not_fit_the_kernel(
    tmp_path: Path, head_dim: int, has_mask: bool
) -> None:
    """The memory-efficient kernel takes the mask of any heads."""
    settings = ["run.device=cuda", "precision.recipe=bf16", "model.context=512", "data.sequence_length=512"]

    def saved(attention: str) -> int:
        words = [*settings, f"model.head_dim={head_dim}", f"precision.attention={attention}"]
        job = small_job(tmp_path, *words)
        return predict_step_memory(job, job.layout_for(1), is_packed=True)[0].predicted.peak

    assert (saved("auto") == saved("efficient")) is has_mask and saved("auto") <= saved("efficient")
