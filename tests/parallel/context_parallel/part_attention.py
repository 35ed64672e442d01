"""Attention of parts of rows on ranks, next to attention of complete rows on each of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from motet.core.trace import install_sink
from motet.models.arch.attention_core import AttentionExchange, ScoreOptions, attend, attention_exchange
from motet.models.arch.attention_mask import AttentionMask, AttentionTokens
from motet.models.layout_invariant_dropout import LayoutInvariantDropoutMode, repeatable_dropout
from motet.models.spec.layer_specs import MicroBatchShape
from motet.parallel.context_parallel import attention_blocks as blocks
from motet.parallel.context_parallel.attention_calls import AttentionCall
from motet.parallel.context_parallel.attention_exchange import ContextAttention, ContextGroup
from motet.parallel.context_parallel.context_bytes import sent_bytes
from motet.parallel.context_parallel.context_partition import (
    ContextOrder,
    ContextParallelKind,
    ContextPartition,
    ContextSplit,
)
from motet.parallel.process.process_group import RankGroup, new_process_group
from on_ranks import Counter


@dataclass(frozen=True)
class Case:
    kind: ContextParallelKind
    inner: int = 1
    order: ContextOrder = "head-tail"
    tokens: int = 31
    query_heads: int = 4
    key_heads: int = 2
    value_dim: int = 8
    causal: bool = True
    window: int | None = None
    has_documents: bool = False
    softcap: float | None = None
    has_sinks: bool = False
    dropout: float = 0.0
    recomputes: bool = False
    overlaps: bool = True
    tile_elements: int = 1 << 20
    dtype: torch.dtype = torch.float64

    @property
    def call(self) -> AttentionCall:
        return AttentionCall("0", self.query_heads, self.key_heads, 8, self.value_dim, self.causal, self.window)


ROWS = 2


@dataclass
class Outcome:
    case: Case
    worst: float  # The largest difference of an output or a gradient, relative to the largest element
    sent: tuple[int, int]  # In the forward and the backward
    promised: tuple[int, int]
    seen_on_wire: tuple[int, int]  # Bytes in messages and all-to-all of the backend, in the same two
    pairs: int


class Attention(nn.Module):
    """A block of a model; its sinks are used in some cases."""

    def __init__(self, case: Case, sinks: Tensor) -> None:
        super().__init__()
        self.case, self.sinks = case, nn.Parameter(sinks.clone())

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        case = self.case
        sinks = self.sinks if case.has_sinks else None
        return attend(q, k, v, mask=mask, options=ScoreOptions(0.6, case.softcap, sinks, case.dropout))


def make_group(group: RankGroup, case: Case) -> ContextGroup:
    """Neighbours make their group each time that they are in another case."""
    partition, inner = ContextPartition(case.tokens, group.world, case.order), None
    if case.inner > 1:
        first = group.rank - group.rank % case.inner
        process_group = new_process_group(group, range(first, first + case.inner))
        inner = RankGroup(group.rank - first, case.inner, process_group, group.device)
    return ContextGroup(partition, group.rank, group, case.kind, inner, case.overlaps)


def inputs_of(case: Case) -> tuple[list[Tensor], Tensor | None, Tensor]:
    """Queries, keys, values and sinks, documents, and the gradient of the output, of complete rows."""
    generator = torch.Generator().manual_seed(case.tokens)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype)

    t = case.tokens
    inputs = [random(ROWS, case.query_heads, t, 8), random(ROWS, case.key_heads, t, 8)]
    inputs += [random(ROWS, case.key_heads, t, case.value_dim), random(case.query_heads)]
    documents = torch.randint(4, (ROWS, t), generator=generator).sort(1).values if case.has_documents else None
    return inputs, documents, random(ROWS, case.query_heads, t, case.value_dim)


def run_attention(case: Case, inputs: list[Tensor], mask: AttentionMask, grad: Tensor) -> list[Tensor]:
    """The output, and the gradients of queries, keys, values and sinks."""
    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
    module = nn.ModuleList([Attention(case, inputs[3])])
    mode = LayoutInvariantDropoutMode(5, module)
    with mode.for_rows(0, torch.arange(ROWS)):
        if case.recomputes:
            contexts = repeatable_dropout()
            output = checkpoint(
                module[0], q, k, v, mask, use_reentrant=False, context_fn=lambda: (contexts(), contexts())
            )
        else:
            output = module[0](q, k, v, mask)
        exchange = attention_exchange.get()
        if isinstance(exchange, Marked):
            exchange.mark()
        output.backward(grad)
    grads = [x.grad for x in (q, k, v, *module.parameters()) if x.grad is not None]
    return [output.detach(), *grads]


@dataclass
class Marked:
    """An exchange that knows where a forward ends."""

    exchange: AttentionExchange
    counter: Counter
    at_mark: dict[str, float]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask, options: ScoreOptions) -> Tensor:
        return self.exchange.attend(q, k, v, mask=mask, options=options)

    def mark(self) -> None:
        self.at_mark.update(self.counter.counts)


def compare(group: RankGroup, cases: list[Case]) -> list[Outcome]:
    """On each rank: the outcome of each case."""
    return [_outcome(group, case) for case in cases]


def _outcome(group: RankGroup, case: Case) -> Outcome:
    inputs, documents, grad = inputs_of(case)
    tokens = AttentionTokens(None, documents)
    expected = run_attention(case, inputs, AttentionMask(tokens, tokens, causal=case.causal, window=case.window), grad)
    context = make_group(group, case)
    index = torch.tensor([i for span in context.partition.spans(group.rank) for i in range(*span)])
    counter, at_mark = Counter(), dict[str, float]()
    token = attention_exchange.set(Marked(ContextAttention(context, documents), counter, at_mark))
    try:
        with (
            install_sink(counter),
            _counted_on_wire(counter),
            patch.object(blocks, "TILE_ELEMENTS", case.tile_elements),
        ):
            part_inputs = [*(x[:, :, index] for x in inputs[:3]), inputs[3]]
            part = AttentionTokens(index, None if documents is None else documents[:, index])
            part_mask = AttentionMask(part, part, causal=case.causal, window=case.window)
            results = run_attention(case, part_inputs, part_mask, grad[:, :, index])
    finally:
        attention_exchange.reset(token)
    if case.has_sinks:
        dist.all_reduce(results[4], group=group.process_group)
    places = [*(x[:, :, index] for x in expected[:4]), *expected[4:]]
    worst = max(
        float((a - b).abs().max() / b.abs().max()) if a.isfinite().all() else float("inf")
        for a, b in zip(results, places, strict=True)
    )
    kinds = [counter.counts.get(f"attention_{each}_bytes", 0) for each in ("forward", "backward")]
    wire = at_mark.get("wire", 0), counter.counts.get("wire", 0) - at_mark.get("wire", 0)
    promised = sent_bytes(
        case.call,
        ContextSplit(group.world, case.order, case.kind, case.inner),
        group.rank,
        shape=MicroBatchShape(ROWS, case.tokens),
        itemsize=case.dtype.itemsize,
    )
    sent = (int(kinds[0]), int(kinds[1]))
    return Outcome(case, worst, sent, promised, (int(wire[0]), int(wire[1])), int(counter.counts["attention_pairs"]))


@contextmanager
def _counted_on_wire(counter: Counter) -> Iterator[None]:
    """Count the bytes for other ranks in messages and in all-to-all, where the backend gets them."""
    isend, all_to_all = dist.isend, dist.all_to_all_single

    def counting_isend(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        counter.on_count("wire", tensor.nbytes)
        return isend(tensor, *args, **kwargs)

    def counting_all_to_all(output: Tensor, input: Tensor, received: Any, sent: Any, group: Any, async_op: bool) -> Any:
        others = sum(sent) - sent[dist.get_rank(group)]
        counter.on_count("wire", others * input.itemsize)
        return all_to_all(output, input, received, sent, group, async_op)

    with patch.object(dist, "isend", counting_isend), patch.object(dist, "all_to_all_single", counting_all_to_all):
        yield


SMALL_TILES: dict[str, Any] = {"tokens": 257, "tile_elements": 1}
ESSENTIAL: list[dict[str, Any]] = [
    {"has_sinks": True, "recomputes": True},
    {"order": "contiguous", "window": 5, "key_heads": 1},
    {"order": "contiguous", "window": 12, "has_documents": True, "dropout": 0.3, "recomputes": True},
    {"causal": False, "has_documents": True, "softcap": 1.5, "value_dim": 5},
    {"has_documents": True, "window": 90, **SMALL_TILES},
]


def varied(case: Case) -> list[Case]:
    """The case under each kind of mask and of scores."""
    variants: list[dict[str, Any]] = [
        *ESSENTIAL,
        {},
        {"order": "contiguous"},
        {"window": 5},
        {"window": 5, "order": "contiguous"},
        {"has_documents": True},
        {"has_documents": True, "window": 4, "order": "contiguous"},
        {"causal": False},
        {"causal": False, "has_documents": True},
        {"softcap": 1.5},
        {"has_sinks": True},
        {"softcap": 1.5, "has_sinks": True, "window": 7, "has_documents": True},
        {"dropout": 0.3},
        {"dropout": 0.3, "has_documents": True, "recomputes": True, "order": "contiguous"},
        {"recomputes": True, "has_sinks": True},
        {"value_dim": 5},
        {"key_heads": 1},
        {"softcap": 1.5, "has_sinks": True, "dropout": 0.3, **SMALL_TILES},
    ]
    return [replace(case, **variant) for variant in variants]
