"""Programs lowered for shared memory, played on multisets of contributors: they end as the Program promises."""

from collections import Counter

import pytest

from motet.collectives import build, collective_names
from motet.collectives.execute.rank_plan import merge_independent_steps
from motet.collectives.execute.slot_plan import SlotPlan, make_slot_plan
from motet.collectives.program import ChunkTransfer, Program
from program_library import every_program

Held = dict[int, Counter[int]]


def plan_on_one_host(program: Program, rank: int) -> SlotPlan:
    return make_slot_plan(program, rank, {other: other for other in range(program.ranks)})


def played(score: Program) -> list[Held]:
    """All ranks in step: everybody puts out, then everybody takes in."""
    parts = [plan_on_one_host(score, rank) for rank in range(score.ranks)]
    assert len({len(part.steps) for part in parts}) == 1
    begun: list[Held] = [{chunk: Counter([rank]) for chunk in held} for rank, held in enumerate(score.initial)]
    made: list[Held] = [{} for _ in range(score.ranks)]
    slots: dict[tuple[int, int], Counter[int]] = {}
    for number in range(len(parts[0].steps)):
        for rank, part in enumerate(parts):
            for put in part.steps[number].published:
                assert put.slot < part.slots and (rank, put.slot) not in slots
                slots[rank, put.slot] = (begun if put.is_initial_value else made)[rank][put.chunk]
        for rank, part in enumerate(parts):
            for arrival in part.steps[number].received:
                own = (begun if arrival.is_initial_value else made)[rank].get(arrival.chunk, Counter[int]())
                total = own if arrival.op == "reduce" and arrival.adds_local_value else Counter[int]()
                for source in arrival.sources if arrival.op == "reduce" else arrival.sources[-1:]:
                    total = total + slots[source]
                made[rank][arrival.chunk] = total
                promised = max(len(held[arrival.chunk]) for held in score.final if arrival.chunk in held)
                assert arrival.is_last_contribution == (arrival.op == "reduce" and sum(total.values()) == promised)
    for rank, part in enumerate(parts):
        assert set(part.scratch_chunks) == set(made[rank]) - set(score.final[rank])
        made[rank] |= {chunk: begun[rank][chunk] for chunk in part.unchanged_chunks}
    return made


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
@pytest.mark.parametrize("collective", sorted({*collective_names()} - {"send", "copy", "signal"}))
def test_every_program_ends_as_promised(collective: str, ranks: int) -> None:
    scores = [score for score in every_program(ranks) if score.collective == collective]
    assert scores
    for score in scores:
        for rank, held in enumerate(played(score)):
            for chunk, contributors in score.final[rank].items():
                assert sorted(held[chunk].elements()) == list(contributors), f"{score}, rank {rank}, chunk {chunk}"


@pytest.mark.parametrize(
    ("collective", "name", "steps", "messages"),
    [
        *(("broadcast", "flat", 1, 1), ("reduce", "flat", 1, 0), ("all-to-all", "pairwise", 1, 3)),
        *(("all-reduce", "flat", 2, 1), ("all-reduce", "direct", 2, 4), ("all-reduce", "ring", 6, 6)),
    ],
)
def test_steps_that_need_not_wait_are_one(collective: str, name: str, steps: int, messages: int) -> None:
    lowered = plan_on_one_host(build(collective, name, 4), 0)
    assert len(lowered.steps) == steps and sum(len(part.published) for part in lowered.steps) == messages


def test_a_step_that_replaces_what_came_waits_and_only_sums_passed_on_are_widened() -> None:
    first, added = (ChunkTransfer(src, 1, 0, 0, "reduce") for src in (0, 2))
    replaced = added._replace(op="copy")
    assert merge_independent_steps(((first,), (added,))) == ((first, added),)
    assert merge_independent_steps(((first,), (replaced,))) == ((first,), (replaced,))
    assert merge_independent_steps(((replaced,), (first,))) == ((replaced,), (first,))
    assert {
        name: plan_on_one_host(build("all-reduce", name, 4), 0).needs_wider_dtype
        for name in ("naive", "direct", "flat", "ring")
    } == {"naive": False, "direct": False, "flat": False, "ring": True}


@pytest.mark.parametrize("name", ["direct", "ring", "hierarchical-sharded"])
def test_ranks_of_other_hosts_are_sent_what_they_fetch(name: str) -> None:
    hosts = ({0: 0, 1: 1}, {2: 0, 3: 1})
    lowered = [make_slot_plan(build("all-reduce", name, 4), rank, hosts[rank // 2]) for rank in range(4)]
    for number in range(len(lowered[0].steps)):
        for src in range(4):
            for dst in set(range(4)) - set(hosts[src // 2]):
                sent = [post[1:] for post in lowered[src].steps[number].socket_sends if post[0] == dst]
                assert sent == [fetch[1:] for fetch in lowered[dst].steps[number].socket_receives if fetch[0] == src]
    assert (
        sum(len(part.socket_sends) for rank in lowered for part in rank.steps)
        == {"direct": 16, "ring": 12, "hierarchical-sharded": 8}[name]
    )
    first = lowered[1].steps[0]
    assert {source for arrival in first.received for source, _ in arrival.sources if source >= 0} == set(first.sources)
