"""The desk of a run: does what rank 0 does elsewhere, that is, tells of steps, judges the model, writes checkpoints."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from motet.core.errors import InputError
from motet.monitor.callback import Callback
from motet.monitor.events import Warned
from motet.parallel.data import FlatSpread, saved_buffers
from motet.parallel.group import Group
from motet.parallel.layout import LayoutSettings
from motet.parallel.server.desk import Desk
from motet.parallel.server.office import Office
from motet.parallel.server.post import Post
from motet.parallel.server.protocol import DESK, View
from motet.parallel.server.settings import helpers, owners_of, rule_of
from motet.parallel.server.shelf import Plan
from motet.train.assemble import Outcome, Parts, Restored, build_parts, monitoring, restore, train
from motet.train.faults import StopFlag
from motet.train.served.meet import SHARES, Seat, posted, same_of
from motet.train.served.mirror import Mirror, plan_of
from motet.train.served.server import forget_old
from motet.train.served.steps import Steps, Whole


class Beside(NamedTuple):
    """What the desk has to do with beside the other ranks."""

    folder: Path
    stop: StopFlag
    callbacks: Sequence[Callback]


def run_desk(seat: Seat, beside: Beside) -> Outcome:
    job = seat.job
    device = torch.device("cpu")
    alone = job.model_copy(update={"layout": LayoutSettings(microbatches=job.layout.microbatches)})
    workers = seat.place.world - helpers(job.layout.server)
    parts = replace(build_parts(alone, Group(0, 1, None, device), beside.folder), workers=workers)
    if saved_buffers(parts.model.module):
        raise InputError(
            "layout.data = 'parameter_server' has no place for the buffers that this model keeps (running statistics); "
            "use a norm without them, or layout.data=all_reduce"
        )
    plan = plan_of(parts.model.module, job)
    restored = restore(parts)
    forget_old(beside.folder, seat.place)
    shares = rule_of(job.layout.server, workers, parts.steps).shares
    same = same_of(job, parts.model.module, plan, parts.data) | {SHARES: str(shares)}
    with posted(seat, DESK, same) as post:
        office, steps, mirror = _opened(seat, parts, restored, (plan, post))
        spread = parts.updater.spread
        assert isinstance(spread, FlatSpread)
        spread.refresh = mirror.refresh
        with monitoring(job, parts.group, beside.folder, beside.callbacks) as monitor:
            office.tell = lambda text: monitor.on_event(Warned(text=text))
            outcome = train(job, parts, restored, monitor, beside.stop, steps)
            office.close([f"s{number}" for number in range(job.layout.server.count)] + _names("w", workers))
        return outcome


def _opened(seat: Seat, parts: Parts, restored: Restored, known: tuple[Plan, Post]) -> tuple[Office, Steps, Mirror]:
    job, done, (plan, post) = seat.job, restored[1], known
    server = job.layout.server
    assert parts.workers
    rule = rule_of(server, parts.workers, parts.steps)
    steps = Steps(job, rule, parts.steps, Whole(rule, done))
    view = View(0, owners_of([piece.server for piece in plan.pieces], server))
    desk = Desk(rule, view, _names("s", server.count), server.copies, judge=steps.judge, until=done, closes=False)
    desk.begin(done)
    mirror = Mirror(plan, parts.updater)
    office = Office(desk, post, (job.run.timeout_s, server.patience_s), mirror.piece)
    steps.office = office
    mirror.follow(office)
    return office, steps, mirror


def _names(letter: str, count: int) -> list[str]:
    return [f"{letter}{number}" for number in range(count)]
