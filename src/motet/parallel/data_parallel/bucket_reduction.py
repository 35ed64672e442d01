"""The reductions of one bucket, executed in the order of its schedule."""

import torch
from torch import Tensor

from motet.collectives.execute.work_queue import WorkHandle
from motet.parallel.data_parallel.communication.communicator import DataParallelCommunicator
from motet.parallel.data_parallel.flat_parameters import GradientBuffer
from motet.parallel.data_parallel.unit_schedule import CommUnitAction, UnitSchedule


class BucketReduction:
    """The gradients of one bucket from the end of their backward to their sum over all ranks.

    Collectives of a bucket follow one another. Those of each micro-batch reduce its gradients, which are then added to
    those before; those of the last micro-batch reduce what has been added up.
    """

    def __init__(
        self, unit_id: int, schedule: UnitSchedule, gradients: GradientBuffer, *, communicator: DataParallelCommunicator
    ) -> None:
        self._unit_id, self._gradients, self._communicator = unit_id, gradients, communicator
        self._each = [action for action in schedule if action.moment == "microbatch"]
        self._last = [action for action in schedule if action.moment == "last_microbatch"]
        # A summation tree adds up the micro-batches itself.
        self._adds_microbatches = bool(self._each) and not any(a.kind == "tree_reduce_scatter" for a in self._each)
        self._todo: list[CommUnitAction] = []
        self._running: CommUnitAction | None = None
        self._work: WorkHandle | None = None
        self._new_sum: Tensor | None = None  # Of this micro-batch, where it is added to those before

    def start(self, is_first: bool, is_last: bool) -> None:
        """Start the first collective of this micro-batch, whose gradients are complete."""
        self._gradients.zero_missing(self._unit_id)
        shard = self._gradients.shard(self._unit_id)
        self._todo = [*self._each, *(self._last if is_last else [])]
        self._new_sum = torch.empty_like(shard) if self._adds_microbatches and not is_first else None
        self._start_next()

    def advance(self) -> None:
        """Wait for the collective in flight, if another one follows or it frees memory, and start the next one."""
        if self._running is not None and (self._todo or self._running.is_scatter):
            self._finish_running()

    def finish(self) -> None:
        """Wait until the gradients are summed."""
        while self._running is not None:
            self._finish_running()

    def _finish_running(self) -> None:
        action, work, self._running, self._work = self._running, self._work, None, None
        assert action is not None and work is not None
        work.wait()
        del work  # its buffers, before the next collective allocates
        if action.is_scatter:
            self._gradients.free_bucket(self._unit_id)
        has_more = any(each.moment == "microbatch" for each in self._todo)
        if self._new_sum is not None and not has_more:
            self._gradients.shard(self._unit_id).add_(self._new_sum)
            self._new_sum = None
        self._start_next()

    def _start_next(self) -> None:
        if not self._todo:
            return
        self._running = action = self._todo.pop(0)
        output = self._gradients.shard(self._unit_id) if self._new_sum is None else self._new_sum
        unsharded = self._gradients.bucket(self._unit_id) if action.is_scatter else None
        self._work = self._communicator.execute(action, self._unit_id, output, source=unsharded)
