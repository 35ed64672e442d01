"""Schedules as files: a line for each rank, with actions such as `0F3` (stage, kind, micro-batch) between commas.

The format is that of torch's pipelines. Kinds are F, B, I, W, and SEND_F, RECV_F, SEND_B, RECV_B for messages. A file
without messages gets them here. Cells may be empty.
"""

import re
from functools import lru_cache
from itertools import count
from pathlib import Path

from motet.core.errors import InputError, check_input, convert_os_errors
from motet.parallel.pipeline.pipeline_schedule import (
    MESSAGES,
    NEEDS,
    ActionKind,
    PipelineAction,
    PipelineSchedule,
    peak_in_flight,
)
from motet.parallel.pipeline.schedule_check import check_computations, check_schedule
from motet.parallel.pipeline.schedule_messages import insert_messages
from motet.parallel.pipeline.schedules import SCHEDULES, PipelineSize, ScheduleKind, make_schedule

_KINDS: dict[str, ActionKind] = {MESSAGES[kind][0] if kind in MESSAGES else kind: kind for kind in NEEDS}
_OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")  # torch's word for a forward and a backward at the same time


def find_schedule(source: str, ranks: int, *, chunks: int, microbatches: int) -> PipelineSchedule:
    """The schedule of this name, or of this file, for these numbers; it is checked."""
    if source in SCHEDULES or not Path(source).is_file():
        return _named_schedule(source, SCHEDULES.get(source), PipelineSize(ranks, chunks, microbatches))
    schedule = read_schedule(Path(source))
    sizes = (("ranks", schedule.ranks, ranks), ("chunks", schedule.chunks, chunks))
    for what, of_file, wanted in (*sizes, ("micro-batches", schedule.microbatches, microbatches)):
        problem = f"{source} is a schedule of {of_file} {what}, but {wanted} are asked for"
        check_input(of_file == wanted, f"{problem}; use {of_file} {what}, or another schedule")
    return schedule


@lru_cache(maxsize=16)
def _named_schedule(name: str, _kind: ScheduleKind | None, size: PipelineSize) -> PipelineSchedule:
    """A checked schedule; it is kept for its kind too, since a user may give the name to another kind later."""
    schedule = make_schedule(name, size.ranks, chunks=size.chunks, microbatches=size.microbatches)
    check_schedule(schedule)
    return schedule


def read_schedule(path: Path) -> PipelineSchedule:
    """The schedule in a file, which is checked; its bound of activations in flight is what it reaches."""
    with convert_os_errors(f"read {path}", "give another file"):
        lines = path.read_text(encoding="utf-8-sig", errors="replace").rstrip().splitlines()
    orders = [_actions_of_line(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]
    check_input(any(orders), f"{path} has no actions; write a line for each rank, such as 0F0,0B0")
    owner: dict[int, int] = {}  # Stage -> the first rank that has it
    for rank, order in enumerate(orders):
        for action in order:
            owner.setdefault(action.stage, rank)
    microbatches = {action.microbatch for order in orders for action in order}
    for what, numbers in (("stage", set(owner)), ("micro-batch", microbatches)):
        missing = next(number for number in count() if number not in numbers)
        problem = f"{path} has {what} {max(numbers)}, but no {what} {missing}"
        check_input(missing == len(numbers), f"{problem}; number them from 0 without gaps")
    stage_ranks = tuple(owner[stage] for stage in range(len(owner)))
    in_flight = tuple(map(peak_in_flight, orders))
    schedule = PipelineSchedule(str(path), len(microbatches), stage_ranks, tuple(orders), in_flight)
    if not any(action.is_message for order in orders for action in order):
        check_computations(schedule)
        return insert_messages(schedule)
    check_schedule(schedule)
    return schedule


def format_schedule(schedule: PipelineSchedule, *, with_messages: bool = True) -> str:
    """The text of the file of a schedule."""
    orders = schedule.actions if with_messages else schedule.compute_actions
    return "".join(",".join(map(str, order)) + "\n" for order in orders)


def _actions_of_line(line: str, where: str) -> tuple[PipelineAction, ...]:
    actions = []
    for number, cell in enumerate(line.split(","), 1):
        overlapped = _OVERLAPPED.fullmatch(cell.strip())
        for text in overlapped[1].split(";") if overlapped else [cell.strip()] if cell.strip() else []:
            match = re.fullmatch(rf"(\d{{1,6}})({'|'.join(_KINDS)})(\d{{1,6}})", text.strip(), re.ASCII)
            if match is None:
                raise InputError(
                    f"{where}, cell {number}: {text[:60]!r} is no action; write stage, kind and micro-batch such as "
                    f"0F3, with a kind of {', '.join(_KINDS)}"
                )
            actions.append(PipelineAction(_KINDS[match[2]], int(match[1]), int(match[3])))
    return tuple(actions)
