"""The operations of one rank in a group: c10d's operators as collectives over chunks of their tensors, and messages.

The connections of one rank to all others: shared memory, message streams and sockets, from rendezvous to exit.
"""

import atexit
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.distributed import Store

from motet.cluster.host_limits import usable_cores
from motet.collectives.execute.work_queue import AsyncWork, CompletedWork, Task, WorkQueue
from motet.collectives.program import CollectiveError, PeerLostError
from motet.collectives.shm_backend import tensor_views as views
from motet.collectives.shm_backend.executor import CollectiveExecutor, PreparedCollective, PreparedCollectiveCache
from motet.collectives.shm_backend.tensor_views import Chunks, CopyBack, Factor
from motet.collectives.shm_backend.torch_operators import OPERATORS
from motet.collectives.shm_backend.transport.local_peers import SPINS
from motet.collectives.shm_backend.transport.message_matcher import MessageMatcher
from motet.collectives.shm_backend.transport.rendezvous import establish_connections
from motet.collectives.shm_backend.transport.shared_memory import is_supported
from motet.collectives.shm_backend.transport.sockets import CollectivePeerSockets
from motet.collectives.torch_private import is_profiling
from motet.core import trace
from motet.core.errors import check_input
from motet.core.units import dtype_name

_OVERSUBSCRIBED_SPINS = 20
_REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
_MIN_BARRIER_WAIT_S = 0.001
_WORKER_JOIN_TIMEOUT_S = 5.0  # A worker that waits for an absent rank is left behind
_DEFAULT_WHEN: tuple[Any, ...] = (True, -1)
_NO_GUARD = nullcontext()
_COMPLETED_WORK = CompletedWork()
_MESSAGE_OPERATORS = ("send", "recv_", "recv_any_source_")
_METHODS = {operator: f"_{operator.strip('_')}" for operator in OPERATORS}


class RankConnections:
    """The message matcher and the collective executor of a rank, over one set of connections."""

    def __init__(self, store: Store, rank: int, ranks: int, *, timeout_s: float) -> None:
        check_input(
            is_supported(),
            "the backend motet needs Linux on an x86-64 processor, because it counts on the order of that "
            "processor's stores; use the backend gloo here",
        )
        rendezvous = establish_connections(store, rank, ranks, timeout_s=timeout_s)
        self.hosts, self.local_peers = rendezvous.hosts, rendezvous.local_peers
        self._spins = _OVERSUBSCRIBED_SPINS if len(self.local_peers.peers) >= usable_cores() else SPINS
        self.local_peers.spins = self._spins
        self._sockets = CollectivePeerSockets(rank, rendezvous.collective_sockets, timeout_s)
        self.executor = CollectiveExecutor(self.local_peers, self._sockets)
        self._message_sockets = list(rendezvous.message_sockets.values())
        self.messages = MessageMatcher(self.local_peers, self._message_sockets, timeout_s)
        self._closed, self._pid = False, os.getpid()
        atexit.register(self.close)

    def reduce_spinning(self, enabled: bool) -> None:
        """Do not spin while another thread of this process wants to run."""
        self.local_peers.spins = 0 if enabled else self._spins

    def set_timeout(self, timeout_s: float) -> None:
        self.local_peers.timeout_s = self.messages.timeout_s = self._sockets.timeout_s = timeout_s

    @contextmanager
    def limited(self, timeout_s: float) -> Iterator[None]:
        """Let one collective wait no longer than this."""
        before = self.local_peers.timeout_s
        self.local_peers.timeout_s = self._sockets.timeout_s = timeout_s
        try:
            yield
        finally:
            self.local_peers.timeout_s = self._sockets.timeout_s = before

    def mark_failed(self, error: BaseException) -> None:
        """Tell the other ranks that this rank takes part in nothing more."""
        self.local_peers.mark_failed(str(error) or type(error).__name__)
        self._sockets.close()

    def close(self) -> None:
        # A process forked from a rank also runs this when it exits.
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        atexit.unregister(self.close)
        self.messages.close()
        self.local_peers.leave()
        self._sockets.close()
        for peer_socket in self._message_sockets:
            peer_socket.stream.close()


class GroupOperations:
    """Everything that a rank does in a group. After a failure every further collective fails."""

    def __init__(self, store: Store, rank: int, size: int, *, timeout: timedelta) -> None:
        self._rank, self._size = rank, size
        self.connections = RankConnections(store, rank, size, timeout_s=timeout.total_seconds())
        self._messages = self.connections.messages
        self._queue = WorkQueue(waiters_help=True, on_worker_run=self.connections.reduce_spinning)
        self._failure: BaseException | None = None
        self._cache = PreparedCollectiveCache(self.connections.local_peers, self.connections.hosts, rank)
        self._barrier_count = 0
        self.sequence_number = 0  # Collectives so far, as torch's other backends count them

    def shutdown(self) -> None:
        self._queue.close(_WORKER_JOIN_TIMEOUT_S)
        self.connections.close()

    def abort(self) -> None:
        self.connections.mark_failed(CollectiveError("the group was aborted"))
        self.shutdown()

    def perform(self, operator: str, *arguments: Any) -> AsyncWork:
        """Run an operator of c10d; the arguments are in its order, without the group."""
        if operator not in _MESSAGE_OPERATORS:
            self.sequence_number += 1
        operation: Callable[..., AsyncWork] = getattr(self, _METHODS[operator])
        with views.without_modes():  # Any thread may write to tensors that are made here
            return operation(*arguments)

    # The operators. Each collective makes two lists of chunks: its input and its output.

    def _allreduce(self, tensors: list[Tensor], op: Any, sparse_indices: Any, *when: Any) -> AsyncWork:
        return self._submit([self._all_reduce_job(tensor, op) for tensor in tensors], tensors, *when)

    def _allreduce_coalesced(self, tensors: list[Tensor], op: Any, *when: Any) -> AsyncWork:
        return self._submit([self._all_reduce_job(tensor, op) for tensor in tensors], tensors, *when)

    def _all_reduce_job(self, tensor: Tensor, op: Any) -> Task:
        if tensor.layout != torch.sparse_coo:
            return self._in_place_job("all-reduce", tensor, op=op)
        reduction, factor = _reduction_and_factor(op, tensor)
        is_sum = reduction == "sum" and factor is None
        check_input(is_sum, f"all-reduce ({reduction}) of a sparse tensor: sparse tensors can only be added up")
        return partial(self._all_reduce_sparse, tensor)

    def _reduce(self, tensors: list[Tensor], op: Any, *where: Any) -> AsyncWork:
        root, root_tensor, *when = where
        job = self._in_place_job("reduce", tensors[root_tensor], op=op, root=root)
        return self._submit([job], tensors, *when)

    def _broadcast(self, tensors: list[Tensor], root: int, root_tensor: int, *when: Any) -> AsyncWork:
        return self._submit([self._in_place_job("broadcast", tensors[root_tensor], root=root)], tensors, *when)

    def _in_place_job(self, kind: str, tensor: Tensor, *, op: Any = None, root: int = 0) -> Task:
        reduction, factor = _reduction_and_factor(op, tensor)
        prepared = self._prepare(kind, tensor, reduction=reduction, root=root)
        buffer, copy_back = views.output_buffer(tensor)
        numels = prepared.chunk_numels
        chunks: Chunks = [buffer] if len(numels) == 1 else list(buffer.split(numels))
        outputs = chunks if kind != "reduce" or root == self._rank else [None] * len(chunks)
        return partial(self._run, prepared, (chunks, outputs), copy_back=copy_back, factor=factor)

    def _allgather(self, outputs: Sequence[Tensor | list[Tensor]], inputs: list[Tensor], *when: Any) -> AsyncWork:
        jobs = [self._gather_job("all-gather", tensor, out) for out, tensor in zip(outputs, inputs, strict=True)]
        return self._submit(jobs, outputs, *when)

    _allgather_into_tensor_coalesced = _allgather

    def _allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], *when: Any) -> AsyncWork:
        return self._allgather([list(outs) for outs in zip(*outputs, strict=True)], inputs, *when)

    def _allgather_base(self, output: Tensor, input: Tensor, *when: Any) -> AsyncWork:
        return self._allgather([output], [input], *when)

    def _gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], root: int, *when: Any) -> AsyncWork:
        out = outputs[0] if root == self._rank else None
        return self._submit([self._gather_job("gather", inputs[0], out, root=root)], outputs, *when)

    def _uneven_lengths(self, tensors: Tensor | list[Tensor] | None, local: Tensor) -> tuple[int, ...] | None:
        """The elements of each rank, where a list has one tensor for each of them and they differ in length."""
        if tensors is None or isinstance(tensors, Tensor) or len(tensors) != self._size:
            return None
        lengths = tuple(tensor.numel() for tensor in tensors)
        is_alike = lengths[self._rank] == local.numel() and all(tensor.dtype == local.dtype for tensor in tensors)
        return lengths if is_alike and len({*lengths}) > 1 else None

    def _gather_job(self, kind: str, input: Tensor, output: Tensor | list[Tensor] | None, *, root: int = 0) -> Task:
        lengths = self._uneven_lengths(output, input) if kind == "all-gather" else None
        prepared = self._prepare(kind, input, root=root, lengths=lengths)
        input_chunks = self._empty_chunks()
        input_chunks[self._rank] = views.flatten(input)
        if output is None:
            return partial(self._run, prepared, (input_chunks, self._empty_chunks()), copy_back=None)
        output_chunks, copy_back = views.per_rank_chunks(
            output, input, self._size, role=f"{kind} output", lengths=lengths
        )
        return partial(self._run, prepared, (input_chunks, output_chunks), copy_back=copy_back)

    def _gather_stacked(self, tensor: Tensor) -> Tensor:
        stacked = tensor.new_empty(self._size, *tensor.shape)
        self._gather_job("all-gather", tensor, stacked)()
        return stacked

    def _all_reduce_sparse(self, tensor: Tensor) -> None:
        """Gather the COO tensors of all ranks, padded to the longest, and add them in order of rank, in place."""
        local = tensor.detach().coalesce()
        shapes = self._gather_stacked(torch.tensor([local._nnz(), local.sparse_dim(), *local.shape]))
        if (shapes[:, 1:] != shapes[0, 1:]).any():
            raise CollectiveError(
                f"all-reduce of sparse tensors: this rank has {views.describe_tensor(local)} with {local.sparse_dim()} "
                f"sparse dimensions, others have {shapes[:, 2:].tolist()} with {shapes[:, 1].tolist()}"
            )
        counts = shapes[:, 0].tolist()
        places = prod(local.shape[: local.sparse_dim()])
        if not all(0 <= count <= places for count in counts):
            raise CollectiveError(f"all-reduce of sparse tensors: ranks have {counts} values for {places} places")
        indices, values = (self._gather_rows(rows, counts) for rows in (local.indices().T, local.values()))
        total = torch.sparse_coo_tensor(indices.T, values, local.shape, check_invariants=True).coalesce()
        with torch.no_grad():  # detach() shares the values, but not their count
            tensor.copy_(total)

    def _gather_rows(self, local_rows: Tensor, counts: list[int]) -> Tensor:
        padded = local_rows.new_zeros(max(counts), *local_rows.shape[1:])
        padded[: len(local_rows)] = local_rows
        return torch.cat([rows[:count] for rows, count in zip(self._gather_stacked(padded), counts, strict=True)])

    def _scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], root: int, *when: Any) -> AsyncWork:
        input = inputs[0] if root == self._rank else None
        return self._submit([self._scatter_job("scatter", input, outputs[0], root=root)], outputs, *when)

    def _reduce_scatter(
        self, outputs: list[Tensor], inputs: Sequence[Tensor | list[Tensor]], op: Any, *when: Any
    ) -> AsyncWork:
        pairs = zip(inputs, outputs, strict=True)
        return self._submit([self._scatter_job("reduce-scatter", *pair, op=op) for pair in pairs], outputs, *when)

    _reduce_scatter_tensor_coalesced = _reduce_scatter

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, op: Any, *when: Any) -> AsyncWork:
        return self._reduce_scatter([output], [input], op, *when)

    def _scatter_job(
        self, kind: str, input: Tensor | list[Tensor] | None, output: Tensor, *, op: Any = None, root: int = 0
    ) -> Task:
        reduction, factor = _reduction_and_factor(op, output)
        lengths = self._uneven_lengths(input, output) if kind == "reduce-scatter" else None
        prepared = self._prepare(kind, output, reduction=reduction, root=root, lengths=lengths)
        input_chunks: Chunks = self._empty_chunks()
        if input is not None:
            input_chunks, _ = views.per_rank_chunks(input, output, self._size, role=f"{kind} input", lengths=lengths)
        output_chunks = self._empty_chunks()
        output_chunks[self._rank], copy_back = views.output_buffer(output)
        return partial(self._run, prepared, (input_chunks, output_chunks), copy_back=copy_back, factor=factor)

    def _alltoall(self, outputs: list[Tensor], inputs: list[Tensor], *when: Any) -> AsyncWork:
        return self._submit([self._uneven_all_to_all_job(inputs, outputs)], outputs, *when)

    def _alltoall_base(self, output: Tensor, input: Tensor, *sizes: Any) -> AsyncWork:
        output_sizes, input_sizes, *when = sizes
        size, numel = self._size, input.numel()
        if output_sizes or input_sizes:
            inputs = views.split_rows(input, input_sizes, size, role="input")
            outputs = views.split_rows(output, output_sizes, size, role="output")
            return self._submit([self._uneven_all_to_all_job(inputs, outputs)], [output], *when)
        check_input(
            numel == output.numel() and numel % size == 0,
            f"all-to-all of {numel} into {output.numel()} elements without split sizes; give both the same multiple of "
            f"the {size} ranks",
        )
        prepared = self._prepare("all-to-all", input)
        buffer, copy_back = views.output_buffer(output)
        sides = (views.split_equally(x, numel // size, size) for x in (views.flatten(input), buffer))
        job = partial(self._run, prepared, self._all_to_all_chunks(*sides), copy_back=copy_back)
        return self._submit([job], [output], *when)

    def _all_to_all_chunks(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[Chunks, Chunks]:
        input_chunks, output_chunks = self._empty_chunks() * self._size, self._empty_chunks() * self._size
        input_chunks[self._rank * self._size : (self._rank + 1) * self._size] = inputs
        output_chunks[self._rank :: self._size] = outputs
        return input_chunks, output_chunks

    def _uneven_all_to_all_job(self, inputs: list[Tensor], outputs: list[Tensor]) -> Task:
        counts = torch.tensor([tensor.numel() for tensor in (*inputs, *outputs)])
        counts_of_ranks = torch.empty(self._size, 2 * self._size, dtype=torch.int64)
        gather = self._gather_job("all-gather", counts, counts_of_ranks)
        buffers, copy_back = views.output_buffers(outputs)
        chunks = self._all_to_all_chunks([views.flatten(tensor) for tensor in inputs], buffers)

        def job() -> None:
            gather()
            sent, expected = counts_of_ranks[:, : self._size], counts_of_ranks[:, self._size :].T
            if not torch.equal(sent, expected):  # Every rank finds it, since all go through as many segments
                source, target = (sent != expected).nonzero()[0].tolist()
                problem = f"rank {source} has {sent[source, target]} elements for rank {target}, "
                problem += f"which expects {expected[source, target]}"
                raise CollectiveError(f"rank {self._rank} in all-to-all: {problem}")
            prepared = self._prepare("all-to-all", outputs[0], lengths=tuple(sent.flatten().tolist()))
            self._run(prepared, chunks, copy_back=copy_back)

        return job

    def _barrier(self, empty: Tensor, device_ids: list[int], *when: Any) -> AsyncWork:
        chunks: Chunks = [empty.data] * self._size
        prepared = self._prepare("barrier", empty)
        return self._submit([partial(self._run, prepared, (chunks, chunks), copy_back=None)], [], *when)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Let every rank write to rank 0, which answers when all have; it names the first missing rank, or all."""
        self._barrier_count += 1
        tag = -self._barrier_count  # Tags of callers are not negative
        timeout_s = self._messages.timeout_s if timeout is None else timeout.total_seconds()
        end, token = time.monotonic() + timeout_s, partial(torch.zeros, 1, dtype=torch.uint8)

        def wait(work: AsyncWork) -> None:
            work.wait(timedelta(seconds=max(_MIN_BARRIER_WAIT_S, end - time.monotonic())))

        if self._rank:
            try:
                wait(self._messages.send(token(), 0, tag))
                wait(self._messages.receive(token(), 0, tag))
            except CollectiveError as error:
                problem = f"rank {self._rank} came to the barrier, but rank 0 did not answer: {error}"
                raise PeerLostError(problem) from error
            return
        absent: dict[int, CollectiveError] = {}
        for other, work in [(other, self._messages.receive(token(), other, tag)) for other in range(1, self._size)]:
            try:
                wait(work)
            except CollectiveError as error:
                absent[other] = error
                if not wait_all_ranks:
                    break
        if absent:
            who = f"Rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}"
            late = f"Rank 0 timed out in monitoredBarrier after {timeout_s:g} s. " if time.monotonic() > end else ""
            raise PeerLostError(f"{late}{who} failed to pass monitoredBarrier: {next(iter(absent.values()))}")
        for other in range(1, self._size):
            self._messages.send(token(), other, tag).wait()

    # Messages.

    def _send(self, tensors: list[Tensor], dst: int, tag: int) -> AsyncWork:
        return self._messages.send(views.flatten(tensors[0]).view(tensors[0].shape), dst, tag)

    def _recv(self, tensors: list[Tensor], src: int | None, tag: int) -> AsyncWork:
        return self._messages.receive(views.require_contiguous(tensors[0]), src, tag)

    def _recv_any_source(self, tensors: list[Tensor], tag: int) -> AsyncWork:
        return self._recv(tensors, None, tag)

    # Jobs, which the queue runs one after another.

    def _prepare(self, kind: str, tensor: Tensor, **details: Any) -> PreparedCollective:
        """Prepare a job, and count its bytes: in the step of the call, whichever thread runs the job later.

        Only where sizes have to be exchanged first (sparse tensors, split sizes) is the job prepared while it runs.
        """
        prepared = self._cache.get_or_prepare(kind, tensor, **details)
        trace.count("sent_bytes", prepared.sent_bytes)
        return prepared

    def _empty_chunks(self) -> list[Tensor | None]:
        return [None] * self._size

    def _run(
        self, prepared: PreparedCollective, sides: tuple[Chunks, Chunks], *, copy_back: CopyBack, factor: Factor = None
    ) -> None:
        inputs, outputs = sides
        if factor is not None:
            inputs = [None if chunk is None else (chunk * factor).to(chunk.dtype) for chunk in inputs]
        with record_function(prepared.event) if is_profiling() else _NO_GUARD:
            self._execute(prepared, inputs, outputs)
        if copy_back is not None:
            copy_back()

    def _execute(self, prepared: PreparedCollective, inputs: Chunks, outputs: Chunks) -> None:
        plan, executor = prepared.plan, self.connections.executor
        if plan.scratch_chunks:
            outputs = list(outputs)
            for chunk in plan.scratch_chunks:
                outputs[chunk] = torch.empty(prepared.chunk_numels[chunk], dtype=prepared.dtype)
        if next((chunk.dtype for chunk in inputs if chunk is not None), prepared.dtype) == prepared.dtype:
            executor.execute(prepared, inputs, outputs)
        else:  # in float32, rounded at the end
            wide = [out if out is None else torch.empty_like(out, dtype=prepared.dtype) for out in outputs]
            executor.execute(prepared, [c if c is None else c.float() for c in inputs], wide)
            for narrow, wide_result in zip(outputs, wide, strict=True):
                if narrow is not None:
                    narrow.copy_(wide_result)
        for chunk in plan.unchanged_chunks:
            source, target = inputs[chunk], outputs[chunk]
            if source is not None and target is not None and source.data_ptr() != target.data_ptr():
                target.copy_(source)

    def _submit(self, jobs: list[Task], outputs: Any, *when: Any) -> AsyncWork:
        """`when` has the last arguments of operators: whether the caller waits later, and the milliseconds it gives."""
        is_async, timeout_ms = [*when, *_DEFAULT_WHEN[len(when) :]]
        task = partial(self._run_jobs, jobs, timeout_ms / 1e3 if timeout_ms > 0 else None)
        if is_async:
            return self._queue.submit(task, outputs)
        self._queue.run(task)
        return _COMPLETED_WORK

    def _run_jobs(self, jobs: list[Task], timeout_s: float | None) -> None:
        if self._failure is not None:
            kind = PeerLostError if isinstance(self._failure, PeerLostError) else CollectiveError
            raise kind(f"this group has failed before: {self._failure}")
        try:
            with views.without_modes(), self.connections.limited(timeout_s) if timeout_s else _NO_GUARD:
                for job in jobs:
                    job()
        except BaseException as error:
            self._failure = error
            self.connections.mark_failed(error)
            raise


def _reduction_and_factor(op: Any, tensor: Tensor) -> tuple[str, Factor]:
    """The name of a reduction, empty for none, and the factor by which contributions are multiplied before it."""
    reduction = "" if op is None else _REDUCTIONS[int(op.op)]
    if reduction != "premul_sum":
        return reduction, None
    problem = f"{reduction} of {dtype_name(tensor.dtype)}: only floating-point numbers have fractions; use sum"
    check_input(tensor.is_floating_point() or tensor.is_complex(), problem)
    return "sum", op.__getstate__()[1]
