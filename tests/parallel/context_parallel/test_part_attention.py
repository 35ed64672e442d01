"""Attention of parts of rows on two, three and four ranks is that of complete rows, and ranks send what is promised."""

from dataclasses import replace

import pytest
import torch

from motet.core.errors import InputError
from motet.models.arch.attention_core import ScoreOptions
from motet.models.arch.attention_mask import AttentionMask
from motet.parallel.context_parallel.attention_exchange import ContextAttention, ContextGroup
from motet.parallel.context_parallel.attention_tiles import PlaceVisibility
from motet.parallel.context_parallel.context_partition import ContextPartition
from motet.parallel.process.process_group import RankGroup
from parallel.context_parallel.part_attention import ESSENTIAL, ROWS, Case, Outcome, compare, varied
from ranks import Ranks

KINDS = [Case("all-gather"), Case("ring"), Case("all-to-all")]


def check(results: list[list[Outcome]]) -> None:
    for outcomes in zip(*results, strict=True):
        case = outcomes[0].case
        for rank, outcome in enumerate(outcomes):
            bound = 1e-13 if case.dtype == torch.float64 else 4 * torch.finfo(case.dtype).eps
            assert outcome.worst < bound, (rank, case, outcome.worst)
            forward, backward = outcome.promised
            again = forward * case.recomputes
            assert outcome.sent == (forward + again, backward), (rank, case)
            if case.kind != "all-gather":
                assert outcome.seen_on_wire == (forward, again + backward), (rank, case)


def test_attention_of_parts(ranks: Ranks) -> None:
    """Each kind on three ranks, whose parts are uneven, and neighbours inside of a ring on four."""
    cases = [replace(each, **variant) for each in KINDS for variant in ESSENTIAL]
    cases += [replace(each, dtype=torch.bfloat16, has_sinks=True, window=9) for each in KINDS]
    check(ranks.on("gloo").run(3, compare, cases))
    shared = Case("all-to-all", query_heads=6, key_heads=3)  # Two ranks share a key head, which has two query heads
    inner = [replace(Case("ring", inner=2), **ESSENTIAL[i]) for i in (0, 2)]
    check(ranks.on("gloo").run(4, compare, [*inner, replace(shared, dropout=0.2)]))


def test_pairs_that_each_rank_computes(ranks: Ranks) -> None:
    """Under a causal mask as many on each rank in head-tail order, and up to (2 cp - 1)/cp of the mean otherwise."""
    cases = [replace(kind, order=order, tokens=256) for kind in KINDS[:2] for order in ("head-tail", "contiguous")]
    results = ranks.on("gloo").run(4, compare, [*cases, replace(KINDS[2], tokens=256)])
    for outcomes in zip(*results, strict=True):
        case, pairs = outcomes[0].case, [outcome.pairs for outcome in outcomes]
        if case.kind == "all-to-all" or case.order == "head-tail":
            assert len(set(pairs)) == 1
        else:
            assert max(pairs) / (sum(pairs) / 4) == pytest.approx(7 / 4, rel=0.01)
            visible, spans = PlaceVisibility(causal=True), ContextPartition(256, 4, "contiguous").spans_by_rank
            passes = 2  # Forward and backward
            assert pairs == [passes * ROWS * 4 * visible.pairs(each, 256) for each in spans]
        assert sum(pairs) == 2 * ROWS * 4 * 256 * 257 // 2


@pytest.mark.proof
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("tokens", [31, 257])
def test_attention_of_parts_in_all_combinations(ranks: Ranks, world: int, tokens: int) -> None:
    kinds = [*KINDS, replace(KINDS[1], overlaps=False), *([Case("ring", inner=2)] if world == 4 else [])]
    key_heads = (1, 2, 4) if tokens == 31 else (2,)
    cases = [each for kind in kinds for n in key_heads for each in varied(replace(kind, tokens=tokens, key_heads=n))]
    check(ranks.on("gloo").run(world, compare, cases, timeout_s=300))
    if tokens == 31:
        check(ranks.run(world, compare, cases, timeout_s=300))


@pytest.mark.parametrize(
    ("queries", "keys", "mask", "dropout", "problem"),
    [
        (8, 16, AttentionMask(causal=True), 0.0, r"8 queries to 16 keys, .* has 8 tokens .*set layout.cp = 1$"),
        (4, 4, AttentionMask(causal=True), 0.0, r"4 queries to 4 keys, .* has 8 tokens"),
        (8, 8, AttentionMask(bias=torch.zeros(1, 4, 8, 8)), 0.0, r"bias of shape \[1, 4, 8, 8\].*set layout.cp = 1$"),
        (8, 8, AttentionMask(causal=True), 0.1, r"dropout 0.1 on parts of rows.* or set the dropout to 0$"),
    ],
)
def test_what_an_exchange_refuses(queries: int, keys: int, mask: AttentionMask, dropout: float, problem: str) -> None:
    group = RankGroup(0, 2, None, torch.device("cpu"))
    context = ContextGroup(ContextPartition(16, 2, "head-tail"), 0, group, "ring")
    q, k = torch.zeros(1, 4, queries, 8), torch.zeros(1, 4, keys, 8)
    with pytest.raises(InputError, match=problem):
        ContextAttention(context, None).attend(q, k, k, mask=mask, options=ScoreOptions(1.0, dropout=dropout))
