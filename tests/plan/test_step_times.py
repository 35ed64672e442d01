"""Times of planned steps: bounds, sums of parts, and what makes a step slower."""

import random
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from motet.core.config_loading import builtin_texts
from motet.core.errors import InputError
from motet.models.settings import DecoderSettings
from motet.parallel.pipeline.schedule_timeline import event_times
from motet.parallel.pipeline.schedules import SCHEDULES, make_schedule
from motet.plan.frameworks import STACKS
from motet.plan.planned_cluster import load_planned_cluster
from motet.plan.planned_step import PlannedStep, even_stages
from motet.plan.time.step_simulation import PipelineDurations, pipeline_lower_bound, simulate_pipeline
from plan.sized_layouts import sized, sized_layout

MODEL = DecoderSettings(
    vocab_size=32000, context=2048, layers=16, hidden=2048, heads=16, kv_heads=8, ffn_hidden=5632, tied=False
)
H100 = load_planned_cluster("h100", 64)


def step_of(**sizes: object) -> PlannedStep:
    return PlannedStep(MODEL, 2048, 256, **sized(**sizes), stack=STACKS["megatron"])


def seconds(cluster=H100, **sizes: object) -> float:
    return cluster.step_times.predict(step_of(**sizes)).seconds


def random_layouts(count: int):
    generator = random.Random(7)
    while count:
        tp, pp, cp = generator.choice((1, 2, 4, 8)), generator.choice((1, 2, 4, 8)), generator.choice((1, 2))
        dp = 64 // (tp * pp * cp)
        chunks = generator.choice((1, 2)) if pp > 1 else 1
        if dp < 1 or 256 % (dp * 8):
            continue
        schedules = ("interleaved", "breadth-first") if chunks > 1 else ("1f1b", "gpipe")
        yield sized(
            dp=dp,
            tp=tp,
            sp=tp > 1,
            pp=pp,
            cp=cp,
            chunks=chunks,
            schedule=generator.choice(schedules),
            zero=generator.choice((0, 1, 3) if pp == 1 else (0, 1)),
            microbatches=generator.choice((1, 2, 8)) * (pp if 256 % (dp * 8 * pp) == 0 else 1),
            recompute=generator.choice(("none", "selective", "full")),
        )
        count -= 1


def test_the_bound_never_exceeds_the_simulation_and_is_near_it() -> None:
    ratios = []
    for sizes in random_layouts(60):
        step = PlannedStep(MODEL, 2048, 256, **sizes)
        times = H100.step_times
        predicted, bound = times.predict(step), times.lower_bound(step)
        assert bound <= predicted.seconds * (1 + 1e-12), sizes
        assert sum(predicted.parts.values()) == pytest.approx(predicted.seconds)
        assert all(value == 0 or value > 1e-10 * predicted.seconds for value in predicted.parts.values())
        ratios.append(bound / predicted.seconds)
    assert sorted(ratios)[len(ratios) // 10] > 0.95


def test_the_bounds_of_all_schedules_never_exceed_their_simulations() -> None:
    times, ratios = H100.step_times, list[float]()
    for sizes in random_layouts(40):
        step, layout = PlannedStep(MODEL, 2048, 256, **sizes), sizes["layout"]
        names = [name for name, kind in SCHEDULES.items() if kind.chunks in (None, layout.chunks)]
        names = names if layout.pp > 1 else [layout.schedule]
        work_bounds = times.lower_bounds(step, names, 0.0)  # All of them exceed this limit
        for name, bound, work_s in zip(names, times.lower_bounds(step, names, inf), work_bounds, strict=True):
            predicted = times.predict(replace(step, layout=replace(layout, schedule=name))).seconds
            assert 0 < work_s <= predicted * (1 + 1e-12) and 0 < bound <= predicted * (1 + 1e-12), (name, layout)
            ratios.append(work_s / predicted)
    assert max(ratios) > 0.95


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zb-v", 2)])
def test_a_pipeline_takes_what_its_schedule_says(schedule: str, chunks: int) -> None:
    ranks, microbatches = 4, 8
    made = make_schedule(schedule, ranks, chunks=chunks, microbatches=microbatches)
    computations = [[action for action in actions if not action.is_message] for actions in made.actions]
    expected = max(stop for _, stop in event_times(computations).values())  # F and I and W take 1, B takes 2
    stages = ranks * chunks
    durations = PipelineDurations(
        schedule, ranks, chunks, microbatches, (1.0,) * stages, (2.0,) * stages, (1.0,) * stages, 0.0, 0.0
    )
    assert simulate_pipeline(durations) == pytest.approx(expected)
    assert pipeline_lower_bound(durations) <= expected


def test_many_microbatches_repeat_the_steady_part() -> None:
    few = PipelineDurations("1f1b", 4, 1, 16, (1.0,) * 4, (2.0,) * 4, (0.5,) * 4, 0.1, 0.0)
    exact, many = simulate_pipeline(few), simulate_pipeline(replace(few, microbatches=160))
    assert many > exact + 144 * 3.0 - 1e-6  # Each micro-batch more takes a forward and a backward at least
    assert many < exact + 144 * (3.0 + 2 * 0.1) + 1e-6


def test_what_makes_a_step_slower() -> None:
    plain = seconds(dp=64, zero=1, microbatches=4)
    assert seconds(dp=64, zero=1, microbatches=4, recompute="full") > 1.2 * plain
    assert seconds(dp=64, zero=1, microbatches=4, recompute="selective") > plain
    slow_links = replace(H100, fabric=replace(H100.fabric, inter_Bps=1e9))
    assert seconds(slow_links, dp=64, zero=1, microbatches=4) > 1.05 * plain
    across, inside = seconds(dp=4, tp=16, sp=True), seconds(dp=8, tp=8, sp=True)
    assert across > inside  # Tensor parallelism over two hosts
    assert seconds(dp=8, pp=8, microbatches=8) > seconds(dp=8, pp=8, chunks=2, schedule="interleaved", microbatches=8)
    a100 = load_planned_cluster("a100", 64)
    assert 1.5 < seconds(a100, dp=64, zero=1, microbatches=4) / plain < 4


def test_stages_share_blocks() -> None:
    assert even_stages(8, 4) == (range(2), range(2, 4), range(4, 6), range(6, 8))
    assert [len(stage) for stage in even_stages(126, 64)] == [1, *[2] * 62, 1]
    assert [len(stage) for stage in even_stages(126, 128)] == [0, *[1] * 126, 0]
    with pytest.raises(InputError, match="9 stages cannot share 6 blocks"):
        even_stages(6, 9)
    ends = PlannedStep(MODEL, 2048, 256, **sized(pp=18, dp=1, microbatches=32)).stage_specs
    assert [block.name for block in ends[0].blocks] == ["embedding"]
    assert [block.name for block in ends[-1].blocks] == ["head"]
    assert sum(spec.parameter_count for spec in ends) == step_of().spec.parameter_count


def test_a_step_waits_for_storage_that_takes_longer() -> None:
    """Two replicas of four ranks read on a host of eight devices; data of the next step is read during a step."""
    fast = H100.step_times
    step = step_of(dp=16, tp=4, sp=True, microbatches=2)
    needed = 4 * 256 * 2048 * 2 / 16
    alone = fast.predict(step)
    assert alone.parts["data loading"] == 0
    slow = replace(fast, storage_Bps=needed / (alone.seconds + 0.5))
    waiting = slow.predict(step)
    assert waiting.seconds == pytest.approx(alone.seconds + 0.5)
    assert waiting.parts["data loading"] == pytest.approx(0.5)
    assert sum(waiting.parts.values()) == pytest.approx(waiting.seconds)
    assert slow.lower_bound(step) == pytest.approx(waiting.seconds)
    hidden = replace(fast, storage_Bps=needed / (0.9 * alone.seconds))
    assert hidden.predict(step) == alone


def test_the_storage_of_a_cluster_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "slow.toml"
    file.write_text("storage_Bps = 1000\n" + builtin_texts("motet.cluster", "presets")["dgx-h100"])
    assert load_planned_cluster(str(file), 8).step_times.storage_Bps == 1000
    assert H100.step_times.storage_Bps == 1e9


def test_stage_3_that_reduces_once_a_step_saves_a_reduction_for_each_other_micro_batch() -> None:
    """Four micro-batches save three times as much as two of the same size."""

    def saved(microbatches: int, *, keeps: bool) -> float:
        """Seconds that one reduction in a step is faster than one for each micro-batch."""
        each, once = (
            sized_layout(
                dp=64, zero=3, microbatches=microbatches, reduce_gradients=when, reshard_after_forward=not keeps
            )
            for when in ("microbatch", "step")
        )
        steps = (PlannedStep(MODEL, 2048, 64 * microbatches, layout) for layout in (each, once))
        slow, fast = (H100.step_times.predict(step).seconds for step in steps)
        return slow - fast

    assert saved(1, keeps=False) == saved(1, keeps=True) == 0
    assert 0 < 3 * saved(2, keeps=False) == pytest.approx(saved(4, keeps=False))
    assert saved(4, keeps=True) > 2 * saved(2, keeps=True) > 0  # The gathers of other micro-batches as well
