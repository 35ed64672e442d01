"""Sums of pseudo-gradients over independent replicas: dense, or by a codec with error feedback."""

from collections.abc import Sequence
from functools import partial
from weakref import finalize

import torch
from torch import Tensor

from motet.collectives.compression import compressed_collectives
from motet.collectives.compression.byte_messages import codec_numerics, to_accumulation_dtype
from motet.collectives.compression.powersgd import PowerSGDCodec
from motet.collectives.execute.api import CollectiveOptions, all_reduce
from motet.collectives.execute.work_queue import CompletedWork, WorkHandle, WorkQueue
from motet.core.errors import InputError
from motet.core.seeds import derive_seed
from motet.parallel.data_parallel.communication.algorithm_choice import CollectiveAlgorithmSelector
from motet.parallel.data_parallel.communication.communication_settings import (
    CommunicationSettings,
    resolve_codecs,
    without_forward_overlap,
)
from motet.parallel.layout import Layout
from motet.parallel.process.process_group import RankGroup


class PseudoGradientReducer:
    """Sums over replicas of one flat tensor for each fragment."""

    def __init__(
        self, settings: CommunicationSettings, layout: Layout, replicas: RankGroup, *, templates: Sequence[Tensor]
    ) -> None:
        codecs = resolve_codecs(settings, layout)
        if isinstance(codecs.replica_gradients, PowerSGDCodec):
            raise InputError(
                f"communication.compress_gradients = {settings.compress_gradients!r} is for matrices, but the "
                "pseudo-gradients of outer.every are flat; use another codec, or "
                "communication.compress_over=shards"
            )
        self._codec = codecs.replica_gradients
        self._compress_after = settings.compress_after
        self._algorithms = CollectiveAlgorithmSelector(without_forward_overlap(settings), layout)
        self._replicas = replicas
        self._check_next_call = True
        self.compression_errors = (
            [torch.zeros_like(to_accumulation_dtype(t)) for t in templates] if codecs.has_replica_error_feedback else []
        )
        self._work_queue = WorkQueue()
        finalize(self, self._work_queue.close)

    def start(self, fragment_id: int, tensor: Tensor, step: int) -> WorkHandle:
        """Start to sum in place. Every rank starts the same fragments in the same order."""
        algorithm = self._algorithms.program("all-reduce", "replicas", tensor.nbytes)
        options: CollectiveOptions = {"async_op": True, "algorithm": algorithm, "check": self._check_next_call}
        self._check_next_call = False
        if not tensor.numel():
            return CompletedWork()
        if self._codec is None or step <= self._compress_after or self._replicas.world == 1:
            return all_reduce(tensor, self._replicas, **options)
        task = partial(self._all_reduce_compressed, fragment_id, tensor, derive_seed(step, fragment_id, "outer"))
        if tensor.device.type == "cpu":
            return self._work_queue.submit(task)
        task()  # queued on the stream; the host continues
        return CompletedWork()

    def _all_reduce_compressed(self, fragment_id: int, tensor: Tensor, seed: int) -> None:
        assert self._codec is not None
        with codec_numerics():
            corrected = (
                (tensor + self.compression_errors[fragment_id]).to(tensor.dtype) if self.compression_errors else tensor
            )
            compressed_sum = compressed_collectives.all_reduce(corrected, self._codec, self._replicas, seed)
            if self.compression_errors:
                is_finite = compressed_sum.error.isfinite().all()
                self.compression_errors[fragment_id].copy_(
                    torch.where(is_finite, compressed_sum.error, self.compression_errors[fragment_id])
                )
            tensor.copy_(compressed_sum.total)
