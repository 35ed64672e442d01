"""Jobs whose activations lie on the host: bytes of each place, the bytes that travel, limits and refusals."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

import motet
from motet.cluster.host_limits import MemoryLimit
from motet.core.errors import InputError
from motet.core.units import format_bytes
from motet.models.spec.model_spec import spec_from_settings
from motet.parallel.process.process_group import RankGroup
from motet.train.build import build_components, precision_context
from motet.train.job import Job, load_job
from motet.train.launch import preflight
from motet.train.launch.preflight import check_memory
from motet.train.memory_check.predicted_ranks import check_device_limit, predict_step_memory
from motet.train.memory_check.step_memory import measure_on_group
from motet.train.memory_check.step_prediction import predict_host_activations
from ranks import Ranks
from train.runs import small_job

STEPS = 2
BATCH_BYTES = 2 * 8 * 8 * 128  # Tokens and targets
SIZES = "vocab_size=260, context=128, layers=4, hidden=64, heads=4"
DECODER = [f"model={{family='decoder', {SIZES}, kv_heads=2, ffn_hidden=128}}"]
T5 = [
    f"model={{family='encoder-decoder', {SIZES.replace('260', '359')}, ffn_hidden=128, dropout=0.1}}",
    *("data.objective=spans", "data.batch_sequences=48"),
]
SHAPE = ["data.sequence_length=128", "data.batch_sequences=8", "precision.recipe=fp32"]


def moved_bytes(group: RankGroup, job: Job) -> tuple[list[int], list[int]]:
    """The largest bytes of activations on the host, and those that a step sends there and back; both as predicted."""
    with precision_context(job, group.device), tempfile.TemporaryDirectory() as folder:
        parts = build_components(job, group, Path(folder))
        engine, step = parts.engine, parts.make_train_step(job)
        for index in range(STEPS):
            step.step(index, job.optimizer.learning_rate)
        recomputation = engine.recomputation.recomputation
        assert recomputation is not None and recomputation.offloaded is not None
        offloaded, link = recomputation.offloaded, recomputation.offloaded.link
        assert offloaded.host_bytes == 0  # After a step nothing is left
        predicted = predict_host_activations(job, engine.plan, parts.layout, rank=group.rank)
        sent = [offloaded.peak_host_bytes, link.sent_to_host // STEPS, link.sent_to_device // STEPS]
        return sent, [predicted.peak_bytes, predicted.to_host, predicted.to_device]


CASES: dict[str, tuple[int, list[str]]] = {
    "one rank": (1, DECODER),
    "micro-batches": (1, [*DECODER, "layout.microbatches=4"]),
    "selective": (1, [*DECODER, "memory.recompute=selective"]),
    "full": (1, [*DECODER, "memory.recompute=full"]),
    "every second": (1, [*DECODER, "memory.recompute=every-k"]),
    "bf16, zero 3": (2, [*DECODER, "precision.recipe=bf16", "layout.zero=3"]),
    "tp": (2, [*DECODER, "layout.tp=2"]),
    "sp": (2, [*DECODER, "layout.tp=2", "layout.sp=true"]),
    "gpipe": (2, [*DECODER, "layout.pp=2", "layout.schedule=gpipe", "layout.microbatches=4"]),
    "1f1b": (2, [*DECODER, "layout.pp=2", "layout.microbatches=4"]),
    "1f1b, full": (2, [*DECODER, "layout.pp=2", "layout.microbatches=4", "memory.recompute=full"]),
    "interleaved": (
        2,
        [*DECODER, "layout.pp=2", "layout.chunks=2", "layout.schedule=interleaved", "layout.microbatches=4"],
    ),
    "zero bubble": (
        2,
        [*DECODER, "layout.pp=2", "layout.chunks=2", "layout.schedule=zb-v", "layout.microbatches=4", "model.layers=8"],
    ),
    "t5": (1, T5),
    "t5, full": (1, [*T5, "memory.recompute=full"]),
}
QUICK = ["micro-batches", "selective", "1f1b"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.proof) for name in CASES]
)
def test_bytes_on_the_host_and_its_link_are_those_of_the_prediction(ranks: Ranks, tmp_path: Path, name: str) -> None:
    world, settings = CASES[name]
    job = small_job(tmp_path, *SHAPE, *settings, "memory.activations=host")
    ranks_moved = ranks.run(world, moved_bytes, job, timeout_s=120)
    assert [moved for moved, _ in ranks_moved] == [predicted for _, predicted in ranks_moved]
    assert all(ranks_moved[0][0])


def measured_and_predicted(group: RankGroup, job: Job) -> tuple[int, int, int, int]:
    """The peak of a step and that of its saved activations; each measured and predicted."""
    with tempfile.TemporaryDirectory() as folder:
        memory = measure_on_group(job, group, Path(folder))
    assert memory.measured is not None
    peaks = memory.measured.peak, memory.predicted.peak
    return *peaks, *(each.peak_of("saved activations") for each in (memory.measured, memory.predicted))


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (1, ["memory.recompute=none"]),
        (2, ["layout.pp=2", "layout.microbatches=4", "model.layers=6"]),
        pytest.param(1, ["memory.recompute=selective", "memory.optimizer=host"], marks=pytest.mark.proof),
        pytest.param(1, ["memory.recompute=full", "layout.microbatches=2"], marks=pytest.mark.proof),
        pytest.param(2, ["layout.zero=2", "memory.recompute=none"], marks=pytest.mark.proof),
        pytest.param(2, ["layout.zero=3", "memory.recompute=none"], marks=pytest.mark.proof),
        pytest.param(2, ["layout.tp=2", "memory.recompute=none"], marks=pytest.mark.proof),
    ],
)
def test_the_peak_of_the_device_is_predicted(ranks: Ranks, tmp_path: Path, world: int, settings: list[str]) -> None:
    """Without activations on the host, the prediction is as near, and the peak higher."""
    words = [*SHAPE, *DECODER, *settings]
    for place in ("device", "host"):
        job = small_job(tmp_path, *words, f"memory.activations={place}")
        peaks = ranks.run(world, measured_and_predicted, job, timeout_s=120)
        for measured, predicted, measured_saved, predicted_saved in peaks:
            assert abs(measured / predicted - 1) < 0.025
            assert abs(measured_saved - predicted_saved) < 0.02 * predicted_saved + BATCH_BYTES
        if place == "device":
            on_device = peaks
    assert peaks[0][0] < on_device[0][0] and peaks[0][2] < 0.75 * on_device[0][2]


def test_a_limit_that_a_step_passes_holds_with_activations_on_the_host(tmp_path: Path) -> None:
    words = [*SHAPE, *DECODER, "run.steps=2", "model.layers=8", "optimizer.name=sgd"]

    def limited(limit: int, *more: str) -> Job:
        return small_job(tmp_path, *words, f"memory.device_limit={limit}", *more)

    def predicted(*more: str) -> int:
        job = small_job(tmp_path, *words, *more)
        return predict_step_memory(job, job.layout_for(1))[0].predicted.peak

    on_host = predicted("memory.activations=host")
    limit = int(1.02 * on_host)
    assert limit < 0.6 * predicted()
    with pytest.raises(InputError, match=f"set memory.*activations=host, which takes {format_bytes(on_host)}"):
        check_device_limit(limited(limit), 1)
    folder = f"run.folder={tmp_path / 'run'}"
    run, _ = motet.run(limited(limit, "memory.activations=host", folder))
    free, _ = motet.run(small_job(tmp_path, *words, f"run.folder={tmp_path / 'free'}"))
    assert [step.loss for step in motet.read_steps(run / "events.jsonl")] == [
        step.loss for step in motet.read_steps(free / "events.jsonl")
    ]


def test_a_host_that_is_too_small_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = small_job(tmp_path, *SHAPE, *DECODER, "memory.activations=host", "data.batch_sequences=512")
    layout = job.layout_for(1)
    sent = predict_step_memory(job, layout)[0].elsewhere["host"]
    needed = sent + 3 * 4 * spec_from_settings(job.model).parameter_count  # Parameters, gradients and moments

    def limits(total: int) -> tuple[MemoryLimit, ...]:
        return (MemoryLimit("this machine has", total, is_shared=False, process_bytes=0),)

    monkeypatch.setattr(preflight, "read_memory_limits", lambda: limits(int(1.2 * needed)))
    check_memory(job, range(1), 1)
    monkeypatch.setattr(preflight, "read_memory_limits", lambda: limits(int(0.9 * needed)))
    with pytest.raises(InputError, match=rf"{format_bytes(sent)} of activations on the host"):
        check_memory(job, range(1), 1)
    on_device = small_job(tmp_path, *SHAPE, *DECODER, "data.batch_sequences=512")
    check_memory(on_device, range(1), 1)  # Activations of the device are no part of the lower bound


def test_a_layout_report_has_the_bytes_of_activations(
    motet: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    words = ["show", "layout", "dp=2 zero=1", "--job", "tiny"]
    reports = [json.loads(motet(*words, *more, "--json").stdout) for more in ([], ["memory.activations=host"])]
    job = load_job("tiny", ["layout.zero=1", "layout.dp=2", "memory.activations=host"])
    memory = predict_step_memory(job, job.layout_for(2))[0]
    device, host = (report["ranks"][0] for report in reports)
    assert device["host_bytes"] == device["activations_to_host"] == 0
    assert host["host_bytes"] == host["activations_to_host"] == host["activations_to_device"] > 50 << 20
    assert host["host_bytes"] == memory.elsewhere["host"]


@pytest.mark.proof
def test_a_rehearsal_sends_activations_of_meta_tensors(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "motet", "train", "tiny", "--rehearse", "--ranks", "4", "layout.zero=2", "--json"]
    peaks = []
    for place in ("device", "host"):
        done = subprocess.run(
            [*command, f"memory.activations={place}"], capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == 0, done.stderr[-500:]
        peaks.append(done.stdout)
    assert peaks[0] != peaks[1]
