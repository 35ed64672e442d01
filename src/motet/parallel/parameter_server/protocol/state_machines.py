"""State machines of the parameter server's protocol: coordinator, server and worker.

The coordinator of a parameter server: hands out work items, and decides which of them make the next update.

The state of a server: the pushes that each slice has, the applied updates, and the pulls that wait for one.

The state of a worker: the slices that it has pulled for its work item, and its acknowledged pushes.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from motet.parallel.parameter_server.protocol import messages
from motet.parallel.parameter_server.protocol.messages import (
    COORDINATOR,
    NO_MORE_WORK,
    GradientPush,
    Message,
    OutgoingMessages,
)

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
    next_work_item: int = 0  # The first work item that was never assigned
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
    ends_at_step_limit: bool = True  # Idle workers then get the message that no work is left
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
        """The work item to assign; None if none is left, or the next is too far ahead, or would be dropped."""
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


@dataclass
class ServerSliceState:
    version: int = 0  # Updates that were applied
    decided: messages.DecidedWorkItems = field(default_factory=messages.DecidedWorkItems)
    pending_work_items: set[int] = field(default_factory=set)  # Pushed, and in no update yet
    # By work item: pushes to acknowledge once the second server has the gradient.
    pushes_awaiting_backup: dict[int, frozenset[GradientPush]] = field(default_factory=dict)
    waiting_pulls: list[messages.ParameterPull] = field(default_factory=list)
    is_initialized: bool = True  # False until the coordinator or the primary sends its state

    def drop_decided(self) -> None:
        self.pending_work_items = {item for item in self.pending_work_items if not self.decided.has(item)}


@dataclass
class ServerStateMachine:
    """The state of one server; each message changes it and yields the messages to send."""

    name: str
    placement: messages.ParameterPlacement
    slice_states: dict[int, ServerSliceState] = field(default_factory=dict)
    norm_request: messages.GradientNormRequest | None = None
    decisions: dict[int, messages.UpdateDecision] = field(default_factory=dict)  # By update that a slice still needs

    def handle(self, message: Message) -> OutgoingMessages:
        """The messages to send and the updates to apply, in this order."""
        match message:
            case GradientPush():
                return self._handle_push(message)
            case messages.BackupPush(server, slice_id, work_item):
                if self._is_primary(slice_id):  # from a server that is lost, and has acknowledged nothing
                    return []
                state = self.slice_state(slice_id)
                if not state.decided.has(work_item):
                    state.pending_work_items.add(work_item)
                return [(server, messages.BackupPushAck(self.name, slice_id, work_item))]
            case messages.BackupPushAck(server, slice_id, work_item):
                is_current = server == self._other_replica(slice_id)
                waiting = self.slice_state(slice_id).pushes_awaiting_backup if is_current else {}
                return self._push_acks(waiting.pop(work_item, frozenset()))
            case messages.ParameterPull():
                return self._handle_pull(message)
            case messages.ParameterStateTransfer() | messages.SliceStartVersion():
                return self._start_slice(message)
            case _:
                return self._handle_from_coordinator(message)

    def _handle_from_coordinator(self, message: Message) -> OutgoingMessages:
        match message:
            case messages.GradientNormRequest(attempt):
                if self.norm_request is None or attempt > self.norm_request.attempt:
                    self.norm_request = message
                return self._norm_replies()
            case messages.UpdateDecision(update):
                self.decisions[update] = message
                return self._apply_decisions()
            case messages.ParameterPlacement(epoch):
                return self._change_placement(message) if epoch > self.placement.epoch else []
            case _:
                raise AssertionError(message)

    def messages_on_connect(self, peer: str) -> OutgoingMessages:
        """Messages that the peer may have missed while the connection was lost."""
        if peer == COORDINATOR:
            request = messages.DecisionReplayRequest(self.name, self._oldest_version())
            return [(COORDINATOR, request), *self._norm_replies()]
        outgoing: OutgoingMessages = []
        for slice_id, state in self.slice_states.items():
            if self._other_replica(slice_id) == peer:
                if self._is_primary(slice_id) and state.is_initialized:
                    outgoing.append((peer, self._state_transfer(slice_id)))
                outgoing += [(peer, messages.BackupPush(self.name, slice_id, i)) for i in state.pushes_awaiting_backup]
        return outgoing

    def _oldest_version(self) -> int:
        """No slice needs an earlier decision; a slice without a state may need any."""
        if not any(self.name in replicas.servers for replicas in self.placement.replicas):
            return 0
        return min((s.version if s.is_initialized else 0 for s in self.slice_states.values()), default=0)

    def _state_transfer(self, slice_id: int) -> messages.ParameterStateTransfer:
        s = self.slice_states[slice_id]
        return messages.ParameterStateTransfer(slice_id, s.version, s.decided, frozenset(s.pending_work_items))

    def slice_state(self, slice_id: int) -> ServerSliceState:
        return self.slice_states.setdefault(slice_id, ServerSliceState(is_initialized=False))

    def _handle_push(self, push: GradientPush) -> OutgoingMessages:
        _, _, slice_id, work_item = push
        state = self.slice_state(slice_id)
        if work_item in state.pushes_awaiting_backup:
            state.pushes_awaiting_backup[work_item] |= {push}
            return []
        if state.decided.has(work_item) or work_item in state.pending_work_items:
            return self._push_acks([push])
        state.pending_work_items.add(work_item)
        return self._replicate_push(slice_id, work_item, frozenset({push}))

    def _replicate_push(self, slice_id: int, work_item: int, pushes: frozenset[GradientPush]) -> OutgoingMessages:
        if (backup := self._other_replica(slice_id)) is None:
            return self._push_acks(pushes)
        self.slice_state(slice_id).pushes_awaiting_backup[work_item] = pushes
        return [(backup, messages.BackupPush(self.name, slice_id, work_item))]

    def _handle_pull(self, pull: messages.ParameterPull) -> OutgoingMessages:
        state = self.slice_state(pull.slice_id)
        if pull not in state.waiting_pulls:
            state.waiting_pulls.append(pull)
        return self._pull_replies(state)

    def _pull_replies(self, state: ServerSliceState) -> OutgoingMessages:
        if not state.is_initialized:
            return []
        pulls, version, reply = state.waiting_pulls, state.version, messages.ParameterPullReply
        state.waiting_pulls = [pull for pull in pulls if pull.min_version > version]
        ready = [pull for pull in pulls if pull.min_version <= version]
        return [(p.worker, reply(p.assignment_id, p.slice_id, version, p.priority)) for p in ready]

    def _norm_replies(self) -> OutgoingMessages:
        if self.norm_request is None:
            return []
        attempt, update, work_items = self.norm_request
        return [
            (COORDINATOR, messages.GradientNormReply(attempt, slice_id))
            for slice_id, s in self.slice_states.items()
            if s.is_initialized and s.version == update and self._is_primary(slice_id)
            if s.pending_work_items >= set(work_items)
        ]

    def _apply_decisions(self) -> OutgoingMessages:
        outgoing: OutgoingMessages = []
        for slice_id, state in self.slice_states.items():
            while state.is_initialized and (decision := self.decisions.get(state.version)) is not None:
                assert state.pending_work_items >= set(decision.work_items), (self.name, slice_id, decision)
                outgoing.append((self.name, messages.ApplyUpdate(slice_id, decision)))
                state.version += 1
                state.decided = state.decided.with_decided(decision.work_items, decision.decided_floor)
                state.drop_decided()
                outgoing += self._pull_replies(state)
        oldest = self._oldest_version()
        self.decisions = {update: decision for update, decision in self.decisions.items() if update >= oldest}
        return outgoing + self._norm_replies()

    def _change_placement(self, placement: messages.ParameterPlacement) -> OutgoingMessages:
        previous, self.placement = self.placement, placement
        outgoing: OutgoingMessages = []
        for slice_id, replicas in enumerate(placement.replicas):
            if self.name not in replicas.servers:
                continue
            state, other = self.slice_state(slice_id), self._other_replica(slice_id)
            if other is not None and other not in previous.replicas[slice_id].servers and self._is_primary(slice_id):
                outgoing.append((other, self._state_transfer(slice_id)))
            awaiting_backup, state.pushes_awaiting_backup = state.pushes_awaiting_backup, {}
            for work_item, pushes in awaiting_backup.items():
                outgoing += self._replicate_push(slice_id, work_item, pushes)
        return outgoing + self._norm_replies()

    def _start_slice(self, start: messages.ParameterStateTransfer | messages.SliceStartVersion) -> OutgoingMessages:
        state = self.slice_state(start.slice_id)
        if state.is_initialized:
            return []
        state.is_initialized, state.version, state.decided = True, start.version, start.decided
        if isinstance(start, messages.ParameterStateTransfer):
            state.pending_work_items |= start.pending_work_items
        state.drop_decided()
        return self._pull_replies(state) + self._apply_decisions()

    def _is_primary(self, slice_id: int) -> bool:
        return self.placement.replicas[slice_id].servers[:1] == (self.name,)

    def _other_replica(self, slice_id: int) -> str | None:
        return next((server for server in self.placement.replicas[slice_id].servers if server != self.name), None)

    def _push_acks(self, pushes: Iterable[GradientPush]) -> OutgoingMessages:
        return [(p.worker, messages.GradientPushAck(self.name, p.assignment_id, p.slice_id)) for p in sorted(pushes)]


@dataclass
class WorkerStateMachine:
    """The state of one worker. It pulls all slices, computes, and pushes each gradient when it is ready."""

    name: str
    placement: messages.ParameterPlacement
    assignment: messages.WorkAssignment = messages.NO_ASSIGNMENT
    pulled_versions: dict[int, int] = field(default_factory=dict)  # By slice
    ready_slices: set[int] = field(default_factory=set)  # Their gradient is computed
    acknowledged_slices: set[int] = field(default_factory=set)  # Their servers have the gradient
    report: messages.WorkItemReport = field(default_factory=messages.WorkItemReport)
    priorities: dict[int, int] = field(default_factory=dict)  # By slice: the lower, the sooner forward needs it

    def handle(self, message: Message) -> OutgoingMessages:
        match message:
            case messages.WorkAssignment(new_assignment_id):
                return self._start_assignment(message) if new_assignment_id > self.assignment.assignment_id else []
            case messages.ParameterPullReply(assignment_id, slice_id, version):
                if assignment_id != self.assignment.assignment_id or slice_id in self.pulled_versions:
                    return []
                self.pulled_versions[slice_id] = version
                has_all = len(self.pulled_versions) == len(self.placement.replicas)
                return [(self.name, messages.ParametersReady(self.assignment))] if has_all else []
            case messages.GradientsReady(_, slice_ids, report):
                self.report = report
                self.ready_slices.update(slice_ids)
                return self._push_messages(slice_ids)
            case messages.GradientPushAck(server, assignment_id, slice_id):
                is_current = assignment_id == self.assignment.assignment_id
                if not is_current or slice_id in self.acknowledged_slices or server not in self._servers_of(slice_id):
                    return []
                self.acknowledged_slices.add(slice_id)
                return self._report_if_complete()
            case messages.ParameterPlacement(epoch):
                return self._change_placement(message) if epoch > self.placement.epoch else []
            case _:
                raise AssertionError(message)

    def messages_on_connect(self, peer: str) -> OutgoingMessages:
        if peer == COORDINATOR:
            completed = self._report_if_complete() if self.assignment.assignment_id > 0 else []
            return [(COORDINATOR, messages.WorkerJoined(self.name)), *completed]
        return self._outstanding({i for i, r in enumerate(self.placement.replicas) if r.servers[:1] == (peer,)})

    def _servers_of(self, slice_id: int) -> tuple[str, ...]:
        return self.placement.replicas[slice_id].servers

    def _start_assignment(self, assignment: messages.WorkAssignment) -> OutgoingMessages:
        self.assignment, self.report = assignment, messages.WorkItemReport()
        self.pulled_versions, self.ready_slices, self.acknowledged_slices = {}, set(), set()
        return [] if assignment.work_item == NO_MORE_WORK else self._pull_messages(range(len(self.placement.replicas)))

    def _report_if_complete(self) -> OutgoingMessages:
        done = messages.WorkItemCompleted(self.name, self.assignment.work_item, self.placement.epoch, self.report)
        return [(COORDINATOR, done)] if len(self.acknowledged_slices) == len(self.placement.replicas) else []

    def _outstanding(self, slice_ids: set[int]) -> OutgoingMessages:
        if self.assignment.work_item == NO_MORE_WORK:
            return []
        pulls = self._pull_messages(sorted(slice_ids - self.pulled_versions.keys()))
        return pulls + self._push_messages(sorted(slice_ids & self.ready_slices - self.acknowledged_slices))

    def _pull_messages(self, slice_ids: Iterable[int]) -> OutgoingMessages:
        assignment_id, _, min_version = self.assignment
        return [
            (to, messages.ParameterPull(self.name, assignment_id, i, min_version, self.priorities.get(i, 0)))
            for i, to in self._primary_servers(slice_ids)
        ]

    def _push_messages(self, slice_ids: Iterable[int]) -> OutgoingMessages:
        assignment_id, work_item, _ = self.assignment
        primaries = self._primary_servers(slice_ids)
        return [(to, messages.GradientPush(self.name, assignment_id, i, work_item)) for i, to in primaries]

    def _primary_servers(self, slice_ids: Iterable[int]) -> list[tuple[int, str]]:
        """(slice, primary); a slice without servers waits for a later placement."""
        return [(i, servers[0]) for i in slice_ids if (servers := self._servers_of(i))]

    def _change_placement(self, placement: messages.ParameterPlacement) -> OutgoingMessages:
        previous, self.placement = self.placement, placement
        if self.assignment.work_item == NO_MORE_WORK:
            return []
        pairs = list(enumerate(zip(previous.replicas, placement.replicas, strict=True)))
        self.acknowledged_slices -= {slice_id for slice_id, (old, new) in pairs if old.incarnation != new.incarnation}
        moved_slices = {slice_id for slice_id, (old, new) in pairs if old.servers[:1] != new.servers[:1]}
        return self._outstanding(moved_slices) + self._report_if_complete()
