"""Runs whose batches are read ahead: the same bits, the same end, and the same errors as without it."""

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from torch import Tensor

import motet
from data.corpora import write_megatron
from motet.core.batch import Batch
from motet.core.errors import InputError
from motet.core.trace import install_sink
from motet.data.samples.loader import BatchLoader
from motet.memory.tiers.device_limit import DeviceLimit
from motet.parallel.process.launch_environment import RankEnvironment
from motet.parallel.process.process_group import RankGroup
from motet.train.build import build_components, precision_context
from motet.train.job import Job
from motet.train.launch.failures import StopFlag
from motet.train.loop import run_rank
from ranks import RankFailureError, Ranks
from train.pipeline_runs import job_of_model
from train.runs import StopAt, same_bits, saved_tensors, small_job

STEPS = 6


MAIN, QUEUE = "MainThread", "motet-input-queue"
Place = tuple[int, range]


def _thread() -> str:
    return threading.current_thread().name.partition("_")[0]


class Recorded:
    """Records the reads of a run, by thread."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.batches, self.places = dict[Place, Batch](), {MAIN: list[Place](), QUEUE: list[Place]()}
        self.spans, read = set[tuple[str, str]](), BatchLoader.batch

        def batch(loader: BatchLoader, step: int, rows: range) -> Batch:
            self.places[_thread()].append((step, rows))
            return self.batches.setdefault((step, rows), read(loader, step, rows))

        patch.setattr(BatchLoader, "batch", batch)

    def on_span(self, action: str, start: float, stop: float, depth: int) -> None:
        self.spans.add((action, _thread()))

    def on_count(self, name: str, value: float) -> None: ...

    def run(self) -> "Run":
        threads = sum(thread.name.startswith(QUEUE) for thread in threading.enumerate())
        batches = {key: batch.tensors() for key, batch in self.batches.items()}
        return Run(batches, self.places, self.spans, threads)


class Run(NamedTuple):
    """The record of a rank."""

    batches: dict[Place, dict[str, Tensor]]
    places: dict[str, list[Place]]  # By thread, in order
    spans: set[tuple[str, str]]
    threads: int  # Of queues, after the run


def run_recorded(place: RankEnvironment, job: Job, folder: Path) -> Run:
    with recorded_run() as recorded:
        run_rank(job, place, folder, StopFlag())
    return recorded.run()


@contextmanager
def recorded_run() -> Iterator[Recorded]:
    with pytest.MonkeyPatch.context() as patch:
        recorded = Recorded(patch)
        with install_sink(recorded):
            yield recorded


def curve(folder: Path) -> list[tuple[float, float | None]]:
    return [(step.loss, step.grad_norm) for step in motet.read_steps(folder / "events.jsonl")]


def same_batches(reads: dict[Place, dict[str, Tensor]], others: dict[Place, dict[str, Tensor]]) -> bool:
    return [*reads] == [*others] and all(same_bits(reads[key], others[key]) for key in reads)


def test_the_same_batches_and_losses_also_after_resuming(ranks: Ranks, tmp_path: Path) -> None:
    settings = [f"run.steps={STEPS}", "layout.microbatches=2", "monitor.evaluate_every=2"]

    def job(prefetch: int, *more: str) -> Job:
        return small_job(tmp_path, *settings, f"data.prefetch={prefetch}", *more)

    direct, ahead, resumed = tmp_path / "direct", tmp_path / "ahead", tmp_path / "resumed"
    places = [(step, rows) for step in range(STEPS) for rows in (range(6), range(6, 12))]
    [read] = ranks.run_places(1, run_recorded, job(0), direct)
    [queued] = ranks.run_places(1, run_recorded, job(3), ahead)
    assert read.places == {MAIN: places, QUEUE: []} and queued.places == {MAIN: [], QUEUE: places}
    assert queued.threads == 0
    [first] = ranks.run_places(1, run_recorded, job(3, "run.stop_at=3"), resumed)
    [second] = ranks.run_places(1, run_recorded, job(1), resumed)
    assert first.places[QUEUE] == places[:6] and second.places[QUEUE] == places[6:]  # Nothing after the stop
    assert same_batches(queued.batches, read.batches)
    assert same_batches(first.batches | second.batches, read.batches)
    assert curve(ahead) == curve(direct) == curve(resumed) and len(curve(ahead)) == STEPS
    assert same_bits(saved_tensors(ahead), saved_tensors(direct))
    assert same_bits(saved_tensors(resumed), saved_tensors(direct))


LAYOUTS = {
    "1f1b": ["layout.pp=2", "layout.microbatches=4"],
    "zb-v": ["layout.pp=2", "layout.schedule=zb-v", "layout.chunks=2", "layout.microbatches=4"],
    "dualpipe-v": ["layout.pp=2", "layout.schedule=dualpipe-v", "layout.chunks=2", "layout.microbatches=4"],
    "interleaved": ["layout.pp=2", "layout.schedule=interleaved", "layout.chunks=2", "layout.microbatches=4"],
    "cp": ["layout.cp=2", "layout.microbatches=2"],
    "replicas": ["outer.every=2", "layout.microbatches=2"],
    "rows": ["run.reproducible=layout", "data.batch_sequences=3"],
    "buckets": ["layout.data=parameter_server", "layout.server.transport=collectives"],
}


def direct_and_ahead(group: RankGroup, job: Job) -> list[tuple[list[float], Run]]:
    """The losses of three steps that change no parameter, and what they read, without and with a queue."""
    runs = []
    with precision_context(job, group.device), tempfile.TemporaryDirectory() as folder:
        parts = build_components(job, group, Path(folder))
        for depth in (0, 3):
            with recorded_run() as recorded, parts.make_train_step(job).reading_ahead(depth, range(3)) as train_step:
                losses = [train_step.step(step, 0.0).loss for step in range(3)]
            runs.append((losses, recorded.run()))
    return runs


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("1f1b", "rows") else pytest.mark.proof) for name in LAYOUTS]
)
def test_every_layout_asks_in_the_order_of_the_queue(ranks: Ranks, tmp_path: Path, name: str) -> None:
    """A request out of the order would end the step."""
    job = job_of_model(tmp_path, "decoder", *LAYOUTS[name])
    for (losses, read), (losses_ahead, queued) in ranks.run(2, direct_and_ahead, job, timeout_s=120):
        assert losses_ahead == losses and same_batches(queued.batches, read.batches)
        assert read.places[QUEUE] == queued.places[MAIN] == []
        assert queued.places[QUEUE] == read.places[MAIN] and len(read.places[MAIN]) >= 3
        assert queued.threads == 0
        assert {thread for _, thread in queued.spans} == {MAIN} and ("read", MAIN) in queued.spans


def test_a_damaged_sample_ends_the_run_at_its_step_with_its_sentence(ranks: Ranks, tmp_path: Path) -> None:
    documents = [[[(7 * i + k) % 250 for k in range(33)]] for i in range(400)]
    documents[200][0][5] = 999
    prefix = write_megatron(tmp_path / "damaged", documents, 4)
    ends = []
    for depth in (0, 3):
        folder = tmp_path / str(depth)
        job = small_job(tmp_path, f"data.source={prefix}", f"data.prefetch={depth}", "run.epochs=1")
        with pytest.raises(RankFailureError, match="holds the token 999, but the tokenizer has only") as failure:
            ranks.run_places(1, run_recorded, job, folder)
        ends.append((str(failure.value).partition("Traceback")[0], curve(folder)))
    assert ends[0] == ends[1] and len(ends[0][1]) > 3


def run_until_stopped(place: RankEnvironment, job: Job, folder: Path) -> tuple[int, list[str]]:
    steps = run_rank(job, place, folder, StopAt(2)).completed_steps
    return steps, [thread.name for thread in threading.enumerate() if thread.name.startswith(QUEUE)]


def test_a_stop_saves_and_ends_the_thread(ranks: Ranks, tmp_path: Path) -> None:
    job = small_job(tmp_path, f"run.steps={STEPS}", "data.prefetch=3")
    assert ranks.run_places(1, run_until_stopped, job, tmp_path / "run") == [(3, [])]
    assert (tmp_path / "run/checkpoints/step-3").is_dir() or any((tmp_path / "run/checkpoints").glob("*3*"))


def peaks(group: RankGroup, job: Job) -> list[int]:
    """The peak bytes of two steps on a device in miniature, without and with a queue."""
    found = list[int]()
    for depth in (0, 3):
        with precision_context(job, group.device), tempfile.TemporaryDirectory() as folder:
            parts = build_components(job, group, Path(folder))
            limit = DeviceLimit(2**40, group.device, known=parts.engine.recomputation.known_tensors)
            with limit.active(), parts.make_train_step(job).reading_ahead(depth, range(2)) as train_step:
                for step in range(2):
                    train_step.step(step, 0.0)
            found.append(limit.peak())
    return found


@pytest.mark.parametrize("settings", [["layout.microbatches=2"], ["layout.cp=2"]])
def test_batches_count_on_the_device_when_the_step_takes_them(
    ranks: Ranks, tmp_path: Path, settings: list[str]
) -> None:
    job = small_job(tmp_path, "precision.recipe=fp32", *settings)
    for direct, ahead in ranks.run(2, peaks, job):
        assert direct == ahead > 0


def test_a_run_with_servers_refuses_the_setting(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"data.prefetch = 2 has no effect .*layout.server.transport=collectives"):
        small_job(tmp_path, "layout.data=parameter_server", "data.prefetch=2")
    assert small_job(tmp_path, "layout.data=parameter_server").data.prefetch == 2
