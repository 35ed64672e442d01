"""The copies of a link to CUDA, over streams that are simulated: each runs as late as it may, or as early."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from motet.memory.tiers import host_link
from motet.memory.tiers.host_link import CudaLink, ImmediateLink

CUDA = torch.device("cuda", 0)


class Recording:
    """A place in the queue of a stream."""

    def __init__(self, stream: "Stream") -> None:
        self.stream, self.stop = stream, stream.begun + len(stream.queue)

    def complete(self) -> None:
        while self.stream.begun < self.stop:
            self.stream.run_next()


class Event:
    """An event like that of torch.cuda: nothing waits for one that was not recorded."""

    def __init__(self) -> None:
        self.recording: Recording | None = None

    def record(self, stream: "Stream") -> None:
        self.recording = Recording(stream)

    def synchronize(self) -> None:
        if self.recording is not None:
            self.recording.complete()


class Stream:
    """A queue of kernels, copies and waits, which runs when somebody waits for it or the simulation says so."""

    def __init__(self, streams: list["Stream"]) -> None:
        self.queue, self.begun, self.device = list[Callable[[], object]](), 0, CUDA
        streams.append(self)

    def run_next(self) -> None:
        self.begun += 1
        self.queue.pop(0)()

    def wait_event(self, event: Event) -> None:
        if event.recording is not None:
            self.queue.append(event.recording.complete)

    def wait_stream(self, other: "Stream") -> None:
        self.queue.append(Recording(other).complete)

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event


class SimulatedCuda(TorchFunctionMode):
    """The part of torch.cuda that a link uses. Copies that do not block wait in the queue of the current stream."""

    def __init__(self, *, runs_early: bool) -> None:
        super().__init__()
        self.streams, self._runs_early = list[Stream](), runs_early
        self.compute = self._current = Stream(self.streams)
        self.freed_when_copied = list[Stream]()  # Of tensors whose memory the allocator keeps for a stream

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if function is Tensor.copy_ and options.pop("non_blocking", False):
            self.launch(lambda: args[0].copy_(args[1]), self._current)
            return args[0]
        return function(*args, **options)

    def launch(self, kernel: Callable[[], object], stream: Stream | None = None) -> None:
        """Queue a kernel. Streams that run early do so before the ones of the model, which runs late."""
        (stream or self.compute).queue.append(kernel)
        while self._runs_early and stream is not None and stream.queue:
            stream.run_next()

    def finish(self) -> None:
        """Run all that is left, the kernels of the model first: copies run when one waits for them."""
        for stream in self.streams:
            while stream.queue:
                stream.run_next()

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before


@pytest.fixture(params=[False, True], ids=["late", "early"])
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedCuda]:
    simulated = SimulatedCuda(runs_early=request.param)
    torch_cuda = SimpleNamespace(
        Stream=lambda device: Stream(simulated.streams),
        Event=Event,
        stream=simulated.stream,
        current_stream=lambda device: simulated._current,
    )

    class Torch:
        cuda = torch_cuda

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        @staticmethod
        def empty(*size: Any, dtype: torch.dtype, device: object = None, pin_memory: bool = False) -> Tensor:
            return torch.full(size[0] if isinstance(size[0], tuple) else size, 77, dtype=dtype)  # Other values

    def record_stream(tensor: Tensor, stream: Stream) -> None:
        simulated.freed_when_copied.append(stream)

    monkeypatch.setattr(Tensor, "record_stream", record_stream)
    monkeypatch.setattr(host_link, "torch", Torch())
    monkeypatch.setattr(host_link, "_STAGED_BYTES", 16)
    with simulated:
        yield simulated


def test_sums_arrive_as_they_were_when_they_were_sent(cuda: SimulatedCuda) -> None:
    link, source = CudaLink(CUDA), torch.zeros(4)
    cuda.launch(lambda: source.fill_(3))
    (copy,), arrival = link.to_host([source])
    (later,), later_arrival = link.to_host([source])
    assert len(cuda.freed_when_copied) == 2  # The caller may free them before they have arrived
    later_arrival.wait_on_host()
    assert copy.tolist() == later.tolist() == [3] * 4
    arrival.let_device_wait()
    cuda.launch(lambda: source.fill_(4))
    cuda.finish()
    assert copy.tolist() == [3] * 4 and (link.sent_to_host, link.sent_to_device) == (32, 0)


def test_memory_of_activations_is_free_when_the_device_waits(cuda: SimulatedCuda) -> None:
    """The wait happens in another stream than that which has made them, as in a thread of autograd."""
    link, source, other = CudaLink(CUDA), torch.zeros(4), Stream(cuda.streams)
    cuda.launch(lambda: source.fill_(3))
    (copy,), arrival = link.to_host([source], may_be_freed=False)
    with cuda.stream(other):
        arrival.let_device_wait()
    cuda.launch(lambda: source.fill_(4))  # Another tensor of the first stream has the memory
    cuda.finish()
    assert copy.tolist() == [3] * 4 and cuda.freed_when_copied == []


def test_a_fetched_copy_waits_for_the_kernels_before_it_and_others_for_it(
    cuda: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, rows, before, read = CudaLink(CUDA), torch.full((4,), 5.0), list[float](), list[float]()
    copy = torch.zeros(4)
    memory = torch.zeros(4)  # That of an earlier tensor, which the copy gets
    monkeypatch.setattr(host_link.torch, "empty", lambda *size, **options: memory)
    cuda.launch(lambda: before.extend(memory.tolist()))
    copy, arrival = link.fetch(rows)
    arrival.let_device_wait()
    cuda.launch(lambda: read.extend(copy.tolist()))
    cuda.finish()
    assert before == [0] * 4 and read == [5] * 4 and (link.sent_to_host, link.sent_to_device) == (0, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_may_change_when_they_are_sent(cuda: SimulatedCuda, dtype: torch.dtype) -> None:
    """They pass two buffers several times."""
    reader = Stream(cuda.streams)  # Another one than that of the thread which sends
    link, values, target = CudaLink(CUDA), torch.arange(50.0), torch.zeros(50, dtype=dtype)
    read = list[float]()
    arrival = link.to_device(target, values)
    other = link.to_device(target[:7], values[:7] + 1)
    values.zero_()
    with cuda.stream(reader):
        arrival.let_device_wait()
        other.let_device_wait()
    reader.queue.append(lambda: read.extend(target.tolist()))
    Recording(reader).complete()
    assert read == [*range(1, 8), *range(7, 50)] and link.sent_to_device == 57 * dtype.itemsize


def test_what_is_fetched_after_it_was_sent_has_arrived(cuda: SimulatedCuda) -> None:
    """An activation goes down and comes back on streams that know nothing of one another."""
    link, source, read = CudaLink(CUDA), torch.zeros(4), list[float]()
    cuda.launch(lambda: source.fill_(3))
    (host,), arrival = link.to_host([source], may_be_freed=False)
    arrival.let_device_wait()
    copy, arrival = link.fetch(host)
    arrival.let_device_wait()
    cuda.launch(lambda: read.extend(copy.tolist()))
    cuda.finish()
    assert read == [3] * 4


def test_a_link_of_processors_counts_the_same_bytes() -> None:
    link, source = ImmediateLink(torch.device("cpu")), torch.ones(4)
    (copy,), _ = link.to_host([source])
    link.fetch(copy)
    link.to_device(source.bfloat16(), copy)
    assert (link.sent_to_host, link.sent_to_device) == (16, 16 + 8)
