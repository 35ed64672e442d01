"""The desk of a parameter server: hands out shares of work, and decides which of them make the next update."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from motet.parallel.parameter_server.protocol.messages import (
    NO_MORE_WORK,
    NONE_DECIDED,
    ConsistencyPolicy,
    DecidedWorkItems,
    DecisionReplayRequest,
    EvictionNotice,
    GradientNormReply,
    GradientNormRequest,
    Message,
    OpaqueScalars,
    OutgoingMessages,
    ParameterPlacement,
    ParameterReplicas,
    ParameterStateAssignment,
    ProcessLost,
    ServerTakeoverOffer,
    UpdateDecision,
    WorkAssignment,
    WorkerJoined,
    WorkItemCompleted,
)

# Decisions that a server can have missed: one that is further behind was given up long ago.
MAX_MISSED_DECISIONS = 2_000
# (number of the update, reports of its shares, squares of its norm by piece) -> how it is to be done.
UpdateRule = Callable[[int, dict[int, OpaqueScalars], dict[int, float]], OpaqueScalars]


def no_update_scalars(update: int, reports: dict[int, OpaqueScalars], squared_norms: dict[int, float]) -> OpaqueScalars:
    return ()


@dataclass
class CoordinatorStateMachine:
    """One for a run."""

    policy: ConsistencyPolicy
    placement: ParameterPlacement
    servers: list[str]
    copies: int = 1  # Servers that a piece should have
    first_logged_update: int = 0  # Updates that were done before this run, or so long ago that nobody asks for them
    update_rule: UpdateRule = no_update_scalars
    workers: list[str] = field(default_factory=list)
    lost_processes: set[str] = field(default_factory=set)
    lost_epoch: int = 0  # The epoch in which pushes were lost last
    assignment_count: int = 0
    current_assignments: dict[str, WorkAssignment] = field(default_factory=dict)  # What each worker is at
    idle_workers: list[str] = field(default_factory=list)
    next_work_item: int = 0  # The first share that nobody has had
    orphaned_work_items: set[int] = field(default_factory=set)  # Shares that somebody had who is lost
    # Pushed, and not in an update yet: their reports, first come first.
    completed_reports: dict[int, OpaqueScalars] = field(default_factory=dict)
    decided: DecidedWorkItems = NONE_DECIDED
    # Shares -> updates that have all of them, of those that a share may need.
    updates_covering: dict[int, int] = field(default_factory=lambda: {0: 0})
    # Of `first-k`, who has done a share of the step that is to be decided next.
    workers_done_with_step: set[str] = field(default_factory=set)
    decision_log: list[UpdateDecision] = field(default_factory=list)  # From update `first` on
    # The shares of the next update, while servers tell how large it is.
    next_update_items: tuple[int, ...] | None = None
    step_limit: int | None = None  # Steps from here on wait until this is raised; all may begin when not given
    ends_at_step_limit: bool = True  # Who has nothing to do then is told that this is the end
    norm_attempt: int = 0
    squared_norms: dict[int, float] = field(default_factory=dict)

    def resume_after(self, done_steps: int) -> "CoordinatorStateMachine":
        """After so many steps that were done before."""
        items_per_step = self.policy.work_items_per_step
        self.first_logged_update = done_steps * (items_per_step if self.policy.has_per_item_updates else 1)
        self.next_work_item = done_steps * items_per_step
        self.decided = DecidedWorkItems(self.next_work_item)
        if self.policy.max_staleness is not None:
            self.updates_covering = dict.fromkeys(
                range(self.policy.required_work_items(self.next_work_item), self.next_work_item + 1, items_per_step),
                self.first_logged_update,
            )
        return self

    @property
    def update_count(self) -> int:
        return self.first_logged_update + len(self.decision_log)

    @property
    def is_finished(self) -> bool:
        return self.decided.floor == self.policy.work_items_per_step * self.policy.steps

    @property
    def is_quiescent(self) -> bool:
        """Nothing of a step is underway, and nothing will be before `until` is raised."""
        work_items = [
            assignment.work_item
            for assignment in self.current_assignments.values()
            if assignment.work_item > NO_MORE_WORK
        ]
        return self._is_at_step_limit and all(self.decided.has(work_item) for work_item in work_items)

    @property
    def _is_at_step_limit(self) -> bool:
        return self.decided.floor >= self.policy.work_items_per_step * self._effective_step_limit

    @property
    def _effective_step_limit(self) -> int:
        return self.policy.steps if self.step_limit is None else self.step_limit

    def extend_to_step(self, step_limit: int, ends_at_step_limit: bool = False) -> OutgoingMessages:
        """To these steps."""
        self.step_limit, self.ends_at_step_limit = step_limit, ends_at_step_limit
        return self._progress()

    def handle(self, message: Message) -> OutgoingMessages:
        match message:
            case WorkerJoined(worker):
                return self._add_worker(worker)
            case WorkItemCompleted():
                self._complete_work_item(message)
            case GradientNormReply(attempt, slice_id, squared_norm):
                if self.next_update_items is not None and attempt == self.norm_attempt:
                    self.squared_norms[slice_id] = squared_norm
            case ProcessLost(name):
                return self._remove_process(name) + self._progress()
            case ServerTakeoverOffer():
                return self._admit_server(message) + self._progress()
            case DecisionReplayRequest(server, version):
                return self._replay_decisions(server, version) if server in self.servers else []
            case _:
                raise AssertionError(message)
        return self._progress()

    def is_replaceable(self, name: str, initialized_servers: Collection[str]) -> bool:
        """Whether others can do all that it does; `begun`: servers that know their pieces."""
        replica_sets = [replicas.servers for replicas in self.placement.replicas if name in replicas.servers]
        return all(any(other in initialized_servers for other in servers if other != name) for servers in replica_sets)

    # --- workers -----------------------------------------------------------------------------------

    def _add_worker(self, worker: str) -> OutgoingMessages:
        """For the first time, or after its connection was lost."""
        if worker in self.lost_processes:
            return [(worker, EvictionNotice(worker))]
        if worker in self.current_assignments:
            return [(worker, self.placement), (worker, self.current_assignments[worker])]
        if worker not in self.workers:
            self.workers.append(worker)
            self.idle_workers.append(worker)
        return [(worker, self.placement), *self._progress()]

    def _complete_work_item(self, completed: WorkItemCompleted) -> None:
        if completed.epoch < self.lost_epoch:  # some of it is lost since; the worker will see, and come again
            return
        if (
            completed.worker in self.current_assignments
            and self.current_assignments[completed.worker].work_item == completed.work_item
        ):
            del self.current_assignments[completed.worker]
            self.idle_workers.append(completed.worker)
            if self._drops_late_items and self.policy.step_of(completed.work_item) == self.update_count:
                self.workers_done_with_step.add(completed.worker)
        if not self.decided.has(completed.work_item) and completed.work_item not in self.completed_reports:
            self.completed_reports[completed.work_item] = completed.report
            self.orphaned_work_items.discard(completed.work_item)

    def _pop_work_item(self, worker: str) -> int | None:
        """The share to hand out; None while there is none, or only what would be too far ahead, or dropped."""
        if self._is_at_step_limit:
            return NO_MORE_WORK if self.ends_at_step_limit else None
        work_item = min(self.orphaned_work_items, default=self.next_work_item)
        if (
            self.policy.step_of(work_item) >= self._effective_step_limit
            or self.policy.required_work_items(work_item) > self.decided.floor
        ):
            return None
        if (
            worker in self.workers_done_with_step
            and self.policy.step_of(work_item) == self.update_count
            and self._has_quorum_in_flight(self.update_count)
        ):
            return None
        self.orphaned_work_items.discard(work_item)
        self.next_work_item = max(self.next_work_item, work_item + 1)
        return work_item

    @property
    def _drops_late_items(self) -> bool:
        return not self.policy.has_per_item_updates and self.policy.quorum < self.policy.work_items_per_step

    def _has_quorum_in_flight(self, step: int) -> bool:
        """Shares that are done or underway make the step, if nobody is lost."""
        work_items = [
            *self.completed_reports,
            *(
                assignment.work_item
                for assignment in self.current_assignments.values()
                if assignment.work_item > NO_MORE_WORK
            ),
        ]
        return (
            len([work_item for work_item in work_items if self.policy.step_of(work_item) == step]) >= self.policy.quorum
        )

    # --- servers -----------------------------------------------------------------------------------

    def _remove_process(self, name: str) -> OutgoingMessages:
        self.lost_processes.add(name)
        if name in self.workers:
            self.workers.remove(name)
            if name in self.idle_workers:
                self.idle_workers.remove(name)
            assignment = self.current_assignments.pop(name, None)
            if (
                assignment is not None
                and assignment.work_item not in self.completed_reports
                and not self.decided.has(assignment.work_item)
            ):
                self.orphaned_work_items.add(assignment.work_item)
            return []
        if name not in self.servers:
            return []
        self.servers.remove(name)
        return self._change_placement([
            ParameterReplicas(tuple(server for server in replicas.servers if server != name), replicas.incarnation)
            for replicas in self.placement.replicas
        ])  # fmt: skip

    def _admit_server(self, offer: ServerTakeoverOffer) -> OutgoingMessages:
        """A server takes the place of one that was lost."""
        name, snapshot_versions = offer.server, dict(offer.snapshot_versions)
        if name in self.servers or name in self.lost_processes:
            return []
        outgoing = self._remove_process(offer.replaced_server)
        self.servers.append(name)
        replicas_by_slice = []
        for slice_id, replicas in enumerate(self.placement.replicas):
            if not replicas.servers and slice_id in snapshot_versions:
                replicas_by_slice.append(ParameterReplicas((name,), replicas.incarnation + 1))
                outgoing.append((name, ParameterStateAssignment(slice_id, self.update_count, self.decided)))
                self._discard_lost_pushes()
            elif replicas.servers and len(replicas.servers) < self.copies:
                replicas_by_slice.append(ParameterReplicas((*replicas.servers, name), replicas.incarnation))
            else:
                replicas_by_slice.append(replicas)
        return outgoing + self._change_placement(replicas_by_slice) + self._replay_decisions(name, 0)

    def _replay_decisions(self, server: str, from_update: int) -> OutgoingMessages:
        """What it may not have heard."""
        messages: list[Message] = [self.placement, *self.decision_log[max(0, from_update - self.first_logged_update) :]]
        if self.next_update_items is not None:
            messages.append(GradientNormRequest(self.norm_attempt, self.update_count, self.next_update_items))
        return [(server, message) for message in messages]

    def _discard_lost_pushes(self) -> None:
        """Pushes are lost that were acknowledged: their shares are to be done again."""
        self.lost_epoch = self.placement.epoch + 1
        self.next_update_items = None
        self.squared_norms.clear()
        self.orphaned_work_items |= self.completed_reports.keys() - {
            assignment.work_item for assignment in self.current_assignments.values()
        }
        self.completed_reports.clear()

    def _change_placement(self, replicas: list[ParameterReplicas]) -> OutgoingMessages:
        self.placement = ParameterPlacement(self.placement.epoch + 1, tuple(replicas))
        return [(other, self.placement) for other in (*self.workers, *self.servers)]

    # --- updates -----------------------------------------------------------------------------------

    def _progress(self) -> OutgoingMessages:
        outgoing: OutgoingMessages = []
        while (work_items := self._items_of_next_update()) is not None:
            if self.policy.has_per_item_updates or len(self.squared_norms) == len(self.placement.replicas):
                outgoing += self._decide_update(work_items)
                continue
            if self.next_update_items is None:
                self.next_update_items = work_items
                self.norm_attempt += 1
                outgoing += [
                    (server, GradientNormRequest(self.norm_attempt, self.update_count, work_items))
                    for server in self.servers
                ]
            break
        for worker in list(self.idle_workers):
            work_item = self._pop_work_item(worker)
            if work_item is None:
                continue
            self.assignment_count += 1
            min_version = (
                0 if work_item == NO_MORE_WORK else self.updates_covering[self.policy.required_work_items(work_item)]
            )
            assignment = WorkAssignment(self.assignment_count, work_item, min_version)
            self.idle_workers.remove(worker)
            self.current_assignments[worker] = assignment
            outgoing.append((worker, assignment))
        return outgoing

    def _items_of_next_update(self) -> tuple[int, ...] | None:
        """The shares of the next update, once they are known."""
        if self.next_update_items is not None:
            return self.next_update_items
        if self.policy.has_per_item_updates:
            return (next(iter(self.completed_reports)),) if self.completed_reports else None
        step_items = [
            work_item for work_item in self.completed_reports if self.policy.step_of(work_item) == self.update_count
        ]
        return tuple(sorted(step_items[: self.policy.quorum])) if len(step_items) >= self.policy.quorum else None

    def _decide_update(self, work_items: tuple[int, ...]) -> OutgoingMessages:
        scalars = self.update_rule(
            self.update_count,
            {work_item: self.completed_reports[work_item] for work_item in work_items},
            self.squared_norms,
        )
        floor = self.decided.floor
        if self.policy.has_per_item_updates:
            while floor in work_items or floor in self.decided.above_floor:
                floor += 1
        else:
            floor = (self.update_count + 1) * self.policy.work_items_per_step
        decision = UpdateDecision(self.update_count, work_items, floor, scalars)
        self.decision_log.append(decision)
        if len(self.decision_log) > 2 * MAX_MISSED_DECISIONS:
            self.first_logged_update += MAX_MISSED_DECISIONS
            del self.decision_log[:MAX_MISSED_DECISIONS]
        self._record_coverage(self.decided.floor, floor)
        self.decided = self.decided.with_decided(work_items, floor)
        self.next_update_items = None
        self.squared_norms = {}
        self.workers_done_with_step = set()
        self.completed_reports = {
            share: report for share, report in self.completed_reports.items() if not self.decided.has(share)
        }
        self.orphaned_work_items = {share for share in self.orphaned_work_items if not self.decided.has(share)}
        self.next_work_item = max(self.next_work_item, floor)
        return [(server, decision) for server in self.servers]

    def _record_coverage(self, previous_floor: int, floor: int) -> None:
        """Shares until here are in the updates."""
        if self.policy.max_staleness is None:
            return
        items_per_step = self.policy.work_items_per_step
        step_ends = range(previous_floor // items_per_step * items_per_step + items_per_step, floor + 1, items_per_step)
        self.updates_covering |= dict.fromkeys(step_ends, self.update_count)
        oldest_needed = self.policy.required_work_items(floor)
        self.updates_covering = {end: updates for end, updates in self.updates_covering.items() if end >= oldest_needed}
