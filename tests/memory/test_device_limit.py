"""A device in miniature: the kernel that passes the limit raises, and memory of the host does not count."""

import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from motet.core.errors import DeviceMemoryError, InputError, RankFailedError
from motet.core.trace import span
from motet.memory.measured_costs import StepBytes
from motet.memory.policy_choice import MemorySettings
from motet.memory.storage_tracker import StepCategories, StorageTracker
from motet.memory.tiers.device_limit import DeviceLimit, count_batch, host_memory, mark_as_host
from motet.train.launch.failures import run_and_record

ROWS, WIDTH, CPU = 8, 16, torch.device("cpu")
MATRIX, WEIGHT = 4 * ROWS * WIDTH, 4 * WIDTH * WIDTH


class Step:
    """A linear layer, its input and an optimizer."""

    def __init__(self) -> None:
        self.layer, self.x = nn.Linear(WIDTH, WIDTH, bias=False), torch.ones(ROWS, WIDTH)
        self.optimizer = torch.optim.AdamW(self.layer.parameters(), foreach=False)

    def known(self) -> list[Tensor]:
        return [self.layer.weight, self.x]

    def limit(self, limit: int) -> DeviceLimit:
        return DeviceLimit(limit, CPU, known=self.known)

    def forward(self) -> Tensor:
        loss: Tensor = self.layer(self.x).square().sum()
        return loss


def with_limit(limit: int, step: Step, *, passes: int) -> None:
    """The first passes of a step: forward, backward, update."""
    with step.limit(limit).active():
        loss = step.forward()
        if passes > 1:
            loss.backward()
        del loss
        if passes > 2:
            step.optimizer.step()


# Live bytes at the peak of each pass, counted by hand, and what is said of the kernel that makes the last of them. The
# forward has y, its square and the loss. Backward has y, three tensors for the gradient of the square, the loss and its
# gradient. The update has both moments, and the temporary tensors of AdamW.
PEAKS = [
    ("forward", 1, WEIGHT + MATRIX + 2 * MATRIX + 4, "the kernel sum makes 4 B", ""),
    ("backward", 2, WEIGHT + MATRIX + 4 * MATRIX + 8, "the kernel mul in backward makes 512 B", " in backward"),
    ("update", 3, None, "makes 1 KiB", ""),
]


@pytest.mark.parametrize(("name", "passes", "counted", "kernel", "where"), PEAKS, ids=[each[0] for each in PEAKS])
def test_the_kernel_that_passes_the_limit_raises(
    name: str, passes: int, counted: int | None, kernel: str, where: str
) -> None:
    free = (step := Step()).limit(2**40)
    with free.active():
        loss = step.forward()
        if passes > 1:
            before = free.peak()
            loss.backward()
            assert free.peak() > before  # The largest of the passes so far
        del loss
        if passes > 2:
            before = free.peak()
            step.optimizer.step()
            assert free.peak() > before
    peak = free.peak()
    assert counted is None or peak == counted
    with_limit(peak, Step(), passes=passes)
    with pytest.raises(DeviceMemoryError) as refused:
        with_limit(peak - 1, Step(), passes=passes)
    sentence = str(refused.value)
    assert sentence.startswith(f"memory.device_limit = {peak - 1} (") and f"({peak} bytes) are alive" in sentence
    assert kernel in sentence
    assert (" in backward" in sentence) == bool(where)
    for remedy in ("memory.recompute", "layout.microbatches", "layout.zero", 'memory.optimizer = "host"'):
        assert remedy in sentence
    assert issubclass(DeviceMemoryError, RankFailedError)


def test_a_rank_goes_on_after_an_error_that_it_catches() -> None:
    """The tensor that was too large is freed; what is left counts on."""
    limit = DeviceLimit(1000, CPU, known=list)
    with limit.active():
        kept = torch.ones(200)
        with pytest.raises(DeviceMemoryError, match=r"the kernel ones makes 400 B, with which 1\.17 KiB") as refused:
            torch.ones(100)
        assert limit.live() == kept.nbytes == 800 and refused.tb is not None  # Its frames are alive
        assert torch.ones(50).nbytes == 200
    torch.ones(1000)


def test_tensors_that_a_rank_has_before_take_more_than_the_limit() -> None:
    step = Step()
    with pytest.raises(InputError, match=f"between steps take 1.5 KiB \\({WEIGHT + MATRIX} bytes\\)"):
        step.limit(WEIGHT + MATRIX - 1).start()
    limit = step.limit(WEIGHT + MATRIX)
    with limit.active():
        assert limit.live() == WEIGHT + MATRIX


def test_memory_of_the_host_does_not_count() -> None:
    limit = DeviceLimit(1000, CPU, known=list)
    with limit.active():
        gradient = torch.ones(100)
        with host_memory():
            master = torch.ones(10000)
            master[:100].sub_(gradient)
        assert limit.live() == limit.peak() == 400
        master.mul_(2)  # Also where a kernel outside changes it, and for its views
        assert limit.live() == 400 and master.view(100, 100)[0].numel() == 100
        copied = master[:50] * 1
        assert limit.live() == 400 + copied.nbytes
        del master
        assert limit.live() == 600


def test_what_host_memory_made_before_does_not_count_later() -> None:
    """Whether a tracker was active then or not."""
    with host_memory():
        masters = [torch.ones(1000), torch.ones(1000).view(10, 100)]
    with DeviceLimit(100, CPU, known=partial(list, masters)).active(), StorageTracker(masters) as later:
        assert later.live() == 0
        masters[0].add_(masters[1].view(-1))
        assert later.live() == later.peak() == 0
    masters.clear()
    assert StorageTracker([torch.ones(1000)]).live() == 4000  # Another storage, perhaps at the same address


def test_tensors_that_are_marked_count_no_longer() -> None:
    limit = DeviceLimit(5000, CPU, known=list)
    with limit.active(), StorageTracker() as inner:
        moment, other = torch.ones(1000), torch.ones(100)
        mark_as_host([moment.view(10, 100)])
        assert limit.live() == inner.live() == other.nbytes
        moment.add_(1)
        assert limit.live() == inner.live() == other.nbytes
        assert torch.ones(1000).nbytes == 4000  # It fits now
        del moment
        assert limit.live() == inner.live() == other.nbytes
    assert StorageTracker([other]).live() == other.nbytes


def test_trackers_that_measure_do_not_count_the_host_either() -> None:
    """The trackers of `memory.recompute = "auto"` and of `motet show memory`, inside of a limit and alone."""
    for is_limited in (True, False):
        with host_memory():
            state = torch.ones(1000)
        limit, measured, categories = DeviceLimit(10000, CPU, known=list), StorageTracker([state]), StepCategories()
        if is_limited:
            limit.start()
        step = StepBytes(measured)
        with categories.watching():
            step.begin()
            categories.begin_step([("moments", [state])])
            with span("forward"), host_memory():
                more = torch.ones(2000)
            with span("forward"):
                kept = torch.ones(100) + state[:100]
            step.end()
            timeline = categories.end_step()
        limit.stop()
        assert measured.live() == kept.nbytes and timeline.total[-1] == kept.nbytes
        assert timeline.peak == max(moment.peak for moment in step.moments) == 2 * kept.nbytes
        assert not is_limited or limit.live() == kept.nbytes
        assert more.numel() and all(life.size < 4000 for life in timeline.lives)


def test_an_inner_tracker_sees_the_error_of_the_outer_one() -> None:
    with DeviceLimit(1000, CPU, known=list).active(), StorageTracker() as inner:
        with pytest.raises(DeviceMemoryError):
            torch.ones(1000)
        assert inner.live() == 0
        assert torch.ones(10).nbytes == inner.peak()


def test_a_batch_counts_from_where_it_is_moved() -> None:
    """Its arrays are made by NumPy, so no kernel makes them. A view of a data set is no batch on the device."""
    tokens = torch.frombuffer(bytearray(800), dtype=torch.int64)
    limit = DeviceLimit(10000, CPU, known=list)
    with limit.active():
        tokens.sum()
        assert limit.live() == 0
        data_set = torch.frombuffer(bytearray(99), dtype=torch.uint8)
        count_batch({"tokens": tokens, "more": [tokens, 3], "view": data_set[1:]})
        assert limit.live() == 800
        tokens.add(1)
        assert limit.live() == 800 and limit.peak() == 1600
        del tokens
        assert limit.live() == 0


def test_on_cuda_the_allocator_keeps_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    set_fractions = list[tuple[float, torch.device]]()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80_000))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *each: set_fractions.append(each))
    device = torch.device("cuda", 0)
    with DeviceLimit(20_000, device, known=list).active(), DeviceLimit(100_000, device, known=list).active():
        with host_memory(device):
            made = torch.ones(30_000)  # Neither limited nor marked
        assert StorageTracker([made]).live() == made.nbytes
    assert set_fractions == [(0.25, device), (1.0, device)]


TORCH_SAYS = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.25 GiB of which 78.10 GiB is "
    "free. 1.00 GiB allowed; Of the allocated memory 998.00 MiB is allocated by PyTorch, and 4.00 MiB is reserved by "
    "PyTorch but unallocated. If reserved but unallocated memory is large try setting ..."
)


def test_the_error_of_the_allocator_becomes_one_sentence() -> None:
    def fail() -> int:
        raise torch.OutOfMemoryError(TORCH_SAYS)

    record = run_and_record(1, fail)
    assert record.exit_code == 3 and record.traceback == "" and not record.caused_by_peer
    assert record.message.startswith(
        "rank 1 failed: the device has too little memory (the operation needs 20.00 MiB more, 998.00 MiB are "
        "allocated, the limit is 1.00 GiB (memory.device_limit), the GPU has 79.25 GiB); recompute"
    )
    assert (
        "\n" not in record.message
        and "memory.device_limit"
        not in run_and_record(
            0, lambda: (_ for _ in ()).throw(torch.OutOfMemoryError(re.sub(r"1\.00 GiB allowed; ", "", TORCH_SAYS)))
        ).message
    )


def test_the_budget_is_the_limit_where_none_is_set() -> None:
    assert MemorySettings(recompute="auto", device_limit=1000).step_budget == 1000
    assert MemorySettings(recompute="auto", device_limit=1000, budget=900).step_budget == 900
    assert MemorySettings(recompute="full", device_limit=1000).step_budget is None
    with pytest.raises(ValueError, match=r"memory.budget = 1001 is more than memory.device_limit = 1000; lower it"):
        MemorySettings(recompute="auto", device_limit=1000, budget=1001)
