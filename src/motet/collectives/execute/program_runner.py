"""Programs over torch.distributed: any backend that can send and receive, any device, any group of ranks.

On a CPU an asynchronous Program is carried out by one thread per group, in order. On CUDA each group has a stream of
its own on which everything is queued, a step's messages as one grouped operation; the host waits for nothing there.
"""

import threading
from datetime import timedelta
from functools import lru_cache, partial
from typing import NamedTuple, TypedDict, Unpack
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from torch import Tensor

from motet.collectives.execute.call_consistency import CollectiveCallSignature, check_same_call
from motet.collectives.execute.cuda_stream import CudaStreamWork, run_on_stream
from motet.collectives.execute.interpreter import RankCollectiveExecution, execute_plan
from motet.collectives.execute.p2p import P2PChannel, dtype_and_device, flatten_contiguous
from motet.collectives.execute.rank_plan import (
    Buffer,
    CollectiveProgramKey,
    assign_offsets,
    chunk_lengths,
    make_rank_plan,
    total_elements,
)
from motet.collectives.execute.reduce_ops import DtypeReduceOp, ReduceOpName, make_reduce_op
from motet.collectives.execute.work_queue import CompletedWork, FifoWorkQueue, WorkHandle
from motet.collectives.program import Program
from motet.core.errors import InputError

_MESSAGE_TAG = 0x6D6F00


class CollectiveProgramOptions(TypedDict, total=False):
    """How a Program is carried out."""

    op: ReduceOpName  # How contributions are joined; "sum" if nothing is said
    async_op: bool  # Return at once; the tensors are not to be touched until the Work is done
    check: bool  # First make sure that all ranks are about to do the same: one small all-gather, unless it is False
    timeout_s: float | None  # How long to wait for each message on a CPU; otherwise as long as the group does


def run_program(
    program: Program,
    output: Tensor | None,
    input: Tensor | None,
    group: dist.ProcessGroup,
    **options: Unpack[CollectiveProgramOptions],
) -> WorkHandle:
    """Carry out a Program, as every rank of the group must; its rank i is rank i of the group.

    `input` holds the chunks that this rank starts with, one after another, `output` those that it must have at the end;
    None where there are none. The input stays as it is. Where both are one tensor, or share the chunks that are in
    both, it is done in place. Gradients are not tracked. `prove` tells whether a Program of your own is right.
    """
    seconds = options.get("timeout_s")
    request = _CollectiveProgramRequest(
        program, output, input, group, options.get("op", "sum"), None if seconds is None else timedelta(seconds=seconds)
    )
    execution, rejection = None, None
    try:
        execution = _prepare_execution(request)
    except InputError as error:
        rejection = error
    if options.get("check", True):
        check_same_call(_call_signature(request, execution, rejection), group, request.timeout)
    if rejection is not None:
        raise rejection
    return CompletedWork() if execution is None else _start_execution(execution, options.get("async_op", False))


class _CollectiveProgramRequest(NamedTuple):
    program: Program
    output: Tensor | None
    input: Tensor | None
    group: dist.ProcessGroup
    op: ReduceOpName
    timeout: timedelta | None


class _CollectiveProgramProperties(NamedTuple):
    """What has to be known of a Program, and takes a while to find out."""

    digest: int  # The same in every process, and another one for another Program, whatever its name
    has_reductions: bool
    outputs_have_one_shape: bool  # All ranks end with all chunks, so that their outputs have one shape
    inputs_have_one_shape: bool  # All ranks start with all chunks, so that their inputs have one shape


@lru_cache(maxsize=256)
def _program_properties(key: CollectiveProgramKey) -> _CollectiveProgramProperties:
    program = key.program
    steps = tuple(tuple((*t[:4], t.op == "copy") for t in step) for step in program.steps)
    final = tuple(tuple(sorted(held.items())) for held in program.final)
    return _CollectiveProgramProperties(
        hash((program.ranks, program.sizes, program.initial, final, steps)),  # of integers: the same everywhere
        any(t.op == "reduce" for step in program.steps for t in step),
        all(len(held) == program.chunks for held in program.final),
        all(len(held) == program.chunks for held in program.initial),
    )


def _prepare_execution(request: _CollectiveProgramRequest) -> RankCollectiveExecution | None:
    """What this rank has to play; None if it has no part."""
    program, rank, world = request.program, dist.get_rank(request.group), dist.get_world_size(request.group)
    if program.ranks != world:
        raise InputError(f"{program} cannot be carried out by {world} ranks; make it for as many as the group has")
    tensors: dict[Buffer, Tensor | None] = {"input": request.input, "output": request.output}
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
    has_reductions = _program_properties(CollectiveProgramKey(program)).has_reductions
    reduce_op = (
        make_reduce_op(request.op, example.dtype, example.device)
        if has_reductions
        else DtypeReduceOp("sum", example.dtype)
    )
    plan = make_rank_plan(program, rank, total_numel, _is_in_place(program, rank, total_numel, flat_tensors))
    timeout = request.timeout if example.device.type == "cpu" else None
    return RankCollectiveExecution(
        str(program), plan, total_numel, flat_tensors, reduce_op, P2PChannel(request.group, timeout, _MESSAGE_TAG)
    )


def _is_in_place(program: Program, rank: int, total: int, flat_tensors: dict[Buffer, Tensor]) -> bool:
    """Whether the chunks that the rank both starts and ends with lie in the same memory; nothing else may."""
    source, target = flat_tensors["input"], flat_tensors["output"]
    byte_offset = target.data_ptr() - source.data_ptr()
    shared_bytes = min(source.nbytes, byte_offset + target.nbytes) - max(0, byte_offset)
    if shared_bytes <= 0 or not source.numel() or not target.numel():
        return False
    lengths = chunk_lengths(program, total)
    starts, ends = (
        assign_offsets("input", program.initial[rank], lengths),
        assign_offsets("output", program.final[rank], lengths),
    )
    shared_chunks = [chunk for chunk in starts if chunk in ends and lengths[chunk]]
    is_aligned = all(
        (starts[chunk].start - ends[chunk].start) * source.itemsize == byte_offset for chunk in shared_chunks
    )
    if not is_aligned or shared_bytes != sum(lengths[chunk] for chunk in shared_chunks) * source.itemsize:
        raise InputError(f"{program}: input and output of rank {rank} overlap; give tensors with memory of their own")
    return True


def _call_signature(
    request: _CollectiveProgramRequest, execution: RankCollectiveExecution | None, rejection: InputError | None
) -> CollectiveCallSignature:
    """What all ranks must agree on."""
    properties = _program_properties(CollectiveProgramKey(request.program))
    operation = f"{request.program} ({request.op})" if properties.has_reductions else str(request.program)
    tensor_description = ""
    if execution is not None:
        full_tensor = (
            request.output
            if properties.outputs_have_one_shape
            else request.input
            if properties.inputs_have_one_shape
            else None
        )
        shape = "" if full_tensor is None else f" of shape {tuple(full_tensor.shape)}"
        tensor_description = f"{execution.total_numel} {dtype_and_device(execution.buffers['output'])}{shape}"
    return CollectiveCallSignature(operation, properties.digest, tensor_description, str(rejection or ""))


def _start_execution(execution: RankCollectiveExecution, async_op: bool) -> WorkHandle:
    work_queue = _execution_queue(execution.channel.group, execution.device)
    if isinstance(work_queue, FifoWorkQueue):
        task = partial(execute_plan, execution)
        if async_op:
            return work_queue.submit(task)
        work_queue.run_and_wait(task)
        return CompletedWork()
    work = _run_on_cuda_stream(execution, work_queue)
    if not async_op:
        work.wait()
    return work


_ExecutionQueue = FifoWorkQueue | torch.cuda.Stream
# Groups are torch's, so what belongs to one is kept beside it.
_execution_queues: WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, _ExecutionQueue]] = WeakKeyDictionary()
_queues_lock = threading.Lock()


def _execution_queue(group: dist.ProcessGroup, device: torch.device) -> _ExecutionQueue:
    with _queues_lock:
        device_queues = _execution_queues.setdefault(group, {})
        if device not in device_queues:
            device_queues[device] = _make_execution_queue(group, device)
        return device_queues[device]


def _make_execution_queue(group: dist.ProcessGroup, device: torch.device) -> _ExecutionQueue:
    if device.type == "cuda":
        # NCCL needs all ranks when a group is first used, but not all have messages in the first step. So a Program in
        # which a rank has no part at all must not be the first of a group there.
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        return torch.cuda.Stream(device)
    work_queue = FifoWorkQueue()
    finalize(group, work_queue.close)
    return work_queue


def _run_on_cuda_stream(execution: RankCollectiveExecution, stream: torch.cuda.Stream) -> CudaStreamWork:
    """Memory that the caller frees is not used again before it is done."""
    work = run_on_stream(partial(execute_plan, execution), stream)
    for tensor in execution.buffers.values():
        tensor.record_stream(stream)
    return work
