"""Rank plans, played on arrays: they satisfy the postcondition, and use no more memory than needed."""

from dataclasses import replace
from fractions import Fraction
from functools import cache

import numpy as np
import pytest

from motet.collectives import algorithm_names, build
from motet.collectives.algorithms import find_algorithm
from motet.collectives.execute.rank_plan import (
    BufferPlan,
    BufferSlice,
    LocalCopy,
    LocalReduction,
    chunk_lengths,
    make_buffer_plan,
    total_elements,
)
from motet.collectives.program import ChunkTransfer, Program
from motet.core.errors import InputError
from program_library import every_program
from refusals import refused


@cache
def contribution(rank: int, chunk: int, length: int) -> np.ndarray:
    return np.random.default_rng([rank, chunk]).integers(0, 1 << 40, length)


class Player:
    """One rank with its buffers, which fails on what no network would survive."""

    def __init__(self, program: Program, rank: int, numel: int, in_place: bool) -> None:
        self.rank = rank
        self.part = make_buffer_plan(program, rank, numel, in_place=in_place)
        lengths = chunk_lengths(program, numel)
        held, kept = sorted(program.initial[rank]), sorted(program.final[rank])
        start = [contribution(rank, chunk, lengths[chunk]) for chunk in held]
        ends = [(chunk, program.final[rank][chunk]) for chunk in kept]
        self.wanted = [sum(contribution(source, chunk, lengths[chunk]) for source in of) for chunk, of in ends]
        self.buffers: dict[str, np.ndarray] = {
            "input": np.concatenate([*start, []]).astype(np.int64),
            "output": np.full(sum(lengths[chunk] for chunk in kept), -1),
            "scratch": np.full(self.part.scratch_elements, -1),
        }
        at = 0
        for chunk in kept:
            if in_place and chunk in held:
                self.buffers["output"][at : at + lengths[chunk]] = start[held.index(chunk)]
            at += lengths[chunk]
        self.before = self.buffers["input"].copy()

    def view(self, span: BufferSlice) -> np.ndarray:
        assert 0 <= span.start < span.stop <= len(self.buffers[span.buffer]), span
        return self.buffers[span.buffer][span.start : span.stop]

    def move(self, moves: tuple[LocalCopy, ...]) -> None:
        for move in moves:
            self.view(move.target)[:] = self.view(move.source)

    def update(self, update: LocalReduction, sent: list[BufferSlice]) -> None:
        values = [self.view(arrival.buffer_slice).copy() for arrival in update.received]
        if update.local is not None:
            values.append(self.view(update.local).copy())
        assert update.after_sends or not any(overlap(update.target, span) for span in sent)
        self.view(update.target)[:] = sum(values)


def overlap(a: BufferSlice, b: BufferSlice) -> bool:
    return a.buffer == b.buffer and a.start < b.stop and b.start < a.stop


def play(program: Program, numel: int, in_place: bool) -> list[BufferPlan]:
    players = [Player(program, rank, numel, in_place) for rank in range(program.ranks)]
    for number in range(len(program.steps)):
        acts = [player.part.steps[number] for player in players]
        wire = {}
        for player, act in zip(players, acts, strict=True):
            player.move(act.packs)
            for send in act.sends:
                wire[player.rank, send.peer] = player.view(send.buffer_slice).copy()
            spans = [message.buffer_slice for message in (*act.receives, *act.sends)]
            for i, receive in enumerate(act.receives):
                assert not any(overlap(receive.buffer_slice, span) for j, span in enumerate(spans) if j != i)
        for player, act in zip(players, acts, strict=True):
            for receive in act.receives:
                player.view(receive.buffer_slice)[:] = wire.pop((receive.peer, player.rank))
            for update in act.reductions:
                player.update(update, [send.buffer_slice for send in act.sends])
        assert not wire
    for player in players:
        player.move(player.part.final_copies)
        assert player.buffers["output"].tolist() == [x for chunk in player.wanted for x in chunk], player.rank
        assert (player.buffers["input"] == player.before).all()
    return [player.part for player in players]


def elements_sent(plan: BufferPlan) -> int:
    return sum(message.buffer_slice.elements for step in plan.steps for message in step.sends)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6, 8])
def test_every_algorithm_at_any_length(ranks: int) -> None:
    for made in every_program(ranks):
        for numel in (0, 1, made.chunks + 1):
            play(made, numel, in_place=False)
        play(made, made.chunks - 1, in_place=True)
        parts = play(made, (2 * sum(made.sizes)), in_place=True)
        sent = [Fraction(elements_sent(part), 2 * made.message_size_units) for part in parts]
        assert sent == [made.send_fraction(rank) for rank in range(ranks)]
        assert sum(len(step.sends) for part in parts for step in part.steps) == made.message_count


def test_scratch_of_the_ring() -> None:
    """A chunk that arrives cannot be added while it arrives; one that only passes through has to be somewhere."""

    def scratch(collective: str, ranks: int, in_place: bool) -> list[int]:
        ring = build(collective, "ring", ranks)
        return [make_buffer_plan(ring, rank, 400, in_place=in_place).scratch_elements for rank in range(ranks)]

    assert scratch("all-reduce", 4, True) == [100] * 4
    # The sum of the last step grows in the output, so that the one before it is all that is elsewhere.
    assert scratch("reduce-scatter", 4, False) == [200] * 4 and scratch("reduce-scatter", 2, False) == [0, 0]
    # Sums start in the input, so the first reduce lands in the output: nothing else is needed.
    assert scratch("all-reduce", 2, False) == [0, 0]


@pytest.mark.parametrize("name", algorithm_names("all-gather"))
def test_copies_land_in_place(name: str) -> None:
    for ranks in (4, 8):
        for rank in range(ranks):
            part = make_buffer_plan(build("all-gather", name, ranks), rank, 64 * ranks, in_place=False)
            packed = max((sum(pack.target.elements for pack in act.packs) for act in part.steps), default=0)
            slices = [[message.buffer_slice for message in act.receives] for act in part.steps]
            passing = [sum(span.elements for span in spans if span.buffer == "scratch") for spans in slices]
            assert part.scratch_elements <= packed + max(passing, default=0)
            if name in ("ring", "direct", "line"):
                assert part.scratch_elements == 0


def test_swaps_and_uneven_exchanges() -> None:
    swap = (ChunkTransfer(0, 1, 0, 0, "copy"), ChunkTransfer(1, 0, 0, 0, "copy"))
    both = Program("swap", "by hand", 2, (1,), ((0,), (0,)), ({0: (1,)}, {0: (0,)}), (swap,))
    parts = play(both, 10, in_place=True)
    assert [part.scratch_elements for part in parts] == [10, 10]
    assert all(part.steps[0].reductions[0].after_sends for part in parts)
    assert [part.scratch_elements for part in play(both, 10, in_place=False)] == [0, 0]
    sizes = (0, 5, 1, 2, 0, 7, 3, 0, 4)
    for name in algorithm_names("all-to-all"):
        if find_algorithm("all-to-all", name).supports(3):
            made = replace(build("all-to-all", name, 3), sizes=sizes)
            parts = play(made, sum(sizes), in_place=False)
            if name == "pairwise":
                assert [elements_sent(part) for part in parts] == [6, 9, 3]
            assert total_elements(made, 0, 6, 5) == sum(sizes)
    with pytest.raises(InputError, match=r"5 elements on rank 0 cannot be 6 of 22 equal parts"):
        total_elements(replace(build("all-to-all", "pairwise", 3), sizes=sizes), 0, 5, 5)


def test_elements_follow_from_what_a_rank_has() -> None:
    gather = build("all-gather", "ring", 3)
    assert chunk_lengths(gather, 10) == (3, 3, 4) and total_elements(gather, 2, 4, 10) == 10
    refused(r"the input of rank 2 has 3 elements; give 4", total_elements, gather, 2, 3, 10)
    scatter = build("scatter", "flat", 3)
    assert [total_elements(scatter, 0, 12, 4), total_elements(scatter, 1, 0, 4)] == [12, 12]
    send = build("send", "direct", 3, src=0, dst=2)
    assert [total_elements(send, 0, 5, 5), total_elements(send, 1, 0, 0), total_elements(send, 2, 0, 5)] == [5, None, 5]
    refused(r"the output of rank 1 has 1 elements; give 0", total_elements, send, 1, 0, 1)
