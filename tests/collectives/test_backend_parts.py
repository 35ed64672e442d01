"""Programs lowered for shared memory, played on multisets of contributors: they end as the Program promises."""

from collections import Counter

import pytest

from motet.collectives import algorithms, collectives, program
from motet.collectives.backend.parts import lower, on_hosts, together
from motet.collectives.library import find
from motet.collectives.score import Program, Transfer

Held = dict[int, Counter[int]]


def played(score: Program) -> list[Held]:
    """All ranks in step: everybody puts out, then everybody takes in."""
    parts = [lower(score, rank) for rank in range(score.ranks)]
    assert len({len(part.parts) for part in parts}) == 1
    begun: list[Held] = [{chunk: Counter([rank]) for chunk in held} for rank, held in enumerate(score.initial)]
    made: list[Held] = [{} for _ in range(score.ranks)]
    slots: dict[tuple[int, int], Counter[int]] = {}
    for number in range(len(parts[0].parts)):
        for rank, part in enumerate(parts):
            for put in part.parts[number].puts:
                assert put.slot < part.slots
                assert (rank, put.slot) not in slots
                slots[rank, put.slot] = (begun if put.fresh else made)[rank][put.chunk]
        for rank, part in enumerate(parts):
            for arrival in part.parts[number].arrivals:
                own = (begun if arrival.fresh else made)[rank].get(arrival.chunk, Counter[int]())
                total = own if arrival.op == "reduce" and arrival.adds_own else Counter[int]()
                sources = arrival.sources if arrival.op == "reduce" else arrival.sources[-1:]
                for source in sources:
                    total = total + slots[source]
                made[rank][arrival.chunk] = total
                promised = max(
                    len(ranks) for held in score.final for chunk, ranks in held.items() if chunk == arrival.chunk
                )
                assert arrival.completes == (arrival.op == "reduce" and sum(total.values()) == promised)
    for rank, part in enumerate(parts):
        assert set(part.scratch) == set(made[rank]) - set(score.final[rank])
        made[rank] |= {chunk: begun[rank][chunk] for chunk in part.kept}
    return made


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
@pytest.mark.parametrize("collective", sorted({*collectives()} - {"send", "copy", "signal"}))
def test_every_program_ends_as_promised(collective: str, ranks: int) -> None:
    taken = [name for name in algorithms(collective) if find(collective, name).takes(ranks)]
    assert taken
    for name in taken:
        score = program(collective, name, ranks)
        for rank, held in enumerate(played(score)):
            for chunk, contributors in score.final[rank].items():
                assert sorted(held[chunk].elements()) == list(contributors), f"{score}, rank {rank}, chunk {chunk}"


@pytest.mark.parametrize(
    ("collective", "name", "steps", "messages"),
    [
        ("broadcast", "flat", 1, 1),
        ("reduce", "flat", 1, 0),
        ("all-to-all", "pairwise", 1, 3),
        ("all-reduce", "flat", 2, 1),
        ("all-reduce", "direct", 2, 4),
        ("all-reduce", "ring", 6, 6),
    ],
)
def test_steps_that_need_not_wait_are_one(collective: str, name: str, steps: int, messages: int) -> None:
    """And what rank 0 puts out for several ranks, it puts out once."""
    lowered = lower(program(collective, name, 4), 0)
    assert len(lowered.parts) == steps
    assert sum(len(part.puts) for part in lowered.parts) == messages


def test_a_step_that_replaces_what_came_waits() -> None:
    first, replaced, added = (
        Transfer(0, 1, 0, 0, "reduce"),
        Transfer(2, 1, 0, 0, "copy"),
        Transfer(2, 1, 0, 0, "reduce"),
    )
    assert together(((first,), (added,))) == ((first, added),)
    assert together(((first,), (replaced,))) == ((first,), (replaced,))
    assert together(((replaced,), (first,))) == ((replaced,), (first,))


def test_only_sums_passed_on_are_widened() -> None:
    widened = {name: lower(program("all-reduce", name, 4), 0).widens for name in ("naive", "direct", "flat", "ring")}
    assert widened == {"naive": False, "direct": False, "flat": False, "ring": True}


@pytest.mark.parametrize("name", ["direct", "ring", "hierarchical-sharded"])
def test_ranks_of_other_hosts_are_sent_what_they_fetch(name: str) -> None:
    hosts = ({0: 0, 1: 1}, {2: 0, 3: 1})
    lowered = [on_hosts(lower(program("all-reduce", name, 4), rank), hosts[rank // 2]) for rank in range(4)]
    for number in range(len(lowered[0].parts)):
        for src in range(4):
            for dst in set(range(4)) - set(hosts[src // 2]):
                sent = [post[1:] for post in lowered[src].parts[number].posts if post[0] == dst]
                fetched = [fetch[1:] for fetch in lowered[dst].parts[number].fetches if fetch[0] == src]
                assert sent == fetched
    assert (
        sum(len(part.posts) for rank in lowered for part in rank.parts)
        == {
            "direct": 16,
            "ring": 12,
            "hierarchical-sharded": 8,
        }[name]
    )
    first = lowered[1].parts[0]
    local = {source for arrival in first.arrivals for source, _ in arrival.sources if source >= 0}
    assert local == set(first.sources)
