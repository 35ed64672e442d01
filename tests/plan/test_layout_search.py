"""The ranking of layouts: everything that is possible, and the same best as without pruning."""

import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from motet.models.settings import DecoderSettings, MixtureOfExpertsSettings
from motet.parallel.layout import Layout
from motet.plan.memory.step_memory import estimate_memory, fits
from motet.plan.planned_cluster import load_planned_cluster
from motet.plan.planned_step import PlannedStep, spec_of
from motet.plan.search.layout_space import SearchSpace, layout_from_words, with_balanced_stages
from motet.plan.search.ranking import Candidate, KindSearch, LayoutRanking, kind_of
from motet.plan.time.step_time import StepTime
from plan.sized_layouts import sized, sized_layout

pytestmark = pytest.mark.no_cover  # tests/plan/test_plan_command.py counts the lines of rankings

MODEL = DecoderSettings(
    vocab_size=32000, context=4096, layers=16, hidden=4096, heads=32, kv_heads=8, ffn_hidden=14336, tied=False
)


def test_every_layout_is_possible() -> None:
    experts = MODEL.model_copy(update={"experts": MixtureOfExpertsSettings(count=16, per_token=2, hidden=2048)})
    layouts = list(SearchSpace(spec_of(experts), 4096, 96, 32, 8).layouts())
    assert len(set(layouts)) == len(layouts) > 100
    for layout in layouts:
        assert layout.ranks == 32 and 96 % (layout.dp * layout.microbatches) == 0
        assert 32 % layout.tp == 0 and 16 % layout.ep == 0
        PlannedStep(experts, 4096, 96, layout).stage_specs  # noqa: B018 - raises if stages cannot share blocks
    for name in ("tp", "pp", "cp", "ep", "chunks", "microbatches"):
        assert len({getattr(layout, name) for layout in layouts}) > 1, name
    assert {layout.zero for layout in layouts} == {0, 1, 2, 3}


def all_with_sizes_of(layout: Layout) -> Iterator[Layout]:
    """All that `[layout]` can say about the sizes of a layout."""
    one_chunk = ["1f1b", "gpipe", "zb-interleaved"]
    schedules = {1: one_chunk, 2: ["interleaved", "breadth-first", "zb-interleaved", "zb-v", "dualpipe-v"]}
    names = schedules.get(layout.chunks, ["interleaved", "breadth-first", "zb-interleaved"])
    in_stage_3 = [(True, "microbatch"), (True, "step")]
    in_stage_3 += [] if layout.pp > 1 else [(False, "microbatch"), (False, "step")]
    for sp in (False, True) if layout.tp > 1 else (False,):
        for schedule in names if layout.pp > 1 else ["1f1b"]:
            for keeps, reduced in in_stage_3 if layout.zero == 3 else [(True, "microbatch")]:
                if reduced == "step" and layout.microbatches == 1:
                    continue  # The same
                other = replace(layout, schedule=schedule, sp=sp)
                yield other.with_sharding(reshard_after_forward=keeps, reduces_once=reduced == "step")


@pytest.mark.parametrize(
    ("cluster", "devices", "model", "global_batch"),
    [
        pytest.param(
            *("a100", 16, MODEL.model_copy(update={"layers": 4}), 4), id="fits easily", marks=pytest.mark.proof
        ),
        pytest.param(
            *("a100", 8, MODEL.model_copy(update={"layers": 64, "hidden": 8192, "heads": 64, "head_dim": 128}), 4),
            id="fits recomputed",
        ),
    ],
)
def test_the_best_are_those_of_a_search_without_pruning(
    cluster: str, devices: int, model: DecoderSettings, global_batch: int
) -> None:
    planned = load_planned_cluster(cluster, devices)
    step = PlannedStep(model, 4096, global_batch, **sized())
    best = LayoutRanking(step, planned).rank(8)
    times, considered, limit = dict[tuple[int, ...], list[float]](), 0, planned.device.usable_bytes
    for layout in SearchSpace(spec_of(model), 4096, global_batch, devices, 8).layouts():
        for variant in all_with_sizes_of(layout):
            for recompute in ("none", "selective", "full"):
                candidate = replace(step, layout=with_balanced_stages(step, variant), recompute=recompute)
                if fits(estimate_memory(candidate), limit) is None:
                    seconds = planned.step_times.predict(candidate).seconds
                    times.setdefault(kind_of(layout), []).append(seconds)
                    considered += variant == layout
                    break
    expected = sorted(times.items(), key=lambda item: min(item[1]))[:8]
    assert [plan.time.seconds for plan in best.plans] == pytest.approx([min(seconds) for _, seconds in expected])
    for kind, (key, seconds) in zip(best.kinds, expected, strict=True):
        assert kind_of(kind.best.step.layout) == key or seconds[0] in [min(each) for _, each in expected if each]
        if kind.next_s is not None:
            assert kind.next_s == pytest.approx(sorted(times[kind_of(kind.best.step.layout)])[1])
    assert len({kind_of(plan.step.layout) for plan in best.plans}) == len(best.kinds)
    assert best.considered == considered < sum(map(len, times.values()))
    assert all(plan.memory.worst.outside <= limit for plan in best.plans)
    assert all(each.reason and each.missing_bytes > 0 for each in best.rejected)


def small_step() -> PlannedStep:
    return PlannedStep(MODEL.model_copy(update={"layers": 4}), 4096, 16, **sized())


def test_kinds_within_the_tolerance_are_equal_and_the_simplest_of_them_come_first() -> None:
    cluster = load_planned_cluster("h100", 8)
    plain, tolerant = (LayoutRanking(small_step(), cluster).rank(12, tolerance=share) for share in (0.0, 0.3))
    seconds = [plan.time.seconds for plan in plain.plans]
    assert seconds == sorted(seconds) and plain.equal == seconds.count(seconds[0])
    equal = [plan.time.seconds for plan in tolerant.plans[: tolerant.equal]]
    assert tolerant.equal > 3 and max(equal) <= seconds[0] * 1.3 and equal != sorted(equal)
    simplicities = [kind.simplicity for kind in tolerant.kinds[: tolerant.equal]]
    assert simplicities == sorted(simplicities)
    for kind in tolerant.kinds[tolerant.equal :]:
        assert kind.best.time.seconds > seconds[0] * 1.3


def test_free_memory_is_left_and_what_cannot_be_trained_is_told() -> None:
    cluster = load_planned_cluster("h100", 8)
    usable = cluster.device.usable_bytes
    ranking = LayoutRanking(small_step(), cluster, headroom=0.5)
    assert all(plan.memory.worst.outside <= usable / 2 for plan in ranking.rank(20).plans)
    everything = ranking.rank(5)
    fastest = {kind_of(plan.step.layout) for plan in everything.plans[:4]}

    def refusal(step: PlannedStep) -> str | None:
        return "not today" if kind_of(step.layout) in fastest else None

    trained = ranking.rank(5, refusal=refusal)
    assert not fastest & {kind_of(plan.step.layout) for plan in trained.plans}
    assert trained.untrained is not None and trained.untrained[1] == "not today"
    assert trained.untrained[0].time.seconds == everything.plans[0].time.seconds
    assert ranking.rank(5, refusal=lambda step: "never").plans == everything.plans


def test_sizes_that_divide_nothing_are_refused_with_a_reason() -> None:
    space = SearchSpace(spec_of(MODEL), 4096, 32, 64, 8)
    refused = space.refusals()
    assert refused["tp=32"] == "tensor parallelism over more than two hosts of 8 devices"
    assert refused["pp=32"] == "more stages than the 16 layers"
    assert refused["cp=8"] == "leaves a rank fewer than 1024 tokens of a sequence of 4096"
    assert refused["dp=64"] == "does not divide the global batch of 32 rows"
    odd = MODEL.model_copy(update={"heads": 12, "kv_heads": 12, "layers": 10, "head_dim": 128})
    refused_odd = SearchSpace(spec_of(odd), 4096, 32, 64, 8).refusals()
    assert refused_odd["tp=8"] == "does not divide 12 heads"
    experts = MODEL.model_copy(update={"experts": MixtureOfExpertsSettings(count=12, per_token=2, hidden=2048)})
    assert SearchSpace(spec_of(experts), 4096, 32, 64, 8).refusals()["ep=8"] == "does not divide 12 experts"
    used = {f"{name}={getattr(layout, name)}" for layout in space.layouts() for name in ("dp", "tp", "pp", "cp")}
    assert not used & set(refused)
    assert {f"tp={n}" for n in (1, 2, 4, 8, 16, 32, 64)} == {s for s in used | set(refused) if s.startswith("tp=")}


def test_layouts_have_what_their_sizes_allow() -> None:
    space = SearchSpace(spec_of(MODEL), 4096, 32, 64, 8)
    layouts = [*space.layouts()]
    assert {layout.zero for layout in layouts if layout.dp * layout.cp == 1} == {0}
    assert {layout.zero for layout in layouts if layout.dp * layout.cp > 1} == {0, 1, 2, 3}
    assert any(layout.chunks > 1 and layout.microbatches == layout.pp for layout in layouts)
    assert {layout.sharding.shards for layout in layouts if (layout.zero, layout.tp, layout.dp) == (3, 2, 32)} == {
        4,
        32,
    }
    assert SearchSpace(spec_of(MODEL), 1024, 32, 64, 8).refusals()["cp=2"].startswith("leaves a rank fewer than 1024")


def test_micro_batches_of_short_sequences_have_many_rows() -> None:
    """Small models wait for the launches of kernels, so that the largest micro-batches are the fastest."""
    small = MODEL.model_copy(update={"hidden": 256, "heads": 4, "kv_heads": 4, "ffn_hidden": 1024, "layers": 4})
    step, cluster = PlannedStep(small, 128, 512, **sized()), load_planned_cluster("h100", 8)
    ranking = LayoutRanking(step, cluster)
    whole, _ = ranking.predict(replace(step, layout=sized_layout(dp=8, zero=1)))
    assert ranking.rank(1).plans[0].time.seconds <= whole.time.seconds
    rows = {
        512 // (layout.dp * layout.microbatches) for layout in SearchSpace(spec_of(small), 8192, 512, 8, 8).layouts()
    }
    assert max(rows) == 16


@pytest.mark.parametrize(
    ("words", "devices", "rows", "microbatches"),
    [
        ("", 4, 64, 1),
        ("pp=2", 2, 64, 8),
        ("pp=4", 8, 64, 16),
        ("pp=2", 4, 12, 2),
        ("pp=8", 8, 7, 7),
        ("pp=2", 2, 9, 3),
        ("pp=2", 4, 2, 1),
    ],
)
def test_a_pipeline_has_up_to_four_micro_batches_for_each_stage(
    words: str, devices: int, rows: int, microbatches: int
) -> None:
    assert layout_from_words(words, devices, rows)[0].microbatches == microbatches


def test_sequences_that_ranks_do_not_divide_are_not_split() -> None:
    layouts = [layout for layout in SearchSpace(spec_of(MODEL), 4094, 32, 16, 8).layouts() if layout.tp > 1]
    assert {(layout.tp, layout.sp) for layout in layouts} == {(2, True), (4, False), (8, False), (16, False)}


def test_the_least_state_is_never_more_than_the_state() -> None:
    """The quick check must not refuse what fits: also where a rank holds fewer experts than a token visits."""
    model = MODEL.model_copy(update={"experts": MixtureOfExpertsSettings(count=16, per_token=8, hidden=1024)})
    for each in (MODEL, model):
        step = PlannedStep(each, 4096, 32, **sized())
        ranking = LayoutRanking(step, load_planned_cluster("h100", 32))
        layouts = list(SearchSpace(spec_of(each), 4096, 32, 32, 8).layouts())
        for layout in random.Random(5).sample(layouts, 150):
            state = max(rank.allocated for rank in estimate_memory(replace(step, layout=layout)).ranks)
            least = ranking.least_state(replace(step, layout=layout))
            assert 0 < least <= state * (1 + 1e-9), layout


@dataclass(frozen=True)
class _Layout:
    tp: int
    seconds: float
    pp: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 1


@dataclass(frozen=True)
class _Plan:
    time: StepTime


def test_a_bound_leaves_out_only_what_cannot_be_among_the_best() -> None:
    generator = random.Random(3)
    for _ in range(50):
        layouts = [_Layout(generator.randrange(8), generator.uniform(1, 2)) for _ in range(60)]
        shares: Any = [(generator.uniform(0.8, 1.0), each) for each in layouts]
        bounds = [Candidate(each.seconds * share, each) for share, each in shares]
        predicted = []

        def predict(candidate: Any, limit_s: float, seen: list[Candidate] = predicted) -> Any:
            seen.append(candidate)
            return _Plan(StepTime(candidate.layout.seconds, {}))

        search = KindSearch(3, 0.0)
        search.add(bounds, predict)
        by_kind = {kind: sorted(each.seconds for each in layouts if each.tp == kind) for kind in range(8)}
        best = sorted((seconds for seconds in by_kind.values() if seconds), key=lambda seconds: seconds[0])[:3]
        ranked = sorted([p.time.seconds for p in plans] for plans in search.kinds.values())[:3]
        assert [plans[0] for plans in ranked] == [seconds[0] for seconds in best]
        for plans, seconds in zip(ranked, best, strict=True):
            assert plans[1:] == seconds[1:2] or seconds[1] >= best[-1][0]
        assert len(predicted) < 60


def test_tensor_parallelism_stays_inside_of_a_host() -> None:
    model = DecoderSettings(
        vocab_size=128256, context=8192, layers=7, hidden=8192, heads=64, kv_heads=8, ffn_hidden=28672, tied=False
    )
    best = LayoutRanking(PlannedStep(model, 8192, 16, **sized()), load_planned_cluster("h100", 16)).rank(3)
    assert all(plan.step.layout.tp <= 8 for plan in best.plans)
    assert all(plan.step.layout.zero or plan.step.layout.dp == 1 for plan in best.plans)


def test_parts_of_a_list_are_shared_by_processes() -> None:
    """Each core computes some, in a process with one thread; pytest may have others."""
    code = """
import os
from motet.plan.search.ranking import map_parts
results = list(map_parts(lambda part: [(os.getpid(), 10 * item) for item in part], list(range(475))))
processes = {process for process, _ in results}
assert [value for _, value in results] == [10 * item for item in range(475)]
assert (os.getpid() in processes) == (len(os.sched_getaffinity(0)) == 1), processes
try:
    list(map_parts(lambda part: [1 // (part[0] - 250)], list(range(475))))
except ZeroDivisionError:
    print("raised")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "raised\n", done.stderr
