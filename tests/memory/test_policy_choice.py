"""The quickest policies within a budget, beside all combinations."""

import itertools
import random

from motet.memory.policy_choice import POLICIES, ChoiceProblem, PolicyCost
from motet.models.spec.layer_specs import BlockPolicy


def costs_of_block(rng: random.Random) -> dict[BlockPolicy, PolicyCost]:
    ranges: dict[BlockPolicy, tuple[int, int]] = {"none": (20, 100), "selective": (8, 20), "full": (1, 8)}
    costs = {}
    for policy in POLICIES[rng.random() < 0.1 :]:
        saved, seconds = rng.randint(*ranges[policy]), rng.random() * POLICIES.index(policy)
        costs[policy] = PolicyCost(saved, saved + rng.randint(0, 30), rng.randint(0, 110), seconds)
    return costs


def need(problem: ChoiceProblem, policies: tuple[BlockPolicy, ...]) -> int:
    """The most bytes at any moment, moment by moment."""
    chosen = [block[policy] for block, policy in zip(problem.blocks, policies, strict=True)]
    if max(problem.in_flight) > 1:
        kept = sum(n * cost.saved for n, cost in zip(problem.in_flight, chosen, strict=True))
        return max(problem.elsewhere, *(kept + each for cost in chosen for each in (cost.forward, cost.backward)))
    moments, kept = [problem.elsewhere], 0
    for cost in chosen:
        moments.append(kept + cost.forward)
        kept += cost.saved
    for cost in reversed(chosen):
        moments.append(kept + cost.backward)
        kept -= cost.saved
    return max(moments)


def test_no_combination_is_quicker() -> None:
    rng, outcomes = random.Random(3), {True: 0, False: 0}
    for _ in range(300):
        blocks = [costs_of_block(rng) for _ in range(rng.randint(1, 5))]
        in_flight = [1] * len(blocks) if rng.random() < 0.6 else [rng.randint(1, 3) for _ in blocks]
        problem, budget = ChoiceProblem(blocks, in_flight, rng.randint(0, 90)), rng.randint(20, 500)
        possible = [p for p in itertools.product(*blocks) if need(problem, p) <= budget]
        chosen = problem.choose(budget)
        assert (chosen is None) == (not possible)
        outcomes[chosen is None] += 1
        if chosen is not None:
            seconds = [sum(b[p].seconds for b, p in zip(blocks, policies, strict=True)) for policies in possible]
            assert chosen.seconds == min(seconds, key=lambda each: abs(each - chosen.seconds))
            assert abs(chosen.seconds - min(seconds)) < 1e-12
            assert chosen.peak_bytes == need(problem, chosen.policies) <= budget
    assert min(outcomes.values()) > 30


def test_many_different_blocks_are_chosen_up_to_the_granularity() -> None:
    """A budget that is larger by the granularity for each block allows nothing quicker."""
    rng, blocks = random.Random(4), []
    for _ in range(40):
        saved = [rng.randrange(10**8, 10**9), rng.randrange(10**7, 10**8), rng.randrange(10**5, 10**6)]
        seconds = [0.0, 0.1 + rng.random() / 10, 1 + rng.random() / 10]
        each = zip(POLICIES, saved, seconds, strict=True)
        blocks.append({policy: PolicyCost(size, size, 0, time) for policy, size, time in each})
    problem, budget = ChoiceProblem(blocks, [1] * 40), 8 * 10**9
    chosen, more = problem.choose(budget), problem.choose(budget + 40 * (budget // 16384 + 1) * 40)
    assert chosen is not None and more is not None
    assert chosen.peak_bytes <= budget and more.seconds <= chosen.seconds <= more.seconds * 1.1
