"""Independent replicas: their checkpoints, failures of one of them, and layouts in which they are one model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import motet
from motet.parallel.process.process_group import RankGroup
from motet.train.engine import TrainingEngine
from parallel.plain_diloco import DILOCO, HALVES, STREAMING, Alone, batch, engine_of, held, loss_sum, same_bits
from ranks import Ranks


# --- checkpoints -----------------------------------------------------------------------------------
def interrupted(group: RankGroup, layout: str, outer: dict[str, Any], folder: str, at: int) -> list[bool]:
    """Whether a run that goes on from a checkpoint has the same bits as one that was never stopped, step by step."""
    first = engine_of(layout, outer)
    for step in range(at):
        first.step(batch(step, group.rank))
    first.save(folder, at)
    second = engine_of(layout, outer)
    assert second.restore(folder) == at
    found = [same_bits(held(first), held(second))]
    for step in range(at, at + 6):
        a, b = first.step(batch(step, group.rank)), second.step(batch(step, group.rank))
        found.append(a == b and same_bits(held(first), held(second)))
    return found


@pytest.mark.parametrize(
    ("world", "layout", "outer", "at"),
    [
        (2, "", DILOCO, 6),
        (2, "", {"every": 4, "optimizer": "average"}, 4),
        (3, "", STREAMING, 5),
        (4, "zero=2 shard_group=2", STREAMING, 6),
        (4, "zero=3 shard_group=2", STREAMING, 7),
    ],
)
def test_a_run_goes_on_bit_for_bit(ranks: Ranks, tmp_path: Path, world: int, layout: str, outer: Any, at: int) -> None:
    for found in ranks.run(world, interrupted, layout, outer, str(tmp_path), at):
        assert all(found), found


def save_at(group: RankGroup, layout: str, outer: Any, folder: str, at: int) -> dict[str, tuple[int, Tensor]]:
    """Train and save; return the outer parameters."""
    engine = engine_of(layout, outer)
    for step in range(at):
        engine.step(batch(step, group.rank))
    engine.save(folder, at)
    with engine.consensus_parameters():
        return held(engine)


def go_on_from(group: RankGroup, layout: str, outer: Any, folder: str) -> tuple[Any, list[str], bool]:
    engine = engine_of(layout, outer)
    _, changes = engine.training_state(folder).restore(Path(folder) / "step-00000006")
    start = held(engine)
    return start, changes, [engine.step(batch(step, group.rank)).is_finite for step in range(6, 12)] == [True] * 6


@pytest.mark.parametrize(
    ("world", "layout", "outer"),
    [
        (1, "", {}),
        (2, "zero=2", {}),
        (2, "", {**DILOCO, "every": 5}),
        (3, "", DILOCO),
        (4, "zero=1 shard_group=2", {"every": 4, "optimizer": "average"}),
        (1, "", DILOCO),
    ],
)
def test_another_layout_begins_where_replicas_met_last(
    ranks: Ranks, tmp_path: Path, world: int, layout: str, outer: dict[str, Any]
) -> None:
    met = ranks.run(2, save_at, "", DILOCO, str(tmp_path), 6)[0]
    said = "the checkpoint holds 2 independent replicas with another schedule than this run: it continues from"
    for start, changes, finite in ranks.run(world, go_on_from, layout, outer, str(tmp_path)):
        exact = world == 4  # the same replicas, each on two ranks
        assert [text.startswith(said) for text in changes].count(True) == (not exact) and finite
        for name, (first, values) in start.items():
            assert torch.equal(values, met[name][1][first : first + values.numel()]) or exact


def test_replicas_go_out_from_a_checkpoint_of_data_parallelism(ranks: Ranks, tmp_path: Path) -> None:
    saved = ranks.run(2, save_at, "", {}, str(tmp_path), 6)[0]
    for start, changes, finite in ranks.run(2, go_on_from, "", DILOCO, str(tmp_path)):
        assert same_bits(start, saved) and finite and not changes


# --- what goes wrong -------------------------------------------------------------------------------
def spoil(engine: TrainingEngine) -> None:
    """The parameters of this rank are lost."""
    spread = engine.optimizer.sharded_parameters
    for piece in spread.local_shards(spread.local_masters).values():
        piece.values.fill_(float("inf"))


def lost(group: RankGroup, layout: str, outer: dict[str, Any]) -> tuple[list[tuple[bool, int]], list[bool]]:
    """(finite, skipped) after each step, and whether masters are: the last rank has a bad batch, then bad masters."""
    engine = engine_of(layout, outer)
    told, whole = [], []
    for step in range(9):
        x = batch(step, group.rank)
        if group.rank == group.world - 1 and step == 1:
            x[0, 0] = float("nan")
        if group.rank == group.world - 1 and step == 5:
            spoil(engine)
        done = engine.step(x)
        told.append((done.is_finite, done.skipped_steps))
        whole.append(all(bool(m.isfinite().all()) for m in engine.optimizer.sharded_parameters.local_masters))
    return told, whole


@pytest.mark.parametrize(("world", "layout"), [(3, ""), (4, "zero=2 shard_group=2")])
def test_a_replica_that_is_lost_does_not_spoil_the_others(ranks: Ranks, world: int, layout: str) -> None:
    for rank, (told, whole) in enumerate(ranks.run(world, lost, layout, DILOCO)):
        bad = rank == world - 1 or (bool(layout) and rank == world - 2)
        assert [finite for finite, _ in told] == [not (bad and step in (1, 5, 6, 7)) for step in range(9)]
        assert [skipped for _, skipped in told] == [0, 0, 0, 1, 0, 0, 0, 3, 0]
        assert all(whole[:5]) and whole[7] and whole[8]
        assert bad or all(whole)


def test_what_a_lost_replica_has_learned_is_left_out(ranks: Ranks) -> None:
    """The meeting is that of the other two, as the formula has it."""
    alone = Alone(2, 1)
    for step in range(4):
        alone.step(step)
    alone.meet(alone.differences([n for half in HALVES for n in half]))
    for kept in ranks.run(3, train_with_a_lost_replica):
        for name, (_, values) in kept.items():
            torch.testing.assert_close(values, alone.anchor[name].flatten(), rtol=1e-12, atol=1e-12)


def train_with_a_lost_replica(group: RankGroup) -> dict[str, tuple[int, Tensor]]:
    engine = engine_of("", DILOCO)
    for step in range(4):
        if group.rank == 2:
            spoil(engine)
        engine.step(batch(step, group.rank))
    return held(engine)


# --- one model of all ------------------------------------------------------------------------------
def finished(group: RankGroup, outer: dict[str, Any], steps: int) -> tuple[bool, dict[str, tuple[int, Tensor]]]:
    engine = engine_of("", outer)
    for step in range(steps):
        engine.step(batch(step, group.rank))
    engine.finalize()
    end = held(engine)
    with engine.consensus_parameters():
        return same_bits(end, held(engine)), end


@pytest.mark.parametrize(("outer", "steps"), [(DILOCO, 6), (DILOCO, 8), (STREAMING, 7)])
def test_the_last_meeting_makes_one_model_of_all(ranks: Ranks, outer: dict[str, Any], steps: int) -> None:
    alone, everything = Alone(2, 1), [*HALVES[0], *HALVES[1]]
    sent: dict[int, dict[str, Tensor]] = {}
    for done in range(1, steps + 1):
        alone.step(done - 1)
        if outer is DILOCO and (done % 4 == 0 or done == steps):
            alone.meet(alone.differences(everything))
        if outer is STREAMING and done % 2 == 0:
            sent[done] = alone.differences(HALVES[done // 2 % 2 - 1])
        if outer is STREAMING and done - 3 in sent:
            alone.meet(sent.pop(done - 3), mix=0.3)
    for _, differences in sorted(sent.items()):
        alone.meet(differences, mix=0.3)
    if outer is STREAMING:
        alone.meet(alone.differences(everything))
    for agreed, end in ranks.run(2, finished, outer, steps):
        assert agreed
        for name, (_, values) in end.items():
            torch.testing.assert_close(values, alone.anchor[name].flatten(), rtol=1e-12, atol=1e-12)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.out = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


def with_buffers(group: RankGroup, layout: str) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The running mean after each step, while the replicas' common model is looked at, and after that."""
    torch.manual_seed(2)
    engine = motet.parallelize(Normed().double(), layout, loss=loss_sum, precision="fp64", outer={"every": 3})
    mean, found = engine.module.norm.running_mean, []
    assert isinstance(mean, Tensor)
    for step in range(6):
        engine.step(batch(step, group.rank))
        before, own = held(engine), mean.clone()
        with engine.consensus_parameters():
            inside = mean.clone()
        assert same_bits(held(engine), before)
        found.append((own, inside, mean.clone()))
    return found


@pytest.mark.parametrize(("world", "layout"), [(2, ""), (4, "zero=1 shard_group=2")])
def test_buffers_are_agreed_on_when_replicas_meet(ranks: Ranks, world: int, layout: str) -> None:
    first, *others = ranks.run(world, with_buffers, layout)
    for step in range(6):
        for own, inside, after in [first[step], *(other[step] for other in others)]:
            assert torch.equal(inside, first[step][0]) and torch.equal(own, after)
        assert torch.equal(others[-1][step][0], first[step][0]) == ((step + 1) % 3 == 0)
