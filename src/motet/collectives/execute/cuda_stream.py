"""Work that is queued on a CUDA stream of its own, behind what the caller has queued so far."""

import torch

from motet.collectives.execute.work_queue import Task


class CudaStreamWork:
    """The host goes on at once; who waits has the current stream wait."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def is_completed(self) -> bool:
        return bool(self._event.query())


def run_on_stream(task: Task, stream: torch.cuda.Stream) -> CudaStreamWork:
    """The caller keeps its tensors until it has waited, or has the stream recorded on them."""
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        task()
        return CudaStreamWork(stream.record_event(), stream.device)
