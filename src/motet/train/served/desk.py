"""The desk of a run: does what rank 0 does elsewhere, that is, tells of steps, judges the model, writes checkpoints."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from motet.core.errors import InputError
from motet.monitor.callback import Callback
from motet.monitor.events import WarningIssued
from motet.parallel.data_parallel.bucketed_zero import BucketedDataParallel, persistent_buffers
from motet.parallel.layout import LayoutSettings
from motet.parallel.parameter_server.process.coordinator_process import CoordinatorProcess
from motet.parallel.parameter_server.process.parameter_store import ParameterPartition
from motet.parallel.parameter_server.process.tcp_transport import TcpTransport
from motet.parallel.parameter_server.protocol.coordinator_state_machine import CoordinatorStateMachine
from motet.parallel.parameter_server.protocol.messages import COORDINATOR, ParameterPlacement
from motet.parallel.parameter_server.server_settings import assign_replicas, consistency_policy, extra_process_count
from motet.parallel.process.process_group import RankGroup
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
    workers = seat.place.world - extra_process_count(job.layout.server)
    parts = replace(build_parts(alone, RankGroup(0, 1, None, device), beside.folder), workers=workers)
    if persistent_buffers(parts.model.module):
        raise InputError(
            "layout.data = 'parameter_server' has no place for the buffers that this model keeps (running statistics); "
            "use a norm without them, or layout.data=all_reduce"
        )
    plan = plan_of(parts.model.module, job)
    restored = restore(parts)
    forget_old(beside.folder, seat.place)
    shares = consistency_policy(job.layout.server, workers, parts.steps).work_items_per_step
    same = same_of(job, parts.model.module, plan, parts.data) | {SHARES: str(shares)}
    with posted(seat, COORDINATOR, same) as post:
        office, steps, mirror = _opened(seat, parts, restored, (plan, post))
        spread = parts.updater.spread
        assert isinstance(spread, BucketedDataParallel)
        spread.fetch_updates = mirror.refresh
        with monitoring(job, parts.group, beside.folder, beside.callbacks) as monitor:
            office.log_membership = lambda text: monitor.on_event(WarningIssued(text=text))
            outcome = train(job, parts, restored, monitor, beside.stop, steps)
            office.close([f"s{number}" for number in range(job.layout.server.count)] + _names("w", workers))
        return outcome


def _opened(
    seat: Seat, parts: Parts, restored: Restored, known: tuple[ParameterPartition, TcpTransport]
) -> tuple[CoordinatorProcess, Steps, Mirror]:
    job, done, (plan, post) = seat.job, restored[1], known
    server = job.layout.server
    assert parts.workers
    rule = consistency_policy(server, parts.workers, parts.steps)
    steps = Steps(job, rule, parts.steps, Whole(rule, done))
    view = ParameterPlacement(0, assign_replicas([piece.server_index for piece in plan.slices], server))
    desk = CoordinatorStateMachine(
        rule,
        view,
        _names("s", server.count),
        server.copies,
        update_rule=steps.judge,
        step_limit=done,
        ends_at_step_limit=False,
    )
    desk.resume_after(done)
    mirror = Mirror(plan, parts.updater)
    office = CoordinatorProcess(desk, post, (job.run.timeout_s, server.eviction_timeout_s), mirror.piece)
    steps.office = office
    mirror.follow(office)
    return office, steps, mirror


def _names(letter: str, count: int) -> list[str]:
    return [f"{letter}{number}" for number in range(count)]
