"""Attention of a part of each row on ranks that share the rows: motet's exchanges, and the way without their kernels.

Without kernels, ranks gather the keys and values of complete rows, and a dense mask [tokens of the rank, tokens of the
row] hides those that a query does not see. Gathering and its gradient, a reduce-scatter, are one autograd function.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from parts.tensor_parallel_stacks import all_gather, reduce_scatter
from torch import Tensor, nn

from motet.core.batch import Batch
from motet.core.trace import install_sink
from motet.models.arch.attention_core import AttentionExchange, ScoreOptions, attend, attention_exchange
from motet.models.arch.attention_mask import AttentionMask, AttentionTokens
from motet.models.build import TrainableModel, build_trainable_model
from motet.models.settings import DecoderSettings
from motet.models.spec.layer_specs import AttentionSpec
from motet.parallel.context_parallel.attention_exchange import ContextAttention, ContextGroup
from motet.parallel.context_parallel.context_partition import (
    ContextOrder,
    ContextParallelKind,
    ContextPartition,
    default_order,
)
from motet.parallel.process.process_group import RankGroup, new_process_group

QUERY_HEADS, KEY_HEADS, HEAD_DIM = 4, 2, 64
VOCABULARY, SEED = 2048, 11


@dataclass(frozen=True)
class AttentionCase:
    """One row of tokens, and the keys that its queries see."""

    name: str
    tokens: int
    window: int | None = None
    documents: int = 1  # Packed into the row, of random lengths
    causal: bool = True

    @property
    def default_order(self) -> ContextOrder:
        """The order in which motet cuts rows for this attention."""
        return default_order([AttentionSpec("", 1, 1, 1, causal=self.causal, window=self.window)])

    @cached_property
    def row_documents(self) -> Tensor | None:
        """[1, T]: the number of the document of each token; None for one document."""
        if self.documents == 1:
            return None
        generator = torch.Generator().manual_seed(SEED)
        starts = torch.randperm(self.tokens - 1, generator=generator)[: self.documents - 1] + 1
        return torch.zeros(self.tokens, dtype=torch.int64).index_fill_(0, starts, 1).cumsum(0).unsqueeze(0)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys, values, and the gradient of the output, of the complete row: [1, heads, T, D]."""
        generator = torch.Generator().manual_seed(SEED)
        shapes = [(heads, self.tokens, HEAD_DIM) for heads in (QUERY_HEADS, KEY_HEADS, KEY_HEADS, QUERY_HEADS)]
        q, k, v, grad = (torch.randn(1, *shape, generator=generator) for shape in shapes)
        return q, k, v, grad

    def mask(self, places: Tensor | None = None) -> AttentionMask:
        """The mask of the complete row, or of the tokens at these places with each other."""
        tokens = AttentionTokens(places, self._documents_at(places))
        return AttentionMask(tokens, tokens, causal=self.causal, window=self.window)

    def dense_mask(self, queries: Tensor, keys: Tensor) -> Tensor:
        """[1, 1, t, T], added to the scores of the queries and keys at these places."""
        sides = (AttentionTokens(places, self._documents_at(places)) for places in (queries, keys))
        mask = AttentionMask(*sides, causal=self.causal, window=self.window)
        dense = mask.dense(len(queries), len(keys), dtype=torch.float32, device=queries.device)
        return torch.zeros(1, 1, len(queries), len(keys)) if dense is None else dense

    def _documents_at(self, places: Tensor | None) -> Tensor | None:
        return self.row_documents if self.row_documents is None or places is None else self.row_documents[:, places]


@dataclass(frozen=True)
class AttentionContender:
    """A way of computing attention of parts of rows; `dense` is the one without kernels."""

    kind: ContextParallelKind | Literal["dense"]
    inner: int = 1
    overlaps: bool = True
    order: ContextOrder | None = None  # That of motet for the case if None

    @property
    def name(self) -> str:
        """The settings of motet, in inline code."""
        if self.kind == "dense":
            return "gathered keys, dense mask"
        return f"`{self.kind}`" + f", `cp_inner = {self.inner}`" * (self.inner > 1)


class BenchmarkRanks:
    """All ranks, with the groups of neighbours inside of a ring, which are made once."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self._inner: dict[int, RankGroup] = {}

    def exchange(self, case: AttentionCase, contender: AttentionContender) -> AttentionExchange:
        """The exchange of a contender."""
        partition = self.partition(case, contender)
        if contender.kind == "dense":
            return GatheredDenseMask.for_case(case, partition, self.group)
        inner = self._neighbours(contender.inner) if contender.inner > 1 else None
        group = ContextGroup(partition, self.group.rank, self.group, contender.kind, inner, contender.overlaps)
        return ContextAttention(group, case.row_documents)

    def partition(self, case: AttentionCase, contender: AttentionContender) -> ContextPartition:
        """The tokens of each rank."""
        return ContextPartition(case.tokens, self.group.world, contender.order or case.default_order)

    def places(self, case: AttentionCase, contender: AttentionContender) -> Tensor:
        """The places of this rank's tokens."""
        return places_of(self.partition(case, contender), self.group.rank)

    def _neighbours(self, size: int) -> RankGroup:
        if size not in self._inner:
            first = self.group.rank - self.group.rank % size
            process_group = new_process_group(self.group, range(first, first + size))
            self._inner[size] = RankGroup(self.group.rank - first, size, process_group, self.group.device)
        return self._inner[size]


def places_of(partition: ContextPartition, rank: int) -> Tensor:
    """The places of a rank's tokens, in their order."""
    return torch.cat([torch.arange(*span) for span in partition.spans(rank)])


# --- without kernels of context parallelism -----------------------------------------------------------


@dataclass(frozen=True, eq=False)
class GatheredDenseMask:
    """Attention to gathered keys, in the order of the ranks. The mask is made before the first layer, for all."""

    mask: Tensor  # [1, 1, t, T]
    group: RankGroup

    @classmethod
    def for_case(cls, case: AttentionCase, partition: ContextPartition, group: RankGroup) -> "GatheredDenseMask":
        """The mask of this rank's queries, and of the keys of all ranks."""
        places = [places_of(partition, rank) for rank in range(group.world)]
        assert len({len(each) for each in places}) == 1, "an all-gather of parts of equal length"
        return cls(case.dense_mask(places[group.rank], torch.cat(places)), group)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask, options: ScoreOptions) -> Tensor:
        """Attention of this rank's queries. The argument `mask` knows this rank's tokens alone, and is not read."""
        apply: Any = _GatherKeys.apply
        keys = cast(Tensor, apply(torch.cat((k, v), -1).permute(2, 0, 1, 3), self.group.process_group))
        k, v = keys.permute(1, 2, 0, 3).tensor_split([k.shape[-1]], dim=-1)
        return F.scaled_dot_product_attention(q, k, v, self.mask, scale=options.scale, enable_gqa=True)


class _GatherKeys(torch.autograd.Function):
    """Parts of all ranks one after another along the first dimension; the gradient is a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        part = part.contiguous()
        gathered = part.new_empty(part.shape[0] * group.size(), *part.shape[1:])
        all_gather(gathered, part, group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        part = grad.new_empty(grad.shape[0] // ctx.group.size(), *grad.shape[1:])
        reduce_scatter(part, grad.contiguous(), group=ctx.group)
        return part, None


# --- one layer ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PassTimes:
    """Seconds of a forward and a backward on one rank."""

    forward_s: float
    backward_s: float
    thread_s: float  # Of the processor, in the thread that computes: without its waiting
    process_s: float  # Of the processor, in all threads: with those that carry messages

    @property
    def total_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


class AttentionLayer:
    """Forward and backward of attention of a rank's tokens by one exchange."""

    def __init__(self, case: AttentionCase, contender: AttentionContender, ranks: BenchmarkRanks) -> None:
        self.places = ranks.places(case, contender)
        *inputs, self.grad = (x[:, :, self.places].contiguous() for x in case.tensors())
        self.inputs = [x.requires_grad_() for x in inputs]
        self.mask, self.exchange = case.mask(self.places), ranks.exchange(case, contender)

    def run(self) -> PassTimes:
        """Time a forward and a backward, which leaves the gradients at the inputs."""
        for x in self.inputs:
            x.grad = None
        with exchanging(self.exchange):
            return timed_passes(
                lambda: attend_with_inputs(self.inputs, self.mask), lambda output: output.backward(self.grad)
            )

    def results(self) -> list[Tensor]:
        """The output, and the gradients of queries, keys and values."""
        with exchanging(self.exchange):
            return output_and_gradients(self.inputs, self.mask, self.grad)

    def expected(self, complete: list[Tensor]) -> list[Tensor]:
        """The same part of the results of one device."""
        return [x[:, :, self.places] for x in complete]


def complete_attention(case: AttentionCase) -> list[Tensor]:
    """The output and the gradients of complete rows, by one device."""
    *inputs, grad = case.tensors()
    return output_and_gradients([x.requires_grad_() for x in inputs], case.mask(), grad)


def output_and_gradients(inputs: list[Tensor], mask: AttentionMask, grad: Tensor) -> list[Tensor]:
    """The output and the gradients of the inputs."""
    output = attend_with_inputs(inputs, mask)
    return [output.detach(), *torch.autograd.grad(output, inputs, grad)]


def attend_with_inputs(inputs: list[Tensor], mask: AttentionMask) -> Tensor:
    """Attention by the function that models call, which an exchange replaces."""
    q, k, v = inputs
    return attend(q, k, v, mask=mask, options=ScoreOptions(HEAD_DIM**-0.5))


def timed_passes(forward: Callable[[], Tensor], backward: Callable[[Tensor], None]) -> PassTimes:
    """Run both and time them."""
    clocks = time.thread_time, time.process_time
    starts, start = [clock() for clock in clocks], time.perf_counter()
    output = forward()
    middle = time.perf_counter()
    backward(output)
    end = time.perf_counter()
    return PassTimes(middle - start, end - middle, *(clock() - at for clock, at in zip(clocks, starts, strict=True)))


@contextmanager
def exchanging(exchange: AttentionExchange) -> Iterator[None]:
    """A context in which attention goes to an exchange."""
    token = attention_exchange.set(exchange)
    try:
        yield
    finally:
        attention_exchange.reset(token)


# --- a decoder --------------------------------------------------------------------------------------------


class DecoderPasses:
    """Forward and backward of a small decoder on a rank's tokens, and the sum of the gradients over ranks."""

    def __init__(self, case: AttentionCase, contender: AttentionContender, ranks: BenchmarkRanks) -> None:
        self.case, self.contender, self.ranks = case, contender, ranks
        self.model, self.batch = make_decoder(case), row_of_tokens(case)
        self.batch = self.batch.at_places(ranks.partition(case, contender).spans(ranks.group.rank))

    def run(self) -> PassTimes:
        """Time a forward and a backward. The exchange, with the dense mask where it has one, is made for each batch."""
        return timed_passes(self._forward, self._backward)

    def results(self) -> list[Tensor]:
        """The sum of losses of all ranks, and the gradients of all parameters."""
        self._backward(loss := self._forward())
        dist.all_reduce(total := loss.detach().clone(), group=self.ranks.group.process_group)
        return [total, self.gradient]

    def expected(self, complete: list[Tensor]) -> list[Tensor]:
        """The results of one device, which each rank has completely."""
        return complete

    def _forward(self) -> Tensor:
        with exchanging(self.ranks.exchange(self.case, self.contender)):
            return self.model.loss_sum(self.batch)

    def _backward(self, loss: Tensor) -> None:
        self.gradient = flat_gradient(self.model.module, loss)
        dist.all_reduce(self.gradient, group=self.ranks.group.process_group)


def complete_passes(case: AttentionCase) -> list[Tensor]:
    """The loss and the gradients of complete rows, by one device."""
    model = make_decoder(case)
    loss = model.loss_sum(row_of_tokens(case))
    return [loss.detach(), flat_gradient(model.module, loss)]


def make_decoder(case: AttentionCase) -> TrainableModel:
    """A decoder of two blocks with the heads of the layer that is measured alone."""
    settings = DecoderSettings(
        vocab_size=VOCABULARY, context=case.tokens, layers=2, hidden=QUERY_HEADS * HEAD_DIM, heads=QUERY_HEADS,
        kv_heads=KEY_HEADS, ffn_hidden=3 * QUERY_HEADS * HEAD_DIM, sliding_window=case.window,
    )  # fmt: skip
    return build_trainable_model(settings, SEED, torch.float32, torch.device("cpu"))


def row_of_tokens(case: AttentionCase) -> Batch:
    """One complete row of random tokens, each of which is a target."""
    tokens = torch.randint(VOCABULARY, (1, case.tokens), generator=torch.Generator().manual_seed(SEED))
    weights, rows = torch.ones(1, case.tokens), torch.zeros(1, dtype=torch.int64)
    return Batch(tokens, tokens.roll(-1, 1), weights, rows, documents=case.row_documents)


def flat_gradient(module: nn.Module, loss: Tensor) -> Tensor:
    """The gradients of all parameters, one after another."""
    return torch.cat([x.flatten() for x in torch.autograd.grad(loss, list(module.parameters()))])


# --- pairs ------------------------------------------------------------------------------------------------


class PairCounter:
    """A sink that adds up the pairs of query and key of a head that this rank computes."""

    def __init__(self) -> None:
        self.pairs = 0

    def on_span(self, action: str, start_s: float, duration_s: float, depth: int) -> None:
        """Ignore spans."""

    def on_count(self, name: str, value: float) -> None:
        """Add up one counter."""
        self.pairs += int(value) if name == "attention_pairs" else 0


def counted_pairs(layer: AttentionLayer) -> int:
    """The pairs that this rank computes in a forward and a backward."""
    with install_sink(counter := PairCounter()):
        layer.run()
    return counter.pairs
