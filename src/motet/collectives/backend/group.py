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

from motet.collectives.backend.chunks import (
    Chunks,
    Factor,
    Finish,
    contiguous,
    dtype_name,
    equal,
    flat,
    landing,
    landings,
    pieces,
    rows,
    scaled,
)
from motet.collectives.backend.errors import CollectiveError
from motet.collectives.backend.monitored import monitored_barrier
from motet.collectives.backend.plans import Plans
from motet.collectives.backend.player import Plan
from motet.collectives.backend.sparse import check_sparse, sum_sparse
from motet.collectives.backend.station import Station, open_station
from motet.collectives.backend.work import Line, Task, completed
from motet.core.errors import InputError

_REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
_DONE = completed([])

if TYPE_CHECKING:

    class _ProcessGroup:
        """All that this class counts on. Torch's stubs describe the C++ methods, whose overloads ours do not have."""

        def __init__(self, rank: int, size: int) -> None: ...
else:
    _ProcessGroup = dist.ProcessGroup


class MotetGroup(_ProcessGroup):
    """A group of CPU ranks."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._station: Station = open_station(store, rank, size, timeout.total_seconds())
        self._line = Line(self._station.give_up, self._station.relax)
        self._plans = Plans(self._station, rank, size)
        self._name = self._description = ""
        self._barriers = 0

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
        self._line.close()
        self._station.close()

    def abort(self) -> None:
        self._station.give_up(CollectiveError("the group was aborted"))
        self.shutdown()

    def set_timeout(self, timeout: timedelta) -> None:
        self._station.set_timeout(timeout.total_seconds())

    # Collectives. Each makes lists of chunks: where they are before, and where they must be in the end.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Task:
        opts = opts or dist.AllreduceOptions()
        jobs: list[Callable[[], None]] = []
        for tensor in tensors:
            name, factor = _operator(opts.reduceOp, tensor)
            if tensor.layout == torch.sparse_coo:
                check_sparse(name, factor)
                jobs.append(partial(sum_sparse, tensor, self._stacked))
                continue
            plan = self._plans.find("all-reduce", tensor, name)
            made, finish = landing(tensor)
            chunks = _split(made, plan)
            jobs.append(self._job(plan, chunks, chunks, finish, factor))
        return self._submit(jobs, tensors, opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> Task:
        name, factor = _operator(opts.reduceOp, tensors[0])
        plan = self._plans.find("reduce", tensors[0], name, opts.rootRank)
        made, finish = landing(tensors[0])
        chunks = _split(made, plan)
        place: Chunks = chunks if opts.rootRank == self._rank else [None] * len(chunks)
        return self._submit([self._job(plan, chunks, place, finish, factor)], tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Task:
        plan = self._plans.find("broadcast", tensors[0], root=opts.rootRank)
        made, finish = landing(tensors[0])
        chunks = _split(made, plan)
        return self._submit([self._job(plan, chunks, chunks, finish)], tensors, opts)

    def allgather(self, outputs: Sequence[Tensor | list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Task:
        jobs = [self._gathering("all-gather", given, out) for out, given in zip(outputs, inputs, strict=True)]
        return self._submit(jobs, outputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced = allgather

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Task:
        """Here the outputs of a rank stand together, not those of a tensor."""
        return self.allgather([list(outs) for outs in zip(*outputs, strict=True)], inputs, opts)

    def _allgather_base(self, output: Tensor, given: Tensor, opts: Any = None) -> Task:
        return self.allgather([output], [given], opts)

    all_gather_single = _allgather_base

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Task:
        root = opts.rootRank
        out = outputs[0] if root == self._rank else None
        return self._submit([self._gathering("gather", inputs[0], out, root)], outputs, opts)

    def _gathering(
        self, kind: str, given: Tensor, out: Tensor | list[Tensor] | None, root: int = 0
    ) -> Callable[[], None]:
        plan = self._plans.find(kind, given, root=root)
        before = self._nothing()
        before[self._rank] = flat(given)
        if out is None:
            return self._job(plan, before, self._nothing())
        place, finish = pieces(out, given, self._size, f"{kind} output")
        return self._job(plan, before, place, finish)

    def _stacked(self, given: Tensor) -> Tensor:
        """What all ranks have, gathered by the thread that carries out a job."""
        made = given.new_empty(self._size, *given.shape)
        self._gathering("all-gather", given, made)()
        return made

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Task:
        out, root = outputs[0], opts.rootRank
        plan = self._plans.find("scatter", out, root=root)
        before: Chunks = self._nothing()
        if root == self._rank:
            before, _ = pieces(inputs[0], out, self._size, "scatter input")
        return self._submit([self._dealing(plan, before, out)], outputs, opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: Sequence[Tensor | list[Tensor]], opts: Any = None) -> Task:
        opts = opts or dist.ReduceScatterOptions()
        jobs = []
        for out, given in zip(outputs, inputs, strict=True):
            name, factor = _operator(opts.reduceOp, out)
            plan = self._plans.find("reduce-scatter", out, name)
            before, _ = pieces(given, out, self._size, "reduce-scatter input")
            jobs.append(self._dealing(plan, before, out, factor))
        return self._submit(jobs, outputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced = reduce_scatter

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, opts: Any = None) -> Task:
        return self.reduce_scatter([output], [given], opts)

    reduce_scatter_single = _reduce_scatter_base

    def _dealing(self, plan: Plan, before: Chunks, out: Tensor, factor: Factor = None) -> Callable[[], None]:
        place = self._nothing()
        place[self._rank], finish = landing(out)
        return self._job(plan, before, place, finish, factor)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Task:
        return self._submit([self._uneven_swap(inputs, outputs)], outputs, opts)

    def alltoall_base(
        self, output: Tensor, given: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> Task:
        if output_sizes or input_sizes:
            inputs = rows(given, input_sizes, self._size, "input")
            outputs = rows(output, output_sizes, self._size, "output")
            return self._submit([self._uneven_swap(inputs, outputs)], [output], opts)
        if given.numel() != output.numel() or given.numel() % self._size:
            raise InputError(
                f"all-to-all of {given.numel()} into {output.numel()} numbers: without split sizes both must be the "
                f"same multiple of the {self._size} ranks"
            )
        plan = self._plans.find("all-to-all", given)
        each = given.numel() // self._size
        made, finish = landing(output)
        before, place = self._swapped(equal(flat(given), each, self._size), equal(made, each, self._size))
        return self._submit([self._job(plan, before, place, finish)], [output], opts)

    all_to_all_single = alltoall_base

    def _swapped(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[Chunks, Chunks]:
        before, place = self._nothing() * self._size, self._nothing() * self._size
        before[self._rank * self._size : (self._rank + 1) * self._size] = inputs
        place[self._rank :: self._size] = outputs
        return before, place

    def _uneven_swap(self, inputs: list[Tensor], outputs: list[Tensor]) -> Callable[[], None]:
        """What everybody has for everybody is gathered first."""
        counts = torch.tensor([piece.numel() for piece in inputs])
        matrix = torch.empty(self._size, self._size, dtype=torch.int64)
        gather = self._gathering("all-gather", counts, matrix)
        made, finish = landings(outputs)
        before, place = self._swapped([flat(piece) for piece in inputs], made)

        def work() -> None:
            gather()
            lengths = tuple(matrix.flatten().tolist())
            for source, out in enumerate(outputs):
                if out.numel() != lengths[source * self._size + self._rank]:
                    raise CollectiveError(
                        f"rank {self._rank} in all-to-all: rank {source} has "
                        f"{lengths[source * self._size + self._rank]} numbers for it, where it expects {out.numel()}"
                    )
            self._job(self._plans.find("all-to-all", outputs[0], lengths=lengths), before, place, finish)()

        return work

    def barrier(self, opts: Any = None) -> Task:
        nothing = torch.empty(0, dtype=torch.uint8)
        chunks: Chunks = [nothing] * self._size
        plan = self._plans.find("barrier", nothing)
        return self._submit([self._job(plan, chunks, chunks)], [], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Raises, on rank 0, with the ranks that do not come in time."""
        self._barriers += 1
        limit_s = self._station.post.timeout_s if timeout is None else timeout.total_seconds()
        tag = -self._barriers  # callers' tags are not negative
        monitored_barrier(self._station, self._rank, self._size, tag, limit_s, wait_all_ranks)

    # Messages.

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Task:
        return self._station.send(flat(tensors[0]).view(tensors[0].shape), dst, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> Task:
        return self._station.receive(contiguous(tensors[0]), src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Task:
        return self._station.receive(contiguous(tensors[0]), None, tag)

    # How it is done.

    def _nothing(self) -> list[Tensor | None]:
        return [None] * self._size

    def _job(
        self, plan: Plan, before: Chunks, place: Chunks, finish: Finish = None, factor: Factor = None
    ) -> Callable[[], None]:
        def work() -> None:
            self._carry_out(plan, before if factor is None else scaled(before, factor), place)
            if finish is not None:
                finish()

        return work

    def _carry_out(self, plan: Plan, before: Chunks, place: Chunks) -> None:
        part = plan.lowered
        if part.scratch:
            place = list(place)
            for chunk in part.scratch:
                place[chunk] = torch.empty(plan.lengths[chunk], dtype=plan.dtype)
        dtype = next((chunk.dtype for chunk in before if chunk is not None), plan.dtype)
        if dtype != plan.dtype:
            self._converted(plan, before, place)
        else:
            self._station.play(plan, before, place)
        for chunk in part.kept:
            source, target = before[chunk], place[chunk]
            if source is not None and target is not None and source.data_ptr() != target.data_ptr():
                target.copy_(source)

    def _converted(self, plan: Plan, before: Chunks, place: Chunks) -> None:
        """In float32, and rounded at the end."""
        wide = [None if chunk is None else chunk.float() for chunk in before]
        made: Chunks = [None if chunk is None else torch.empty_like(chunk, dtype=plan.dtype) for chunk in place]
        self._station.play(plan, wide, made)
        for narrow, result in zip(place, made, strict=True):
            if narrow is not None and result is not None:
                narrow.copy_(result)

    def _submit(self, jobs: list[Callable[[], None]], outputs: Any, opts: Any) -> Task:
        def work() -> None:
            for job in jobs:
                job()

        if getattr(opts, "asyncOp", True):
            return self._line.later(work, outputs)
        self._line.now(jobs[0] if len(jobs) == 1 else work)
        return _DONE


def _operator(op: Any, tensor: Tensor) -> tuple[str, Factor]:
    """The name of a reduction, and what contributions are multiplied by before it."""
    name = _REDUCTIONS[int(op.op)]
    if name != "premul_sum":
        return name, None
    if not tensor.is_floating_point() and not tensor.is_complex():
        raise InputError(f"{name} of {dtype_name(tensor.dtype)}: only floating-point numbers have fractions; use sum")
    return "sum", op.__getstate__()[1]


def _split(whole: Tensor, plan: Plan) -> Chunks:
    return [whole] if len(plan.lengths) == 1 else list(whole.split(plan.lengths))
