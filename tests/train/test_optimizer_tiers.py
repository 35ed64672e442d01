"""An optimizer whose states lie on the host trains to the bits of one whose states lie on the device."""

import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from motet.memory.tiers import optimizer_states, row_window
from motet.memory.tiers.host_link import Arrival, ImmediateLink
from motet.memory.tiers.optimizer_states import FileStates
from motet.models.user_module import find_blocks
from motet.parallel.data_parallel.fsdp import FSDP2DataParallel, local_shard
from motet.parallel.process.process_group import RankGroup
from motet.parallel.step_plan.traffic import HostLinkBytes, host_link_bytes, state_files
from motet.train.build import TrainingComponents, build_components, precision_context
from motet.train.job import Job
from motet.train.memory_check.step_prediction import memory_need
from ranks import Ranks
from train.runs import run_job, same_bits, saved_tensors, small_job

STEPS = 6


Trained = tuple[list[tuple[float, float, bool]], dict[str, torch.Tensor], list[int], HostLinkBytes, list[int], int]


@contextmanager
def counted_buffers() -> Iterator[list[int]]:
    """The bytes of live buffers for rows that are read from files, and the most of them."""
    counts = [0, 0]

    def add(size: int) -> None:
        counts[0] += size
        counts[1] = max(counts)

    class Counted(row_window.RowBuffer):
        def __init__(self, byte_count: int, device: torch.device) -> None:
            super().__init__(byte_count, device)
            add(self.bytes.nbytes)
            weakref.finalize(self, add, -self.bytes.nbytes)

    with patch.object(row_window, "RowBuffer", Counted):
        yield counts


def trained(group: RankGroup, job: Job) -> Trained:
    """(Loss, norm, is finite) of each step; the parameters, masters and moments of a rank; the bytes that it sent to
    its host and to its device, and those of a step by the plan; the bytes that it read and wrote in files, and those of
    a step by the plan."""
    with precision_context(job), tempfile.TemporaryDirectory() as folder, counted_buffers() as buffers:
        parts = build_components(job, group, Path(folder))
        optimizer, step, results = parts.engine.optimizer, parts.make_train_step(job), []
        states: Any = optimizer.states
        before = [states.sent_to_host, states.sent_to_device] if states else []  # A check of a module calls it
        moved_before = states.moved_bytes if isinstance(states, FileStates) else (0, 0)
        for index in range(STEPS):
            result = step.step(index, job.optimizer.learning_rate)
            results.append((result.loss, result.grad_norm, result.is_finite))
        tensors = {
            f"{kind}/{name}": shard.values.clone()
            for kind, shards in optimizer.state_by_kind().items()
            for name, shard in shards.items()
        }
        optimizer.drop_copies()
        tensors |= {name: local_shard(p).values.clone() for name, p in parts.model.module.named_parameters()}
        sent = [states.sent_to_host - before[0], states.sent_to_device - before[1]] if states else []
        planned = host_link_bytes(parts.engine.plan, job.precision.resolved, rank=group.rank)
        if states and not job.precision.moment_dtype:
            check_bytes_of_the_host(parts, job, group.rank, window=buffers[1])
        moved, files = [0, 0], 0
        if isinstance(states, FileStates):
            moved = [after - start for after, start in zip(states.moved_bytes, moved_before, strict=True)]
            layouts = state_files(
                parts.engine.plan,
                job.precision.resolved,
                moment_kinds=job.optimizer.moment_kinds,
                rank=group.rank,
            )
            files = sum(layout.update_bytes for layout in layouts)
            kinds = 1 + len(job.optimizer.moment_kinds)
            exact = kinds * sum(tensor.nbytes for tensor in states.masters)
            assert exact <= files < exact + kinds * 4096 * len(states.masters)
        return results, tensors, sent, planned, moved, files


def check_bytes_of_the_host(parts: TrainingComponents, job: Job, rank: int, *, window: int) -> None:
    """The bytes on the host are predicted: masters and moments, unless they are in files, gradients, and a window of
    rows that are read from files."""
    engine = parts.engine
    need = memory_need(engine.plan, job.precision.resolved, job.optimizer, rank=rank, place="host")
    state, engines = engine.optimizer.state_by_kind(), engine.optimizer.sharded_parameters.engines
    kept = sum(shard.values.nbytes for kind in state for shard in state[kind].values() if shard.shape)
    gradients = sum(sent.nbytes for each in engines for sent in (each._hosted.sums.values() if each._hosted else ()))
    rows = [
        shard.values
        for each in engines
        if isinstance(each, FSDP2DataParallel) and job.memory.parameters == "host"
        for name, shard in each._row_shards.items()
        # Trained rows are masters that lie on the host; an engine may know rows of others.
        if name in each.plan.group.frozen or (name in each.sharded_parameters and job.memory.optimizer == "disk")
    ]
    if job.memory.parameters == "disk":
        assert need["parameters"] == window > 0
    copies = sum(each.nbytes for each in rows) + window
    padding = sum(need.values()) - gradients - kept * (job.memory.optimizer == "host") - copies
    assert need["gradients that were sent"] == gradients > 0
    assert 0 <= padding <= 0.02 * (kept + copies)  # Buckets and rows have padding


def has_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


CASES: list[tuple[str, list[str]]] = [
    ("zero=0", []),
    ("dp=2 zero=0", ["precision.recipe=bf16"]),
    ("dp=2 zero=1", []),
    ("dp=3 zero=2 microbatches=2", ["precision.recipe=bf16"]),
    ("dp=2 zero=3 microbatches=2", ["precision.recipe=fp32"]),
    ("dp=2 zero=3", ["precision.recipe=bf16"]),
    ("tp=2", ["precision.recipe=bf16"]),
    ("dp=1 pp=2 microbatches=2", ["precision.recipe=fp32"]),
    ("pp=2 chunks=2 schedule=zb-v microbatches=4", ["model.layers=4", "precision.recipe=bf16"]),
    ("dp=2 zero=1", ["precision.recipe=fp16", "precision.loss_scale_initial=4194304"]),
    ("dp=2 zero=2", ["run.reproducible=layout"]),
    ("dp=2 zero=1", ["precision.moment_dtype=bfloat16", "precision.recipe=bf16"]),
    ("dp=2 zero=1", ["optimizer.name=sgd", "optimizer.momentum=0.9"]),
    ("dp=2 zero=2", ["memory.recompute=full", "precision.recipe=bf16"]),
]
QUICK = [("host", 0), ("host", 3), ("host", 8), ("host", 9), ("disk", 1), ("disk", 4), ("disk", 9)]


@pytest.mark.parametrize(
    ("layout", "settings", "place"),
    [
        pytest.param(*case, place, marks=() if (place, index) in QUICK else pytest.mark.proof)
        for index, case in enumerate(CASES)
        for place in ("host", "disk")
        if place == "host" or not any("moment_dtype" in word for word in case[1])
    ],
)
def test_states_elsewhere_have_the_bits_of_the_device(
    ranks: Ranks, tmp_path: Path, layout: str, settings: list[str], place: str
) -> None:
    check_bits(ranks, tmp_path, layout, settings, place)


def check_bits(
    ranks: Ranks, tmp_path: Path, layout: str, settings: list[str], place: str, *, overlap: str = "backward"
) -> None:
    """Training with states elsewhere has the bits of training with states on the device."""
    words = [f"layout.{word}" for word in layout.split()]
    jobs = [
        small_job(tmp_path, "optimizer.clip_norm=0.05", *words, *settings, f"memory.optimizer={each}", *more)
        for each, more in (
            ("device", []),
            (place, [f"memory.folder={tmp_path}"] * (place == "disk") + [f"communication.overlap={overlap}"]),
        )
    ]
    first, second = (ranks.run(world_of(layout), trained, job, timeout_s=120) for job in jobs)
    for (results, tensors, *_), (other_results, other_tensors, sent, planned, moved, files) in zip(
        first, second, strict=True
    ):
        assert repr(results) == repr(other_results)  # A norm may be NaN
        assert tensors.keys() == other_tensors.keys()
        assert [name for name in tensors if not has_same_bits(tensors[name], other_tensors[name])] == []
        updates = sum(is_finite for *_, is_finite in results)
        assert sent == [STEPS * planned.to_host, updates * planned.to_device]
        assert planned.to_host > 0 and updates
        assert moved == [updates * files, updates * files] and bool(files) == (place == "disk")


def world_of(layout: str) -> int:
    """The ranks of a layout."""
    world = 1
    for word in layout.split():
        key, _, value = word.partition("=")
        world *= int(value) if key in ("dp", "tp", "pp") else 1
    return world


OVERLAPPED = [
    ("zero=1", "host", ["precision.recipe=bf16"]),
    ("dp=2 zero=1", "host", []),
    ("dp=2 zero=1", "disk", ["precision.recipe=bf16"]),
    ("dp=2 zero=2 microbatches=2", "host", ["precision.recipe=fp32", "communication.first_bucket_mib=0.01"]),
    ("dp=2 zero=3 microbatches=2", "host", ["precision.recipe=bf16"]),
    ("dp=2 zero=3", "disk", ["precision.recipe=fp32"]),
    ("dp=2 tp=2 zero=1", "host", ["precision.recipe=bf16", "communication.bucket_mib=0.01"]),
    ("dp=2 pp=2 zero=1 microbatches=2", "host", ["precision.recipe=fp32"]),
    ("dp=2 zero=1", "disk", ["precision.recipe=fp16", "precision.loss_scale_initial=4194304"]),
    ("dp=2 zero=2", "host", ["run.reproducible=layout"]),
    ("dp=2 pp=2 zero=3 chunks=2 schedule=zb-v microbatches=6", "host", ["model.layers=4", "precision.recipe=bf16"]),
    ("dp=2 zero=3", "host", ["precision.recipe=bf16", "memory.recompute=full"]),
    ("dp=2 zero=1", "host", ["precision.recipe=bf16", "precision.moment_dtype=bfloat16"]),
]


@pytest.mark.parametrize(
    ("layout", "place", "settings"),
    [pytest.param(*case, marks=() if i in (3, 5) else pytest.mark.proof) for i, case in enumerate(OVERLAPPED)],
)
def test_updates_that_overlap_with_forward_have_the_same_bits(
    ranks: Ranks, tmp_path: Path, layout: str, place: str, settings: list[str]
) -> None:
    check_bits(ranks, tmp_path, layout, settings, place, overlap="forward")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("host", "disk"),
        *(pytest.param(*pair, marks=pytest.mark.proof) for pair in (("disk", "device"), ("device", "host"))),
    ],
)
def test_a_run_goes_on_in_another_place(ranks: Ranks, tmp_path: Path, first: str, second: str) -> None:
    def job_in(place: str, steps: int) -> Job:
        folder = [f"memory.folder={tmp_path}"] * (place == "disk")
        settings = [
            "precision.recipe=bf16",
            "layout.zero=1",
            "checkpoint.every=1000",
            "optimizer.schedule.kind=constant",
        ]
        return small_job(tmp_path, *settings, f"memory.optimizer={place}", f"run.steps={steps}", *folder)

    for folder, runs in (("whole", [("device", 6)]), ("run", [(first, 3), (second, 6)])):
        (tmp_path / folder).mkdir()
        for place, steps in runs:
            ranks.run_places(2, run_job, job_in(place, steps), tmp_path / folder, timeout_s=120)
    assert same_bits(saved_tensors(tmp_path / "whole"), saved_tensors(tmp_path / "run"))
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("motet-state")]


CGROUPS = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def memory_cgroup(tmp_path: Path) -> Iterator[Path]:
    """A memory cgroup of version 1, which root can make."""
    group = CGROUPS / f"motet-test-{tmp_path.name}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield group
    for _ in range(50):
        try:
            group.rmdir()
            return
        except OSError:
            time.sleep(0.1)


@pytest.mark.proof
def test_files_fit_where_the_host_is_too_small(tmp_path: Path, memory_cgroup: Path) -> None:
    """A process limit that holds the state in files and not in memory."""
    (memory_cgroup / "memory.limit_in_bytes").write_text(f"{1000 << 20}")

    def train(*words: str) -> subprocess.CompletedProcess[str]:
        settings = [*words, "memory.device_limit=400MiB", "run.steps=3", "run.threads=1", "monitor.tensorboard=false"]
        command = [
            sys.executable,
            "-m",
            "motet",
            "train",
            "offload-demo",
            *settings,
            f"run.folder={tmp_path / words[0]}",
        ]
        enter = f'echo $$ > {memory_cgroup}/cgroup.procs; exec "$@"'
        return subprocess.run(["bash", "-c", enter, "bash", *command], capture_output=True, text=True, check=False)

    on_host, on_disk = train("memory.optimizer=host"), train("memory.optimizer=disk", f"memory.folder={tmp_path}")
    assert on_host.returncode == 3 and "SIGKILL" in on_host.stderr, on_host.stderr[-500:]
    assert on_disk.returncode == 0, on_disk.stderr[-500:]


def updates_in_forward(group: RankGroup, job: Job) -> list[int]:
    """The masters that were not updated yet when the first block began the forward of each step after the second. Each
    update of the last ones waits for that forward."""
    with precision_context(job), tempfile.TemporaryDirectory() as folder:
        parts = build_components(job, group, Path(folder))
        engine, step = parts.engine, parts.make_train_step(job)
        optimizer, begun, left = engine.optimizer, threading.Event(), list[int]()
        updates: Any = optimizer.states.updates if optimizer.states else None
        update_slice, count = optimizer._update_slice, len(optimizer._masters)
        done = list[int]()

        def waiting(index: int, following: list[int]) -> None:
            if index == ends[0]:
                begun.clear()  # The forward waits for this one
            if index == ends[1] and not begun.wait(30):
                raise TimeoutError("the forward does not begin before the last update")
            update_slice(index, following)
            done.append(index)

        def on_forward(module: torch.nn.Module, args: object) -> None:
            left.append(len(updates._left))
            begun.set()

        optimizer._update_slice = waiting
        ends = [-1, -1]  # The masters that the forward needs first and last
        blocks = find_blocks(parts.model.module)
        for index in range(4):
            step.step(index, 0.01)
            if index == 0:
                blocks[0].register_forward_pre_hook(on_forward)
            order = optimizer.sharded_parameters.update_order
            assert order is not None and sorted(order) == list(range(count))
            ends[:] = order[0], order[-1]
        ends[:] = -1, -1
        begun.set()
        optimizer.sharded_parameters.wait_for_pending()
        assert len(done) == 4 * count
        return left


@pytest.mark.parametrize("layout", ["zero=1", "dp=2 zero=1", "dp=2 zero=3"])
def test_the_forward_begins_before_the_last_update(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    small = [] if "zero=3" in layout else ["communication.bucket_mib=0.01", "communication.first_bucket_mib=0.01"]
    words = [f"layout.{word}" for word in layout.split()]
    job = small_job(tmp_path, *words, *small, "memory.optimizer=host", "communication.overlap=forward")
    for left in ranks.run(world_of(layout), updates_in_forward, job, timeout_s=120):
        assert len(left) == 3 and all(left[1:])


class SlowLink(ImmediateLink):
    """Sums and values arrive some time after they were sent, in another thread."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._sender = ThreadPoolExecutor(1)
        self.has_sent = threading.Event()  # Sums of the step that is under way
        self.alive = list[int]()  # Copies of sums that the host has when those of a bucket are sent
        self.waiting_threads = set[str]()  # Threads that have waited for sums
        self._sums = weakref.WeakSet[torch.UntypedStorage]()

    def _to_host(self, tensors: Sequence[torch.Tensor], *, may_be_freed: bool) -> tuple[list[torch.Tensor], Arrival]:
        self.alive.append(len(self._sums))
        self.has_sent.set()
        copies = [torch.zeros_like(tensor) for tensor in tensors]
        self._sums.update(copy.untyped_storage() for copy in copies)
        return copies, self._send(copies, tensors)

    def _to_device(self, target: torch.Tensor, values: torch.Tensor) -> Arrival:
        return self._send([target], [values.to(target.dtype, copy=True)])

    def _send(self, copies: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Arrival:
        def send() -> None:
            time.sleep(0.02)
            with torch.no_grad():
                for copy, source in zip(copies, sources, strict=True):
                    copy.copy_(source)

        return SlowArrival(self, self._sender.submit(send))


@dataclass(frozen=True)
class SlowArrival:
    link: SlowLink
    sent: Future[None]

    def let_device_wait(self) -> None:
        self.sent.result()

    def wait_on_host(self) -> None:
        self.link.waiting_threads.add(threading.current_thread().name)
        self.sent.result()


def trained_over_a_slow_link(group: RankGroup, job: Job) -> Trained:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer_states, "link_of", SlowLink)
        return trained(group, job)


@pytest.mark.parametrize("layout", ["zero=1", "dp=2 zero=1", pytest.param("dp=2 zero=3", marks=pytest.mark.proof)])
def test_a_forward_waits_for_values_that_arrive_late(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    words = [f"layout.{word}" for word in layout.split()]
    small = [] if "zero=3" in layout else ["communication.bucket_mib=0.05", "communication.first_bucket_mib=0.05"]
    late = ["memory.optimizer=host", "communication.overlap=forward"]
    here, there = (
        ranks.run(world_of(layout), function, small_job(tmp_path, *words, *small, *more), timeout_s=120)
        for function, more in ((trained, []), (trained_over_a_slow_link, late))
    )
    for (results, tensors, *_), (other_results, other_tensors, *_) in zip(here, there, strict=True):
        assert results == other_results
        assert [name for name in tensors if not has_same_bits(tensors[name], other_tensors[name])] == []


def waits_for_sums(group: RankGroup, job: Job) -> tuple[int, set[str]]:
    """The most copies of sums of earlier steps that the host has in a step, and the threads that wait for sums."""
    with pytest.MonkeyPatch.context() as patch, precision_context(job), tempfile.TemporaryDirectory() as folder:
        patch.setattr(optimizer_states, "link_of", SlowLink)
        parts = build_components(job, group, Path(folder))
        optimizer, step = parts.engine.optimizer, parts.make_train_step(job)
        states, update_slice = optimizer.states, optimizer._update_slice
        assert states is not None and isinstance(states.link, SlowLink)
        link, alive = states.link, list[int]()

        def update_behind_sums(index: int, following: Sequence[int]) -> None:
            assert not optimizer.delays or link.has_sent.wait(30)
            update_slice(index, following)

        optimizer._update_slice = update_behind_sums
        for index in range(4):
            link.alive.clear()
            link.has_sent.clear()
            step.step(index, 0.01)
            alive.append(link.alive[0])
        optimizer.sharded_parameters.wait_for_pending()
        return max(alive), link.waiting_threads


@pytest.mark.parametrize(
    ("settings", "thread"),
    [
        ([], "MainThread"),
        (["communication.overlap=forward"], "motet-host-update_0"),
        (["memory.update=delayed"], "MainThread"),  # An update in the background waits for no sums of its step
        (["memory.update=delayed", "communication.overlap=forward"], "MainThread"),
    ],
)
def test_the_sums_of_a_step_are_freed_before_the_next_arrive(
    ranks: Ranks, tmp_path: Path, settings: list[str], thread: str
) -> None:
    job = small_job(tmp_path, "layout.zero=1", "memory.optimizer=host", "communication.bucket_mib=0.05", *settings)
    for alive, threads in ranks.run(1, waits_for_sums, job, timeout_s=120):
        assert alive == 0
        assert thread in threads and threads <= {"MainThread", thread}
