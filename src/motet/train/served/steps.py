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
from motet.train.schedule import learning_rate_factor
from motet.train.step import StepResult


class Share(NamedTuple):
    """What a worker reports of a share."""

    loss: float
    targets: float
    tokens: float
    squares: float
    """Of the norm of its gradient, where it is an update by itself; else 0."""
    version: float
    """The oldest of what it was computed with."""


class Update(NamedTuple):
    shares: list[Share]
    stale: list[int]
    """How many updates before it each lacked."""
    behind: list[int]
    """How many steps before its own each lacked some of."""
    norm: float
    applied: bool


@dataclass
class Whole:
    """The steps that updates have all of."""

    rule: ConsistencyPolicy
    done: int
    """Steps before the first update that is told of."""
    seen: Counter[int] = field(default_factory=Counter)
    """Shares of steps that are not whole."""
    ends: list[int] = field(default_factory=list)
    """Of each step after `done`: updates that have all of it."""

    def tell(self, number: int, shares: Iterable[int]) -> None:
        """What an update has."""
        self.seen.update(map(self.rule.step_of, shares))
        whole = self.rule.work_items_per_step if self.rule.has_per_item_updates else self.rule.quorum
        while self.seen[self.done + len(self.ends)] == whole:
            del self.seen[self.done + len(self.ends)]
            self.ends.append(number + 1)

    def steps(self, updates: int) -> int:
        return self.done + bisect_right(self.ends, updates)


@dataclass
class Steps:
    """The steps of a run, which others do. Judges each update."""

    job: Job
    rule: ConsistencyPolicy
    steps: int
    whole: Whole
    office: CoordinatorProcess | None = None
    results: list[Update] = field(default_factory=list)
    """Of each update that is in no step yet."""
    skipped: int = 0
    moved: tuple[int, int] = (0, 0)
    """What all servers have sent and received, as told before."""

    def judge(self, number: int, reports: dict[int, OpaqueScalars], squares: dict[int, float]) -> OpaqueScalars:
        """(learning rate, factor, whether it is to be applied)"""
        numbers = sorted(reports)
        shares = [Share(*reports[share]) for share in numbers]
        count = sum(share.targets for share in shares)
        divisor = count if count > 0 else 1.0
        total = (
            math.fsum(share.squares for share in shares)
            if self.rule.has_per_item_updates
            else math.fsum(squares.values())
        )
        norm = math.sqrt(total) / divisor
        finite = math.isfinite(norm) and all(math.isfinite(share.loss) for share in shares)
        stale = [number - int(share.version) for share in shares]
        whole = [self.whole.steps(int(share.version)) for share in shares]
        behind = [self.rule.step_of(share) - steps for share, steps in zip(numbers, whole, strict=True)]
        self.whole.tell(number, numbers)
        self.results.append(Update(shares, stale, behind, norm, finite))
        clip = self.job.optimizer.clip_norm
        clipped = 1.0 if clip is None or norm <= clip else clip / norm
        rate = self.rate(number // self.rule.work_items_per_step if self.rule.has_per_item_updates else number)
        late = sum(stale) / len(stale)
        if self.rule.has_per_item_updates:  # as many updates as shares make the progress of one step
            rate /= self.rule.work_items_per_step
            late /= self.rule.work_items_per_step
        if self.job.layout.server.learning_rate_scaling == "by-staleness":
            rate /= max(1.0, late)
        return (rate, clipped / divisor, 1.0) if finite else (0.0, 0.0, 0.0)

    def rate(self, step: int) -> float:
        optimizer = self.job.optimizer
        return learning_rate_factor(optimizer.schedule, step, self.steps) * optimizer.learning_rate

    def step(self, number: int, learning_rate: float, stop: bool = False, last: bool = False) -> StepResult:
        office = self.office
        assert office is not None
        until = max(number + 1, self._begun) if stop else self._boundary(number)
        if until != office.state_machine.step_limit:
            office.extend_to_step(until)
        updates = self.rule.work_items_per_step if self.rule.has_per_item_updates else 1
        office.run(lambda: len(self.results) >= updates, f"at step {number + 1}")
        now, self.results = self.results[:updates], self.results[updates:]
        return self._result(now, learning_rate, stop and until == number + 1)

    @property
    def _begun(self) -> int:
        """Steps of which a share was handed out."""
        assert self.office is not None
        return -(-self.office.state_machine.next_work_item // self.rule.work_items_per_step)

    def _boundary(self, number: int) -> int:
        """The next step after which the parameters are looked at."""
        job = self.job
        ends = [self.steps, job.run.stop_at or self.steps]
        for every in (job.checkpoint.every, job.monitor.evaluate_every):
            if every is not None:
                ends.append((number // every + 1) * every)
        return min(ends)

    def _result(self, updates: list[Update], rate: float, stop: bool) -> StepResult:
        shares = [share for update in updates for share in update.shares]
        count = math.fsum(share.targets for share in shares)
        finite = all(update.applied for update in updates)
        self.skipped = 0 if finite else self.skipped + 1
        return StepResult(
            loss=math.fsum(share.loss for share in shares) / (count if count > 0 else 1.0),
            grad_norm=max(update.norm for update in updates),
            targets=count,
            tokens=int(sum(share.tokens for share in shares)),
            learning_rate=rate,
            finite=finite,
            stop_requested=stop,
            skipped=self.skipped,
            server=self._work(updates),
        )

    def _work(self, updates: list[Update]) -> ParameterServerStepStats:
        assert self.office is not None
        loads = self.office.traffic_reports.values()
        before, self.moved = (
            self.moved,
            (
                sum(load.sent_bytes for load in loads),
                sum(load.received_bytes for load in loads),
            ),
        )
        return ParameterServerStepStats(
            staleness_histogram=_counts(late for update in updates for late in update.stale),
            steps_behind_histogram=_counts(late for update in updates for late in update.behind),
            workers=len(self.office.state_machine.workers),
            sent_bytes=self.moved[0] - before[0],
            received_bytes=self.moved[1] - before[1],
            waiting_bytes=sum(load.queued_bytes for load in loads),
        )


def _counts(values: Iterable[int]) -> tuple[int, ...]:
    """How many are 0, 1, 2 and so on."""
    found = Counter(values)
    return tuple(found[value] for value in range(max(found) + 1))
