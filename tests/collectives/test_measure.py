"""Programs carried out and measured: every algorithm is right and sends what it says; a wrong one is noticed."""

from dataclasses import replace

import torch

from motet.collectives.algorithms import algorithm_names, build, collective_names, find_algorithm
from motet.collectives.execute.measure import CollectiveMeasurement, _expected_result, measure_program
from motet.collectives.program import ChunkTransfer, Program
from motet.core.errors import MotetError
from motet.parallel.process.process_group import RankGroup
from ranks import Ranks


def measured(group: RankGroup) -> list[tuple[str, CollectiveMeasurement]]:
    """All that so many ranks can do."""
    assert group.process_group is not None
    names = [
        (c, a) for c in collective_names() for a in algorithm_names(c) if find_algorithm(c, a).supports(group.world)
    ]
    made = [build(collective, name, group.world) for collective, name in names]
    return [(str(one), measure_program(one, group.process_group, size=1000, repeats=2)) for one in made]


def wrong(group: RankGroup) -> str:
    """A ring that forgets one addition, told to be proven."""
    assert group.process_group is not None
    made = build("all-reduce", "ring", group.world)
    steps = ((made.steps[0][0]._replace(op="copy"), *made.steps[0][1:]), *made.steps[1:])
    try:
        measure_program(replace(made, steps=steps), group.process_group, size=1000, repeats=1)
    except MotetError as error:
        return str(error)
    return ""


def test_every_algorithm_is_right_and_sends_what_its_program_says(ranks: Ranks) -> None:
    world = 4
    results = ranks.run(world, measured)
    assert all(result == results[0] for result in results)  # all ranks know the same
    assert len(results[0]) >= 35
    for name, found in results[0]:
        collective, algorithm = name.split(" of ")[0].split("/")
        made = build(collective, algorithm, world)
        assert found.sent_bytes == tuple(int(made.send_fraction(rank) * found.size) for rank in range(world)), name
        assert sum(found.messages) == made.message_count, name
        assert 1000 <= found.size < 1000 + 4 * made.chunks
        assert len(found.seconds) == 2
        assert min(found.seconds) > 0
        assert found.largest_error <= found.allowed_error
        if not any(t.op == "reduce" for step in made.steps for t in step):
            assert found.allowed_error == 0


def test_a_wrong_result_is_noticed(ranks: Ranks) -> None:
    assert all("has a wrong result; the largest error is" in complaint for complaint in ranks.run(2, wrong))


def test_what_is_expected_is_the_sum_of_the_contributors() -> None:
    made = Program(
        "all-reduce",
        "mine",
        2,
        (1, 1),
        ((0, 1), (0, 1)),
        ({0: (0, 1)}, {1: (1,)}),
        ((ChunkTransfer(1, 0, 0, 0, "reduce"),),),
    )
    both = [torch.randn(6, generator=torch.Generator().manual_seed(rank)).double() for rank in range(2)]
    total, allowed = _expected_result(made, 0, 6)
    assert torch.equal(total, (both[0] + both[1])[:3])
    assert torch.allclose(allowed, (both[0].abs() + both[1].abs())[:3] * 2**-24, rtol=1e-6, atol=0)
    alone, exact = _expected_result(made, 1, 6)
    assert torch.equal(alone, both[1][3:])
    assert not exact.any()
