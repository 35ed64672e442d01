"""Replicas that train apart and meet rarely, against plain torch: one after another, and meetings by formula."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import motet
from motet.core.errors import InputError
from motet.core.trace import listening
from motet.parallel.group import Group
from motet.parallel.meetings import Schedule, cut_fragments
from motet.train.engine import Engine, Update
from on_ranks import Counter
from ranks import Ranks

RATE, CLIP, STEPS = 0.02, 0.4, 13
ADAMW = {"learning_rate": RATE, "clip_norm": CLIP}
SGD = {"name": "sgd", "learning_rate": RATE, "clip_norm": None, "weight_decay": 0.0}
DILOCO = {"every": 4, "learning_rate": 0.6, "momentum": 0.8}
Parameters = dict[str, Tensor]


def net() -> nn.Module:
    """Four parameters of 36, 6, 36 and 6 numbers."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()


HALVES = [["0.weight", "0.bias"], ["2.weight", "2.bias"]]


def batch(step: int, rank: int, even: bool = False) -> Tensor:
    """Other ranks have other numbers of rows, unless these are to be even."""
    rows = 3 if even else 2 + (step + rank) % 3
    return torch.randn(rows, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_sum(module: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    return (module(x) - x.flip(1)).square().sum(), len(x)


def held(engine: Engine) -> dict[str, tuple[int, Tensor]]:
    """What this rank keeps of each parameter: from where on, and the numbers."""
    spread = engine.updater.spread
    return {n: (piece.start, piece.values.clone()) for n, piece in spread.pieces(spread.masters).items()}


def train(
    group: Group,
    layout: str,
    outer: dict[str, Any],
    optimizer: dict[str, Any],
    even: bool = False,
    communication: dict[str, Any] | None = None,
) -> tuple[list[Update], list[dict[str, tuple[int, Tensor]]]]:
    """After each step, what it told and what this rank keeps."""
    engine = motet.parallelize(
        net(),
        layout,
        loss=loss_sum,
        optimizer=optimizer,
        precision="fp64",
        communication=communication,
        outer=outer,
    )
    told, kept = [], []
    for step in range(STEPS):
        told.append(engine.step(batch(step, group.rank, even)))
        engine.settle()
        kept.append(held(engine))
    return told, kept


# --- the reference ---------------------------------------------------------------------------------


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in module.parameters() if p.ndim > 1]
    others = [p for p in module.parameters() if p.ndim == 1]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], RATE, (0.9, 0.95)
    )


@dataclass
class Alone:
    """Replicas of some ranks each, in one process."""

    replicas: int
    shards: int
    rate: float = 0.6
    momentum: float = 0.8
    modules: list[nn.Module] = field(default_factory=list)
    anchor: Parameters = field(default_factory=dict)
    momenta: Parameters = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.modules = [net() for _ in range(self.replicas)]
        self.optimizers = [adamw(module) for module in self.modules]
        self.anchor = {n: p.detach().clone() for n, p in self.modules[0].named_parameters()}
        self.momenta = {n: torch.zeros_like(p) for n, p in self.anchor.items()}

    def step(self, step: int) -> list[float]:
        losses = []
        for number, (module, optimizer) in enumerate(zip(self.modules, self.optimizers, strict=True)):
            ranks = range(number * self.shards, (number + 1) * self.shards)
            total, count = loss_sum(module, torch.cat([batch(step, rank) for rank in ranks]))
            optimizer.zero_grad()
            (total / count).backward()
            grads = [p.grad for p in module.parameters() if p.grad is not None]
            factor = min(1.0, CLIP / nn.utils.get_total_norm(grads).item())  # torch's own adds 1e-6 to the norm
            for grad in grads:
                grad.mul_(factor)
            optimizer.step()
            losses.append(total.item() / count)
        return losses

    def differences(self, names: list[str]) -> Parameters:
        return {
            n: torch.stack([self.anchor[n] - m.get_parameter(n).detach() for m in self.modules]).mean(0) for n in names
        }

    def meet(self, differences: Parameters, mix: float = 0.0) -> None:
        for name, difference in differences.items():
            self.momenta[name] = self.momentum * self.momenta[name] + difference
            self.anchor[name] = self.anchor[name] - self.rate * (difference + self.momentum * self.momenta[name])
            for module in self.modules:
                own = module.get_parameter(name).data
                own.copy_(mix * own + (1 - mix) * self.anchor[name])


def compare(
    results: list[Any], alone: Alone, meet: Callable[[int], None], shards: int, steps: int = STEPS
) -> list[float]:
    """After each step, the largest difference of any number that any rank holds or tells."""
    worst = []
    for step in range(steps):
        losses = alone.step(step)
        meet(step + 1)
        most = 0.0
        for rank, (told, kept) in enumerate(results):
            most = max(most, abs(told[step].loss - losses[rank // shards]))
            wanted = dict(alone.modules[rank // shards].named_parameters())
            for name, (start, values) in kept[step].items():
                part = wanted[name].detach().flatten()[start : start + values.numel()]
                most = max([most, *(values - part).abs().tolist()])
        worst.append(most)
    return worst


# --- the same numbers ------------------------------------------------------------------------------


def same_bits(a: dict[str, tuple[int, Tensor]], b: dict[str, tuple[int, Tensor]]) -> bool:
    return all(torch.equal(values, b[name][1]) for name, (_, values) in a.items())


@pytest.mark.parametrize("layout", ["", "zero=2 shard_group=1"])
def test_the_average_after_every_step_of_sgd_is_data_parallelism(ranks: Ranks, layout: str) -> None:
    wanted = ranks.run(3, train, layout, {}, SGD, True)
    found = ranks.run(3, train, layout, {"every": 1, "optimizer": "average"}, SGD, True)
    for (_, kept), (_, other) in zip(wanted, found, strict=True):
        for name, (_, values) in kept[-1].items():
            torch.testing.assert_close(other[-1][name][1], values, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("world", "shards", "layout"),
    [
        (1, 1, ""),
        (2, 1, ""),
        (3, 1, ""),
        (2, 2, "zero=2"),
        (4, 2, "zero=1 shard_group=2"),
        (4, 2, "zero=2 shard_group=2"),
        (4, 2, "zero=3 shard_group=2"),
    ],
)
def test_diloco_is_what_its_formula_gives(ranks: Ranks, world: int, shards: int, layout: str) -> None:
    alone = Alone(world // shards, shards)

    def meet(done: int) -> None:
        if done % 4 == 0:
            alone.meet(alone.differences([n for half in HALVES for n in half]))

    results = ranks.run(world, train, layout, DILOCO, ADAMW)
    assert max(compare(results, alone, meet, shards)) < 1e-12
    for step in range(STEPS):
        pairs = [same_bits(kept[step], results[rank % shards][1][step]) for rank, (_, kept) in enumerate(results)]
        assert all(pairs) == ((step + 1) % 4 == 0 or world == shards), step


@pytest.mark.parametrize(("world", "shards", "layout"), [(3, 1, ""), (4, 2, "zero=2 shard_group=2")])
def test_fragments_meet_in_turn(ranks: Ranks, world: int, shards: int, layout: str) -> None:
    alone = Alone(world // shards, shards)

    def meet(done: int) -> None:
        if done % 2 == 0:  # the first half after 2 steps, 6, 10
            alone.meet(alone.differences(HALVES[done // 2 % 2 - 1]))

    results = ranks.run(world, train, layout, {**DILOCO, "fragments": 2}, ADAMW)
    assert max(compare(results, alone, meet, shards)) < 1e-12


STREAMING = {**DILOCO, "fragments": 2, "delay": 3, "mix": 0.3}


LOSSLESS = {"compress_gradients": "randomk:keep=1.0,unbiased=false", "compress_over": "replicas"}


@pytest.mark.parametrize(
    ("world", "shards", "layout", "communication"),
    [
        (2, 1, "", None),
        (2, 1, "", LOSSLESS),
        (4, 2, "zero=1 shard_group=2", None),
        (4, 2, "zero=2 shard_group=2", {"overlap": "forward", "bucket_mib": 2e-4}),
        (4, 2, "zero=3 shard_group=2", LOSSLESS),
    ],
)
def test_what_was_underway_is_merged_after_the_delay(
    ranks: Ranks, world: int, shards: int, layout: str, communication: dict[str, Any] | None
) -> None:
    """With 3 steps of delay two fragments are underway at times."""
    alone = Alone(world // shards, shards)
    sent: dict[int, Parameters] = {}

    def meet(done: int) -> None:
        if done % 2 == 0:
            sent[done] = alone.differences(HALVES[done // 2 % 2 - 1])
        if done - 3 in sent:
            alone.meet(sent[done - 3], mix=0.3)

    results = ranks.run(world, train, layout, STREAMING, ADAMW, False, communication)
    assert max(compare(results, alone, meet, shards)) < 1e-12


# --- what is sent ----------------------------------------------------------------------------------


def bytes_of_steps(group: Group, layout: str, outer: dict[str, Any]) -> list[dict[str, float]]:
    """Per step: what was sent by Programs, and the sizes of all collectives."""
    ring = {"all_reduce": "ring", "reduce_scatter": "ring", "all_gather": "ring"}
    engine = motet.parallelize(
        net(), layout, loss=loss_sum, optimizer=ADAMW, precision="fp64", communication=ring, outer=outer
    )
    found = []
    for step in range(8):
        counter = Counter()
        with listening(counter):
            engine.step(batch(step, group.rank))
        found.append(counter.counts)
    return found


def test_nothing_is_sent_between_meetings_and_the_parameters_at_them(ranks: Ranks) -> None:
    whole, half = 8 * (36 + 6 + 36 + 6), 8 * (36 + 6)
    for counts in ranks.run(3, bytes_of_steps, "", DILOCO):
        for step, counted in enumerate(counts):
            met = (step + 1) % 4 == 0
            assert counted.get("all_reduce_bytes", 0) == (whole if met else 0)
            assert counted.get("sent_bytes", 0) == (whole * 2 * 2 // 3 if met else 0)
            assert met or not any(name.endswith("_bytes") for name in counted)
    for counts in ranks.run(3, bytes_of_steps, "", {**DILOCO, "fragments": 2, "delay": 1}):
        assert sum(c.get("sent_bytes", 0) for c in counts[:7]) == 3 * half * 2 * 2 // 3  # it is sent beside the steps
        assert not any(name.endswith("_bytes") for c in counts[::2] for name in c if name != "sent_bytes")


def test_between_meetings_bytes_stay_inside_a_replica(ranks: Ranks) -> None:
    """In what a step of stage 1 sends in a replica of 2, half of everything is reduced and half of it gathered."""
    alone = ranks.run(2, bytes_of_steps, "zero=1", {})
    apart = ranks.run(4, bytes_of_steps, "zero=1 shard_group=2", DILOCO)
    sent = [[c.get("sent_bytes", 0) for c in counts] for counts in (*alone, *apart)]
    assert all(counts[:3] == sent[0][:3] for counts in sent)
    shares = [counts[3] - 2 * sent[0][3] + sent[0][3] / 2 for counts in sent[2:]]  # published twice, and met
    assert sum(shares[:2]) == sum(shares[2:]) == 8 * (36 + 6 + 36 + 6)


def compressed(group: Group, layout: str, outer: dict[str, Any], codec: str, folder: str) -> list[Any]:
    """Sizes of messages, and what this rank keeps, after each step; the last ones after a checkpoint."""
    how = {"compress_gradients": codec, "compress_over": "replicas"}
    engine, found = engine_of(layout, outer, how), []
    for step in range(10):
        if step == 7:
            engine.save(folder, step)
            for other in range(2):
                engine.step(batch(step + other, group.rank))
            ahead = held(engine)
            engine = engine_of(layout, outer, how)
            engine.restore(folder)
        counter = Counter()
        with listening(counter):
            engine.step(batch(step, group.rank))
        found.append((counter.counts, held(engine)))
    assert same_bits(found[8][1], ahead)
    return found


@pytest.mark.parametrize("codec", ["int8:rounding=stochastic", "topk:keep=0.1", "randomk:keep=0.2,unbiased=false"])
@pytest.mark.parametrize(
    ("world", "layout", "outer"),
    [(2, "", DILOCO), (3, "", STREAMING), (4, "zero=2 shard_group=2", STREAMING)],
)
def test_differences_may_be_compressed(
    ranks: Ranks, tmp_path: Path, codec: str, world: int, layout: str, outer: dict[str, Any]
) -> None:
    first, *others = ranks.run(world, compressed, layout, outer, codec, str(tmp_path))
    for step, (counts, kept) in enumerate(first):
        if outer is DILOCO:
            met = (step + 1) % 4 == 0
            assert all(same_bits(kept, other[step][1]) == met for other in others)
            assert met or not any(name.endswith("_bytes") for name in counts)


# --- checkpoints -----------------------------------------------------------------------------------


def engine_of(layout: str, outer: dict[str, Any], communication: dict[str, Any] | None = None) -> Engine:
    return motet.parallelize(
        net(),
        layout,
        loss=loss_sum,
        optimizer=ADAMW,
        precision="fp64",
        communication=communication,
        outer=outer,
    )


def interrupted(group: Group, layout: str, outer: dict[str, Any], folder: str, at: int) -> list[bool]:
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
def test_a_run_goes_on_bit_for_bit(
    ranks: Ranks, tmp_path: Path, world: int, layout: str, outer: dict[str, Any], at: int
) -> None:
    for found in ranks.run(world, interrupted, layout, outer, str(tmp_path), at):
        assert all(found), found


def save_at(group: Group, layout: str, outer: dict[str, Any], folder: str, at: int) -> dict[str, tuple[int, Tensor]]:
    """What the replicas have agreed on."""
    engine = engine_of(layout, outer)
    for step in range(at):
        engine.step(batch(step, group.rank))
    engine.save(folder, at)
    with engine.agreed():
        return held(engine)


def go_on_from(
    group: Group, layout: str, outer: dict[str, Any], folder: str
) -> tuple[dict[str, tuple[int, Tensor]], list[str], bool]:
    engine = engine_of(layout, outer)
    _, changes = engine._state(folder).restore(Path(folder) / "step-00000006")
    start = held(engine)
    finite = [engine.step(batch(step, group.rank)).finite for step in range(6, 12)]
    return start, changes, all(finite)


@pytest.mark.parametrize(
    ("world", "layout", "outer"),
    [
        (1, "", {}),
        (2, "zero=2", {}),
        (2, "", {**DILOCO, "every": 5}),
        (3, "", DILOCO),
        (4, "zero=1 shard_group=2", {**DILOCO, "optimizer": "average"} | {"momentum": 0.8}),
        (1, "", DILOCO),
    ],
)
def test_another_layout_begins_where_replicas_met_last(
    ranks: Ranks, tmp_path: Path, world: int, layout: str, outer: dict[str, Any]
) -> None:
    met = ranks.run(2, save_at, "", DILOCO, str(tmp_path), 6)[0]
    said = "the checkpoint holds 2 replicas that train apart, and not as this run has them: it goes on from where"
    for start, changes, finite in ranks.run(world, go_on_from, layout, outer, str(tmp_path)):
        exact = world == 4  # the same replicas, each on two ranks
        assert [text.startswith(said) for text in changes].count(True) == (not exact) and finite
        for name, (first, values) in start.items():
            equal = torch.equal(values, met[name][1][first : first + values.numel()])
            assert equal or exact


def test_replicas_go_out_from_a_checkpoint_of_data_parallelism(ranks: Ranks, tmp_path: Path) -> None:
    saved = ranks.run(2, save_at, "", {}, str(tmp_path), 6)[0]
    for start, changes, finite in ranks.run(2, go_on_from, "", DILOCO, str(tmp_path)):
        assert same_bits(start, saved) and finite and not changes


# --- what goes wrong -------------------------------------------------------------------------------


def spoil(engine: Engine) -> None:
    """The parameters of this rank are lost."""
    spread = engine.updater.spread
    for piece in spread.pieces(spread.masters).values():
        piece.values.fill_(float("inf"))


def lost(group: Group, layout: str, outer: dict[str, Any]) -> tuple[list[tuple[bool, int]], list[bool]]:
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
        told.append((done.finite, done.skipped))
        whole.append(all(bool(m.isfinite().all()) for m in engine.updater.spread.masters))
    return told, whole


@pytest.mark.parametrize(("world", "layout"), [(3, ""), (4, "zero=2 shard_group=2")])
def test_a_replica_that_is_lost_does_not_spoil_the_others(ranks: Ranks, world: int, layout: str) -> None:
    results = ranks.run(world, lost, layout, DILOCO)
    for rank, (told, whole) in enumerate(results):
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


def train_with_a_lost_replica(group: Group) -> dict[str, tuple[int, Tensor]]:
    engine = engine_of("", DILOCO)
    for step in range(4):
        if group.rank == 2:
            spoil(engine)
        engine.step(batch(step, group.rank))
    return held(engine)


# --- one model of all ------------------------------------------------------------------------------


def finished(group: Group, outer: dict[str, Any], steps: int) -> tuple[bool, dict[str, tuple[int, Tensor]]]:
    engine = engine_of("", outer)
    for step in range(steps):
        engine.step(batch(step, group.rank))
    engine.finish()
    end = held(engine)
    with engine.agreed():
        return same_bits(end, held(engine)), end


@pytest.mark.parametrize(("outer", "steps"), [(DILOCO, 6), (DILOCO, 8), (STREAMING, 7)])
def test_the_last_meeting_makes_one_model_of_all(ranks: Ranks, outer: dict[str, Any], steps: int) -> None:
    alone = Alone(2, 1)
    everything = [n for half in HALVES for n in half]
    sent: dict[int, Parameters] = {}
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
    """Its buffers are other ones on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.out = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


def with_buffers(group: Group, layout: str) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The running mean after each step, while the replicas' common model is looked at, and after that."""
    torch.manual_seed(2)
    engine = motet.parallelize(Normed().double(), layout, loss=loss_sum, precision="fp64", outer={"every": 3})
    mean, found = engine.module.norm.running_mean, []
    assert isinstance(mean, Tensor)
    for step in range(6):
        engine.step(batch(step, group.rank))
        before, own = held(engine), mean.clone()
        with engine.agreed():
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


# --- when, and what is refused ---------------------------------------------------------------------


def test_fragments_are_runs_of_about_equal_size() -> None:
    sizes = {f"p{i}": 10 for i in range(10)}
    assert [len(names) for names in cut_fragments(sizes, 4)] == [2, 3, 2, 3]
    assert cut_fragments({"table": 1000, "a": 1, "b": 1}, 3) == [["table"], ["a"], ["b"]]
    assert cut_fragments({"a": 1, "b": 1, "table": 1000}, 3) == [["a"], ["b"], ["table"]]


def test_each_fragment_has_its_turn_between_two_meetings() -> None:
    when = Schedule(every=6, fragments=4, delay=5)
    turns = {done: when.leaving(done) for done in range(1, 13)}
    assert turns == {1: [0], 3: [1], 4: [2], 6: [3], 7: [0], 9: [1], 10: [2], 12: [3], 2: [], 5: [], 8: [], 11: []}
    assert when.underway(7) == [(3, [1]), (4, [2]), (6, [3]), (7, [0])]
    assert Schedule(2, 1, 0).underway(2) == []


@pytest.mark.parametrize(
    ("outer", "sentence"),
    [
        ({"momentum": 0.5}, "outer: the others have no effect without every"),
        ({"every": 4, "delay": 4}, r"outer.delay = 4 does not fit between meetings: .* = 4 it is at most 3"),
        ({"every": 4, "fragments": 5}, r"outer.fragments = 5 does not fit .* at most 4"),
        ({"every": 9, "fragments": 5}, "outer.fragments = 5 is more than the 4 trainable parameters"),
        ({"evry": 9}, "outer: unknown key 'evry'"),
    ],
)
def test_what_is_refused(outer: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        motet.parallelize(net(), outer=outer)
