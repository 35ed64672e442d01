"""Sums of differences over replicas that train apart: as they are, or by a codec, which gives again what it lost."""

from collections.abc import Sequence
from functools import partial
from weakref import finalize

import torch
from torch import Tensor

from motet.collectives.compression import compressed_collectives
from motet.collectives.compression.byte_messages import codec_numerics, to_accumulation_dtype
from motet.collectives.compression.codec_options import PowerSGDCodecOptions
from motet.collectives.execute.api import CollectiveOptions, WorkHandle, all_reduce
from motet.collectives.execute.work_queue import CompletedWork, FifoWorkQueue
from motet.core.errors import InputError
from motet.core.seeds import derive_seed
from motet.parallel.communication import CommunicationSettings, compression, undeferred
from motet.parallel.group import Group
from motet.parallel.layout import Layout
from motet.parallel.routes import Routes


class Differences:
    """Sums over replicas, numbered, of tensors that are always of the same sizes."""

    def __init__(
        self, settings: CommunicationSettings, layout: Layout, replicas: Group, like: Sequence[Tensor]
    ) -> None:
        how = compression(settings, layout)
        if isinstance(how.replicas, PowerSGDCodecOptions):
            raise InputError(
                f"communication.compress_gradients = {settings.compress_gradients!r} is for matrices, and what "
                "replicas tell each other with outer.every is none; use another codec, or "
                "communication.compress_over=shards"
            )
        self._codec = how.replicas
        self._after = settings.compress_after
        self._routes = Routes(undeferred(settings), layout)
        self._replicas = replicas
        self._checks = True
        self.errors = [torch.zeros_like(to_accumulation_dtype(t)) for t in like] if how.feeds_back_replicas else []
        """What was lost and is not given again yet, on this rank."""
        self._lane = FifoWorkQueue()
        finalize(self, self._lane.close)

    def start(self, number: int, tensor: Tensor, step: int) -> WorkHandle:
        """Sum in place, in the course of what comes. Every rank starts the same ones in one order."""
        algorithm = self._routes.program("all-reduce", "replicas", tensor.nbytes)
        call: CollectiveOptions = {"async_op": True, "algorithm": algorithm, "check": self._checks}
        self._checks = False
        if not tensor.numel():
            return CompletedWork()
        if self._codec is None or step <= self._after or self._replicas.world == 1:
            return all_reduce(tensor, self._replicas, **call)
        task = partial(self._sum, number, tensor, derive_seed(step, number, "outer"))
        if tensor.device.type == "cpu":
            return self._lane.submit(task)
        task()  # it is queued behind what the stream has to do, and the host goes on
        return CompletedWork()

    def _sum(self, number: int, tensor: Tensor, seed: int) -> None:
        assert self._codec is not None
        with codec_numerics():
            given = (tensor + self.errors[number]).to(tensor.dtype) if self.errors else tensor
            reduced = compressed_collectives.all_reduce(given, self._codec, self._replicas, seed)
            if self.errors:
                finite = reduced.error.isfinite().all()
                self.errors[number].copy_(torch.where(finite, reduced.error, self.errors[number]))
            tensor.copy_(reduced.total)
