"""Programs over torch.distributed: on any backend that sends and receives, any device, any group of ranks.

On a CPU, a thread of each group executes asynchronous Programs in order. On CUDA, each group has a stream on which
everything is queued, the messages of a step as one grouped operation, and the host does not wait.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache
from typing import TypedDict, Unpack
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from torch import Tensor

from motet.collectives.execute import buffer_plan
from motet.collectives.execute.buffer_plan import Buffer, BufferPlan, BufferSlice, BufferStep
from motet.collectives.execute.call_consistency import CollectiveCallSignature, check_same_call
from motet.collectives.execute.p2p import P2PBatch, P2PChannel, P2PTensor, dtype_and_device, flatten_contiguous
from motet.collectives.execute.rank_plan import chunk_lengths, total_elements
from motet.collectives.execute.reduce_ops import DtypeReduceOp, ReduceOpName, make_reduce_op
from motet.collectives.execute.work_queue import CompletedWork, WorkHandle, WorkQueue, run_on_stream
from motet.collectives.program import Program
from motet.core import trace
from motet.core.errors import InputError, check_input

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
    plan = buffer_plan.make_buffer_plan(program, rank, total_numel, in_place=in_place)
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
    starts = buffer_plan.assign_offsets("input", program.initial[rank], lengths)
    ends = buffer_plan.assign_offsets("output", program.final[rank], lengths)
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
