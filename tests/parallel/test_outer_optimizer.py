"""Independent replicas with outer steps: the same numbers as plain torch, and the bytes sent."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pages.control_collectives import control_bytes
from torch import Tensor

import motet
from motet.core.errors import InputError
from motet.core.trace import install_sink
from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.parallel.data_parallel.data_sharding import DataParallelSharding
from motet.parallel.local_sgd.outer_optimizer import PseudoGradientReducer
from motet.parallel.local_sgd.schedule import FragmentSyncSchedule, split_into_fragments
from motet.parallel.process.process_group import RankGroup
from motet.train.engine import StepStats
from on_ranks import Counter
from parallel.plain_diloco import DILOCO, HALVES, STEPS, STREAMING, Alone, batch, engine_of, held, net, same_bits
from ranks import Ranks

SGD = {"name": "sgd", "learning_rate": 0.02, "clip_norm": None, "weight_decay": 0.0}


def train(
    group: RankGroup, layout: str, outer: Any, optimizer: Any = None, even: bool = False, communication: Any = None
) -> tuple[list[StepStats], list[dict[str, tuple[int, Tensor]]]]:
    """After each step, what it told and what this rank keeps."""
    engine, told, kept = engine_of(layout, outer, communication, optimizer), [], []
    for step in range(STEPS):
        told.append(engine.step(batch(step, group.rank, even)))
        engine.synchronize()
        kept.append(held(engine))
    return told, kept


# --- the same numbers ------------------------------------------------------------------------------
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
        *((world, 1, "") for world in (1, 2, 3)),
        (2, 2, "zero=2"),
        *((4, 2, f"zero={n} shard_group=2") for n in (1, 2, 3)),
    ],
)
def test_diloco_is_what_its_formula_gives(ranks: Ranks, world: int, shards: int, layout: str) -> None:
    alone = Alone(world // shards, shards)

    def meet(done: int) -> None:
        if done % 4 == 0:
            alone.meet(alone.differences([n for half in HALVES for n in half]))

    results = ranks.run(world, train, layout, DILOCO)
    assert alone.compare(results, meet) < 1e-12
    for step in range(STEPS):
        pairs = [same_bits(kept[step], results[rank % shards][1][step]) for rank, (_, kept) in enumerate(results)]
        assert all(pairs) == ((step + 1) % 4 == 0 or world == shards), step


TURNS = {**DILOCO, "fragments": 2}
LOSSLESS = {"compress_gradients": "randomk:keep=1.0,unbiased=false", "compress_over": "replicas"}


@pytest.mark.parametrize(
    ("outer", "world", "shards", "layout", "communication"),
    [
        (TURNS, 3, 1, "", None),
        (TURNS, 4, 2, "zero=2 shard_group=2", None),
        (STREAMING, 2, 1, "", None),
        (STREAMING, 2, 1, "", LOSSLESS),
        (STREAMING, 4, 2, "zero=1 shard_group=2", None),
        (STREAMING, 4, 2, "zero=2 shard_group=2", {"overlap": "forward", "bucket_mib": 2e-4}),
        (STREAMING, 4, 2, "zero=3 shard_group=2", LOSSLESS),
    ],
)
def test_fragments_meet_in_turn_and_are_merged_after_the_delay(
    ranks: Ranks, outer: dict[str, Any], world: int, shards: int, layout: str, communication: Any
) -> None:
    """A delay of 3 steps sometimes leaves two fragments in transit."""
    delay, alone = outer.get("delay", 0), Alone(world // shards, shards)
    sent: dict[int, dict[str, Tensor]] = {}

    def meet(done: int) -> None:
        if done % 2 == 0:  # the first half after 2 steps, 6, 10
            sent[done] = alone.differences(HALVES[done // 2 % 2 - 1])
        if done - delay in sent:
            alone.meet(sent[done - delay], mix=0.3 if delay else 0.0)

    assert alone.compare(ranks.run(world, train, layout, outer, None, False, communication), meet) < 1e-12


# --- what is sent ----------------------------------------------------------------------------------
def bytes_of_steps(group: RankGroup, layout: str, outer: dict[str, Any]) -> list[dict[str, float]]:
    """Per step: what was sent, without control collectives, and the sizes of all collectives."""
    ring = {"all_reduce": "ring", "reduce_scatter": "ring", "all_gather": "ring"}
    engine, found = engine_of(layout, outer, ring), []
    for step in range(8):
        counter = Counter()
        with install_sink(counter):
            engine.step(batch(step, group.rank))
        control = [("micro-batches", 0, engine.step_group), ("agreement", 1, engine.step_group)]
        if outer and (step + 1) % (outer["every"] // outer.get("fragments", 1)) == 0:
            control += [("outer validity", 0, engine.step_group), ("outer step", 0, group)]
        for name, numel, ranks in control:
            sent = control_bytes(name, numel, rank=ranks.rank, hosts=(0,) * ranks.world)
            counter.on_count("sent_bytes", -sent)
        counter.on_count("sent_bytes", -counter.counts.get("check_bytes", 0))
        found.append({name: value for name, value in counter.counts.items() if value})
    return found


def test_nothing_is_sent_between_meetings_and_the_parameters_at_them(ranks: Ranks) -> None:
    whole, half = 8 * (36 + 6 + 36 + 6), 8 * (36 + 6)
    for counts in ranks.run(3, bytes_of_steps, "", DILOCO):
        for step, counted in enumerate(counts):
            met = (step + 1) % 4 == 0
            assert counted.get("all_reduce_bytes", 0) == (whole if met else 0)
            assert counted.get("sent_bytes", 0) == (whole * 2 * 2 // 3 if met else 0)
            assert met or not any(name.endswith("_bytes") for name in counted)
    for counts in ranks.run(3, bytes_of_steps, "", {**TURNS, "delay": 1}):
        assert [c.get("sent_bytes", 0) for c in counts] == [0, half * 2 * 2 // 3] * 4  # in the step that starts it
        assert not any(name.endswith("_bytes") for c in counts[::2] for name in c)


def test_between_outer_steps_bytes_stay_inside_a_replica(ranks: Ranks) -> None:
    """A step of stage 1 in a replica of 2 ranks reduces half of everything and gathers half of it."""
    alone = ranks.run(2, bytes_of_steps, "zero=1", {})
    apart = ranks.run(4, bytes_of_steps, "zero=1 shard_group=2", DILOCO)
    sent = [[c.get("sent_bytes", 0) for c in counts] for counts in (*alone, *apart)]
    assert all(counts[:3] == sent[0][:3] for counts in sent)
    shares = [counts[3] - 2 * sent[0][3] + sent[0][3] / 2 for counts in sent[2:]]  # published twice, and met
    assert sum(shares[:2]) == sum(shares[2:]) == 8 * (36 + 6 + 36 + 6)


def compressed(group: RankGroup, layout: str, outer: dict[str, Any], codec: str, folder: str) -> list[Any]:
    """Sizes of messages, and what this rank keeps, after each step; the last ones after a checkpoint."""
    how = {"compress_gradients": codec, "compress_over": "replicas"}
    engine, found = engine_of(layout, outer, how), []
    for step in range(10):
        if step == 7:
            engine.save(folder, step)
            for other in range(2):
                engine.step(batch(step + other, group.rank))
            ahead, engine = held(engine), engine_of(layout, outer, how)
            engine.restore(folder)
        counter = Counter()
        with install_sink(counter):
            engine.step(batch(step, group.rank))
        found.append((counter.counts, held(engine)))
    assert same_bits(found[8][1], ahead)
    return found


@pytest.mark.parametrize("codec", ["int8:rounding=stochastic", "topk:keep=0.1", "randomk:keep=0.2,unbiased=false"])
@pytest.mark.parametrize(
    ("world", "layout", "outer"), [(2, "", DILOCO), (3, "", STREAMING), (4, "zero=2 shard_group=2", STREAMING)]
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


# --- when, and what is refused ---------------------------------------------------------------------
def test_differences_are_no_matrices() -> None:
    alone, how = RankGroup(0, 1, None, torch.device("cpu")), CommunicationSettings(compress_gradients="powersgd")
    with pytest.raises(InputError, match=r"compress_gradients = 'powersgd' compresses matrices, .* use another codec"):
        PseudoGradientReducer(how, DataParallelSharding(2, 1), alone, templates=[])


def test_fragments_are_runs_of_about_equal_size() -> None:
    sizes = {f"p{i}": 10 for i in range(10)}
    assert [len(names) for names in split_into_fragments(sizes, 4)] == [2, 3, 2, 3]
    assert split_into_fragments({"table": 1000, "a": 1, "b": 1}, 3) == [["table"], ["a"], ["b"]]
    assert split_into_fragments({"a": 1, "b": 1, "table": 1000}, 3) == [["a"], ["b"], ["table"]]


def test_each_fragment_has_its_turn_between_two_meetings() -> None:
    when = FragmentSyncSchedule(every=6, fragments=4, delay=5)
    turns = {done: when.due_fragments(done) for done in range(1, 13)}
    assert turns == {1: [0], 3: [1], 4: [2], 6: [3], 7: [0], 9: [1], 10: [2], 12: [3], 2: [], 5: [], 8: [], 11: []}
    assert when.in_flight(7) == [(3, [1]), (4, [2]), (6, [3]), (7, [0])]
    assert FragmentSyncSchedule(2, 1, 0).in_flight(2) == []


@pytest.mark.parametrize(
    ("outer", "sentence"),
    [
        ({"momentum": 0.5}, "parallelize: outer.momentum = 0.5 has no effect without outer.every"),
        ({"every": 4, "delay": 4}, r"outer.delay = 4 does not fit between the steps of outer.every = 4; use at most 3"),
        ({"every": 4, "fragments": 5}, r"outer.fragments = 5 does not fit .* at most 4"),
        ({"every": 9, "fragments": 5}, "outer.fragments = 5 is more than the 4 trainable parameters"),
        ({"evry": 9}, "outer: unknown key 'evry'"),
    ],
)
def test_what_is_refused(outer: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        motet.parallelize(net(), outer=outer)
