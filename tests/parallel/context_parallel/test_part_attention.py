"""Attention of parts of rows on two, three and four ranks is that of complete rows, and ranks send what is promised."""

from dataclasses import replace

import pytest

from parallel.context_parallel.part_attention import Case, Outcome, compare, varied
from ranks import Ranks

KINDS = [Case("all-gather"), Case("ring"), Case("all-to-all")]


def check(results: list[list[Outcome]]) -> None:
    for outcomes in zip(*results, strict=True):
        case = outcomes[0].case
        for rank, outcome in enumerate(outcomes):
            assert outcome.worst < 1e-13, (rank, case, outcome.worst)
            forward, backward = outcome.promised
            again = forward * case.recomputes
            assert outcome.sent == (forward + again, backward), (rank, case)
            if case.kind != "all-gather":
                assert outcome.seen_on_wire == (forward, again + backward), (rank, case)


def test_attention_of_parts(ranks: Ranks) -> None:
    """Each kind on three ranks, whose parts are uneven, and neighbours inside of a ring on four."""
    cases = [case for each in KINDS for case in varied(each)]
    check(ranks.on("gloo").run(3, compare, cases))
    inner = varied(Case("ring", inner=2))
    uneven = Case("all-to-all", query_heads=6, key_heads=3)  # Two ranks share a key head, which has two query heads
    check(ranks.on("gloo").run(4, compare, [*inner, uneven, replace(uneven, dropout=0.2, tokens=257)]))


@pytest.mark.proof
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("tokens", [31, 257])
def test_attention_of_parts_in_all_combinations(ranks: Ranks, world: int, tokens: int) -> None:
    kinds = [*KINDS, replace(KINDS[1], overlaps=False), *([Case("ring", inner=2)] if world == 4 else [])]
    bases = [replace(kind, tokens=tokens, key_heads=heads, query_heads=4) for kind in kinds for heads in (1, 2, 4)]
    cases = [case for base in bases for case in varied(base)]
    check(ranks.on("gloo").run(world, compare, cases, timeout_s=300))
    check(ranks.run(world, compare, cases, timeout_s=300))
