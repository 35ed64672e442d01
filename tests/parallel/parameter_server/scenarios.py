"""The systems that are explored, smaller and larger ones, and those that have a mistake."""

from dataclasses import dataclass, replace
from typing import Any

from motet.parallel.parameter_server.protocol import messages
from motet.parallel.parameter_server.protocol.messages import ConsistencyPolicy, GradientPush, OutgoingMessages
from motet.parallel.parameter_server.protocol.state_machines import (
    CoordinatorStateMachine,
    ServerStateMachine,
    WorkerStateMachine,
)
from parallel.parameter_server.explorer import Exploration
from parallel.parameter_server.scenario import Scenario

RULES = ("sync", "first-k", "async", "bounded")


def policy(name: str, work_items: int, steps: int, first: int = 0) -> ConsistencyPolicy:
    """All work items but one make an update; or each does, and with enough steps one more step may be begun."""
    closes = {"first-k": max(1, work_items - 1), "bounded": 1, "async": 1}.get(name, work_items)
    ahead = {"bounded": int(steps - first > 2), "async": None}.get(name, 0)
    return ConsistencyPolicy(work_items, steps, closes, ahead, has_per_item_updates=name in ("bounded", "async"))


def with_mode(scenario: Scenario, name: str) -> Scenario:
    work_items, steps = scenario.policy[:2]
    return replace(scenario, policy=policy(name, work_items, steps, scenario.first))


def _of(workers: int, servers: int, steps: int, work_items: int = 0, mode: str = "sync", **others: Any) -> Scenario:
    """A scenario with a work item per worker, unless `work_items` is given."""
    return Scenario(policy(mode, work_items or workers, steps), workers, servers, **others)


EMPTY_PAIR = {"copies": 2, "starts_empty": True}
SMALL = {
    "nothing goes wrong": _of(2, 2, 3),
    "three work items for two workers": _of(2, 1, 3, work_items=3),
    "each slice has two servers": _of(2, 2, 1, copies=2),
    "decisions overtake each other": _of(2, 1, 2, has_late_decisions=True),
    "a message comes twice": _of(2, 1, 2, duplicates=1),
    "a connection is lost": _of(2, 1, 1, disconnects=1),
    "a worker ends": _of(2, 1, 2, crashes=1),
    "a message comes twice, and a worker ends": _of(2, 2, 1, duplicates=1, crashes=1),
    "a server ends": _of(1, 2, 2, copies=2, crashes=1),
    "a server ends, and one comes with its snapshot": _of(1, 1, 2, crashes=1, replacements=True),
    "values are read in parts": _of(2, 1, 2, partial_reads=True),
    "gradients come slice by slice, a server ends": _of(1, 2, 1, copies=2, crashes=1, gradients_by_slice=True),
    "gradients come slice by slice, a connection is lost": _of(1, 2, 1, disconnects=1, gradients_by_slice=True),
    "a run that goes on for two steps": _of(2, 1, 3, starts_empty=True, first=1),
    "a run that goes on; a message comes twice": _of(1, 2, 2, duplicates=1, first=1, **EMPTY_PAIR),
    "a run that goes on; a connection is lost": _of(1, 2, 2, disconnects=1, first=1, **EMPTY_PAIR),
    "a run that rests after each step; a connection is lost": _of(1, 2, 1, disconnects=1, is_paced=True, **EMPTY_PAIR),
    "a run that rests, and is stopped": _of(2, 1, 3, is_paced=True, stops=1),
    "a run that rests, and is stopped; a worker ends": _of(2, 1, 2, crashes=1, is_paced=True, stops=1),
}

LARGE = {
    "a message comes twice, and a worker ends": _of(2, 2, 3, duplicates=1, crashes=1),
    "the same in two steps; or a server ends": _of(2, 2, 2, copies=2, duplicates=1, crashes=1),
    "a message comes twice, and a worker or a server ends": _of(2, 2, 3, copies=2, duplicates=1, crashes=1),
    "three workers; a message comes twice, and one ends": _of(3, 2, 2, duplicates=1, crashes=1),
    "a server of two ends, and one comes with nothing": _of(1, 2, 1, copies=2, crashes=1, replacements=True),
    "one of two workers or of two servers ends, and a server comes": _of(2, 2, 1, crashes=1, replacements=True),
    "two servers for each slice, a connection is lost": _of(2, 2, 1, copies=2, disconnects=1),
}


def modes_of(scenario: Scenario) -> list[str]:
    """The modes that differ for it: with one step bounded is async, and with one worker first-k is sync."""
    different: dict[ConsistencyPolicy, str] = {}
    for name in RULES:
        asked = with_mode(scenario, name).policy
        is_free = asked.has_per_item_updates and asked.steps - scenario.first == 1
        different.setdefault(asked._replace(max_staleness=None) if is_free else asked, name)
    return list(different.values())


def row(name: str, scenario: Scenario, result: Exploration) -> str:
    """A row of the table of explored scenarios."""
    size = f"{scenario.workers} x {scenario.servers} x {scenario.policy.steps - scenario.first}"
    (kind,) = (kind for kind in RULES if with_mode(scenario, kind) == scenario and kind in modes_of(scenario))
    faults = scenario.duplicates, scenario.crashes, scenario.disconnects
    cells = size, scenario.copies, *faults, kind, f"{result.states:,}", f"{result.steps:,}", len(result.ends)
    return f"| {name} | {' | '.join(map(str, cells))} |"


def alike(line: str) -> str:
    """The cells of a row that name the system and the mode."""
    return "|".join(line.split("|")[:8])


# --- what is wrong ---------------------------------------------------------------------------------


class AsksOnce(WorkerStateMachine):
    """A worker does not repeat messages that were lost with a connection."""

    def messages_on_connect(self, peer: str) -> OutgoingMessages:
        return []


class AcknowledgesAtOnce(ServerStateMachine):
    """A server acknowledges a push before the second server of the slice has it."""

    def _replicate_push(self, slice_id: int, work_item: int, pushes: frozenset[GradientPush]) -> OutgoingMessages:
        return self._push_acks(pushes) + super()._replicate_push(slice_id, work_item, pushes)


class AnswersAnyPull(ServerStateMachine):
    """A server answers with what it has, however old."""

    def _handle_pull(self, pull: messages.ParameterPull) -> OutgoingMessages:
        return super()._handle_pull(pull._replace(min_version=0))


class ForgetsTheSum(ServerStateMachine):
    """A server that becomes primary does not send the norm that the former primary owed."""

    def _change_placement(self, view: messages.ParameterPlacement) -> OutgoingMessages:
        closing, self.norm_request = self.norm_request, None
        sent = super()._change_placement(view)
        self.norm_request = closing
        return sent


class SkipsDecisions(ServerStateMachine):
    """A server applies a decision although an earlier one is missing."""

    def _apply_decisions(self) -> OutgoingMessages:
        for state in self.slice_states.values():
            if state.is_initialized and self.decisions:
                state.version = max(state.version, min(self.decisions))
        return super()._apply_decisions()


class DropsWorkItems(CoordinatorStateMachine):
    """The coordinator counts all work items before a decided one as decided."""

    def _decide_update(self, work_items: tuple[int, ...]) -> OutgoingMessages:
        self.decided = self.decided.with_decided(tuple(range(min(work_items))), self.decided.floor)
        return super()._decide_update(work_items)


class CountsTwice(CoordinatorStateMachine):
    """The coordinator makes a second update of a work item that is reported twice."""

    def _complete_work_item(self, done: messages.WorkItemCompleted) -> None:
        super()._complete_work_item(done)
        if self.decided.has(done.work_item) and done.worker not in self.current_assignments:
            self.completed_reports[done.work_item] = done.report


class RunsAhead(CoordinatorStateMachine):
    """The coordinator lets workers begin one step more than the bound allows."""

    def resume_after(self, done: int) -> CoordinatorStateMachine:
        self.policy = self.policy._replace(max_staleness=(self.policy.max_staleness or 0) + 1)
        return super().resume_after(done)


class TooLax(ConsistencyPolicy):
    """The rule of the bound is one step too lax."""

    def required_work_items(self, work_item: int) -> int:
        return super().required_work_items(max(0, work_item - self.work_items_per_step))


class ForgetsWorkers(CoordinatorStateMachine):
    """The coordinator does not assign the work item of a lost worker again."""

    def _remove_process(self, name: str) -> OutgoingMessages:
        sent = super()._remove_process(name)
        self.orphaned_work_items.clear()
        return sent


class BelievesTheLost(CoordinatorStateMachine):
    """The coordinator counts a work item as done whose pushes were lost since."""

    def _complete_work_item(self, done: messages.WorkItemCompleted) -> None:
        super()._complete_work_item(done._replace(epoch=self.placement.epoch))


class WaitsForOld(WorkerStateMachine):
    """A worker does not ask the server that replaced a lost one."""

    def _change_placement(self, view: messages.ParameterPlacement) -> OutgoingMessages:
        self.placement = view
        return []


class KeepsLateCopies(ServerStateMachine):
    """A server that becomes primary keeps late copies of the former primary, and forwards them to no second server."""

    takes_copy = False

    def _is_primary(self, slice_id: int) -> bool:
        return not self.takes_copy and super()._is_primary(slice_id)

    def handle(self, message: messages.Message) -> OutgoingMessages:
        self.takes_copy = isinstance(message, messages.BackupPush)
        return super().handle(message)


class ForgetsDecisions(ServerStateMachine):
    """A new server drops decisions that a slice without a state still needs."""

    def _oldest_version(self) -> int:
        return min((state.version if state.is_initialized else 0 for state in self.slice_states.values()), default=0)


@dataclass(frozen=True)
class Mistake:
    promise: str  # That it breaks
    scenario: Scenario

    @property
    def words(self) -> str:
        if self.scenario.updates_in_place:
            return "An update writes over parameters that are being sent."
        kinds = self.scenario.coordinator, self.scenario.server, self.scenario.worker, type(self.scenario.policy)
        (kind,) = (kind for kind in kinds if kind.__module__ == __name__)
        return (kind.__doc__ or "").strip()


LOST = "no push that was acknowledged is lost"
TORN = "no value is torn"
BOUND = "the bound is kept"
DEADLOCK = "everybody comes to the end"
ONCE = "each work item is in one update"

LOSES_SERVERS = {"copies": 2, "crashes": 1}
MISTAKES = {
    "acknowledges at once": Mistake(LOST, _of(2, 2, 2, server=AcknowledgesAtOnce, **LOSES_SERVERS)),
    "believes the lost": Mistake(LOST, _of(1, 1, 2, crashes=1, replacements=True, coordinator=BelievesTheLost)),
    "keeps late copies": Mistake(LOST, _of(1, 2, 1, replacements=True, server=KeepsLateCopies, **LOSES_SERVERS)),
    "writes in place": Mistake(TORN, _of(2, 1, 2, mode="async", partial_reads=True, updates_in_place=True)),
    "answers any pull": Mistake(BOUND, _of(2, 2, 2, server=AnswersAnyPull)),
    "skips decisions": Mistake(ONCE, _of(2, 1, 2, mode="async", has_late_decisions=True, server=SkipsDecisions)),
    "drops work items": Mistake(ONCE, _of(2, 1, 3, mode="bounded", coordinator=DropsWorkItems)),
    "runs ahead": Mistake(BOUND, _of(2, 1, 3, mode="bounded", coordinator=RunsAhead)),
    "is too lax": Mistake(BOUND, replace(_of(2, 1, 2), policy=TooLax(*policy("sync", 2, 2)))),
    "counts twice": Mistake(ONCE, _of(2, 1, 2, mode="async", duplicates=1, coordinator=CountsTwice)),
    "forgets the sum": Mistake(DEADLOCK, _of(2, 2, 2, server=ForgetsTheSum, **LOSES_SERVERS)),
    "forgets workers": Mistake(DEADLOCK, _of(2, 2, 2, crashes=1, coordinator=ForgetsWorkers)),
    "waits for old servers": Mistake(DEADLOCK, _of(2, 2, 2, worker=WaitsForOld, **LOSES_SERVERS)),
    "forgets decisions": Mistake(DEADLOCK, _of(1, 2, 1, replacements=True, server=ForgetsDecisions, **LOSES_SERVERS)),
    "asks once": Mistake(DEADLOCK, _of(2, 1, 2, disconnects=1, worker=AsksOnce)),
}


def mistake_row(name: str, result: Exploration) -> str:
    mistake = MISTAKES[name]
    return f"| {mistake.words} | {mistake.promise} | {result.states:,} |"
