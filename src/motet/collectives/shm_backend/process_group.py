"""The process group `motet`: what torch calls, turned into plans over chunks of the tensors given.

Everything that torch calls by a private name is in this file. It uses the method names of torch 2.11, with those of
later versions beside them.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from motet.collectives.shm_backend.errors import CollectiveError
from motet.collectives.shm_backend.executor import PreparedCollective
from motet.collectives.shm_backend.monitored_barrier import run_monitored_barrier
from motet.collectives.shm_backend.plan_cache import PreparedCollectiveCache
from motet.collectives.shm_backend.rank_connections import RankConnections, open_rank_connections
from motet.collectives.shm_backend.sparse_all_reduce import all_reduce_sparse, check_sparse
from motet.collectives.shm_backend.tensor_views import (
    Chunks,
    CopyBack,
    Factor,
    dtype_name,
    flatten,
    output_buffer,
    output_buffers,
    per_rank_chunks,
    require_contiguous,
    scale_chunks,
    split_equally,
    split_rows,
)
from motet.collectives.shm_backend.work_handle import BackendWorkHandle, CollectiveJobQueue, completed_work
from motet.core.errors import InputError

_REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
_COMPLETED_WORK = completed_work([])

if TYPE_CHECKING:

    class _TypedProcessGroupBase:
        """All that this class counts on. Torch's stubs describe the C++ methods, whose overloads ours do not have."""

        def __init__(self, rank: int, size: int) -> None: ...
else:
    _TypedProcessGroupBase = dist.ProcessGroup


class MotetProcessGroup(_TypedProcessGroupBase):
    """A group of CPU ranks."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._connections: RankConnections = open_rank_connections(store, rank, size, timeout.total_seconds())
        self._queue = CollectiveJobQueue(self._connections.mark_failed, self._connections.reduce_spinning)
        self._plan_cache = PreparedCollectiveCache(self._connections, rank, size)
        self._name = self._description = ""
        self._barrier_count = 0

    # What torch asks about the group.

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:  # noqa: N802
        return "motet"

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def shutdown(self) -> None:
        self._queue.close()
        self._connections.close()

    def abort(self) -> None:
        self._connections.mark_failed(CollectiveError("the group was aborted"))
        self.shutdown()

    def set_timeout(self, timeout: timedelta) -> None:
        self._connections.set_timeout(timeout.total_seconds())

    # Collectives. Each makes lists of chunks: where they are before, and where they must be in the end.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> BackendWorkHandle:
        opts = opts or dist.AllreduceOptions()
        jobs: list[Callable[[], None]] = []
        for tensor in tensors:
            reduction, factor = _reduction_and_factor(opts.reduceOp, tensor)
            if tensor.layout == torch.sparse_coo:
                check_sparse(reduction, factor)
                jobs.append(partial(all_reduce_sparse, tensor, self._gather_stacked))
                continue
            plan = self._plan_cache.get_or_prepare("all-reduce", tensor, reduction)
            buffer, copy_back = output_buffer(tensor)
            chunks = _split_chunks(buffer, plan)
            jobs.append(self._make_job(plan, chunks, chunks, copy_back, factor))
        return self._submit(jobs, tensors, opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> BackendWorkHandle:
        reduction, factor = _reduction_and_factor(opts.reduceOp, tensors[0])
        plan = self._plan_cache.get_or_prepare("reduce", tensors[0], reduction, opts.rootRank)
        buffer, copy_back = output_buffer(tensors[0])
        chunks = _split_chunks(buffer, plan)
        output_chunks: Chunks = chunks if opts.rootRank == self._rank else [None] * len(chunks)
        return self._submit([self._make_job(plan, chunks, output_chunks, copy_back, factor)], tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> BackendWorkHandle:
        plan = self._plan_cache.get_or_prepare("broadcast", tensors[0], root=opts.rootRank)
        buffer, copy_back = output_buffer(tensors[0])
        chunks = _split_chunks(buffer, plan)
        return self._submit([self._make_job(plan, chunks, chunks, copy_back)], tensors, opts)

    def allgather(
        self, outputs: Sequence[Tensor | list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> BackendWorkHandle:
        jobs = [self._gather_job("all-gather", given, out) for out, given in zip(outputs, inputs, strict=True)]
        return self._submit(jobs, outputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced = allgather

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> BackendWorkHandle:
        """Here the outputs of a rank stand together, not those of a tensor."""
        return self.allgather([list(outs) for outs in zip(*outputs, strict=True)], inputs, opts)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> BackendWorkHandle:
        return self.allgather([output], [input], opts)

    all_gather_single = _allgather_base

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> BackendWorkHandle:
        root = opts.rootRank
        out = outputs[0] if root == self._rank else None
        return self._submit([self._gather_job("gather", inputs[0], out, root)], outputs, opts)

    def _gather_job(
        self, kind: str, input: Tensor, output: Tensor | list[Tensor] | None, root: int = 0
    ) -> Callable[[], None]:
        plan = self._plan_cache.get_or_prepare(kind, input, root=root)
        input_chunks = self._empty_chunks()
        input_chunks[self._rank] = flatten(input)
        if output is None:
            return self._make_job(plan, input_chunks, self._empty_chunks())
        output_chunks, copy_back = per_rank_chunks(output, input, self._size, f"{kind} output")
        return self._make_job(plan, input_chunks, output_chunks, copy_back)

    def _gather_stacked(self, tensor: Tensor) -> Tensor:
        """What all ranks have, gathered by the thread that carries out a job."""
        stacked = tensor.new_empty(self._size, *tensor.shape)
        self._gather_job("all-gather", tensor, stacked)()
        return stacked

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> BackendWorkHandle:
        out, root = outputs[0], opts.rootRank
        plan = self._plan_cache.get_or_prepare("scatter", out, root=root)
        input_chunks: Chunks = self._empty_chunks()
        if root == self._rank:
            input_chunks, _ = per_rank_chunks(inputs[0], out, self._size, "scatter input")
        return self._submit([self._scatter_job(plan, input_chunks, out)], outputs, opts)

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: Sequence[Tensor | list[Tensor]], opts: Any = None
    ) -> BackendWorkHandle:
        opts = opts or dist.ReduceScatterOptions()
        jobs = []
        for out, input in zip(outputs, inputs, strict=True):
            reduction, factor = _reduction_and_factor(opts.reduceOp, out)
            plan = self._plan_cache.get_or_prepare("reduce-scatter", out, reduction)
            input_chunks, _ = per_rank_chunks(input, out, self._size, "reduce-scatter input")
            jobs.append(self._scatter_job(plan, input_chunks, out, factor))
        return self._submit(jobs, outputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced = reduce_scatter

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> BackendWorkHandle:
        return self.reduce_scatter([output], [input], opts)

    reduce_scatter_single = _reduce_scatter_base

    def _scatter_job(
        self, plan: PreparedCollective, input_chunks: Chunks, output: Tensor, factor: Factor = None
    ) -> Callable[[], None]:
        output_chunks = self._empty_chunks()
        output_chunks[self._rank], copy_back = output_buffer(output)
        return self._make_job(plan, input_chunks, output_chunks, copy_back, factor)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> BackendWorkHandle:
        return self._submit([self._uneven_all_to_all_job(inputs, outputs)], outputs, opts)

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> BackendWorkHandle:
        if output_sizes or input_sizes:
            inputs = split_rows(input, input_sizes, self._size, "input")
            outputs = split_rows(output, output_sizes, self._size, "output")
            return self._submit([self._uneven_all_to_all_job(inputs, outputs)], [output], opts)
        if input.numel() != output.numel() or input.numel() % self._size:
            raise InputError(
                f"all-to-all of {input.numel()} into {output.numel()} numbers: without split sizes both must be the "
                f"same multiple of the {self._size} ranks"
            )
        plan = self._plan_cache.get_or_prepare("all-to-all", input)
        numel_per_rank = input.numel() // self._size
        buffer, copy_back = output_buffer(output)
        input_chunks, output_chunks = self._all_to_all_chunks(
            split_equally(flatten(input), numel_per_rank, self._size), split_equally(buffer, numel_per_rank, self._size)
        )
        return self._submit([self._make_job(plan, input_chunks, output_chunks, copy_back)], [output], opts)

    all_to_all_single = alltoall_base

    def _all_to_all_chunks(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[Chunks, Chunks]:
        input_chunks, output_chunks = self._empty_chunks() * self._size, self._empty_chunks() * self._size
        input_chunks[self._rank * self._size : (self._rank + 1) * self._size] = inputs
        output_chunks[self._rank :: self._size] = outputs
        return input_chunks, output_chunks

    def _uneven_all_to_all_job(self, inputs: list[Tensor], outputs: list[Tensor]) -> Callable[[], None]:
        """What everybody has for everybody is gathered first."""
        counts = torch.tensor([piece.numel() for piece in inputs])
        counts_of_ranks = torch.empty(self._size, self._size, dtype=torch.int64)
        gather = self._gather_job("all-gather", counts, counts_of_ranks)
        buffers, copy_back = output_buffers(outputs)
        input_chunks, output_chunks = self._all_to_all_chunks([flatten(piece) for piece in inputs], buffers)

        def work() -> None:
            gather()
            lengths = tuple(counts_of_ranks.flatten().tolist())
            for source, out in enumerate(outputs):
                if out.numel() != lengths[source * self._size + self._rank]:
                    raise CollectiveError(
                        f"rank {self._rank} in all-to-all: rank {source} has "
                        f"{lengths[source * self._size + self._rank]} numbers for it, where it expects {out.numel()}"
                    )
            self._make_job(
                self._plan_cache.get_or_prepare("all-to-all", outputs[0], lengths=lengths),
                input_chunks,
                output_chunks,
                copy_back,
            )()

        return work

    def barrier(self, opts: Any = None) -> BackendWorkHandle:
        empty = torch.empty(0, dtype=torch.uint8)
        chunks: Chunks = [empty] * self._size
        plan = self._plan_cache.get_or_prepare("barrier", empty)
        return self._submit([self._make_job(plan, chunks, chunks)], [], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Raises, on rank 0, with the ranks that do not come in time."""
        self._barrier_count += 1
        limit_s = self._connections.messages.timeout_s if timeout is None else timeout.total_seconds()
        tag = -self._barrier_count  # callers' tags are not negative
        run_monitored_barrier(self._connections, self._rank, self._size, tag, limit_s, wait_all_ranks)

    # Messages.

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> BackendWorkHandle:
        return self._connections.send(flatten(tensors[0]).view(tensors[0].shape), dst, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> BackendWorkHandle:
        return self._connections.receive(require_contiguous(tensors[0]), src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> BackendWorkHandle:
        return self._connections.receive(require_contiguous(tensors[0]), None, tag)

    # How it is done.

    def _empty_chunks(self) -> list[Tensor | None]:
        return [None] * self._size

    def _make_job(
        self,
        plan: PreparedCollective,
        input_chunks: Chunks,
        output_chunks: Chunks,
        copy_back: CopyBack = None,
        factor: Factor = None,
    ) -> Callable[[], None]:
        def work() -> None:
            self._execute(plan, input_chunks if factor is None else scale_chunks(input_chunks, factor), output_chunks)
            if copy_back is not None:
                copy_back()

        return work

    def _execute(self, plan: PreparedCollective, input_chunks: Chunks, output_chunks: Chunks) -> None:
        schedule = plan.schedule
        if schedule.scratch_chunks:
            output_chunks = list(output_chunks)
            for chunk in schedule.scratch_chunks:
                output_chunks[chunk] = torch.empty(plan.chunk_numels[chunk], dtype=plan.dtype)
        dtype = next((chunk.dtype for chunk in input_chunks if chunk is not None), plan.dtype)
        if dtype != plan.dtype:
            self._execute_in_plan_dtype(plan, input_chunks, output_chunks)
        else:
            self._connections.execute(plan, input_chunks, output_chunks)
        for chunk in schedule.unchanged_chunks:
            source, target = input_chunks[chunk], output_chunks[chunk]
            if source is not None and target is not None and source.data_ptr() != target.data_ptr():
                target.copy_(source)

    def _execute_in_plan_dtype(self, plan: PreparedCollective, input_chunks: Chunks, output_chunks: Chunks) -> None:
        """In float32, and rounded at the end."""
        wide_inputs = [None if chunk is None else chunk.float() for chunk in input_chunks]
        wide_outputs: Chunks = [
            None if chunk is None else torch.empty_like(chunk, dtype=plan.dtype) for chunk in output_chunks
        ]
        self._connections.execute(plan, wide_inputs, wide_outputs)
        for narrow, result in zip(output_chunks, wide_outputs, strict=True):
            if narrow is not None and result is not None:
                narrow.copy_(result)

    def _submit(self, jobs: list[Callable[[], None]], outputs: Any, opts: Any) -> BackendWorkHandle:
        def work() -> None:
            for job in jobs:
                job()

        if getattr(opts, "asyncOp", True):
            return self._queue.submit(work, outputs)
        self._queue.run_inline(jobs[0] if len(jobs) == 1 else work)
        return _COMPLETED_WORK


def _reduction_and_factor(op: Any, tensor: Tensor) -> tuple[str, Factor]:
    """The name of a reduction, and what contributions are multiplied by before it."""
    reduction = _REDUCTIONS[int(op.op)]
    if reduction != "premul_sum":
        return reduction, None
    if not tensor.is_floating_point() and not tensor.is_complex():
        raise InputError(
            f"{reduction} of {dtype_name(tensor.dtype)}: only floating-point numbers have fractions; use sum"
        )
    return "sum", op.__getstate__()[1]


def _split_chunks(tensor: Tensor, plan: PreparedCollective) -> Chunks:
    return [tensor] if len(plan.chunk_numels) == 1 else list(tensor.split(plan.chunk_numels))
