"""The steps of a run with a parameter server, as its desk sees them: others do them, it judges each update."""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from motet.monitor.events import ParameterServerStepStats
from motet.parallel.parameter_server.process.coordinator_process import CoordinatorProcess
from motet.parallel.parameter_server.protocol.messages import ConsistencyPolicy, OpaqueScalars
from motet.train.job import Job
from motet.train.optimizer.lr_schedule import learning_rate_factor
from motet.train.step import StepResult


class WorkItemReport(NamedTuple):
    """What a worker reports of a share."""

    loss_sum: float
    targets: float
    tokens: float
    squared_norm: float  # Of the norm of its gradient, where it is an update by itself; else 0
    oldest_version: float  # The oldest of what it was computed with


class ServerUpdateStats(NamedTuple):
    reports: list[WorkItemReport]
    update_staleness: list[int]  # How many updates before it each lacked
    step_staleness: list[int]  # How many steps before its own each lacked some of
    grad_norm: float
    is_applied: bool


@dataclass
class StepCompletionTracker:
    """The steps that updates have all of."""

    policy: ConsistencyPolicy
    first_step: int  # Steps before the first update that is told of
    work_items_by_step: Counter[int] = field(default_factory=Counter)  # Shares of steps that are not whole
    # Of each step after `done`: updates that have all of it.
    updates_at_step_end: list[int] = field(default_factory=list)

    def add_update(self, update: int, work_items: Iterable[int]) -> None:
        """What an update has."""
        self.work_items_by_step.update(map(self.policy.step_of, work_items))
        items_of_step = self.policy.work_items_per_step if self.policy.has_per_item_updates else self.policy.quorum
        while self.work_items_by_step[self.first_step + len(self.updates_at_step_end)] == items_of_step:
            del self.work_items_by_step[self.first_step + len(self.updates_at_step_end)]
            self.updates_at_step_end.append(update + 1)

    def completed_steps(self, updates: int) -> int:
        return self.first_step + bisect_right(self.updates_at_step_end, updates)


@dataclass
class CoordinatorTrainStep:
    """The steps of a run, which others do. Judges each update."""

    job: Job
    policy: ConsistencyPolicy
    total_steps: int
    completion: StepCompletionTracker
    coordinator: CoordinatorProcess | None = None
    unreported_updates: list[ServerUpdateStats] = field(default_factory=list)  # Of each update that is in no step yet
    consecutive_skipped: int = 0
    last_traffic_bytes: tuple[int, int] = (0, 0)  # What all servers have sent and received, as told before

    def decide_update(
        self, update: int, reports: dict[int, OpaqueScalars], squared_norms: dict[int, float]
    ) -> OpaqueScalars:
        """(learning rate, factor, whether it is to be applied)"""
        work_items = sorted(reports)
        item_reports = [WorkItemReport(*reports[work_item]) for work_item in work_items]
        count = sum(share.targets for share in item_reports)
        divisor = count if count > 0 else 1.0
        total = (
            math.fsum(share.squared_norm for share in item_reports)
            if self.policy.has_per_item_updates
            else math.fsum(squared_norms.values())
        )
        norm = math.sqrt(total) / divisor
        is_finite = math.isfinite(norm) and all(math.isfinite(share.loss_sum) for share in item_reports)
        update_staleness = [update - int(share.oldest_version) for share in item_reports]
        completed_steps = [self.completion.completed_steps(int(share.oldest_version)) for share in item_reports]
        step_staleness = [
            self.policy.step_of(share) - steps for share, steps in zip(work_items, completed_steps, strict=True)
        ]
        self.completion.add_update(update, work_items)
        self.unreported_updates.append(
            ServerUpdateStats(item_reports, update_staleness, step_staleness, norm, is_finite)
        )
        clip_norm = self.job.optimizer.clip_norm
        clip_factor = 1.0 if clip_norm is None or norm <= clip_norm else clip_norm / norm
        rate = self.learning_rate_at(
            update // self.policy.work_items_per_step if self.policy.has_per_item_updates else update
        )
        mean_staleness = sum(update_staleness) / len(update_staleness)
        if self.policy.has_per_item_updates:  # as many updates as shares make the progress of one step
            rate /= self.policy.work_items_per_step
            mean_staleness /= self.policy.work_items_per_step
        if self.job.layout.server.learning_rate_scaling == "by-staleness":
            rate /= max(1.0, mean_staleness)
        return (rate, clip_factor / divisor, 1.0) if is_finite else (0.0, 0.0, 0.0)

    def learning_rate_at(self, step: int) -> float:
        optimizer = self.job.optimizer
        return learning_rate_factor(optimizer.schedule, step, self.total_steps) * optimizer.learning_rate

    def step(self, step: int, learning_rate: float, stop: bool = False, last: bool = False) -> StepResult:
        coordinator = self.coordinator
        assert coordinator is not None
        step_limit = max(step + 1, self._started_steps) if stop else self._next_boundary(step)
        if step_limit != coordinator.state_machine.step_limit:
            coordinator.extend_to_step(step_limit)
        update_count = self.policy.work_items_per_step if self.policy.has_per_item_updates else 1
        coordinator.run(lambda: len(self.unreported_updates) >= update_count, f"at step {step + 1}")
        step_updates, self.unreported_updates = (
            self.unreported_updates[:update_count],
            self.unreported_updates[update_count:],
        )
        return self._step_result(step_updates, learning_rate, stop and step_limit == step + 1)

    @property
    def _started_steps(self) -> int:
        """Steps of which a share was handed out."""
        assert self.coordinator is not None
        return -(-self.coordinator.state_machine.next_work_item // self.policy.work_items_per_step)

    def _next_boundary(self, step: int) -> int:
        """The next step after which the parameters are looked at."""
        job = self.job
        boundaries = [self.total_steps, job.run.stop_at or self.total_steps]
        for every in (job.checkpoint.every, job.monitor.evaluate_every):
            if every is not None:
                boundaries.append((step // every + 1) * every)
        return min(boundaries)

    def _step_result(self, updates: list[ServerUpdateStats], rate: float, stop: bool) -> StepResult:
        reports = [report for update in updates for report in update.reports]
        count = math.fsum(share.targets for share in reports)
        is_finite = all(update.is_applied for update in updates)
        self.consecutive_skipped = 0 if is_finite else self.consecutive_skipped + 1
        return StepResult(
            loss=math.fsum(share.loss_sum for share in reports) / (count if count > 0 else 1.0),
            grad_norm=max(update.grad_norm for update in updates),
            targets=count,
            tokens=int(sum(share.tokens for share in reports)),
            learning_rate=rate,
            is_finite=is_finite,
            stop_requested=stop,
            skipped_steps=self.consecutive_skipped,
            server_work=self._server_work(updates),
        )

    def _server_work(self, updates: list[ServerUpdateStats]) -> ParameterServerStepStats:
        assert self.coordinator is not None
        traffic_reports = self.coordinator.traffic_reports.values()
        previous_traffic, self.last_traffic_bytes = (
            self.last_traffic_bytes,
            (
                sum(traffic_report.sent_bytes for traffic_report in traffic_reports),
                sum(load.received_bytes for load in traffic_reports),
            ),
        )
        return ParameterServerStepStats(
            staleness_histogram=_histogram(late for update in updates for late in update.update_staleness),
            steps_behind_histogram=_histogram(late for update in updates for late in update.step_staleness),
            workers=len(self.coordinator.state_machine.workers),
            sent_bytes=self.last_traffic_bytes[0] - previous_traffic[0],
            received_bytes=self.last_traffic_bytes[1] - previous_traffic[1],
            waiting_bytes=sum(load.queued_bytes for load in traffic_reports),
        )


def _histogram(values: Iterable[int]) -> tuple[int, ...]:
    """How many are 0, 1, 2 and so on."""
    counts = Counter(values)
    return tuple(counts[value] for value in range(max(counts) + 1))
