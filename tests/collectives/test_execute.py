"""Programs on real ranks: every algorithm against a reference in float64, every byte and message counted."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from motet.collectives import algorithm_names, build, collective_names
from motet.collectives.algorithms import find_algorithm
from motet.collectives.execute.program_runner import run_program
from motet.collectives.execute.rank_plan import chunk_lengths
from motet.core.trace import install_sink
from motet.parallel.process.process_group import RankGroup
from on_ranks import Counter, end_of, group_of, start_of
from ranks import Ranks


class Told(NamedTuple):
    """The trace records of a rank for a Program on `sum(sizes)` elements of eight bytes."""

    collective: str
    algorithm: str
    sent_bytes: float
    messages: float


def every_algorithm(group: RankGroup) -> list[Told]:
    told = []
    for collective in collective_names():
        for name in algorithm_names(collective):
            if find_algorithm(collective, name).supports(group.world):
                even = build(collective, name, group.world)
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
                        counts = counter.counts
                        told.append(Told(collective, name, counts.get("sent_bytes", 0), counts.get("messages", 0)))
    return told


@pytest.mark.parametrize("world", [2, 3, 4, 5, 8])
def test_every_algorithm(ranks: Ranks, world: int) -> None:
    told = ranks.run(world, every_algorithm, timeout_s=120)
    assert len(told[0]) > 30
    for of_ranks in zip(*told, strict=True):
        made = build(of_ranks[0].collective, of_ranks[0].algorithm, world)
        size = 2 * made.message_size_units * 8
        assert [one.sent_bytes for one in of_ranks] == [made.send_fraction(rank) * size for rank in range(world)], made
        assert sum(one.messages for one in of_ranks) == made.message_count, made
