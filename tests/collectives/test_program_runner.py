"""Programs on real ranks: every algorithm is right, and every byte and message is counted and measured."""

from dataclasses import replace

import pytest
import torch

from motet.collectives.algorithms import build
from motet.collectives.execute.program_runner import (
    CollectiveMeasurement,
    _expected_result,
    measure_program,
    run_program,
)
from motet.collectives.execute.rank_plan import chunk_lengths
from motet.collectives.program import ChunkTransfer, Program
from motet.core.errors import MotetError
from motet.core.trace import install_sink
from motet.parallel.process.process_group import RankGroup
from on_ranks import Counter, end_of, group_of, start_of
from program_library import every_program
from ranks import Ranks


def every_algorithm(group: RankGroup) -> list[tuple[str, str, float, float]]:
    told = []
    for even in every_program(group.world):
        # Twice as much as there are chunks, one more, and so little that most chunks are empty.
        for numel in (2 * even.chunks, even.chunks + 1, 1):
            made = replace(even, sizes=chunk_lengths(even, numel))
            mine, wanted = start_of(made, group.rank, numel), end_of(made, group.rank, numel)
            output, counter = torch.full_like(wanted, torch.nan), Counter()
            with install_sink(counter):
                run_program(made, output if made.final[group.rank] else None, mine, group_of(group))
            torch.testing.assert_close(output, wanted, rtol=1e-14, atol=1e-14, msg=f"{made} of {numel}")
            assert torch.equal(mine, start_of(made, group.rank, numel)), made
            if numel == 2 * even.chunks:
                counts = [counter.counts.get(name, 0) for name in ("sent_bytes", "messages")]
                told.append((even.collective, even.algorithm, *counts))
    return told


@pytest.mark.parametrize("world", [2, 4, *(pytest.param(world, marks=pytest.mark.proof) for world in (3, 5, 8))])
def test_every_algorithm(ranks: Ranks, world: int) -> None:
    told = ranks.run(world, every_algorithm, timeout_s=120)
    assert len(told[0]) > 30
    for rank_results in zip(*told, strict=True):
        made = build(*rank_results[0][:2], world)
        size = 2 * made.message_size_units * 8
        assert [sent for *_, sent, _ in rank_results] == [made.send_fraction(rank) * size for rank in range(world)], (
            made
        )
        assert sum(messages for *_, messages in rank_results) == made.message_count, made


def measured(group: RankGroup) -> list[tuple[str, CollectiveMeasurement]]:
    made = every_program(group.world)
    return [(str(one), measure_program(one, group_of(group), size=1000, repeats=2)) for one in made]


def wrong(group: RankGroup) -> str:
    made = build("all-reduce", "ring", group.world)
    steps = ((made.steps[0][0]._replace(op="copy"), *made.steps[0][1:]), *made.steps[1:])
    with pytest.raises(MotetError) as raised:
        measure_program(replace(made, steps=steps), group_of(group), size=1000, repeats=1)
    return str(raised.value)


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
        assert 1000 <= found.size < 1000 + 4 * made.chunks and len(found.seconds) == 2 and min(found.seconds) > 0
        assert found.largest_error <= found.allowed_error
        if not any(t.op == "reduce" for step in made.steps for t in step):
            assert found.allowed_error == 0


def test_a_wrong_result_is_noticed(ranks: Ranks) -> None:
    assert all("has a wrong result; the largest error is" in complaint for complaint in ranks.run(2, wrong))


def test_what_is_expected_is_the_sum_of_the_contributors() -> None:
    step = (ChunkTransfer(1, 0, 0, 0, "reduce"),)
    made = Program("all-reduce", "mine", 2, (1, 1), ((0, 1), (0, 1)), ({0: (0, 1)}, {1: (1,)}), (step,))
    both = [torch.randn(6, generator=torch.Generator().manual_seed(rank)).double() for rank in range(2)]
    total, allowed = _expected_result(made, 0, 6)
    assert torch.equal(total, (both[0] + both[1])[:3])
    assert torch.allclose(allowed, (both[0].abs() + both[1].abs())[:3] * 2**-24, rtol=1e-6, atol=0)
    alone, exact = _expected_result(made, 1, 6)
    assert torch.equal(alone, both[1][3:]) and not exact.any()
