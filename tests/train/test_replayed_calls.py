"""Calls that are captured once and replayed while their tensors stay, and the updates of ranks at stages 0 to 3."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from gpu_checks.kernel_patches import kernels_forced
from torch import Tensor

from kernel_recorder import KernelRecorder
from motet.parallel.process.process_group import RankGroup
from motet.train.job import Job
from motet.train.optimizer import one_pass_adamw
from motet.train.optimizer.replayed_calls import ReplayedCalls, cuda_graph_capture
from ranks import Ranks
from train.runs import Trained, same_bits, small_job, train, worst_difference


def add(total: Tensor, x: Tensor) -> None:
    total.add_(x.float())


class Sums:
    """A sum, to which kernels add tensors that are replayed, and what it must be."""

    def __init__(self, capture: Callable[[Callable[[], None]], Callable[[], None]] | None = None) -> None:
        self.recorder = KernelRecorder()
        self.calls = ReplayedCalls(capture or self.recorder.capture)
        self.sum, self.expected = torch.zeros(2, 2), torch.zeros(2, 2)
        self.compared = 0

    def add(self, x: Tensor, key: str = "") -> None:
        """Add a tensor, and compare. Each call has another function, as each update has."""

        def tensors() -> Iterator[Tensor]:
            self.compared += 1
            yield from (self.sum, x)

        self.calls.call(lambda: self.recorder.start(add, self.sum, x), key, tensors())
        self.expected += x.float()
        assert torch.equal(self.sum, self.expected)

    @property
    def counts(self) -> tuple[int, int]:
        return self.recorder.captures, self.recorder.replays


def test_a_call_is_replayed_while_its_tensors_stay() -> None:
    sums, x = Sums(), torch.randn(2, 2)
    for step in range(5):
        x.mul_(0.5)
        sums.add(x.view(2, 2))
        assert sums.counts == (min(step, 1), step)


def test_tensors_elsewhere_are_read_there() -> None:
    sums, xs = Sums(), torch.randn(3, 2, 2)
    for index in (0, 0, 0, 1, 0, 0, 2, 2):
        sums.add(xs[index])
    assert sums.counts == (3, 4)


@pytest.mark.parametrize(
    "changed",
    [lambda x: x.t(), lambda x: x.view(torch.int32), lambda x: x[:1], lambda x: x[:, :1]],
    ids=["strides", "dtype", "rows", "columns"],
)
def test_a_tensor_at_the_same_address_is_another_one(changed: Callable[[Tensor], Tensor]) -> None:
    sums, x = Sums(), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    for tensor in (x, x, changed(x), x):
        sums.add(tensor)
    assert sums.counts == (1, 1)


def test_each_key_has_a_capture() -> None:
    sums, xs = Sums(), torch.randn(2, 2, 2)
    for _ in range(3):
        sums.add(xs[0], "first")
        sums.add(xs[1], "second")
    assert sums.counts == (2, 4)


def test_tensors_that_move_often_end_captures_of_a_key() -> None:
    sums, xs = Sums(), torch.randn(3, 2, 2)
    for index in (*(0, 1) * 4, 0):
        sums.add(xs[index])
    for _ in range(3):
        sums.add(xs[2])
        sums.add(xs[1], "other")
    assert sums.counts == (1, 2) and sums.compared == 9 + 3


def test_captures_that_pay_go_on() -> None:
    sums, xs = Sums(), torch.randn(2, 2, 2)
    for move in range(20):
        for _ in range(5):
            sums.add(xs[move % 2])
    assert sums.counts == (20, 80)


def test_captures_that_do_not_pay_end() -> None:
    sums, xs = Sums(), torch.randn(2, 2, 2)
    for move in range(20):
        for _ in range(3):
            sums.add(xs[move % 2])
    assert sums.counts == (8, 16)


def test_a_capture_that_fails_leaves_the_call_to_run() -> None:
    """It may fail after it has kept kernels; a call that was captured runs, too."""
    recorder = KernelRecorder()

    def capture(function: Callable[[], None]) -> Callable[[], None]:
        replay = recorder.capture(function)
        if recorder.captures == 2:
            raise RuntimeError("not permitted when a stream is capturing")
        return replay

    sums, xs = Sums(capture), torch.randn(2, 2, 2)
    sums.recorder = recorder
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            sums.add(xs[0], "first")
        for _ in range(3):
            sums.add(xs[1], "second")
            sums.add(xs[0], "first")
    assert [str(each.message) for each in caught] == [
        "updates are not captured as CUDA graphs, and take longer on the host: not permitted when a stream is capturing"
    ]
    assert sums.counts == (2, 4)


def test_a_failing_function_raises() -> None:
    """Its error is not that of the capture: without one it raises again."""

    def fail() -> None:
        raise RuntimeError("out of memory")

    calls = ReplayedCalls(KernelRecorder().capture)
    calls.call(lambda: None, 0, [])
    with pytest.warns(UserWarning, match="out of memory"), pytest.raises(RuntimeError, match="out of memory"):
        calls.call(fail, 0, [])


def test_other_devices_capture_nothing() -> None:
    assert cuda_graph_capture(torch.device("cpu")) is None
    ran, tensors = list[int](), iter([torch.ones(())])
    for step in range(3):
        ReplayedCalls(None).call(partial(ran.append, step), 0, tensors)
    assert ran == [0, 1, 2] and len([*tensors]) == 1  # Placements were not read


class Graph:
    """torch's CUDA graph, whose calls are noted."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def capture_begin(self, *, capture_error_mode: str) -> None:
        self._events.append(f"begin {capture_error_mode}")

    def capture_end(self) -> None:
        self._events.append("end")

    def replay(self) -> None:
        self._events.append("replay")


class Stream:
    """A stream that is the current one inside."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def __enter__(self) -> None:
        self._events.append("side stream")

    def __exit__(self, *_: object) -> None:
        self._events.append("stream before")


def test_a_capture_begins_and_ends_on_a_side_stream() -> None:
    """There is no GPU here: calls of torch's public names are noted."""
    events = list[str]()

    def fail() -> None:
        raise RuntimeError

    with (
        patch.object(torch.cuda, "Stream", lambda device: Stream(events)),
        patch.object(torch.cuda, "stream", lambda stream: stream),
        patch.object(torch.cuda, "CUDAGraph", partial(Graph, events)),
    ):
        capture = cuda_graph_capture(torch.device("cuda", 1))
        assert capture is not None
        replay = capture(partial(events.append, "kernels"))
        captured = ["side stream", "begin thread_local", "kernels", "end", "stream before"]
        assert events == captured
        replay()
        assert events.pop() == "replay"
        with pytest.raises(RuntimeError):
            capture(fail)
    assert events == captured + [each for each in captured if each != "kernels"]


# --- ranks -------------------------------------------------------------------------------------------

STEPS = 4


def update_by_torch(
    master: Tensor,
    gradient: Tensor,
    moments: list[Tensor],
    *,
    numbers: Tensor,
    step: Tensor,
    compute: Tensor | None,
) -> None:
    """The kernel's update in operations of torch, which read every tensor when they run."""
    rate, decay, beta1, beta2, eps, scale = numbers.tolist()
    mean, square = moments
    scaled = gradient.to(master.dtype) * scale
    mean.lerp_(scaled, 1 - beta1)
    square.mul_(beta2).addcmul_(scaled, scaled, value=1 - beta2)
    root = (square / (1 - beta2 ** step.item())).sqrt_().add_(eps)
    master.mul_(1 - rate * decay).addcdiv_(mean, root, value=-rate / (1 - beta1 ** step.item()))
    if compute is not None:
        compute.copy_(master)


def train_with_updates(group: RankGroup, job: Job, *, captures: bool) -> tuple[Trained, int, int]:
    """A run with one kernel for each master: the numbers of kernels that ran, and of replays."""
    recorder, kernels = KernelRecorder(), 0

    def update(*tensors: Any, **named: Any) -> None:
        nonlocal kernels
        kernels += 1
        update_by_torch(*tensors, **named)

    with (
        kernels_forced({"adamw": "triton"}),
        patch.object(one_pass_adamw, "_update_adamw", partial(recorder.start, update)),
        patch.object(one_pass_adamw, "cuda_graph_capture", lambda device: recorder.capture if captures else None),
    ):
        return train(group, job, STEPS), kernels, recorder.replays


def train_in_three_ways(
    group: RankGroup, job: Job
) -> tuple[Trained, tuple[Trained, int, int], tuple[Trained, int, int]]:
    runs = [train_with_updates(group, job, captures=captures) for captures in (False, True)]
    return train(group, job, STEPS), runs[0], runs[1]


SMALL_BUCKETS = ["communication.bucket_mib=0.05", "communication.first_bucket_mib=0.05"]
# Settings, and the updates of a step that later steps replay, if addresses do not depend on the allocator.
CASES: dict[str, tuple[list[str], int]] = {
    "stage 0": (["layout.zero=0", *SMALL_BUCKETS], 1),
    "stage 0, updates on arrival": (["layout.zero=0", "communication.overlap=forward", *SMALL_BUCKETS], 4),
    "stage 1": (["layout.zero=1", "layout.microbatches=2", *SMALL_BUCKETS], 1),
    "stage 2": (["layout.zero=2", "layout.microbatches=2"], 1),
    "stage 2 in bf16": (["layout.zero=2", "precision.recipe=bf16"], 1),
    "a rank without masters": (["layout.data=parameter_server", "layout.server.transport=collectives"], 1),
    "stage 3": (["layout.zero=3"], 0),
    "stage 3 and a bucket": (["layout.zero=3", "layout.min_shard_numel=1000"], 1),
}


QUICK = "stage 0", "stage 2 in bf16", "stage 3"


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.proof) for case in CASES]
)
def test_updates_of_ranks_are_replayed_or_launched_with_the_same_bits(ranks: Ranks, tmp_path: Path, case: str) -> None:
    """Bits are those of launches, and numbers those of torch's AdamW."""
    settings, updates = CASES[case]
    job = small_job(tmp_path, "run.ranks=2", *settings)
    runs = ranks(2, train_in_three_ways, job)
    assert max(kernels for _, (_, kernels, _), _ in runs) >= STEPS
    for by_torch, (launched, kernels, none), (replayed, same_kernels, replays) in runs:
        least = (STEPS - 1) * updates if kernels else 0
        assert none == 0 and kernels == same_kernels and (replays >= least if "stage 3" in case else replays == least)
        assert launched.losses == replayed.losses and launched.norms == replayed.norms
        assert same_bits(launched.parameters, replayed.parameters) and same_bits(launched.masters, replayed.masters)
        if "bf16" not in case:
            pair = (replace(each, gradients=by_torch.gradients) for each in (launched, by_torch))
            assert worst_difference(*pair) < 1e-12  # torch's update scales its gradients in place
