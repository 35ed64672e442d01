"""The coordinator of a parameter server: hands out work items, and decides which of them make the next update."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from motet.parallel.parameter_server.protocol import messages
from motet.parallel.parameter_server.protocol.messages import NO_MORE_WORK, Message, OutgoingMessages

MAX_MISSED_DECISIONS = 2_000  # A server that is further behind was evicted long ago
# (update, reports by work item, squared norms by slice) -> how servers apply it.
UpdateRule = Callable[[int, dict[int, messages.WorkItemReport], dict[int, float]], messages.UpdateScalars]


@dataclass
class CoordinatorStateMachine:
    """The state of a run's coordinator; each message changes it and yields the messages to send, in their order."""

    policy: messages.ConsistencyPolicy
    placement: messages.ParameterPlacement
    servers: list[str]
    copies: int = 1
    first_logged_update: int = 0  # Earlier ones precede this run, or are so old that no server asks for them
    update_rule: UpdateRule = lambda update, reports, squared_norms: messages.UpdateScalars()
    workers: list[str] = field(default_factory=list)
    lost_processes: set[str] = field(default_factory=set)
    lost_epoch: int = 0  # The epoch in which acknowledged pushes were lost last
    assignment_count: int = 0
    current_assignments: dict[str, messages.WorkAssignment] = field(default_factory=dict)  # By worker
    idle_workers: list[str] = field(default_factory=list)
    next_work_item: int = 0  # The first that was never assigned
    orphaned_work_items: set[int] = field(default_factory=set)  # Assigned to workers that were lost
    # Pushed, and in no update yet: their reports, in the order of arrival.
    completed_reports: dict[int, messages.WorkItemReport] = field(default_factory=dict)
    decided: messages.DecidedWorkItems = field(default_factory=messages.DecidedWorkItems)
    # Work items -> updates that have all of them, for every bound that a later work item may need.
    updates_covering: dict[int, int] = field(default_factory=lambda: {0: 0})
    # For `first-k`: workers that completed a work item of the step to be decided next.
    workers_done_with_step: set[str] = field(default_factory=set)
    decision_log: list[messages.UpdateDecision] = field(default_factory=list)  # From `first_logged_update` on
    # The work items of the next update, while servers compute the norm of its gradient.
    next_update_items: tuple[int, ...] | None = None
    step_limit: int | None = None  # Later steps wait until this is raised; None: no limit
    ends_at_step_limit: bool = True  # Idle workers then hear that there is no more work
    norm_attempt: int = 0
    squared_norms: dict[int, float] = field(default_factory=dict)

    def resume_after(self, done_steps: int) -> "CoordinatorStateMachine":
        items_per_step = self.policy.work_items_per_step
        self.first_logged_update = done_steps * self.policy.updates_per_step
        self.next_work_item = done_items = done_steps * items_per_step
        self.decided = messages.DecidedWorkItems(done_items)
        if self.policy.max_staleness is not None:
            step_ends = range(self.policy.required_work_items(done_items), done_items + 1, items_per_step)
            self.updates_covering = dict.fromkeys(step_ends, self.first_logged_update)
        return self

    @property
    def update_count(self) -> int:
        return self.first_logged_update + len(self.decision_log)

    @property
    def is_quiescent(self) -> bool:
        """Whether nothing is in flight, and nothing will be before `step_limit` is raised."""
        return self._is_at_step_limit and all(map(self.decided.has, self._items_in_flight))

    @property
    def _items_in_flight(self) -> list[int]:
        return [a.work_item for a in self.current_assignments.values() if a.work_item > NO_MORE_WORK]

    @property
    def _is_at_step_limit(self) -> bool:
        return self.decided.floor >= self.policy.work_items_per_step * self._effective_step_limit

    @property
    def _effective_step_limit(self) -> int:
        return self.policy.steps if self.step_limit is None else self.step_limit

    def extend_to_step(self, step_limit: int, ends_at_step_limit: bool = False) -> OutgoingMessages:
        self.step_limit, self.ends_at_step_limit = step_limit, ends_at_step_limit
        return self._progress()

    def handle(self, message: Message) -> OutgoingMessages:
        match message:
            case messages.WorkerJoined(worker):
                return self._add_worker(worker)
            case messages.WorkItemCompleted():
                self._complete_work_item(message)
            case messages.GradientNormReply(attempt, slice_id, squared_norm):
                if self.next_update_items is not None and attempt == self.norm_attempt:
                    self.squared_norms[slice_id] = squared_norm
            case messages.ProcessLost(name):
                return self._remove_process(name) + self._progress()
            case messages.ServerTakeoverOffer():
                return self._admit_server(message) + self._progress()
            case messages.DecisionReplayRequest(server, version):
                return self._replay_decisions(server, version) if server in self.servers else []
            case _:
                raise AssertionError(message)
        return self._progress()

    def is_replaceable(self, name: str, initialized_servers: Collection[str]) -> bool:
        """Whether an initialized server has a second copy of each slice of this process."""
        others = set(initialized_servers) - {name}
        return all(others & set(servers) for servers, _ in self.placement.replicas if name in servers)

    def _add_worker(self, worker: str) -> OutgoingMessages:
        if worker in self.lost_processes:
            return [(worker, messages.EvictionNotice(worker))]
        if worker in self.current_assignments:
            return [(worker, self.placement), (worker, self.current_assignments[worker])]
        if worker not in self.workers:
            self.workers.append(worker)
            self.idle_workers.append(worker)
        return [(worker, self.placement), *self._progress()]

    def _complete_work_item(self, completed: messages.WorkItemCompleted) -> None:
        worker, work_item, epoch, report = completed
        if epoch < self.lost_epoch:  # some of its pushes are lost; the worker will see that, and report again
            return
        if worker in self.current_assignments and self.current_assignments[worker].work_item == work_item:
            del self.current_assignments[worker]
            self.idle_workers.append(worker)
            if self.policy.drops_late_items and self.policy.step_of(work_item) == self.update_count:
                self.workers_done_with_step.add(worker)
        if not self.decided.has(work_item) and work_item not in self.completed_reports:
            self.completed_reports[work_item] = report
            self.orphaned_work_items.discard(work_item)

    def _pop_work_item(self, worker: str) -> int | None:
        """The work item to assign; None if there is none, or only one too far ahead, or one that would be dropped."""
        if self._is_at_step_limit:
            return NO_MORE_WORK if self.ends_at_step_limit else None
        work_item = min(self.orphaned_work_items, default=self.next_work_item)
        step, needed_work_items = self.policy.step_of(work_item), self.policy.required_work_items(work_item)
        if step >= self._effective_step_limit or needed_work_items > self.decided.floor:
            return None
        if worker in self.workers_done_with_step and step == self.update_count:  # it only helps if a process is lost
            steps = list(map(self.policy.step_of, [*self.completed_reports, *self._items_in_flight]))
            if steps.count(step) >= self.policy.quorum:
                return None
        self.orphaned_work_items.discard(work_item)
        self.next_work_item = max(self.next_work_item, work_item + 1)
        return work_item

    def _remove_process(self, name: str) -> OutgoingMessages:
        self.lost_processes.add(name)
        if name in self.workers:
            self.workers.remove(name)
            self.idle_workers = [worker for worker in self.idle_workers if worker != name]
            _, item, _ = self.current_assignments.pop(name, messages.NO_ASSIGNMENT)
            if item not in self.completed_reports and not self.decided.has(item):
                self.orphaned_work_items.add(item)
            return []
        if name not in self.servers:
            return []
        self.servers.remove(name)
        placed = self.placement.replicas
        return self._change_placement([r._replace(servers=tuple(s for s in r.servers if s != name)) for r in placed])

    def _admit_server(self, offer: messages.ServerTakeoverOffer) -> OutgoingMessages:
        name, replaced_server, snapshot_versions = offer
        if name in self.servers or name in self.lost_processes:
            return []
        outgoing = self._remove_process(replaced_server)
        self.servers.append(name)
        placed = list(self.placement.replicas)
        for slice_id, (servers, incarnation) in enumerate(placed):
            if not servers and slice_id in dict(snapshot_versions):
                placed[slice_id] = messages.SlicePrimaryAndBackups((name,), incarnation + 1)
                outgoing.append((name, messages.SliceStartVersion(slice_id, self.update_count, self.decided)))
                self.lost_epoch = self.placement.epoch + 1  # with its pushes
                self.orphaned_work_items |= self.completed_reports.keys() - set(self._items_in_flight)
                self.next_update_items, self.squared_norms, self.completed_reports = None, {}, {}
            elif servers and len(servers) < self.copies:
                placed[slice_id] = messages.SlicePrimaryAndBackups((*servers, name), incarnation)
        return outgoing + self._change_placement(placed) + self._replay_decisions(name, 0)

    def _replay_decisions(self, server: str, from_update: int) -> OutgoingMessages:
        replayed: list[Message] = [self.placement, *self.decision_log[max(0, from_update - self.first_logged_update) :]]
        if self.next_update_items is not None:
            replayed.append(messages.GradientNormRequest(self.norm_attempt, self.update_count, self.next_update_items))
        return [(server, message) for message in replayed]

    def _change_placement(self, replicas: list[messages.SlicePrimaryAndBackups]) -> OutgoingMessages:
        self.placement = messages.ParameterPlacement(self.placement.epoch + 1, tuple(replicas))
        return [(other, self.placement) for other in (*self.workers, *self.servers)]

    def _progress(self) -> OutgoingMessages:
        outgoing: OutgoingMessages = []
        while (work_items := self._items_of_next_update()) is not None:
            if self.policy.has_per_item_updates or len(self.squared_norms) == len(self.placement.replicas):
                outgoing += self._decide_update(work_items)
                continue
            if self.next_update_items is None:
                self.next_update_items, self.norm_attempt = work_items, self.norm_attempt + 1
                request = messages.GradientNormRequest(self.norm_attempt, self.update_count, work_items)
                outgoing += [(server, request) for server in self.servers]
            break
        for worker in list(self.idle_workers):
            if (work_item := self._pop_work_item(worker)) is None:
                continue
            self.assignment_count += 1
            needed = self.policy.required_work_items(work_item)
            min_version = self.updates_covering[needed] if work_item != NO_MORE_WORK else 0
            self.idle_workers.remove(worker)
            self.current_assignments[worker] = messages.WorkAssignment(self.assignment_count, work_item, min_version)
            outgoing.append((worker, self.current_assignments[worker]))
        return outgoing

    def _items_of_next_update(self) -> tuple[int, ...] | None:
        if self.next_update_items is not None:
            return self.next_update_items
        if self.policy.has_per_item_updates:
            return tuple(self.completed_reports)[:1] or None
        step_items = [item for item in self.completed_reports if self.policy.step_of(item) == self.update_count]
        return tuple(sorted(step_items[: self.policy.quorum])) if len(step_items) >= self.policy.quorum else None

    def _decide_update(self, work_items: tuple[int, ...]) -> OutgoingMessages:
        reports = {item: self.completed_reports[item] for item in work_items}
        scalars = self.update_rule(self.update_count, reports, self.squared_norms)
        floor = self.decided.floor
        if not self.policy.has_per_item_updates:
            floor = (self.update_count + 1) * self.policy.work_items_per_step
        while floor in work_items or floor in self.decided.above_floor:
            floor += 1
        decision = messages.UpdateDecision(self.update_count, work_items, floor, scalars)
        self.decision_log.append(decision)
        if len(self.decision_log) > 2 * MAX_MISSED_DECISIONS:
            self.first_logged_update += MAX_MISSED_DECISIONS
            del self.decision_log[:MAX_MISSED_DECISIONS]
        if self.policy.max_staleness is not None:  # remember which update completed the work items below the floor
            per_step, oldest_needed = self.policy.work_items_per_step, self.policy.required_work_items(floor)
            step_ends = range(self.decided.floor // per_step * per_step + per_step, floor + 1, per_step)
            self.updates_covering |= dict.fromkeys(step_ends, self.update_count)
            self.updates_covering = {k: updates for k, updates in self.updates_covering.items() if k >= oldest_needed}
        self.decided = self.decided.with_decided(work_items, floor)
        self.next_update_items, self.squared_norms, self.workers_done_with_step = None, {}, set()
        self.completed_reports = {i: report for i, report in self.completed_reports.items() if not self.decided.has(i)}
        self.orphaned_work_items = {item for item in self.orphaned_work_items if not self.decided.has(item)}
        self.next_work_item = max(self.next_work_item, floor)
        return [(server, decision) for server in self.servers]
