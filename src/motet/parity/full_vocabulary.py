"""The head and the table with all entries of a large vocabulary, split over ranks, against plain operations of PyTorch.

The small job of a verification has few entries. This module looks for mistakes that need many of them, such as a number
of an entry that is kept in 16 bits, or tiny errors that are rounded before they are scaled. With few tokens and narrow
vectors, it checks the lookup, both losses and all gradients of ranks that are threads of this process, in float64 and
in the dtype in which the job computes. Training uses the same shards, lookup and losses.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import inf, sqrt
from time import perf_counter
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet.core.errors import ReplicaMismatchError
from motet.models.arch.layers import accumulation_dtype
from motet.models.arch.loss import cross_entropy, linear_cross_entropy
from motet.parallel.model_sharding import TENSOR_DIMENSION, DimensionSplit, ModelSharding, ShardRule, TensorInfo
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.shard_spec import ShardBox, ShardSpec
from motet.parallel.tensor_parallel.vocabulary.rank_vocabulary import RankVocabularyShard, shard_embedding
from motet.parity.compare.tensor_differences import NOISE_MARGIN, relative_distance
from motet.parity.rank_threads import RankThreads
from motet.parity.record.record_verification_steps import SINGLE_RANK_GROUP, single_thread

TOKENS, WIDTH = 32, 8
MAX_ENTRIES = 1 << 19  # A larger vocabulary is cut to a number that leaves the same padding
# Entries whose gradients are added at a time in float64: short sums are more exact than the long ones that they check
PART_ENTRIES = 4096
BLOCK_ROWS = 8  # Rows whose logits the fused loss holds together; so it goes through several blocks
PADDING_VALUE = 3.0  # Padding takes no part, whatever its values
# A sum of n values is rounded n times: its error grows with the root of n. NOISE_MARGIN holds up to this many entries.
ENTRIES_OF_NOISE_MARGIN = 1 << 14
DTYPE_MARGIN = 4.0  # Ranks may be this many times as far from float64 as one device in the same dtype
DTYPE_ROUNDINGS = 2.0  # One device may be this many machine epsilons of its dtype away from float64 (measured: 0.6)
MANY_ENTRIES = 1 << 18  # With them probabilities are far below the smallest normal number of float16
HEAD_SIZE = 0.1  # Scale of the head's weights and bias: no entry is much likelier than others
FLOAT16_SCALE = 2.0**10  # Loss scale in backward
UNLIKELY = "gradient of the entries that are not targets"
MAX_ENDS = 8  # Ranks, at most, whose last and next entries are among the ids
SPLIT_TENSORS = ("table", "head", "bias")
LossPath = Literal["fused", "from logits"]
LOSS_PATHS: tuple[LossPath, ...] = get_args(LossPath)


@dataclass(frozen=True)
class HeadVerdict:
    """Whether ranks that split all entries compute the same as one device."""

    entries: int
    ranks: int
    ok: bool
    worst_relative: float  # Largest relative error in float64
    worst_tensor: str
    cause: str | None = None
    seconds: float = 0.0
    exit_code: int = ReplicaMismatchError.exit_code  # The command's, if the verdict is not ok

    def as_json(self) -> dict[str, Any]:
        """All fields but the exit code."""
        return {name: value for name, value in asdict(self).items() if name != "exit_code"}

    def __str__(self) -> str:
        description = f"head of {self.entries:,} entries on {f'tp={self.ranks}' if self.ranks > 1 else 'one device'}"
        if self.ok:
            return f"same   {description}: worst {self.worst_relative:.1e}, {self.worst_tensor} ({self.seconds:.1f} s)"
        return f"WRONG  {description}: {self.cause} ({self.seconds:.1f} s)"


def verify_full_head(entries: int, ranks: int, dtype: torch.dtype) -> HeadVerdict:
    """Compare a head of all entries in float64, and in the dtype in which a job computes."""
    start_s, compared = perf_counter(), list[_HeadDifference]()
    entries -= max(0, -(-(entries - MAX_ENTRIES) // ranks) * ranks)
    with single_thread():
        for each in dict.fromkeys((torch.float64, dtype)):
            compared += _FullHead.random(entries, ranks, each).differences(ranks)
    first = next((each for each in compared if not each.is_rounding), None)
    in_float64 = [each for each in compared if each.dtype == torch.float64]
    worst = first or max(in_float64, key=lambda each: each.relative_error)
    seconds, cause = perf_counter() - start_s, str(first) if first else None
    return HeadVerdict(entries, ranks, first is None, worst.relative_error, worst.name, cause, seconds)


class _HeadDifference(NamedTuple):
    """A tensor's distance from plain operations in float64."""

    name: str
    dtype: torch.dtype
    relative_error: float
    bound: float
    reason: str = ""

    @property
    def is_rounding(self) -> bool:
        return not self.reason and self.relative_error <= self.bound

    def __str__(self) -> str:
        reason = self.reason or f"its relative error is {self.relative_error:.1e}, and may be {self.bound:.1e}"
        return f"first in {self.name}, in {str(self.dtype).removeprefix('torch.')}: {reason}"


def many_entries(entries: int, ranks: int) -> int:
    """A number of entries of a large vocabulary that leaves the same padding."""
    return entries + max(0, -(-(MANY_ENTRIES - entries) // ranks) * ranks)


@dataclass(frozen=True)
class _FullHead:
    """A table and a head of all entries, and a batch for them."""

    tensors: Mapping[str, Tensor]  # The table and the weight of the head [V, H], its bias [V]
    ids: Tensor  # [N]
    targets: Tensor  # [N]
    weights: Tensor  # [N]
    padding_id: int

    @staticmethod
    def random(entries: int, ranks: int, dtype: torch.dtype) -> "_FullHead":
        """Random values; some ids and targets lie at the ends of ranks' entries, or at powers of two."""
        generator, share = torch.Generator().manual_seed(0), -(-entries // ranks)
        shapes = {name: (entries,) if name == "bias" else (entries, WIDTH) for name in SPLIT_TENSORS}
        values = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        tensors = {n: (each if n == "table" else HEAD_SIZE * each).to(dtype) for n, each in values.items()}
        ends = [rank * share for rank in range(1, ranks, -(-ranks // MAX_ENDS))] + [2**bits for bits in (15, 16, 17)]
        ids = [0, entries - 2, entries - 1, *(end - one for end in ends if end < entries for one in (1, 0))]
        others = torch.randint(entries, (TOKENS - len(ids),), generator=generator)
        all_ids = torch.cat([torch.tensor(ids), others])
        targets = all_ids[torch.randperm(TOKENS, generator=generator)]
        weights = torch.rand(TOKENS, generator=generator)
        weights[::5] = 0.0
        return _FullHead(tensors, all_ids, targets, weights, entries - 2)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors["table"].dtype

    def differences(self, ranks: int) -> Iterator[_HeadDifference]:
        """The difference of each tensor on one device and on the ranks, in the order in which they are computed."""
        expected, dtype = self._expected(), self.dtype
        rounding = self._rounding()
        for path in LOSS_PATHS:
            bounds = {n: max(rounding, DTYPE_ROUNDINGS * torch.finfo(dtype).eps * (n != "loss")) for n in expected}
            for world in dict.fromkeys((1, ranks)):
                where = f"(loss {path}, {f'{world} ranks' if world > 1 else 'one device'})"
                try:
                    computed = self._on_ranks(world, path)
                except Exception as error:  # noqa: BLE001  # a wrong shard may raise anything
                    reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                    yield _HeadDifference(f"the loss {where}", dtype, inf, rounding, reason)
                    return
                for name, value in computed.items():
                    distance = relative_distance(value, expected[name])
                    yield _HeadDifference(f"{name} {where}", dtype, distance, bounds[name])
                    if world == 1:
                        bounds[name] = max(rounding, DTYPE_MARGIN * distance)

    def _rounding(self) -> float:
        """A relative error that rounding explains: most of it arises in the gradients' sums over all entries."""
        roundings = NOISE_MARGIN * max(1.0, sqrt(len(self.tensors["table"]) / ENTRIES_OF_NOISE_MARGIN))
        return roundings * torch.finfo(accumulation_dtype(self.tensors["table"])).eps

    def _expected(self) -> dict[str, Tensor]:
        """The loss and its gradients by plain operations in float64, a few rows after another.

        Logits have the values that they have in the dtype: their rounding is not a mistake, and exceeds other errors.
        """
        table, head, bias = (self.tensors[name].double().requires_grad_() for name in SPLIT_TENSORS)
        losses, vectors, grad_vectors = list[Tensor](), list[Tensor](), list[Tensor]()
        for rows in torch.arange(TOKENS).split(BLOCK_ROWS):
            looked_up = F.embedding(self.ids[rows], table, padding_idx=self.padding_id)
            looked_up.retain_grad()
            parts = zip(head.split(PART_ENTRIES), bias.split(PART_ENTRIES), strict=True)
            logits = torch.cat([F.linear(looked_up, *part) for part in parts], 1)
            rounded = F.linear(*(tensor.to(self.dtype) for tensor in (looked_up, head, bias)))
            logits = logits + (rounded.double() - logits).detach()
            each = F.cross_entropy(logits, self.targets[rows], reduction="none")
            loss = (each * self.weights[rows].double()).sum()
            loss.backward()
            losses.append(loss.detach())
            vectors.append(looked_up.detach())
            grad_vectors.append(_gradient(looked_up))
        results = {"vectors": torch.cat(vectors), "loss": torch.stack(losses).sum()}
        named = zip(SPLIT_TENSORS, (table, head, bias), strict=True)
        gradients = {f"gradient of the {name}": _gradient(tensor) for name, tensor in named}
        return self._with_unlikely({**results, "gradient of the vectors": torch.cat(grad_vectors), **gradients})

    def _with_unlikely(self, results: dict[str, Tensor]) -> dict[str, Tensor]:
        """The results, and the gradients of non-target entries, whose tiny errors vanish in the norm of all."""
        return {**results, UNLIKELY: results["gradient of the head"].index_fill(0, self.targets, 0.0)}

    def _on_ranks(self, ranks: int, path: LossPath) -> dict[str, Tensor]:
        """The same in this dtype, by the operations of training on ranks that split the entries."""
        threads = RankThreads(ranks)
        results = threads.run(lambda rank: _RankOfHead(self, threads, rank).compute(path))
        joined = dict(results[0])
        for name in SPLIT_TENSORS:
            key = f"gradient of the {name}"
            joined[key] = torch.zeros_like(self.tensors[name], dtype=torch.float64)
            for rank, rank_results in enumerate(results):
                _join(joined[key], rank_results[key], _shard(self.tensors[name], ranks, rank))
        return self._with_unlikely(joined)


@dataclass(frozen=True)
class _RankOfHead:
    """A rank that holds some of the entries."""

    full: _FullHead
    threads: RankThreads
    rank: int

    def compute(self, path: LossPath) -> dict[str, Tensor]:
        """The loss and its gradients; those of split tensors are the rank's."""
        full, shard = self.full, self._vocabulary_shard()
        weight, head, bias = (self._local(name) for name in SPLIT_TENSORS)
        table = nn.Embedding(len(weight), WIDTH, _weight=weight)
        table.padding_idx = full.padding_id
        if shard is not None:
            shard_embedding(table, range(shard.start, shard.stop))
        partial_vectors = table(full.ids)
        vectors = self._sum(partial_vectors.detach().clone()).requires_grad_()
        if path == "fused":
            batch = {"targets": full.targets, "weights": full.weights}
            block_bytes = BLOCK_ROWS * full.dtype.itemsize * len(head)
            loss = linear_cross_entropy(vectors, head, bias, **batch, vocabulary=shard, block_bytes=block_bytes)
        else:
            loss = cross_entropy(F.linear(vectors, head, bias), full.targets, full.weights, vocabulary=shard)
        scale = FLOAT16_SCALE if full.dtype == torch.float16 else 1.0
        scaled = torch.autograd.grad(loss, (vectors, head, bias), torch.full_like(loss, scale))
        grad_vectors, grad_head, grad_bias = (gradient.double() / scale for gradient in scaled)
        if path != "fused":
            grad_vectors = self._sum(grad_vectors)
        (grad_table,) = torch.autograd.grad(partial_vectors, table.weight, grad_vectors.to(partial_vectors.dtype))
        return {
            "vectors": vectors.detach(),
            "loss": loss.detach(),
            "gradient of the vectors": grad_vectors,
            "gradient of the table": grad_table,
            "gradient of the head": grad_head,
            "gradient of the bias": grad_bias,
        }

    def _sum(self, tensor: Tensor) -> Tensor:
        return self.threads.all_reduce(self.rank, tensor, "sum")

    def _local(self, name: str) -> Tensor:
        """The rank's entries of a tensor, and padding."""
        spec = _shard(self.full.tensors[name], self.threads.ranks, self.rank)
        local = self.full.tensors[name].new_full(spec.local_shape, PADDING_VALUE)
        for box, elements in spec.boxes(0, local.numel()):
            local.view(-1)[elements] = _narrow(self.full.tensors[name], box).flatten()
        return local.requires_grad_()

    def _vocabulary_shard(self) -> "_ThreadVocabularyShard | None":
        if self.threads.ranks == 1:
            return None
        spec = _shard(self.full.tensors["head"], self.threads.ranks, self.rank)
        shard = RankVocabularyShard.from_spec(spec, 0, group=SINGLE_RANK_GROUP)
        return _ThreadVocabularyShard(shard.start, shard.stop, shard.size, shard.group, self)


@dataclass(frozen=True)
class _ThreadVocabularyShard(RankVocabularyShard):
    """The entries of a rank that is a thread."""

    on_rank: _RankOfHead

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"]) -> Tensor:
        return self.on_rank.threads.all_reduce(self.on_rank.rank, tensor, op)


def _shard(tensor: Tensor, ranks: int, rank: int) -> ShardSpec:
    """The entries of a rank, as of a model whose vocabulary ranks split."""
    rule = ShardRule((DimensionSplit(0, TENSOR_DIMENSION),))
    dims = ParallelDims(((TENSOR_DIMENSION, ranks),))
    info = TensorInfo("head", tuple(tensor.shape), "", "trained")
    spec = ModelSharding({"head": rule}).spec(info, dims.coordinates(rank), dims)
    assert spec is not None  # Without stages every rank holds a shard
    return spec


def _join(total: Tensor, local: Tensor, spec: ShardSpec) -> None:
    """Add a rank's elements to a tensor in place; add padding, which should be zero, to every element."""
    is_padding = torch.ones(local.numel(), dtype=torch.bool)
    for box, elements in spec.boxes(0, local.numel()):
        part = _narrow(total, box)
        part += local.flatten()[elements].view_as(part)
        is_padding[elements] = False
    total += local.flatten()[is_padding].abs().sum()


def _gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def _narrow(tensor: Tensor, box: ShardBox) -> Tensor:
    for dim, (offset, length) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor
