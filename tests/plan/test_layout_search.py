"""The ranking of layouts: everything that is possible, and the same best as without pruning."""

import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from motet.models.settings import DecoderSettings, MixtureOfExpertsSettings
from motet.parallel.layout import Layout
from motet.plan.memory.step_memory import estimate_memory, fits
from motet.plan.planned_cluster import load_planned_cluster
from motet.plan.planned_step import PlannedStep, spec_of
from motet.plan.search.layout_space import SearchSpace, layout_from_words, with_balanced_stages
from motet.plan.search.ranking import Candidate, LayoutRanking, best_by_bound
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
    of_one = ["1f1b", "gpipe", "zb-interleaved"]
    schedules = {1: of_one, 2: ["interleaved", "breadth-first", "zb-interleaved", "zb-v", "dualpipe-v"]}
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
    times, considered, limit = dict[str, float](), 0, planned.device.usable_bytes
    for layout in SearchSpace(spec_of(model), 4096, global_batch, devices, 8).layouts():
        for variant in all_with_sizes_of(layout):
            for recompute in ("none", "selective", "full"):
                candidate = replace(step, layout=with_balanced_stages(step, variant), recompute=recompute)
                if fits(estimate_memory(candidate), limit) is None:
                    times[str(candidate.layout)] = planned.step_times.predict(candidate).seconds
                    considered += variant == layout
                    break
    assert [plan.time.seconds for plan in best.plans] == pytest.approx(sorted(times.values())[:8])
    assert len({str(plan.step.layout) for plan in best.plans}) == 8
    assert all(times[str(plan.step.layout)] == pytest.approx(plan.time.seconds) for plan in best.plans)
    assert best.considered == considered < len(times)
    assert all(plan.memory.worst.outside <= limit for plan in best.plans)
    assert all(each.reason and each.missing_bytes > 0 for each in best.rejected)


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


class _Time:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds


class _Plan:
    def __init__(self, seconds: float) -> None:
        self.time = _Time(seconds)


def test_a_bound_leaves_out_only_what_cannot_be_among_the_best() -> None:
    generator = random.Random(3)
    for _ in range(50):
        seconds = [generator.uniform(1, 2) for _ in range(30)]
        bounds = [Candidate(value * generator.uniform(0.6, 1.0), value) for value in seconds]  # type: ignore[arg-type]
        predicted = []

        def predict(candidate: Candidate, limit: float, seen: list[Candidate] = predicted) -> _Plan:
            assert limit > 1
            seen.append(candidate)
            return _Plan(candidate.layout)

        best = [plan.time.seconds for plan in best_by_bound(bounds, predict, 4)]  # type: ignore[arg-type]
        assert best == sorted(seconds)[:4]
        assert len(predicted) < 30


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
