"""Schedules of pipelines: all are right, hold as many activations as they declare, and compute in torch's order."""

from collections import defaultdict

import pytest
from schedule_execution import executes
from torch_schedules import torch_order

from motet.parallel.pipeline.pipeline_schedule import PipelineAction, PipelineSchedule, peak_in_flight
from motet.parallel.pipeline.schedule_timeline import DURATIONS, ScheduleTimeline, event_times
from motet.parallel.pipeline.schedules import SCHEDULES, ScheduleKind, check_schedule, make_schedule
from refusals import refused

ANY_CHUNKS = [name for name, kind in SCHEDULES.items() if kind.chunks is None]


def check_all(schedule: PipelineSchedule) -> None:
    check_schedule(schedule)
    assert tuple(map(peak_in_flight, schedule.actions)) == schedule.max_in_flight
    weights: dict[int, list[int]] = defaultdict(list)
    for order in schedule.actions:
        for action in order:
            if action.kind in "BW":
                weights[action.stage].append(action.microbatch)
    # All schedules add up gradients in one order, so that their sums have the same bits.
    assert list(weights.values()) == [list(range(schedule.microbatches))] * schedule.stages
    if schedule.microbatches not in (1, 3, 5, 8, 13):
        return
    # Messages that take no time delay nothing, where each rank waits for whole batches; DualPipe-V has many of them.
    without_messages = max(stop for _, stop in event_times(schedule.compute_actions).values())
    assert ScheduleTimeline(schedule).end <= without_messages * (1.02 if schedule.name == "dualpipe-v" else 1)


@pytest.mark.parametrize(
    "counts",
    [(1, 2, 3, 4, 5, 7, 8, 9, 13, 16), pytest.param((6, 10, 11, 12, 14, 15), marks=pytest.mark.proof)],
    ids=["some", "others"],
)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_right(name: str, ranks: int, counts: tuple[int, ...]) -> None:
    for microbatches in counts:
        check_all(make_schedule(name, ranks, chunks=SCHEDULES[name].chunks or 2, microbatches=microbatches))


@pytest.mark.parametrize("chunks", [1, 3, 4])
@pytest.mark.parametrize("name", ANY_CHUNKS)
def test_every_number_of_chunks_is_right(name: str, chunks: int) -> None:
    for ranks in (2, 4):
        for microbatches in (1, 4, 7, 9):
            check_all(make_schedule(name, ranks, chunks=chunks, microbatches=microbatches))


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_can_be_carried_out(name: str) -> None:
    for ranks in (1, 2, 3, 5):
        for microbatches in (1, 2, 4, 9):
            assert executes(make_schedule(name, ranks, chunks=SCHEDULES[name].chunks or 3, microbatches=microbatches))


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_order_is_torchs(name: str) -> None:
    compared = 0
    for ranks in (2, 3, 4, 8):
        for chunks in (2, 3) if name in ANY_CHUNKS else [SCHEDULES[name].chunks or 1]:
            for microbatches in (1, 2, 3, 4, 6, 8, 16):
                try:
                    expected = torch_order(name, ranks, chunks, microbatches)
                except ValueError:  # Numbers that torch refuses
                    continue
                ours = make_schedule(name, ranks, chunks=chunks, microbatches=microbatches).compute_actions
                compared += 1
                if name == "breadth-first":
                    _check_as_good(ours, expected, microbatches)
                else:
                    assert list(map(list, ours)) == expected, (ranks, chunks, microbatches)
    print(f"{name}: {compared} schedules like torch's")  # noqa: T201 - the report of `pytest -s`
    assert compared >= 10


def _check_as_good(
    ours: tuple[tuple[PipelineAction, ...], ...], theirs: list[list[PipelineAction]], microbatches: int
) -> None:
    """Torch's breadth-first backwards begin with the last micro-batch. Ours begin with the first one, so that the sums
    of gradients have the bits of the other schedules; time and memory are the same."""
    last = microbatches - 1
    turned = [[a if a.kind == "F" else a._replace(microbatch=last - a.microbatch) for a in order] for order in theirs]
    assert list(map(list, ours)) == turned
    assert [*map(peak_in_flight, ours)] == [*map(peak_in_flight, theirs)]
    spans = [max(stop for _, stop in event_times(orders).values()) for orders in (ours, theirs)]
    assert spans[0] <= spans[1]


def test_numbers_that_torch_refuses_work() -> None:
    refused_by_torch = (
        ("1f1b", 4, 1, 2),
        ("interleaved", 4, 2, 9),
        ("zb-interleaved", 4, 2, 9),
        ("dualpipe-v", 4, 2, 3),
    )
    for name, ranks, chunks, microbatches in refused_by_torch:
        with pytest.raises(ValueError, match=r"."):
            torch_order(name, ranks, chunks, microbatches)
        check_schedule(make_schedule(name, ranks, chunks=chunks, microbatches=microbatches))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2])
def test_idle_time_is_that_of_the_published_formulas(ranks: int, rounds: int) -> None:
    """(p - 1) / (m + p - 1), of interleaved schedules (p - 1) / (v m + p - 1), for any durations."""
    microbatches = ranks * rounds
    for name, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("breadth-first", 3)):
        schedule = make_schedule(name, ranks, chunks=chunks, microbatches=microbatches)
        # Places of messages are chosen for B of 2 F; with others a rank may wait for a batch.
        for forward, backward, error in ((1.0, 2.0, 1e-12), (2.0, 2.0, 0.006), (0.7, 1.9, 0.006)):
            expected = (ranks - 1) / (chunks * microbatches + ranks - 1)
            timeline = ScheduleTimeline(schedule, {**DURATIONS, "F": forward, "B": backward})
            for rank in (None, 0, ranks - 1):
                assert timeline.bubble_share(rank) == pytest.approx(expected, abs=error)


def test_v_schedules_keep_their_promises() -> None:
    """Ranks of zb-v wait only before they begin if F, I and W take equally long, in the memory of 1F1B's first rank."""
    for ranks in (2, 4, 8):
        for microbatches in (2 * ranks, 3 * ranks):
            timeline = ScheduleTimeline(make_schedule("zb-v", ranks, chunks=2, microbatches=microbatches))
            assert timeline.end == 6 * microbatches + ranks - 1
            assert [timeline.memory(rank) for rank in range(ranks)] == [ranks] * ranks
            dualpipe = ScheduleTimeline(make_schedule("dualpipe-v", ranks, chunks=2, microbatches=microbatches))
            assert [dualpipe.memory(rank) for rank in range(ranks)] == [ranks + 0.5] * ranks


def test_bytes_between_ranks_grow_with_the_chunks() -> None:
    def messages(name: str, chunks: int) -> int:
        schedule = make_schedule(name, 4, chunks=chunks, microbatches=8)
        assert schedule.crossings * 2 * 8 == sum(a.is_message for order in schedule.actions for a in order) / 2
        return schedule.crossings

    assert messages("1f1b", 1) == 3
    assert [messages("interleaved", chunks) for chunks in (1, 2, 3)] == [
        3,
        7,
        11,
    ]  # and 2 of the turns from rank 3 to 0
    assert messages("zb-v", 2) == messages("dualpipe-v", 2) == 6  # the turn of the V stays on a rank


def test_messages_that_take_time_are_hidden_where_there_is_room() -> None:
    """Batches add little to the time that messages themselves take."""
    for name, limit in (("1f1b", 0.04), ("interleaved", 0.07), ("zb-v", 0.01)):
        schedule = make_schedule(name, 4, chunks=SCHEDULES[name].chunks or 2, microbatches=16)
        ends = [ScheduleTimeline(schedule, {**DURATIONS, "M": duration}).end for duration in (0.0, 0.2)]
        without_queues = max(
            stop for _, stop in event_times(schedule.compute_actions, {**DURATIONS, "M": 0.2}).values()
        )
        assert ends[0] < without_queues <= ends[1] <= without_queues * (1 + limit), name


def test_a_schedule_of_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    def backwards_in_pairs(size: object, rank: int) -> tuple[str, int]:
        return "F0 F0 B0 B0 " * 2, 2

    monkeypatch.setitem(SCHEDULES, "pairs", ScheduleKind(backwards_in_pairs, chunks=1))
    schedule = make_schedule("pairs", 2, chunks=1, microbatches=4)
    check_all(schedule)
    assert " ".join(map(str, schedule.compute_actions[1])) == "1F0 1F1 1B0 1B1 1F2 1F3 1B2 1B3"
    for words, sentence in (
        ("F0 B1", r"'pairs': 'B1' is not an action of a rank with 1 chunks; .* such as F0"),
        ("F0 W", r"'pairs': 'W' has no I before it"),
        ("B0 F0 " * 4, r"schedule pairs: rank 0 has 0B0 before 0F0"),
        ("F0 " * 3 + "B0 " * 3, r"micro-batch 3 has at stage 0 0 forwards"),
        ("F0 " * 4 + "B0 " * 4, r"rank 0 has 4 activations in flight, above its bound of 2"),
    ):
        monkeypatch.setitem(SCHEDULES, "pairs", ScheduleKind(lambda size, rank, words=words: (words, 2), chunks=1))
        refused(sentence, make_schedule, "pairs", 2, chunks=1, microbatches=4)


@pytest.mark.parametrize(
    ("name", "numbers", "sentence"),
    [
        ("2f2b", (2, 1, 4), r"no schedule '2f2b'; use one of gpipe, 1f1b, "),
        ("zb-v", (2, 3, 4), r"schedule 'zb-v' has 2 chunks a rank, not 3; give 2$"),
        ("gpipe", (2, 2, 4), r"schedule 'gpipe' has 1 chunk a rank, not 2; give 1$"),
        ("1f1b", (0, 1, 4), r"a pipeline cannot have 0 ranks; give 1 or more$"),
        ("1f1b", (2, 1, 0), r"0 micro-batches; give 1 or more$"),
        ("interleaved", (2, 0, 1), r"0 chunks; give 1 or more$"),
    ],
)
def test_sizes_that_cannot_be(name: str, numbers: tuple[int, int, int], sentence: str) -> None:
    ranks, chunks, microbatches = numbers
    refused(sentence, make_schedule, name, ranks, chunks=chunks, microbatches=microbatches)
