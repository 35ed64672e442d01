"""Programs over torch.distributed: on any backend that sends and receives, any device, any group of ranks.

On a CPU, a thread of each group executes asynchronous Programs in order. On CUDA, each group has a stream on which
everything is queued, the messages of a step as one grouped operation, and the host does not wait.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache, partial
from typing import NamedTuple, TypedDict, Unpack
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from torch import Tensor

from motet.collectives.execute.buffer_plan import (
    Buffer,
    BufferPlan,
    BufferSlice,
    BufferStep,
    assign_offsets,
    make_buffer_plan,
)
from motet.collectives.execute.call_consistency import CollectiveCallSignature, check_same_call
from motet.collectives.execute.p2p import P2PBatch, P2PChannel, P2PTensor, dtype_and_device, flatten_contiguous
from motet.collectives.execute.rank_plan import CollectiveProgramKey, chunk_lengths, total_elements
from motet.collectives.execute.reduce_ops import DtypeReduceOp, ReduceOpName, make_reduce_op
from motet.collectives.execute.work_queue import CompletedWork, WorkHandle, WorkQueue, run_on_stream
from motet.collectives.program import Program
from motet.core.errors import InputError

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
        execution = _prepare_execution(program, output, input, group=group, op=op, timeout=timeout)
    except InputError as error:
        rejection = error
    if options.get("check", True):
        properties = _program_properties(CollectiveProgramKey(program))
        description = ""
        if execution is not None:
            full = output if properties.outputs_have_one_shape else input if properties.inputs_have_one_shape else None
            shape = "" if full is None else f" of shape {tuple(full.shape)}"
            description = f"{execution.total_numel} {dtype_and_device(execution.buffers['output'])}{shape}"
        operation = f"{program} ({op})" if properties.has_reductions else str(program)
        signature = CollectiveCallSignature(operation, properties.digest, description, str(rejection or ""))
        check_same_call(signature, group, timeout)
    if rejection is not None:
        raise rejection
    return CompletedWork() if execution is None else _start_execution(execution, options.get("async_op", False))


@dataclass(frozen=True)
class RankCollectiveExecution:
    """A plan with its tensors, all flat and of one dtype and device."""

    title: str
    plan: BufferPlan
    total_numel: int  # Elements of all chunks
    buffers: dict[Buffer, Tensor]
    reduce_op: DtypeReduceOp
    channel: P2PChannel


class _CollectiveProgramProperties(NamedTuple):
    """Properties of a Program that are slow to compute."""

    digest: int  # Equal in all processes for equal Programs, whatever their names
    has_reductions: bool
    outputs_have_one_shape: bool  # All ranks end with all chunks
    inputs_have_one_shape: bool  # All ranks start with all chunks


@lru_cache(maxsize=256)
def _program_properties(key: CollectiveProgramKey) -> _CollectiveProgramProperties:
    program = key.program
    steps = tuple(tuple((*t[:4], t.op == "copy") for t in step) for step in program.steps)
    final = tuple(tuple(sorted(held.items())) for held in program.final)
    return _CollectiveProgramProperties(
        hash((program.ranks, program.sizes, program.initial, final, steps)),  # of integers: equal in all processes
        any(t.op == "reduce" for step in program.steps for t in step),
        all(len(held) == program.chunks for held in program.final),
        all(len(held) == program.chunks for held in program.initial),
    )


def _prepare_execution(
    program: Program,
    output: Tensor | None,
    input: Tensor | None,
    *,
    group: dist.ProcessGroup,
    op: ReduceOpName,
    timeout: timedelta | None,
) -> RankCollectiveExecution | None:
    """The plan and tensors of this rank; None if it takes no part."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    if program.ranks != world:
        raise InputError(f"{program} cannot be executed by {world} ranks; build it for the ranks of the group")
    tensors: dict[Buffer, Tensor | None] = {"input": input, "output": output}
    flat_tensors = {
        name: flatten_contiguous(tensor, f"{program}: rank {rank}")
        for name, tensor in tensors.items()
        if tensor is not None
    }
    input_numel, output_numel = (flat_tensors[name].numel() if name in flat_tensors else 0 for name in tensors)
    total_numel = total_elements(program, rank, input_numel, output_numel)
    if total_numel is None:
        return None
    if not flat_tensors:
        raise InputError(f"{program}: rank {rank} takes part, but gave no tensor")
    kinds = {dtype_and_device(tensor) for tensor in flat_tensors.values()}
    if len(kinds) > 1:
        raise InputError(
            f"{program}: rank {rank} gave {' and '.join(sorted(kinds))}; give an input and output of one kind"
        )
    example = next(iter(flat_tensors.values()))
    for name in tensors:
        flat_tensors.setdefault(name, example.new_empty(0))
    reduce_op = DtypeReduceOp("sum", example.dtype)
    if _program_properties(CollectiveProgramKey(program)).has_reductions:
        reduce_op = make_reduce_op(op, example.dtype, example.device)
    in_place = _is_in_place(program, rank, total_numel, buffers=flat_tensors)
    return RankCollectiveExecution(
        str(program),
        make_buffer_plan(program, rank, total_numel, in_place=in_place),
        total_numel,
        flat_tensors,
        reduce_op,
        P2PChannel(group, timeout if example.device.type == "cpu" else None, _MESSAGE_TAG),
    )


def _is_in_place(program: Program, rank: int, total: int, *, buffers: dict[Buffer, Tensor]) -> bool:
    """Whether the chunks that are both initial and final are in the same memory; no other chunk may be."""
    source, target = buffers["input"], buffers["output"]
    byte_offset = target.data_ptr() - source.data_ptr()
    shared_bytes = min(source.nbytes, byte_offset + target.nbytes) - max(0, byte_offset)
    if shared_bytes <= 0 or not source.numel() or not target.numel():
        return False
    lengths = chunk_lengths(program, total)
    starts = assign_offsets("input", program.initial[rank], lengths)
    ends = assign_offsets("output", program.final[rank], lengths)
    shared_chunks = [chunk for chunk in starts if chunk in ends and lengths[chunk]]
    offsets = {(starts[chunk].start - ends[chunk].start) * source.itemsize for chunk in shared_chunks}
    if offsets - {byte_offset} or shared_bytes != sum(lengths[chunk] for chunk in shared_chunks) * source.itemsize:
        raise InputError(f"{program}: input and output of rank {rank} overlap; give tensors that share no memory")
    return True


@torch.no_grad()
def _execute_plan(execution: RankCollectiveExecution) -> None:
    """Run all steps. On CUDA everything is queued on the current stream."""
    plan, reduce_op = execution.plan, execution.reduce_op
    buffers = execution.buffers | {"scratch": execution.buffers["output"].new_empty(plan.scratch_elements)}

    def view(span: BufferSlice) -> Tensor:
        return buffers[span.buffer][span.start : span.stop]

    for step_index, step in enumerate(plan.steps):
        if step.sends or step.receives:
            _run_step(step, view, execution, context=f"step {step_index} of {execution.title}")
    for copy in plan.final_copies:
        view(copy.target).copy_(view(copy.source))
    if reduce_op.operator == "avg":
        for ranks, span in plan.contributor_counts:
            reduce_op.divide(view(span), ranks)


def _run_step(
    step: BufferStep, view: Callable[[BufferSlice], Tensor], execution: RankCollectiveExecution, *, context: str
) -> None:
    for pack in step.packs:
        view(pack.target).copy_(view(pack.source))
    receives, sends = ([P2PTensor(m.peer, view(m.buffer_slice)) for m in side] for side in (step.receives, step.sends))
    messages = P2PBatch(receives, sends, execution.channel, context=context)

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
            execution.reduce_op.accumulate(view(reduction.target), view(reduction.local), received)
    messages.wait()


def _start_execution(execution: RankCollectiveExecution, async_op: bool) -> WorkHandle:
    queue = _execution_queue(execution.channel.group, execution.buffers["output"].device)
    task = partial(_execute_plan, execution)
    if isinstance(queue, WorkQueue):
        if async_op:
            return queue.submit(task)
        queue.run(task)
        return CompletedWork()
    work = run_on_stream(task, queue)
    for tensor in execution.buffers.values():
        tensor.record_stream(queue)  # so that memory which the caller frees is not used again before the end
    if not async_op:
        work.wait()
    return work


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
