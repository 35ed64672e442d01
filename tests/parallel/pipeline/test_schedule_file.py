"""Schedules in files: what is written is read again, and what cannot be is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
from torch_schedules import SEVERAL_STAGES, torch_stages

from motet.parallel.pipeline.schedules import (
    SCHEDULES,
    PipelineSize,
    ScheduleKind,
    find_schedule,
    format_schedule,
    make_schedule,
    read_schedule,
)
from refusals import refused


@pytest.mark.parametrize("with_messages", [True, False])
@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_written_is_read(name: str, tmp_path: Path, with_messages: bool) -> None:
    for ranks in (1, 3, 4):
        schedule = make_schedule(name, ranks, chunks=SCHEDULES[name].chunks or 2, microbatches=6)
        path = tmp_path / "schedule.csv"
        path.write_text(format_schedule(schedule, with_messages=with_messages), encoding="utf-8")
        again = read_schedule(path)
        assert replace(again, name=schedule.name) == schedule
        assert find_schedule(str(path), ranks, chunks=schedule.chunks, microbatches=6) == again


@pytest.mark.parametrize("name", SEVERAL_STAGES)
def test_files_of_torch_are_read(name: str, tmp_path: Path) -> None:
    """Its own writer, with empty cells for idle time, and pairs that it overlaps."""
    path = tmp_path / "torch.csv"
    SEVERAL_STAGES[name](torch_stages(4, 2), 8)._dump_csv(str(path), format="compute_only")
    schedule = read_schedule(path)
    if name != "breadth-first":
        assert schedule.actions == make_schedule(name, 4, chunks=2, microbatches=8).actions


def test_a_byte_order_mark_is_no_action(tmp_path: Path) -> None:
    path = tmp_path / "windows.csv"
    path.write_text("0F0,0B0\n1F0,1B0\n", encoding="utf-8-sig")
    assert read_schedule(path).stage_ranks == (0, 1)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", r"bad\.csv has no actions; write a line for each rank, such as 0F0,0B0$"),
        ("0F0,0B0\n1F0,1X0", r"bad\.csv, line 2, cell 2: '1X0' is not an action; .* 0F3, with a kind of F, .*SEND_F"),
        ("0F0,,B0", r"line 1, cell 3: 'B0' is not an action"),
        ("0F0,(0B0;1F1OVERLAP_F_B", r"line 1, cell 2: '\(0B0;1F1OVERLAP_F_B' is not an action"),
        ("0F0,0B0\n2F0,2B0", r"has stage 2, but no stage 1; number them from 0 without gaps$"),
        ("0F1,0B1", r"has micro-batch 1, but no micro-batch 0"),
        ("0F0,999999F0", r"has stage 999999, but no stage 1"),
        ("0F0,0B0\n\n1F0,1B0", r"rank 1 of 3 has no stage or no actions; give it both$"),
        ("0F0,0F0,0B0", r"micro-batch 0 has at stage 0 2 forwards; write 0F0 once$"),
        ("0B0,0F0", r"rank 0 has 0B0 before 0F0, which it needs; write 0F0 first$"),
        ("0F0,0I0", r"B 0, I 1 and W 0 times; write either B once, or I and W once each$"),
        ("0F0,0F1,0B0,0B1\n1F1,1B1,1F0,1B0", None),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", r"bad\.csv: the order deadlocks: .*0B0.* wait for one another"),
        ("0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0", r"rank 0 has 0RECV_B0 0 times; write one such message$"),
        (
            "0F0,0F1,0SEND_F0,0SEND_F1,0RECV_B0,0RECV_B1,0B0,0B1\n1RECV_F1,1RECV_F0,1F0,1F1,1B0,1B1,1SEND_B0,1SEND_B1",
            r"rank 0 sends 0SEND_F0 where rank 1 receives 1RECV_F1; write one order on both$",
        ),
        (
            "0F0,0SEND_F0,0F1,0RECV_B0,0B0,0SEND_F1,0RECV_B1,0B1\n1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1",
            r"the order deadlocks: .* ranks 0, 1 wait for one another",
        ),
    ],
)  # fmt: skip
def test_bad_files_are_refused(text: str, sentence: str | None, tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text, encoding="utf-8")
    if sentence is None:
        assert read_schedule(path).microbatches == 2
    else:
        refused(sentence, read_schedule, path)


def test_a_schedule_is_made_once_for_its_function_and_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, int]] = []

    def kind_with_order(order: str) -> ScheduleKind:
        def rank_order(size: PipelineSize, rank: int) -> tuple[str, int]:
            made.append((order, size.microbatches))
            return order * size.microbatches, 2

        return ScheduleKind(rank_order, chunks=1)

    whole, split = kind_with_order("F0 B0 "), kind_with_order("F0 I0 W0 ")
    for kind, microbatches in ((whole, 2), (whole, 2), (whole, 3), (split, 2), (whole, 2)):
        monkeypatch.setitem(SCHEDULES, "mine", kind)
        schedule = find_schedule("mine", 1, chunks=1, microbatches=microbatches)
        assert (schedule.splits_backward, schedule.microbatches) == (kind is split, microbatches)
    assert made == [("F0 B0 ", 2), ("F0 B0 ", 3), ("F0 I0 W0 ", 2)]
    path = tmp_path / "changed.csv"
    for text in ("0F0,0B0", "0F0,0I0,0W0"):
        path.write_text(text, encoding="utf-8")
        assert find_schedule(str(path), 1, chunks=1, microbatches=1).splits_backward == ("I" in text)


def test_a_file_for_other_numbers_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text(format_schedule(make_schedule("zb-v", 2, chunks=2, microbatches=4)), encoding="utf-8")
    for ranks, chunks, microbatches, what in (
        (3, 2, 4, "2 ranks, not 3"),
        (2, 1, 4, "2 chunks"),
        (2, 2, 8, "4 micro-b"),
    ):
        refused(f"a schedule of {what}", find_schedule, str(path), ranks, chunks=chunks, microbatches=microbatches)
    refused("cannot read .*; give another file", read_schedule, tmp_path / "nothing.csv")
