"""The steps of a run as its coordinator sees them: workers compute, and the coordinator decides each update."""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from motet.monitor.events import ParameterServerStepStats
from motet.parallel.parameter_server.process.coordinator_process import CoordinatorProcess
from motet.parallel.parameter_server.protocol.messages import ConsistencyPolicy, UpdateScalars, WorkItemReport
from motet.train.job import Job
from motet.train.optimizer.optimizer_settings import learning_rate_factor
from motet.train.step import StepResult


class ServerUpdateStats(NamedTuple):
    """The work items of an update; staleness is how many updates, or steps, their parameters were behind."""

    reports: list[WorkItemReport]
    update_staleness: list[int]
    step_staleness: list[int]
    grad_norm: float
    is_applied: bool


@dataclass
class ServerUpdateStepTracker:
    """Which steps are complete at which update."""

    policy: ConsistencyPolicy
    first_step: int
    work_items_by_step: Counter[int] = field(default_factory=Counter)  # Of incomplete steps
    updates_at_step_end: list[int] = field(default_factory=list)  # From `first_step` on: updates until it is complete

    def add_update(self, update: int, work_items: Iterable[int]) -> None:
        self.work_items_by_step.update(map(self.policy.step_of, work_items))
        items_of_step = self.policy.work_items_per_step if self.policy.has_per_item_updates else self.policy.quorum
        while self.work_items_by_step[step := self.first_step + len(self.updates_at_step_end)] == items_of_step:
            del self.work_items_by_step[step]
            self.updates_at_step_end.append(update + 1)

    def completed_steps(self, updates: int) -> int:
        return self.first_step + bisect_right(self.updates_at_step_end, updates)


@dataclass
class CoordinatorTrainStep:
    """Waits until workers have done a step, and reports it. The protocol calls `decide_update` for each update."""

    job: Job
    policy: ConsistencyPolicy
    total_steps: int
    completion: ServerUpdateStepTracker
    coordinator: CoordinatorProcess
    unreported_updates: list[ServerUpdateStats] = field(default_factory=list)
    consecutive_skipped: int = 0
    last_traffic: tuple[int, int] = 0, 0  # Bytes that all servers had sent and received at the last step

    def decide_update(self, update: int, reports: dict[int, WorkItemReport], norms: dict[int, float]) -> UpdateScalars:
        """Clip the gradient by the squared norms, scale the learning rate, and skip an update that is not finite."""
        work_items = sorted(reports)
        item_reports = [reports[work_item] for work_item in work_items]
        count = sum(report.targets for report in item_reports)
        divisor = count if count > 0 else 1.0
        if self.policy.has_per_item_updates:
            norms = {work_item: reports[work_item].squared_norm for work_item in work_items}
        norm = math.sqrt(_sum(norms.values())) / divisor
        is_finite = math.isfinite(norm) and all(math.isfinite(report.loss_sum) for report in item_reports)
        versions = [int(report.oldest_version) for report in item_reports]
        update_staleness = [update - version for version in versions]
        completed = map(self.completion.completed_steps, versions)
        step_staleness = [self.policy.step_of(i) - steps for i, steps in zip(work_items, completed, strict=True)]
        self.completion.add_update(update, work_items)
        stats = ServerUpdateStats(item_reports, update_staleness, step_staleness, norm, is_finite)
        self.unreported_updates.append(stats)
        if not is_finite:
            return UpdateScalars()
        clip_norm = self.job.optimizer.clip_norm
        clip_factor = 1.0 if clip_norm is None or norm <= clip_norm else clip_norm / norm
        return UpdateScalars(self._update_rate(update, update_staleness), clip_factor / divisor, is_applied=True)

    def _update_rate(self, update: int, update_staleness: list[int]) -> float:
        updates_per_step, optimizer = self.policy.updates_per_step, self.job.optimizer
        factor = learning_rate_factor(optimizer.schedule, update // updates_per_step, self.total_steps)
        rate = factor * optimizer.learning_rate / updates_per_step
        if self.job.layout.server.learning_rate_scaling == "by-staleness":
            rate /= max(1.0, sum(update_staleness) / len(update_staleness) / updates_per_step)
        return rate

    def step(self, step: int, learning_rate: float, stop: bool = False, last: bool = False) -> StepResult:
        state_machine = self.coordinator.state_machine
        started_steps = -(-state_machine.next_work_item // self.policy.work_items_per_step)
        step_limit = max(step + 1, started_steps) if stop else self._next_boundary(step)
        if step_limit != state_machine.step_limit:
            self.coordinator.extend_to_step(step_limit)
        count = self.policy.updates_per_step
        self.coordinator.run(lambda: len(self.unreported_updates) >= count, f"at step {step + 1}")
        updates, self.unreported_updates = self.unreported_updates[:count], self.unreported_updates[count:]
        return self._step_result(updates, learning_rate, stop_requested=stop and step_limit == step + 1)

    def _next_boundary(self, step: int) -> int:
        """The next step after which the coordinator reads the parameters."""
        job = self.job
        intervals = [every for every in (job.checkpoint.every, job.monitor.evaluate_every) if every is not None]
        ends = [self.total_steps, job.run.stop_at or self.total_steps]
        return min([*ends, *((step // every + 1) * every for every in intervals)])

    def _step_result(self, updates: list[ServerUpdateStats], rate: float, *, stop_requested: bool) -> StepResult:
        reports = [report for update in updates for report in update.reports]
        count = _sum(report.targets for report in reports)
        is_finite = all(update.is_applied for update in updates)
        self.consecutive_skipped = 0 if is_finite else self.consecutive_skipped + 1
        traffic, previous_traffic = self.coordinator.traffic_reports.values(), self.last_traffic
        sent, received = self.last_traffic = sum(t.sent_bytes for t in traffic), sum(t.received_bytes for t in traffic)
        server_work = ParameterServerStepStats(
            staleness_histogram=_histogram(late for update in updates for late in update.update_staleness),
            steps_behind_histogram=_histogram(late for update in updates for late in update.step_staleness),
            workers=len(self.coordinator.state_machine.workers),
            sent_bytes=sent - previous_traffic[0],
            received_bytes=received - previous_traffic[1],
            waiting_bytes=sum(report.queued_bytes for report in traffic),
        )
        return StepResult(
            loss=_sum(report.loss_sum for report in reports) / (count if count > 0 else 1.0),
            grad_norm=max(update.grad_norm for update in updates),
            targets=count,
            tokens=int(sum(report.tokens for report in reports)),
            learning_rate=rate,
            is_finite=is_finite,
            stop_requested=stop_requested,
            skipped_steps=self.consecutive_skipped,
            server_work=server_work,
        )


def _sum(values: Iterable[float]) -> float:
    """The exact sum; not a number if it is infinite."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return math.nan


def _histogram(values: Iterable[int]) -> tuple[int, ...]:
    counts = Counter(values)
    return tuple(counts[value] for value in range(max(counts) + 1))
