"""How sums and gathers over ranks travel: as they are, by the algorithms of the settings, or by a codec.

What a codec loses of a sum is added to what the same bucket gives the next time: error feedback (arXiv:1901.09847).
"""

from collections.abc import Callable, Sequence
from functools import partial
from weakref import finalize
from zlib import crc32

import torch
from torch import Tensor

from motet.collectives.compression import compressed_collectives
from motet.collectives.compression.byte_messages import codec_numerics
from motet.collectives.compression.codec_options import BlockwiseCodecOptions, CodecOptions, PowerSGDCodecOptions
from motet.collectives.compression.encode_decode import decode, encode
from motet.collectives.execute import api
from motet.collectives.execute.api import CollectiveOptions
from motet.collectives.execute.cuda_stream import run_on_stream
from motet.collectives.execute.work_queue import FifoWorkQueue, Task, WorkHandle
from motet.core.seeds import derive_seed
from motet.parallel.communication import CommunicationSettings, Compression, compression
from motet.parallel.group import Group
from motet.parallel.layout import Layout
from motet.parallel.matrices import Matrix, Sums
from motet.parallel.mesh import Mesh
from motet.parallel.routes import Over, Routes
from motet.parallel.spread import Piece
from motet.parallel.tree_sums import TreeSums


class Coded:
    """Sums over some ranks by a codec: for each of them its error, and PowerSGD's bases."""

    def __init__(self, codec: CodecOptions, ranks: Group, sums: Sequence[Sums], shard: int, feeds_back: bool) -> None:
        """`sums`: of each shard; those of `shard` are done here."""
        self.codec = codec
        self.ranks = ranks
        self._sums = sums[shard].each
        self._digest = crc32(repr((str(codec), ranks.world, sums)).encode())
        """Of what the state is of, the same on all ranks."""
        dtype = getattr(torch, sums[shard].dtype)
        sizes = [s.numel if feeds_back else 0 for s in self._sums]
        self.errors = torch.zeros(sum(sizes), dtype=dtype, device=ranks.device)
        self._errors = self.errors.split(sizes)
        shapes = [_bases(codec, one) for one in sums]
        most = max(sum(rows * columns for bases in of_shard for rows, columns in bases) for of_shard in shapes)
        with codec_numerics():
            self.bases = torch.zeros(most, dtype=torch.float32, device=ranks.device)
        at = 0
        self._bases: list[list[Tensor]] = []
        for bases in shapes[shard]:
            self._bases.append([])
            for rows, columns in bases:
                self._bases[-1].append(self.bases[at : at + rows * columns].view(rows, columns))
                at += rows * columns
        self._cuts = [
            s.cut(codec, sums[shard].dtype) if isinstance(codec, PowerSGDCodecOptions) else [] for s in self._sums
        ]

    def all_reduce(self, number: int, tensor: Tensor, seed: int, dense: compressed_collectives.DenseAllReduce) -> None:
        """In place; all ranks get the same bits."""
        given = self._given(number, tensor)
        if isinstance(self.codec, PowerSGDCodecOptions):
            total, lost = self._low_rank(number, given, seed, dense)
        else:
            reduced = compressed_collectives.all_reduce(given, self.codec, self.ranks, seed, dense_all_reduce=dense)
            total, lost = reduced.total, reduced.error
            self._clear(number, lost)
            self._clear(number, total)
        self._keep(number, lost, total)
        tensor.copy_(total)

    def reduce_scatter(
        self, number: int, shard: Tensor, whole: Tensor, seed: int, dense: compressed_collectives.DenseAllReduce
    ) -> None:
        """`whole` may be overwritten: only blockwise codecs sum shards apart from each other."""
        if isinstance(self.codec, BlockwiseCodecOptions):
            given = self._given(number, whole)
            total, lost = compressed_collectives.reduce_scatter(given, self.codec, self.ranks, seed)
            self._clear(number, lost)
            self._clear(number, total, self.ranks.rank * len(total))
            self._keep(number, lost, total)
            shard.copy_(total)
            return
        self.all_reduce(number, whole, seed, dense)
        shard.copy_(whole.view(self.ranks.world, -1)[self.ranks.rank])

    def state(self) -> dict[str, Tensor]:
        """What the next sums go by. Of these ranks and sums only, which the names tell."""
        kinds = {"errors": self.errors, "bases": self.bases}
        return {f"{kind}-{self._digest:08x}": tensor for kind, tensor in kinds.items() if tensor.numel()}

    def _low_rank(
        self, number: int, given: Tensor, seed: int, dense: compressed_collectives.DenseAllReduce
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(self.codec, PowerSGDCodecOptions)
        cut, bases = self._cuts[number], self._bases[number]
        parts = [given[p.start : p.stop].view(p[1:] if isinstance(p, Matrix) else -1) for p in cut]
        found = compressed_collectives.all_reduce_powersgd(parts, self.codec, self.ranks, seed, bases, dense)
        for basis, reduced in zip(bases, found, strict=True):
            if reduced.basis is not None:
                basis.copy_(reduced.basis)
        total, lost = (
            torch.cat([t.reshape(-1) for t in ts]) for ts in zip(*((r.total, r.error) for r in found), strict=True)
        )
        return total, lost

    def _given(self, number: int, tensor: Tensor) -> Tensor:
        assert tensor.numel() == self._sums[number].numel
        return tensor + self._errors[number] if self.errors.numel() else tensor

    def _clear(self, number: int, tensor: Tensor, start: int = 0) -> None:
        """What belongs to no parameter stays zero: a block may bring a number that is not finite there, or a sign."""
        for first, last in self._sums[number].gaps if isinstance(self.codec, BlockwiseCodecOptions) else ():
            tensor[max(first - start, 0) : max(last - start, 0)] = 0

    def _keep(self, number: int, lost: Tensor, total: Tensor) -> None:
        """A sum that is not finite is one that nobody applies."""
        if self.errors.numel():
            finite = total.isfinite().all() & lost.isfinite().all()
            self._errors[number].copy_(torch.where(finite, lost, self._errors[number]))


class Carry:
    """The sums and gathers of a model. Every rank must start them in one order.

    Compressed sums are done on a thread of their own, or on a stream of their own on CUDA, beside backward.
    """

    def __init__(
        self,
        mesh: Mesh,
        layout: Layout,
        settings: CommunicationSettings,
        over_shards: Sums,
        over_replicas: Sequence[Sums],
    ) -> None:
        """`over_replicas`: those of each shard."""
        self.mesh = mesh
        self.settings = settings
        self._owners = layout.owners
        self._routes = Routes(settings, layout)
        how = compression(settings, layout)
        shard, fed, again = mesh.shards.rank, how.feeds_back_shards, how.feeds_back_replicas
        self._over_shards = Coded(how.shards, mesh.shards, [over_shards], 0, fed) if how.shards else None
        self._over_replicas = Coded(how.replicas, mesh.replicas, over_replicas, shard, again) if how.replicas else None
        self._parameters = how.parameters
        self._tree = TreeSums(mesh, layout) if layout.sequences else None
        self._steps = torch.zeros((), dtype=torch.int64)
        """Begun since the first of the run."""
        self._part = 0
        """The micro-batch."""
        self._checks = True
        """That all ranks do the same is checked until the second step begins; every other is like the first."""
        self._begun = False
        device = mesh.shards.device
        self._stream = torch.cuda.Stream(device) if how != Compression() and device.type == "cuda" else None
        self._lane = FifoWorkQueue()
        finalize(self, self._lane.close)

    def begin_step(self) -> None:
        self._steps += 1
        self._checks = not self._begun
        self._begun = True

    def begin_backward(self, first: bool) -> None:
        self._part = 0 if first else self._part + 1
        if self._tree:
            self._tree.begin_backward(self._part)

    def end_backward(self) -> None:
        """All of its gradients have been given."""
        if self._tree:
            self._tree.end_backward()

    @property
    def by_tree(self) -> bool:
        """Every backward gives its gradients for itself, also where no rank shares a copy."""
        return self._tree is not None

    def reduce_scatter(self, number: int, shard: Tensor, whole: Tensor) -> WorkHandle:
        """Over the ranks that share a copy. `whole` is free to be overwritten."""
        if self._tree:
            return self._tree.reduce_scatter(number, shard, whole)
        if self._over_shards is None or self._is_warming_up:
            call = self._call("reduce-scatter", "shards", whole)
            return api.reduce_scatter(shard, whole, self.mesh.shards, **call)
        seed = self._seed(number, "shards", self._part)
        if self.mesh.near and self.mesh.far and isinstance(self._over_shards.codec, BlockwiseCodecOptions):
            mesh = self.mesh.near, self.mesh.far
            return self._start(partial(_in_two_levels, shard, whole, self._over_shards.codec, mesh, seed))
        return self._start(partial(self._over_shards.reduce_scatter, number, shard, whole, seed, self._dense))

    def reduce(self, whole: Tensor, owner: int) -> WorkHandle:
        """To the one rank that keeps the bucket."""
        assert self._owners
        call: CollectiveOptions = {"async_op": True, "algorithm": self._owners.reduce, "check": self._checks}
        return api.reduce(whole, self.mesh.shards, owner, **call)

    def broadcast(self, whole: Tensor, owner: int) -> WorkHandle:
        """From it."""
        assert self._owners
        call: CollectiveOptions = {"async_op": True, "algorithm": self._owners.broadcast, "check": self._checks}
        return api.broadcast(whole, self.mesh.shards, owner, **call)

    def all_reduce(self, number: int, shard: Tensor) -> WorkHandle:
        """Over the replicas."""
        if self._tree:
            return self._tree.all_reduce(number, shard)
        if self._over_replicas is None or self._is_warming_up:
            return api.all_reduce(shard, self.mesh.replicas, **self._call("all-reduce", "replicas", shard))
        seed = self._seed(number, "replicas", self._part)
        return self._start(partial(self._over_replicas.all_reduce, number, shard, seed, self._dense))

    def all_gather(self, number: int, whole: Tensor, own: Tensor, near: bool = False) -> WorkHandle:
        """Over the ranks that share a copy. A codec leaves all of them with the same bits, its own shard included.

        `near`: over the neighbours that share a second copy, which went through the codec when it was made.
        """
        if near:
            assert self.mesh.near is not None
            return api.all_gather(whole, own, self.mesh.near, **self._call("all-gather", "near", whole))
        if self._parameters is None or not own.is_floating_point():
            return api.all_gather(whole, own, self.mesh.shards, **self._call("all-gather", "shards", whole))
        seed = self._seed(number, "gather", self.mesh.shards.rank)
        with codec_numerics():
            message = encode(self._parameters, own, seed)
            arrived = message.new_empty(self.mesh.shards.world, message.numel())
        call = self._call("all-gather", "shards", arrived)
        work = api.all_gather(arrived, message, self.mesh.shards, **call)
        return _Arriving(work, arrived, whole, self._parameters)

    def state(self) -> dict[str, Piece | Tensor]:
        """What only ranks and buckets like these can go on with: a row for each rank. Read and written as views."""
        coded = {"shards": self._over_shards, "replicas": self._over_replicas}
        world = self.mesh.shards.world * self.mesh.replicas.world
        rank = self.mesh.replicas.rank * self.mesh.shards.world + self.mesh.shards.rank
        found: dict[str, Piece | Tensor] = {}
        for over, sums in coded.items():
            for name, row in (sums.state() if sums else {}).items():
                found[f"{over}-{name}"] = Piece(torch.Size([world, row.numel()]), rank * row.numel(), row)
        return {"steps": self._steps, **found} if found or self._parameters or any(coded.values()) else {}

    @property
    def _is_warming_up(self) -> bool:
        return int(self._steps) <= self.settings.compress_after

    def _seed(self, *words: int | str) -> int:
        return derive_seed(int(self._steps), *words)

    def _dense(self, tensor: Tensor, ranks: api.RankGroupLike) -> None:
        over: Over = "replicas" if ranks is self.mesh.replicas else "shards"
        call = self._call("all-reduce", over, tensor)
        api.all_reduce(tensor, ranks, **(call | {"async_op": False}))

    def _call(self, collective: str, over: Over, whole: Tensor) -> CollectiveOptions:
        return {
            "async_op": True,
            "algorithm": self._routes.program(collective, over, whole.nbytes),
            "check": self._checks,
        }

    def _start(self, task: Callable[[], None]) -> WorkHandle:
        task = partial(_do_as_it_is, task)
        if self._stream is None:
            return self._lane.submit(task)
        return run_on_stream(task, self._stream)


class _Arriving:
    """Messages of parameters. The caller has sent them and decodes them, so that it may send other things before."""

    def __init__(self, work: WorkHandle, messages: Tensor, whole: Tensor, codec: BlockwiseCodecOptions) -> None:
        self._work = work
        self._messages: Tensor | None = messages
        self._whole = whole
        self._codec = codec

    def wait(self) -> None:
        self._work.wait()
        if self._messages is None:
            return
        with codec_numerics():
            for part, message in zip(self._whole.view(len(self._messages), -1), self._messages, strict=True):
                part.copy_(decode(self._codec, message, part.shape, part.dtype))
        self._messages = None

    def is_completed(self) -> bool:
        return self._work.is_completed()


def _in_two_levels(
    shard: Tensor, whole: Tensor, codec: BlockwiseCodecOptions, mesh: tuple[Group, Group], seed: int
) -> None:
    """Among neighbours first, so that between hosts there is one message of a host where there was one of each rank."""
    near, far = mesh
    by_place = whole.view(far.world, near.world, -1).transpose(0, 1)
    sums, _ = compressed_collectives.reduce_scatter(by_place, codec, near, derive_seed(seed, "near"))
    shard.copy_(compressed_collectives.reduce_scatter(sums, codec, far, derive_seed(seed, "far"))[0])


def _do_as_it_is(task: Task) -> None:
    with codec_numerics():
        task()


def _bases(codec: CodecOptions, sums: Sums) -> list[list[tuple[int, int]]]:
    """Shapes of PowerSGD's bases, for each part of each sum; none is 0 x 0."""
    if not isinstance(codec, PowerSGDCodecOptions):
        return []
    return [
        [(p.columns, min(codec.rank, p.rows, p.columns)) if isinstance(p, Matrix) else (0, 0) for p in parts]
        for parts in (one.cut(codec, sums.dtype) for one in sums.each)
    ]
