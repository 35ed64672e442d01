"""Parameters of stage 3 whose rows lie on the host train to the bits of those on the device, on less of it."""

import gc
import json
import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from motet import parallelize
from motet.core.errors import InputError
from motet.memory.storage_tracker import StorageTracker
from motet.memory.tiers.optimizer_states import HostStates
from motet.parallel.process.process_group import RankGroup
from motet.train.build import build_components, precision_context
from motet.train.job import Job, load_job
from motet.train.launch.preflight import check_job
from motet.train.memory_check.predicted_ranks import check_device_limit
from motet.train.rehearsal.rehearsal import rehearse
from ranks import Ranks
from train.runs import run_job, same_bits, saved_tensors, small_job
from train.test_optimizer_tiers import STEPS, has_same_bits, trained, world_of

NO_CLIPPING = "optimizer.clip_norm=1000.0"  # The norm adds up by parameter at stage 3, and by bucket at stage 0


def job_of(folder: Path, layout: str, places: str, *settings: str, model: str = "decoder") -> Job:
    """A job with `optimizer/parameters` in these places."""
    optimizer, parameters = places.split("/")
    words = [*(f"layout.{word}" for word in layout.split()), *settings]
    words += [f"memory.optimizer={optimizer}", f"memory.parameters={parameters}"]
    return small_job(folder, *words, *[f"memory.folder={folder}"] * (optimizer == "disk"), model=model)


# (Layout, settings, model): the reference has the same layout with everything on the device.
CASES: list[tuple[str, list[str], str]] = [
    ("dp=2 zero=3", ["precision.recipe=fp32"], "decoder"),
    ("dp=2 zero=3 microbatches=2", ["precision.recipe=bf16"], "decoder"),
    ("dp=3 zero=3", ["precision.recipe=bf16", "memory.recompute=full"], "decoder"),
    ("dp=2 zero=3 microbatches=2 reduce_gradients=step", ["precision.recipe=fp32"], "decoder"),
    ("dp=2 zero=3 reshard_after_forward=false", ["precision.recipe=bf16"], "decoder"),
    ("dp=2 zero=3 min_shard_numel=100", ["precision.recipe=bf16"], "decoder"),
    ("dp=2 tp=2 zero=3", ["precision.recipe=bf16"], "decoder"),
    ("dp=2 pp=2 microbatches=2 zero=3", ["precision.recipe=fp32"], "decoder"),
    ("dp=4 zero=3 shard_group=2 microbatches=3", ["precision.recipe=bf16"], "decoder"),
    ("dp=2 zero=3", ["precision.recipe=fp16", "precision.loss_scale_initial=4194304"], "decoder"),
    ("dp=2 zero=3", ["communication.compress_gradients=int8", "precision.recipe=bf16"], "decoder"),
    ("dp=2 zero=3", ["communication.compress_parameters=int8", "precision.recipe=bf16"], "decoder"),
    ("dp=2 zero=3", ["precision.moment_dtype=bfloat16", "precision.recipe=bf16"], "decoder"),
    ("dp=2 zero=3", ["precision.recipe=bf16"], "adapters"),
    ("dp=2 zero=3", ["precision.recipe=fp32"], "t5"),
]
QUICK = [("host", 9), ("disk", 1)]


def check_same(jobs: Sequence[Job], ranks: Ranks, world: int, *, with_norms: bool = True) -> None:
    first, second = (ranks.run(world, trained, job, timeout_s=120) for job in jobs)
    for (results, tensors, *_), (other_results, others, sent, planned, moved, files) in zip(first, second, strict=True):
        names = [name for name in tensors if with_norms or "/" in name]  # Stage 0 has parameters in another dtype
        assert tensors.keys() == others.keys() and len(names) > 1
        assert [n for n in names if not has_same_bits(tensors[n].flatten(), others[n].flatten())] == []
        if with_norms:
            assert repr(results) == repr(other_results)  # A norm may be NaN
        assert [loss for loss, *_ in results] == [loss for loss, *_ in other_results]
        updates = sum(is_finite for *_, is_finite in results)
        after_updates = planned.to_device - planned.fetched
        assert sent == [STEPS * planned.to_host, STEPS * planned.fetched + updates * after_updates]
        assert planned.to_host > 0 and planned.fetched > 0 and updates
        assert moved == [updates * files + STEPS * planned.read, updates * files]


@pytest.mark.parametrize(
    ("layout", "settings", "model", "optimizer"),
    [
        pytest.param(*case, place, marks=() if (place, index) in QUICK else pytest.mark.proof)
        for index, case in enumerate(CASES)
        for place in ("host", "disk")
        if place == "host" or not any("moment_dtype" in word for word in case[1])
    ],
)
def test_rows_on_the_host_have_the_bits_of_the_device(
    ranks: Ranks, tmp_path: Path, layout: str, settings: list[str], model: str, optimizer: str
) -> None:
    places = "device/device", f"{optimizer}/host"
    jobs = [job_of(tmp_path, layout, place, "optimizer.clip_norm=0.05", *settings, model=model) for place in places]
    check_same(jobs, ranks, world_of(layout))


@pytest.mark.parametrize("optimizer", ["host", pytest.param("disk", marks=pytest.mark.proof)])
def test_rows_wait_for_updates_that_overlap_with_the_forward(ranks: Ranks, tmp_path: Path, optimizer: str) -> None:
    places = ("device/device", []), (f"{optimizer}/host", ["communication.overlap=forward"])
    settings = ["optimizer.clip_norm=0.05", "precision.recipe=bf16"]
    jobs = [job_of(tmp_path, "dp=2 zero=3 microbatches=2", place, *settings, *more) for place, more in places]
    check_same(jobs, ranks, 2)


ALONE = [
    ("", ["precision.recipe=fp32"]),
    ("microbatches=2", ["precision.recipe=bf16"]),
    ("microbatches=2", ["precision.recipe=bf16", "memory.recompute=full"]),
    ("tp=2", ["precision.recipe=bf16"]),
    ("dp=1 pp=2 microbatches=4", ["precision.recipe=fp32"]),
    ("pp=2 chunks=2 schedule=zb-v microbatches=4", ["model.layers=4", "precision.recipe=fp32"]),
    ("dp=2 shard_group=1 microbatches=2", ["precision.recipe=fp32"]),
]


@pytest.mark.parametrize(
    ("layout", "settings"),
    [pytest.param(*case, marks=() if index in (1, 3) else pytest.mark.proof) for index, case in enumerate(ALONE)],
)
def test_shard_groups_of_one_rank_have_the_bits_of_stage_0(
    ranks: Ranks, tmp_path: Path, layout: str, settings: list[str]
) -> None:
    others = " ".join(word for word in layout.split() if "shard_group" not in word)
    jobs = [
        job_of(tmp_path, f"{others} zero=0", "device/device", *settings, NO_CLIPPING),
        job_of(tmp_path, f"{layout} zero=3", "host/host", *settings, NO_CLIPPING),
    ]
    check_same(jobs, ranks, world_of(layout), with_norms=False)


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(pair, marks=pytest.mark.proof)
        for pair in (("device/device", "host/host"), ("host/host", "host/device"))
    ],
)
def test_a_run_goes_on_with_rows_in_another_place(ranks: Ranks, tmp_path: Path, pair: tuple[str, str]) -> None:
    check_resumed(ranks, tmp_path, pair)


def check_resumed(ranks: Ranks, tmp_path: Path, pair: tuple[str, str]) -> None:
    """A run that goes on with states and rows in another place has the bits of one that was not interrupted."""

    def job_in(places: str, steps: int) -> Job:
        settings = ["precision.recipe=bf16", "optimizer.schedule.kind=constant", f"run.steps={steps}"]
        return job_of(tmp_path, "zero=3", places, *settings)

    for folder, runs in (("whole", [("device/device", 6)]), ("run", [(pair[0], 3), (pair[1], 6)])):
        (tmp_path / folder).mkdir()
        for places, steps in runs:
            ranks.run_places(2, run_job, job_in(places, steps), tmp_path / folder, timeout_s=120)
    assert same_bits(saved_tensors(tmp_path / "whole"), saved_tensors(tmp_path / "run"))


def live_bytes(group: RankGroup, job: Job, folder: Path) -> tuple[int, int, int]:
    """(Bytes that live after a step, the peak of the next one, bytes of the rows in the dtype of masters)."""
    with precision_context(job):
        parts = build_components(job, group, folder)
        step = parts.make_train_step(job)
        tracker = StorageTracker(parts.engine.recomputation.known_tensors())
        with tracker:
            step.step(0, job.optimizer.learning_rate)
            live = tracker.live()
            tracker.reset_peak()
            step.step(1, job.optimizer.learning_rate)
        rows = sum(each.nbytes for each in parts.engine.optimizer.sharded_parameters.local_masters)
        return live, tracker.peak(), rows


@pytest.mark.parametrize("world", [1, 2])
def test_the_device_holds_neither_rows_nor_sums_nor_gathered_blocks(ranks: Ranks, tmp_path: Path, world: int) -> None:
    settings = ["precision.recipe=fp32", "model.layers=8", "data.batch_sequences=2", "memory.recompute=full"]

    def measure(layout: str, places: str) -> tuple[int, int, int]:
        job = job_of(tmp_path, layout, places, *settings)
        return ranks.run(world, live_bytes, job, tmp_path, timeout_s=120)[0]

    live, peak, rows = measure("zero=3", "host/host")
    other_live, other_peak, _ = measure("zero=3" if world > 1 else "zero=0", "host/device")
    assert other_live - live >= 1.9 * rows  # Rows and their sums
    assert live < 0.1 * rows
    # Eight blocks of equal size; at most two are gathered, with the sums of one.
    assert other_peak - peak >= 1.2 * rows if world > 1 else other_peak - peak >= rows


def assigned_rows(group: RankGroup, job: Job, folder: Path) -> tuple[bool, bool]:
    with precision_context(job):
        parts = build_components(job, group, folder)
        module, sharded = parts.model.module, parts.engine.optimizer.sharded_parameters
        before = [each.clone() for each in sharded.local_masters]
        state = {name: 2 * value for name, value in module.state_dict().items()}
        module.load_state_dict(state, assign=True)
        parts.make_train_step(job).step(0, 0.0)
        after = sharded.local_masters
        return all(torch.equal(2 * a, b) for a, b in zip(before, after, strict=True)), after[0] is not before[0]


def test_a_module_that_is_loaded_fills_the_rows(ranks: Ranks, tmp_path: Path) -> None:
    """FSDP2 itself would keep the assigned tensors, which the host does not update."""
    job = job_of(tmp_path, "zero=3", "host/host", "precision.recipe=fp32", "optimizer.weight_decay=0.0")
    assert ranks.run(2, assigned_rows, job, tmp_path) == [(True, True)] * 2


def test_fetched_rows_are_memory_of_the_device() -> None:
    states = HostStates(torch.device("cpu"), torch.float32)
    with StorageTracker() as tracker:
        (rows,), masters = states.allocate_rows([6], [8])
        assert tracker.live() == 0 and masters is None and states.masters[0].data_ptr() == rows.data_ptr()
        fetched = states.fetch(rows)
        assert tracker.live() == states.sent_to_device == fetched.nbytes == 32


@pytest.mark.parametrize("layout", ["zero=3", "dp=2 zero=3 microbatches=2", "dp=2 pp=2 microbatches=2 zero=3"])
def test_a_rehearsal_has_the_predicted_peak(tmp_path: Path, layout: str) -> None:
    check_rehearsal(tmp_path, layout, "host/host")


def check_rehearsal(tmp_path: Path, layout: str, places: str) -> None:
    """Tensors without values are on the device or on the host, too."""
    world = world_of(layout)
    # Blocks with more parameters than activations
    settings = ["precision.recipe=bf16", "model.hidden=128", "model.ffn_hidden=512", "memory.recompute=full"]
    job = job_of(tmp_path, layout, places, *settings, f"run.ranks={world}")
    (rehearsed,) = rehearse(job, world, 0, all_kinds=False, log=lambda text: None).rehearsed
    memory = rehearsed.memory
    assert memory.measured is not None
    assert memory.measured.peak == pytest.approx(memory.predicted.peak, rel=0.05)
    assert not memory.measured.peak_of("master parameters", "moments")
    assert memory.measured.peak_of("gradients") == memory.predicted.peak_of("gradients")  # Of a table of two stages


def refusal(*words: str) -> str:
    with pytest.raises(InputError) as caught:
        check_device_limit(load_job("offload-demo", words), 1)
    return str(caught.value)


def test_a_limit_of_the_device_names_the_remedy() -> None:
    words = "memory.optimizer=host layout.zero=3 memory.parameters=host"
    assert f"set {words}, which takes 112 MiB, or raise" in refusal("memory.device_limit=150MiB")
    rest = "set layout.zero=3 memory.parameters=host, which takes"
    assert rest in refusal("memory.device_limit=150MiB", "memory.optimizer=host")
    check_device_limit(load_job("offload-demo", ["memory.device_limit=150MiB", *words.split()]), 1)


def collected(group: RankGroup) -> bool:
    """Whether a module and its engine are collected when nobody uses them."""
    module = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)))
    memory = {"optimizer": "host", "parameters": "host"}
    engine = parallelize(module, "zero=3", loss=lambda m, x: (m(x).sum(), 1), memory=memory)
    engine.step(torch.ones(2, 8), learning_rate=0.1)
    alive = weakref.ref(module)
    del module, engine
    gc.collect()
    return alive() is None


def test_a_module_with_rows_on_the_host_is_collected(ranks: Ranks) -> None:
    assert ranks.run(1, collected) == [True]


def test_parameters_on_the_host_need_states_there() -> None:
    with pytest.raises(InputError, match=r"parameters = 'host' needs memory.optimizer = 'host' or 'disk'"):
        load_job("tiny", ["layout.zero=3", "memory.parameters=host"])


def test_rows_that_are_masters_refuse_a_delay() -> None:
    with pytest.raises(InputError, match=r"memory.update = 'delayed' changes masters while a step computes"):
        check_job(load_job("tiny", [*WORDS, "memory.update=delayed"]), 1)


def motet(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "motet", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


WORDS = ["memory.optimizer=host", "layout.zero=3", "memory.parameters=host"]


@pytest.mark.proof
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    "settings", [[], ["layout.microbatches=2", "memory.recompute=full"], ["precision.recipe=fp32"]]
)
def test_the_peak_is_predicted(world: int, settings: list[str]) -> None:
    shown = motet("show", "memory", "offload-demo", f"run.ranks={world}", *WORDS, *settings, "--json")
    for memory in json.loads(shown.stdout)["memory"]:
        measured, predicted = (memory[kind]["peak_bytes"] for kind in ("measured", "predicted"))
        assert abs(measured / predicted - 1) < 0.01


@pytest.mark.proof
def test_a_run_fits_a_limit_that_only_rows_on_the_host_keep(tmp_path: Path) -> None:
    words = ["train", "offload-demo", "memory.device_limit=120MiB", "run.steps=3", f"run.folder={tmp_path}"]
    words += ["run.threads=1", "monitor.tensorboard=false"]
    refused, trains = motet(*words, "memory.optimizer=host"), motet(*words, *WORDS)
    assert refused.returncode == 2 and "memory.parameters=host, which takes" in refused.stderr, refused.stderr[-500:]
    assert trains.returncode == 0, trains.stderr[-500:]
