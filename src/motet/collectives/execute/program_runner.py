"""Programs over torch.distributed: on any backend that sends and receives, any device, any group of ranks.

On a CPU, a thread of each group executes asynchronous Programs in order. On CUDA, each group has a stream on which
everything is queued, the messages of a step as one grouped operation, and the host does not wait.

Batches of sends and receives over torch.distributed, waited for one by one.

Messages from one rank to another arrive in the order in which they were sent, whether or not a backend knows tags.

The check that all ranks are about to make the same call: one small all-gather before any data moves.

Without it, a message of an unexpected size ends a process under Gloo, and gives wrong numbers elsewhere.

The measurement of a Program on this machine: errors, bytes and messages of each rank, and times.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple, TypedDict, Unpack
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from motet.collectives.execute import rank_plan
from motet.collectives.execute.rank_plan import (
    Buffer,
    BufferPlan,
    BufferSlice,
    BufferStep,
    assign_offsets,
    chunk_lengths,
    total_elements,
)
from motet.collectives.execute.reduce_ops import DtypeReduceOp, ReduceOpName, make_reduce_op
from motet.collectives.execute.work_queue import CompletedWork, WorkHandle, WorkQueue, run_on_stream
from motet.collectives.program import Program
from motet.core import trace
from motet.core.errors import InputError, MotetError, RankFailedError, check_input
from motet.core.units import dtype_name


class PeerTransferError(RankFailedError):
    """Another rank did not send or receive."""


class P2PTensor(NamedTuple):
    """A flat tensor on its way to or from another rank of the group."""

    peer: int
    tensor: Tensor


_P2PCall = tuple[Callable[..., Any], Tensor, int]  # `dist.irecv` or `dist.isend`, a view as bytes, the peer


@dataclass(frozen=True)
class P2PChannel:
    """The group, timeout and tag of messages of one kind."""

    group: dist.ProcessGroup
    timeout: timedelta | None  # Limit of each wait on a CPU; None: that of the group
    tag: int  # Separates them from other messages of the group, on backends that know tags


def flatten_contiguous(tensor: Tensor, owner: str) -> Tensor:
    """A view of all elements in one dimension."""
    problem = f"{owner} gave a tensor of shape {tuple(tensor.shape)} that is not contiguous; give its contiguous()"
    check_input(tensor.is_contiguous(), problem)
    return tensor.detach().view(-1)


def dtype_and_device(tensor: Tensor) -> str:
    return f"{dtype_name(tensor.dtype)} on {tensor.device.type}"


class P2PBatch:
    """Receives and sends that were started together; `context` names the operation in errors."""

    def __init__(
        self, receives: Sequence[P2PTensor], sends: Sequence[P2PTensor], channel: P2PChannel, *, context: str
    ) -> None:
        self._channel, self._context = channel, context
        self._peers = [message.peer for message in (*receives, *sends)]
        self._receive_count = len(receives)
        functions = [dist.irecv] * len(receives) + [dist.isend] * len(sends)
        # Bytes, since backends do not know all dtypes.
        byte_views = [message.tensor.view(torch.uint8) for message in (*receives, *sends)]
        start = self._start_as_one_operation if any(v.is_cuda for v in byte_views) else self._start_separately
        self._works = start([*zip(functions, byte_views, self._peers, strict=True)])

    def wait_for_message(self, message: int) -> None:
        """Wait for a message by its index; the receives come before the sends."""
        work, timeout = self._works[message], self._channel.timeout
        if work is not None:
            with self._explain_errors(self._peers[message]):
                work.wait(timeout) if timeout else work.wait()
            self._works[message] = None

    def wait(self, *, only_sends: bool = False) -> None:
        for message in range(self._receive_count if only_sends else 0, len(self._peers)):
            self.wait_for_message(message)

    def _start_as_one_operation(self, calls: list[_P2PCall]) -> list[dist.Work | None]:
        """Start one grouped operation: NCCL would run one message after the other."""
        group = self._channel.group
        ops = [dist.P2POp(function, view, group=group, group_peer=peer) for function, view, peer in calls]
        works = dist.batch_isend_irecv(ops)
        # One handle for all messages, or one for each.
        return [works[min(i, len(works) - 1)] for i in range(len(calls))]

    def _start_separately(self, calls: list[_P2PCall]) -> list[dist.Work | None]:
        works: list[dist.Work | None] = []
        for function, view, peer in calls:
            with self._explain_errors(peer):
                end = {"group_src" if function is dist.irecv else "group_dst": peer}
                works.append(function(view, group=self._channel.group, tag=self._channel.tag, **end))
        return works

    @contextmanager
    def _explain_errors(self, peer: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise PeerTransferError(
                f"rank {dist.get_rank(self._channel.group)} waited in vain for rank {peer} in {self._context}: that "
                "rank has ended, is late or does something else "
                f"({str(error).strip().splitlines()[0]}); start the group again"
            ) from error


@dataclass(frozen=True)
class CollectiveCallSignature:
    """The call that a rank is about to make."""

    operation: str  # The Program, and the reduction if it has one
    digest: int  # Distinguishes Programs of one name
    tensor_description: str = ""  # Elements and dtype; empty on a rank without a tensor, which fits any
    rejection: str = ""  # Why this rank will not make the call, for the other ranks

    def __str__(self) -> str:
        return f"{self.operation} on {self.tensor_description}" if self.tensor_description else self.operation


def check_same_call(signature: CollectiveCallSignature, group: dist.ProcessGroup, timeout: timedelta | None) -> None:
    """Raise InputError on every rank if the calls differ or a rank rejects its call."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    hashes = [_text_hash(f"{signature.operation} {signature.digest}"), _text_hash(signature.tensor_description)]
    device = "cpu" if "cpu" in dist.get_backend_config(group) else "cuda"  # The host needs the answer
    local_hashes = torch.tensor([*hashes, len(signature.rejection)], device=device)
    all_hashes = [torch.empty_like(local_hashes) for _ in range(world)]
    trace.count("check_bytes", (world - 1) * local_hashes.nbytes)
    try:
        work = dist.all_gather(all_hashes, local_hashes, group=group, async_op=True)
        assert work is not None
        work.wait(timeout) if timeout else work.wait()
    except RuntimeError as error:
        raise PeerTransferError(
            f"rank {rank}: not all ranks are ready for {signature}: one has ended or does something else ({error})"
        ) from error
    calls, tensors, rejections = map(set, zip(*torch.stack(all_hashes).tolist(), strict=True))
    if len(calls) > 1 or len(tensors - {0}) > 1 or any(rejections):
        signatures: list[CollectiveCallSignature] = [signature] * world
        dist.all_gather_object(signatures, signature, group=group)
        raise InputError(_describe_difference(signatures, rank))


def _describe_difference(signatures: list[CollectiveCallSignature], rank: int) -> str:
    if rejection := signatures[rank].rejection:
        return rejection
    for other, signature in enumerate(signatures):
        if signature.rejection:
            return f"rank {other} rejects the call: {signature.rejection}"
    have_one_digest = len({signature.digest for signature in signatures}) == 1
    callers: dict[str, list[str]] = {}
    for other, signature in enumerate(signatures):
        description = str(signature) if have_one_digest else f"{signature} ({signature.digest:016x})"
        callers.setdefault(description, []).append(str(other))
    calls = [
        f"ranks {', '.join(ranks)} do {call}" if len(ranks) > 1 else f"rank {ranks[0]} does {call}"
        for call, ranks in callers.items()
    ]
    return f"ranks make different calls: {'; '.join(calls)}; let all make the same"


def _text_hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "big") | 1 if text else 0


_MESSAGE_TAG = 0x6D6F00


class ProgramExecutionOptions(TypedDict, total=False):
    """The options of a Program that is executed."""

    op: ReduceOpName  # "sum" by default
    async_op: bool  # Return immediately; the tensors must not be used before the handle has been waited for
    check: bool  # First check that all ranks make the same call, by one small all-gather; True by default
    timeout_s: float | None  # The limit of each wait for a message on a CPU; the timeout of the group by default


def run_program(
    program: Program,
    output: Tensor | None,
    input: Tensor | None,
    group: dist.ProcessGroup,
    **options: Unpack[ProgramExecutionOptions],
) -> WorkHandle:
    """Execute a Program. Every rank of the group must call this; its rank i is rank i of the group.

    `input` holds the initial chunks of this rank one after another, and is not written. `output` receives its final
    chunks. Either is None on a rank without such chunks. The Program runs in place if both are one tensor, or share the
    memory of the chunks that are in both. Gradients are not tracked. `prove_program` checks custom Programs.
    """
    seconds, op = options.get("timeout_s"), options.get("op", "sum")
    timeout = None if seconds is None else timedelta(seconds=seconds)
    execution, rejection = None, None
    try:
        execution = _prepare_execution(program, output, input, op=op, channel=P2PChannel(group, timeout, _MESSAGE_TAG))
    except InputError as error:
        rejection = error
    if options.get("check", True):
        description = ""
        if execution is not None:
            # Where all ranks have all chunks, their tensors have one shape.
            ends = ((output, program.final), (input, program.initial))
            full = [x for x, held in ends if x is not None and all(len(chunks) == program.chunks for chunks in held)]
            shape = f" of shape {tuple(full[0].shape)}" if full else ""
            description = f"{execution.total_numel} {dtype_and_device(execution.buffers['output'])}{shape}"
        operation = f"{program} ({op})" if program.has_reductions else str(program)
        signature = CollectiveCallSignature(operation, _digest(program), description, str(rejection or ""))
        check_same_call(signature, group, timeout)
    if rejection is not None:
        raise rejection
    return CompletedWork() if execution is None else execution.start(options.get("async_op", False))


@dataclass(frozen=True)
class RankCollectiveExecution:
    """A plan with its tensors, all flat and of one dtype and device."""

    title: str
    plan: BufferPlan
    total_numel: int  # Elements of all chunks
    buffers: dict[Buffer, Tensor]
    reduce_op: DtypeReduceOp
    channel: P2PChannel

    def start(self, async_op: bool) -> WorkHandle:
        """Execute the plan in the order of the calls on this group."""
        queue = _execution_queue(self.channel.group, self.buffers["output"].device)
        # Counted here, in the step of the call, whichever thread executes the plan later.
        trace.count("sent_bytes", self.buffers["output"].itemsize * self.plan.sent_numel)
        trace.count("messages", sum(len(step.sends) for step in self.plan.steps))
        if isinstance(queue, WorkQueue):
            if async_op:
                return queue.submit(self._execute)
            queue.run(self._execute)
            return CompletedWork()
        work = run_on_stream(self._execute, queue)
        for tensor in self.buffers.values():
            tensor.record_stream(queue)  # so that memory which the caller frees is not used again before the end
        if not async_op:
            work.wait()
        return work

    @torch.no_grad()
    def _execute(self) -> None:
        buffers = self.buffers | {"scratch": self.buffers["output"].new_empty(self.plan.scratch_elements)}

        def view(span: BufferSlice) -> Tensor:
            return buffers[span.buffer][span.start : span.stop]

        for step_index, step in enumerate(self.plan.steps):
            if step.sends or step.receives:
                self._run_step(step, view, context=f"step {step_index} of {self.title}")
        for copy in self.plan.final_copies:
            view(copy.target).copy_(view(copy.source))
        if self.reduce_op.operator == "avg":
            for ranks, span in self.plan.contributor_counts:
                self.reduce_op.divide(view(span), ranks)

    def _run_step(self, step: BufferStep, view: Callable[[BufferSlice], Tensor], *, context: str) -> None:
        for pack in step.packs:
            view(pack.target).copy_(view(pack.source))
        sides = step.receives, step.sends
        receives, sends = ([P2PTensor(m.peer, view(m.buffer_slice)) for m in side] for side in sides)
        messages = P2PBatch(receives, sends, self.channel, context=context)

        def received_tensor(receive_index: int, span: BufferSlice) -> Tensor:
            messages.wait_for_message(receive_index)
            return view(span)

        for reduction in step.reductions:
            if reduction.after_sends:
                messages.wait(only_sends=True)
            received = (received_tensor(*each) for each in reduction.received)
            if reduction.local is None:
                view(reduction.target).copy_(next(received))
            else:
                self.reduce_op.accumulate(view(reduction.target), view(reduction.local), received)
        messages.wait()


@lru_cache(maxsize=256)
def _digest(program: Program) -> int:
    """A number that all processes have for equal Programs, whatever their names."""
    steps = tuple(tuple((*t[:4], t.op == "copy") for t in step) for step in program.steps)
    final = tuple(tuple(sorted(held.items())) for held in program.final)
    return hash((program.ranks, program.sizes, program.initial, final, steps))  # of integers: equal in all processes


def _prepare_execution(
    program: Program, output: Tensor | None, input: Tensor | None, *, op: ReduceOpName, channel: P2PChannel
) -> RankCollectiveExecution | None:
    rank, world = dist.get_rank(channel.group), dist.get_world_size(channel.group)
    fits = program.ranks == world
    check_input(fits, f"{program} cannot be executed by {world} ranks; build it for the ranks of the group")
    tensors: dict[Buffer, Tensor | None] = {"input": input, "output": output}
    owner = f"{program}: rank {rank}"
    buffers = {name: flatten_contiguous(x, owner) for name, x in tensors.items() if x is not None}
    numels = (buffers[name].numel() if name in buffers else 0 for name in tensors)
    total_numel = total_elements(program, rank, *numels)
    if total_numel is None:
        return None
    check_input(buffers, f"{owner} takes part, but gave no tensor")
    kinds = sorted({dtype_and_device(tensor) for tensor in buffers.values()})
    check_input(len(kinds) == 1, f"{owner} gave {' and '.join(kinds)}; give an input and output of one kind")
    example = next(iter(buffers.values()))
    for name in tensors:
        buffers.setdefault(name, example.new_empty(0))
    reduce_op = DtypeReduceOp("sum", example.dtype)
    if program.has_reductions:
        reduce_op = make_reduce_op(op, example.dtype, example.device)
    in_place = _is_in_place(program, rank, total_numel, buffers=buffers)
    plan = rank_plan.make_buffer_plan(program, rank, total_numel, in_place=in_place)
    if example.device.type != "cpu":
        channel = replace(channel, timeout=None)
    return RankCollectiveExecution(str(program), plan, total_numel, buffers, reduce_op, channel)


def _is_in_place(program: Program, rank: int, total: int, *, buffers: dict[Buffer, Tensor]) -> bool:
    """Whether the chunks that are both initial and final are in the same memory; no other chunk may be."""
    source, target = buffers["input"], buffers["output"]
    byte_offset = target.data_ptr() - source.data_ptr()
    shared_bytes = min(source.nbytes, byte_offset + target.nbytes) - max(0, byte_offset)
    if shared_bytes <= 0 or not source.numel() or not target.numel():
        return False
    lengths = chunk_lengths(program, total)
    starts = rank_plan.assign_offsets("input", program.initial[rank], lengths)
    ends = rank_plan.assign_offsets("output", program.final[rank], lengths)
    shared_chunks = [chunk for chunk in starts if chunk in ends and lengths[chunk]]
    offsets = {(starts[chunk].start - ends[chunk].start) * source.itemsize for chunk in shared_chunks}
    if offsets - {byte_offset} or shared_bytes != sum(lengths[chunk] for chunk in shared_chunks) * source.itemsize:
        raise InputError(f"{program}: input and output of rank {rank} overlap; give tensors that share no memory")
    return True


_ExecutionQueue = WorkQueue | torch.cuda.Stream
_execution_queues: WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, _ExecutionQueue]] = WeakKeyDictionary()
_queues_lock = threading.Lock()


def _execution_queue(group: dist.ProcessGroup, device: torch.device) -> _ExecutionQueue:
    with _queues_lock:
        device_queues = _execution_queues.setdefault(group, {})
        if device in device_queues:
            return device_queues[device]
        if device.type == "cuda":
            # NCCL needs all ranks when a group is first used, but not all have messages in the first step of a Program.
            # A Program in which a rank takes no part must not be the first use of a group.
            dist.all_reduce(torch.zeros(1, device=device), group=group)
            device_queues[device] = torch.cuda.Stream(device)
        else:
            device_queues[device] = queue = WorkQueue()
            finalize(group, queue.close)
        return device_queues[device]


DTYPE = torch.float32


@dataclass(frozen=True)
class CollectiveMeasurement:
    """The results that all ranks of a group share."""

    dtype: str
    size: int  # S in bytes, rounded up to whole elements in every chunk
    seconds: tuple[float, ...]  # The time of the slowest rank in each repeat
    largest_error: float
    allowed_error: float  # The bound of rounding in any order of the terms; 0 if nothing is reduced
    sent_bytes: tuple[int, ...]  # Bytes that each rank sends
    messages: tuple[int, ...]  # Messages that each rank sends


def measure_program(program: Program, group: dist.ProcessGroup, *, size: int, repeats: int) -> CollectiveMeasurement:
    """Check the result of one execution, then time `repeats` more. All ranks must call this."""
    rank = dist.get_rank(group)
    elements_per_unit = -(-size // (DTYPE.itemsize * program.message_size_units))
    elements = elements_per_unit * sum(program.sizes)
    expected, allowed = _expected_result(program, rank, elements)
    chunks = _rank_contribution(rank, elements).split(list(chunk_lengths(program, elements)))
    input_tensor = torch.cat([torch.empty(0, dtype=DTYPE), *(chunks[chunk] for chunk in sorted(program.initial[rank]))])
    output = torch.full_like(expected, torch.nan, dtype=DTYPE)
    run_program(program, output, input_tensor, group)
    error = (output.double() - expected).abs()
    if not bool((error <= allowed).all()):
        raise MotetError(f"{program}: rank {rank} has a wrong result; the largest error is {float(error.max())}")
    seconds, counters = torch.zeros(repeats, dtype=torch.float64), _TraceCounterCollector()
    for repeat in range(repeats):
        dist.barrier(group=group)
        counters.clear()
        start_s = time.perf_counter()
        with trace.install_sink(counters):
            run_program(program, output, input_tensor, group, check=False)
        seconds[repeat] = time.perf_counter() - start_s
    max_errors = torch.stack([functional.pad(bound, (0, 1)).max() for bound in (error, allowed)])  # 0 if empty
    for tensor in (seconds, max_errors):
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    local_counts = torch.tensor([counters["sent_bytes"], counters["messages"]], dtype=torch.float64)
    all_counts = [torch.empty_like(local_counts) for _ in range(program.ranks)]
    dist.all_gather(all_counts, local_counts, group=group)
    return CollectiveMeasurement(
        dtype_name(DTYPE),
        elements_per_unit * program.message_size_units * DTYPE.itemsize,
        tuple(seconds.tolist()),
        *max_errors.tolist(),
        *(tuple(int(row[column]) for row in all_counts) for column in (0, 1)),
    )


class _TraceCounterCollector(Counter[str]):
    def on_count(self, name: str, value: float) -> None:
        self[name] += int(value)

    def on_span(self, action: str, start: float, stop: float, depth: int) -> None:
        """Ignore spans."""


def _rank_contribution(rank: int, elements: int) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(rank), dtype=DTYPE)


def _expected_result(program: Program, rank: int, elements: int) -> tuple[Tensor, Tensor]:
    """The result of a rank in float64, and the error bound of float32: (n - 1) u times the sum of the magnitudes."""
    lengths = chunk_lengths(program, elements)
    output_slices = assign_offsets("output", program.final[rank], lengths)
    total, magnitude = torch.zeros(2, sum(home.elements for home in output_slices.values()), dtype=torch.float64)
    for source in range(program.ranks):
        chunks = _rank_contribution(source, elements).double().split(list(lengths))
        for chunk, home in output_slices.items():
            if multiplicity := program.final[rank][chunk].count(source):
                output_range = slice(home.start, home.stop)
                total[output_range] += multiplicity * chunks[chunk]
                magnitude[output_range] += multiplicity * chunks[chunk].abs()
    for chunk, home in output_slices.items():
        rounding = (len(program.final[rank][chunk]) - 1) * torch.finfo(DTYPE).eps / 2
        magnitude[home.start : home.stop] *= rounding / (1 - rounding)
    return total, magnitude
