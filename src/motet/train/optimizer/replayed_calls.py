"""Calls that start many kernels, captured in CUDA graphs: the host launches a graph in place of each kernel.

A graph keeps the addresses of tensors. So a call is captured when its tensors lie where they lay in the call before it,
and replayed while they stay there. The first call always runs: it compiles kernels and makes states. Tensors that have
moved are not copied to where a graph expects them: a copy has more bytes than a launch is worth.
"""

import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Records the kernels that a function starts, which do not run; returns a function that runs them.
Capture = Callable[[Callable[[], None]], Callable[[], None]]

_MOST_RUNS = 8  # Without enough replays between them, after which calls with a key are no longer captured; assumed
_REPLAYS_OF_A_CAPTURE = 4  # As long as a capture takes; assumed


@dataclass
class _LastCall:
    """The last call with a key."""

    placement: Sequence[tuple[object, ...]] | None = None  # Where its tensors lay
    replay: Callable[[], None] | None = None  # Set once the call is captured
    replays: int = 0
    runs: int = 0

    def move(self, placement: Sequence[tuple[object, ...]]) -> None:
        """Let tensors lie elsewhere, where a graph does not reach them."""
        self.runs = 1 if self.replays >= _REPLAYS_OF_A_CAPTURE else self.runs + 1
        self.placement, self.replay, self.replays = placement, None, 0


class ReplayedCalls:
    """Calls of functions by key; those with unmoved tensors are replayed."""

    def __init__(self, capture: Capture | None) -> None:
        """Every call runs without `capture`, and after a capture has failed."""
        self._capture, self._last_calls = capture, defaultdict[Hashable, _LastCall](_LastCall)

    def call(self, function: Callable[[], None], key: Hashable, tensors: Iterable[Tensor]) -> None:
        """Do what a function does by kernels alone. These are its tensors, other than tensors that never move; it
        allocates none."""
        last = self._last_calls[key]
        if self._capture is None or last.runs > _MOST_RUNS:
            function()
            return
        placement = [(each.data_ptr(), each.shape, each.stride(), each.dtype) for each in tensors]
        if placement != last.placement:
            last.move(placement)
        elif last.replay is None:
            last.replay = self._try_to_capture(function)
        if last.replay is None:
            function()
        else:
            last.replays += 1
            last.replay()

    def _try_to_capture(self, function: Callable[[], None]) -> Callable[[], None] | None:
        assert self._capture is not None
        try:
            return self._capture(function)
        except RuntimeError as error:
            warnings.warn(
                f"updates are not captured as CUDA graphs, and take longer on the host: {error}", stacklevel=2
            )
            self._capture = None
            return None


def cuda_graph_capture(device: torch.device) -> Capture | None:
    """The capture of kernels on a GPU; None for other devices."""
    if device.type != "cuda":
        return None
    side_stream = torch.cuda.Stream(device)

    def capture(function: Callable[[], None]) -> Callable[[], None]:
        """Unlike `torch.cuda.graph`, keep the caches of torch's allocators and wait for nothing: an emptied cache
        costs the next step its allocations, and moves gradients."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(side_stream):
            # Other threads pin memory and query events meanwhile
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                function()
            finally:
                graph.capture_end()
        return graph.replay

    return capture
