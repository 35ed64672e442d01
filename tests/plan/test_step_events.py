"""The events of a simulated step: they end when the prediction says, and nothing is used before it is there."""

from collections import defaultdict
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch

from motet.models.settings import DecoderSettings
from motet.parallel.data_parallel.bucketed_zero import BucketedDataParallel
from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.parallel.layout import Layout
from motet.parallel.process.process_group import RankGroup
from motet.plan.frameworks import STACKS
from motet.plan.planned_cluster import load_planned_cluster
from motet.plan.planned_step import PlannedStep, Recompute
from motet.plan.time.step_events import StepEvent
from motet.train.build import build_components, precision_context
from motet.train.forecast.planned_job import planned_step
from plan.sized_layouts import sized_layout
from train.runs import small_job

MODEL = DecoderSettings(
    vocab_size=32000, context=2048, layers=8, hidden=2048, heads=16, kv_heads=8, ffn_hidden=5632, tied=False
)
CLUSTERS = {name: load_planned_cluster(name, 64) for name in ("h100", "a100-pcie")}
BLOCKS = ["embedding", *(f"block {i}" for i in range(8)), "head"]
LAYOUTS = {
    **{f"stage {zero}": sized_layout(dp=64, zero=zero, microbatches=2) for zero in range(4)},
    "one micro-batch": sized_layout(dp=64, zero=2),
    "shard groups": sized_layout(dp=64, zero=1, shard_group=8),
    "kept parameters": sized_layout(dp=64, zero=3, reshard_after_forward=False, microbatches=2),
    "one reduction": sized_layout(dp=64, zero=3, microbatches=2, reduce_gradients="step"),
    "stage 2 as stage 1": sized_layout(dp=64, zero=2, microbatches=4, reduce_gradients="step"),
    "gathered once": sized_layout(dp=64, zero=3, microbatches=2, reshard_after_forward=False, reduce_gradients="step"),
    "tp": sized_layout(dp=16, tp=4, sp=True, zero=1),
    "cp": sized_layout(dp=16, cp=4, zero=3),
    "1f1b": sized_layout(dp=16, pp=4, microbatches=8, zero=2),
    "stage 3 below a pipeline": sized_layout(dp=16, pp=4, microbatches=8, zero=3, reduce_gradients="step"),
    "interleaved": sized_layout(dp=16, pp=4, chunks=2, schedule="interleaved", microbatches=4, zero=1, tp=1),
    "zb-v": sized_layout(dp=8, tp=2, pp=4, chunks=2, schedule="zb-v", microbatches=8, zero=1),
    "many micro-batches": sized_layout(dp=16, pp=4, microbatches=16, zero=1),
}


def step_of(layout: Layout, stack: str = "motet", **communication: object) -> PlannedStep:
    settings = CommunicationSettings.model_validate(communication)
    recompute: Recompute = "full" if layout.tp > 1 else "none"
    return PlannedStep(MODEL, 2048, 256, layout, stack=STACKS[stack], communication=settings, recompute=recompute)


def events_of(layout: Layout, cluster: str = "h100", **communication: object) -> list[StepEvent]:
    return CLUSTERS[cluster].step_times.events(step_of(layout, **communication))


def select_kinds(events: list[StepEvent], *kinds: str) -> list[StepEvent]:
    return [event for event in events if event.kind in kinds and "next step" not in event.name]


@pytest.mark.parametrize("stack", ["motet", "motet-cpu"])
@pytest.mark.parametrize("overlap", ["none", "backward", "forward"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_events_end_when_the_step_does(name: str, overlap: str, stack: str) -> None:
    """Each stream does one thing at a time; nothing but gathers runs into the next step."""
    for cluster in CLUSTERS.values():
        step, times = step_of(LAYOUTS[name], stack, overlap=overlap), cluster.step_times
        seconds, events = times.predict(step).seconds, times.events(step)
        assert {event.rank for event in events} == set(range(0, 64, 64 // step.layout.pp))
        assert max(event.stop_s for event in select_kinds(events, "host", "data")) == pytest.approx(seconds, rel=1e-9)
        assert all(event.stop_s <= seconds * (1 + 1e-9) for event in select_kinds(events) if event.kind != "gather")
        streams = defaultdict[tuple[int, str], list[StepEvent]](list)
        for event in events:
            if event.kind not in ("exchange", "message", "gather"):  # These also wait in other streams of a rank
                streams[event.rank, event.stream].append(event)
        for before, after in (pair for stream in streams.values() for pair in pairwise(stream)):
            assert before.stop_s <= after.start_s + 1e-9 * seconds, (before, after)


@pytest.mark.parametrize("name", LAYOUTS)
def test_all_blocks_are_computed_in_order(name: str) -> None:
    layout, events = LAYOUTS[name], events_of(LAYOUTS[name])
    for microbatch in range(layout.microbatches):
        forward = [e for e in select_kinds(events, "forward") if e.microbatch == microbatch]
        assert [e.block for e in sorted(forward, key=lambda e: e.start_s)] == BLOCKS[1:] or layout.cp * layout.tp > 1
        computed = {(e.block, e.microbatch) for e in select_kinds(events, "backward", "weights")}
    assert {(block, number) for block in BLOCKS[1:] for number in range(layout.microbatches)} <= computed
    gathered = {e.block for e in select_kinds(events, "gather") if e.block}
    is_sharded = layout.zero == 3 and (layout.sharding.reshard_after_forward or not layout.sharding.reduces_once)
    assert gathered == (set(BLOCKS) if is_sharded else set())
    assert bool(select_kinds(events, "recomputation")) == (layout.tp > 1)
    assert bool(select_kinds(events, "message")) == (layout.pp > 1)
    assert bool(select_kinds(events, "exchange")) == (layout.tp * layout.cp > 1)
    assert bool(select_kinds(events, "weights")) == (layout.schedule == "zb-v")


@pytest.mark.parametrize("overlap", ["none", "backward"])
@pytest.mark.parametrize("zero", range(3))
def test_a_bucket_is_reduced_when_its_gradients_are_there(zero: int, overlap: str) -> None:
    """Backward is long enough to hide all but the last bucket."""
    layout = sized_layout(dp=64, zero=zero, microbatches=2)
    events = events_of(layout, bucket_mib=300, overlap=overlap)
    sent = select_kinds(events, "reduce")
    kind, parts = ("all-reduce", [""]) if zero == 0 else ("reduce-scatter", [""])
    parts = [" of micro-batch 1", " of micro-batch 2"] if zero == 2 else parts
    buckets = 1 + max(int(event.name.split()[2]) for event in sent)
    assert [event.name for event in sent] == [f"{kind} bucket {i}{part}" for part in parts for i in range(buckets)]
    assert buckets > 3
    backward = [event for event in select_kinds(events, "backward") if event.microbatch == 1]
    last = max(event.stop_s for event in backward)
    overlapping = [event for event in sent if event.start_s < last - 1e-9 and (zero < 2 or "2" in event.name[-1])]
    assert bool(overlapping) == (overlap == "backward")
    if overlap == "backward":
        head = next(event for event in backward if event.block == "head")
        assert all(event.start_s >= head.stop_s for event in overlapping)
    assert max(event.stop_s for event in sent) <= select_kinds(events, "norm")[0].start_s + 1e-12


def test_without_overlap_a_micro_batch_waits_for_the_reductions_before_it() -> None:
    events = events_of(sized_layout(dp=64, zero=2, microbatches=2), overlap="none")
    reduced = max(event.stop_s for event in select_kinds(events, "reduce") if event.name.endswith("micro-batch 1"))
    assert reduced == pytest.approx(min(event.start_s for event in events if event.microbatch == 1))


def test_reductions_take_the_time_of_their_bytes() -> None:
    step = step_of(sized_layout(dp=64, zero=1), bucket_mib=100)
    times = CLUSTERS["a100-pcie"].step_times
    events, per_host = times.events(step), times.devices_per_host
    for kind, collective, width in (("reduce", "reduce-scatter", 4), ("gather", "all-gather", 2)):
        seconds = times.costs.seconds(collective, width * step.spec.parameter_count, ranks=64, ranks_per_host=per_host)
        total = sum(event.stop_s - event.start_s for event in select_kinds(events, kind))
        assert total == pytest.approx(seconds, rel=1e-6), kind


def test_stage_3_gathers_before_it_computes_and_reduces_behind() -> None:
    for cluster, keeps in product(CLUSTERS, (False, True)):
        layout = sized_layout(dp=64, zero=3, microbatches=2, reshard_after_forward=not keeps)
        events = events_of(layout, cluster)
        times = {(e.kind, e.name.split()[2] if e.kind == "gather" else "", e.block, e.microbatch): e for e in events}
        for block, microbatch in product(BLOCKS[1:], range(2)):
            gather = times["gather", "forward", block, microbatch]
            assert gather.stop_s <= times["forward", "", block, microbatch].start_s + 1e-12
            again, backward = (
                times.get(("gather", "backward", block, microbatch)),
                times["backward", "", block, microbatch],
            )
            assert (again is None) == keeps and (again is None or again.stop_s <= backward.start_s + 1e-12)
            assert times["reduce", "", block, microbatch].start_s >= backward.stop_s - 1e-12


@pytest.mark.parametrize("zero", [0, 1])
def test_the_next_forward_overlaps_with_gathers(zero: int) -> None:
    """At stage 0 the sums are gathered before the update, at stage 1 parameters behind it."""
    events = events_of(sized_layout(dp=64, zero=zero), "a100-pcie", overlap="forward", bucket_mib=100)
    (update,), gathers = select_kinds(events, "update"), select_kinds(events, "gather")
    assert (gathers[0].start_s < update.start_s) == (zero == 0)
    again = [event for event in events if event.name.endswith("of the next step")]
    assert [event.block for event in again] == BLOCKS[1:] and gathers[-1].stop_s > again[0].start_s
    names = [event.name for event in gathers]
    assert names == [f"all-gather bucket {number}" for number in reversed(range(len(names)))]


def test_stages_wait_for_the_messages_of_their_neighbours() -> None:
    events = events_of(LAYOUTS["1f1b"])
    for microbatch in range(8):
        microbatch_events = [event for event in events if event.microbatch == microbatch]
        for stage in range(3):
            sent = next(
                e for e in microbatch_events if e.kind == "message" and f"activation to stage {stage + 1}" in e.name
            )
            first = min(e.start_s for e in microbatch_events if e.kind == "forward" and e.stage == stage + 1)
            last = max(e.stop_s for e in microbatch_events if e.kind == "forward" and e.stage == stage)
            assert sent.rank == 16 * stage and last <= sent.start_s + 1e-9 and sent.stop_s <= first + 1e-9


def test_backward_has_gradients_in_that_order(tmp_path: Path) -> None:
    """The order in which a real backward completes buckets."""
    job = small_job(tmp_path, "communication.bucket_mib=0.02", "communication.first_bucket_mib=0.001")
    order: list[int] = []
    with precision_context(job):
        parts = build_components(job, RankGroup(0, 1, None, torch.device("cpu")), tmp_path)
        (spread,) = parts.engine.optimizer.sharded_parameters.engines
        assert isinstance(spread, BucketedDataParallel)
        spread.flat_parameters.gradients.on_bucket_ready = order.append
        parts.make_train_step(job).step(0, 0.001)
    layout = sized_layout(dp=2)
    events = load_planned_cluster("h100", 2).step_times.events(planned_step(job, layout))
    assert len(order) > 4
    assert [event.name for event in select_kinds(events, "reduce")] == [
        f"all-reduce bucket {number}" for number in order
    ]
