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

from motet.collectives.agree import Intent, agree
from motet.collectives.arithmetic import Arithmetic, Operator, arithmetic
from motet.collectives.lane import Done, Lane, Work
from motet.collectives.lower import Buffer, Same, elements, extents, laid, lower
from motet.collectives.play import Playing, play
from motet.collectives.score import Program
from motet.collectives.stream import Queued, queue
from motet.collectives.transport import Channel, flat, kind
from motet.core.errors import InputError

_TAG = 0x6D6F00


class Manner(TypedDict, total=False):
    """How a Program is carried out."""

    op: Operator
    """How contributions are joined; "sum" if nothing is said."""
    async_op: bool
    """Return at once; the tensors are not to be touched until the Work is done."""
    check: bool
    """First make sure that all ranks are about to do the same: one small all-gather, unless it is False."""
    timeout_s: float | None
    """How long to wait for each message on a CPU; otherwise as long as the group does."""


def run(
    program: Program, output: Tensor | None, input: Tensor | None, group: dist.ProcessGroup, **manner: Unpack[Manner]
) -> Work:
    """Carry out a Program, as every rank of the group must; its rank i is rank i of the group.

    `input` holds the chunks that this rank starts with, one after another, `output` those that it must have at the end;
    None where there are none. The input stays as it is. Where both are one tensor, or share the chunks that are in
    both, it is done in place. Gradients are not tracked. `prove` tells whether a Program of your own is right.
    """
    seconds = manner.get("timeout_s")
    request = _Request(
        program, output, input, group, manner.get("op", "sum"), None if seconds is None else timedelta(seconds=seconds)
    )
    playing, refusal = None, None
    try:
        playing = _ready(request)
    except InputError as error:
        refusal = error
    if manner.get("check", True):
        agree(_intent(request, playing, refusal), group, request.timeout)
    if refusal is not None:
        raise refusal
    return Done() if playing is None else _start(playing, manner.get("async_op", False))


class _Request(NamedTuple):
    program: Program
    output: Tensor | None
    input: Tensor | None
    group: dist.ProcessGroup
    op: Operator
    timeout: timedelta | None


class _Facts(NamedTuple):
    """What has to be known of a Program, and takes a while to find out."""

    digest: int
    """The same in every process, and another one for another Program, whatever its name."""
    reduces: bool
    same_end: bool
    """All ranks end with all chunks, so that their outputs have one shape."""
    same_start: bool
    """All ranks start with all chunks, so that their inputs have one shape."""


@lru_cache(maxsize=256)
def _facts(key: Same) -> _Facts:
    program = key.program
    steps = tuple(tuple((*t[:4], t.op == "copy") for t in step) for step in program.steps)
    final = tuple(tuple(sorted(held.items())) for held in program.final)
    return _Facts(
        hash((program.ranks, program.sizes, program.initial, final, steps)),  # of integers: the same everywhere
        any(t.op == "reduce" for step in program.steps for t in step),
        all(len(held) == program.chunks for held in program.final),
        all(len(held) == program.chunks for held in program.initial),
    )


def _ready(request: _Request) -> Playing | None:
    """What this rank has to play; None if it has no part."""
    program, rank, world = request.program, dist.get_rank(request.group), dist.get_world_size(request.group)
    if program.ranks != world:
        raise InputError(f"{program} cannot be carried out by {world} ranks; make it for as many as the group has")
    given: dict[Buffer, Tensor | None] = {"input": request.input, "output": request.output}
    flats = {name: flat(tensor, f"{program}: rank {rank}") for name, tensor in given.items() if tensor is not None}
    held, kept = (flats[name].numel() if name in flats else 0 for name in given)
    total = elements(program, rank, held, kept)
    if total is None:
        return None
    if not flats:
        raise InputError(f"{program}: rank {rank} takes part, but gave no tensor")
    kinds = {kind(tensor) for tensor in flats.values()}
    if len(kinds) > 1:
        raise InputError(
            f"{program}: rank {rank} gave {' and '.join(sorted(kinds))}; give an input and output of one kind"
        )
    some = next(iter(flats.values()))
    for name in given:
        flats.setdefault(name, some.new_empty(0))
    reduces = _facts(Same(program)).reduces
    how = arithmetic(request.op, some.dtype, some.device) if reduces else Arithmetic("sum", some.dtype)
    part = lower(program, rank, total, _in_place(program, rank, total, flats))
    timeout = request.timeout if some.device.type == "cpu" else None
    return Playing(str(program), part, total, flats, how, Channel(request.group, timeout, _TAG))


def _in_place(program: Program, rank: int, total: int, flats: dict[Buffer, Tensor]) -> bool:
    """Whether the chunks that the rank both starts and ends with lie in the same memory; nothing else may."""
    source, target = flats["input"], flats["output"]
    ahead = target.data_ptr() - source.data_ptr()
    shared = min(source.nbytes, ahead + target.nbytes) - max(0, ahead)
    if shared <= 0 or not source.numel() or not target.numel():
        return False
    lengths = extents(program, total)
    starts, ends = laid("input", program.initial[rank], lengths), laid("output", program.final[rank], lengths)
    both = [chunk for chunk in starts if chunk in ends and lengths[chunk]]
    aligned = all((starts[chunk].start - ends[chunk].start) * source.itemsize == ahead for chunk in both)
    if not aligned or shared != sum(lengths[chunk] for chunk in both) * source.itemsize:
        raise InputError(f"{program}: input and output of rank {rank} overlap; give tensors with memory of their own")
    return True


def _intent(request: _Request, playing: Playing | None, refusal: InputError | None) -> Intent:
    """What all ranks must agree on."""
    facts = _facts(Same(request.program))
    what = f"{request.program} ({request.op})" if facts.reduces else str(request.program)
    tensor = ""
    if playing is not None:
        whole = request.output if facts.same_end else request.input if facts.same_start else None
        shape = "" if whole is None else f" of shape {tuple(whole.shape)}"
        tensor = f"{playing.numel} {kind(playing.buffers['output'])}{shape}"
    return Intent(what, facts.digest, tensor, str(refusal or ""))


def _start(playing: Playing, async_op: bool) -> Work:
    lane = _lane(playing.channel.group, playing.device)
    if isinstance(lane, Lane):
        task = partial(play, playing)
        if async_op:
            return lane.start(task)
        lane.do(task)
        return Done()
    work = _queue(playing, lane)
    if not async_op:
        work.wait()
    return work


_Lane = Lane | torch.cuda.Stream
_lanes: WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, _Lane]] = WeakKeyDictionary()
"""Groups are torch's, so what belongs to one is kept beside it."""
_finding = threading.Lock()


def _lane(group: dist.ProcessGroup, device: torch.device) -> _Lane:
    with _finding:
        lanes = _lanes.setdefault(group, {})
        if device not in lanes:
            lanes[device] = _new_lane(group, device)
        return lanes[device]


def _new_lane(group: dist.ProcessGroup, device: torch.device) -> _Lane:
    if device.type == "cuda":
        # NCCL needs all ranks when a group is first used, but not all have messages in the first step. So a Program in
        # which a rank has no part at all must not be the first of a group there.
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        return torch.cuda.Stream(device)
    lane = Lane()
    finalize(group, lane.close)
    return lane


def _queue(playing: Playing, stream: torch.cuda.Stream) -> Queued:
    """Memory that the caller frees is not used again before it is done."""
    queued = queue(partial(play, playing), stream)
    for tensor in playing.buffers.values():
        tensor.record_stream(stream)
    return queued
