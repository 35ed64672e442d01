"""Messages that nothing will come of, now or later: a state is the same without them."""

from motet.parallel.parameter_server.protocol import messages
from motet.parallel.parameter_server.protocol.coordinator_state_machine import CoordinatorStateMachine
from motet.parallel.parameter_server.protocol.messages import Message, ParameterPull, ParameterPullReply
from motet.parallel.parameter_server.protocol.server_state_machine import ServerStateMachine
from motet.parallel.parameter_server.protocol.worker_state_machine import WorkerStateMachine
from parallel.parameter_server.scenario import Machine, PartialRead


def is_ignored(machine: Machine, message: Message | PartialRead, is_lasting: bool) -> bool:
    """Whether its receiver ignores the message. `is_lasting`: acknowledged pushes are never lost."""
    message = message.value if isinstance(message, PartialRead) else message
    if isinstance(machine, WorkerStateMachine):
        return _ignored_by_worker(machine, message, is_lasting)
    return (
        _ignored_by_server(machine, message)
        if isinstance(machine, ServerStateMachine)
        else _ignored_by_coordinator(machine, message)
    )


def _ignored_by_worker(worker: WorkerStateMachine, message: Message, is_lasting: bool) -> bool:
    match message:
        case messages.WorkAssignment(number):
            return number <= worker.assignment.assignment_id
        case ParameterPullReply(assignment, slice_id):
            return assignment < worker.assignment.assignment_id or (
                assignment == worker.assignment.assignment_id and slice_id in worker.pulled_versions
            )
        case messages.GradientPushAck(_, assignment, slice_id):
            again = assignment == worker.assignment.assignment_id and slice_id in worker.acknowledged_slices
            return assignment < worker.assignment.assignment_id or (again and is_lasting)
        case messages.ParameterPlacement(epoch):
            return epoch <= worker.placement.epoch
    return False


def _ignored_by_server(server: ServerStateMachine, message: Message) -> bool:
    match message:
        case messages.ParameterPlacement(epoch):
            return epoch <= server.placement.epoch
        case messages.GradientNormRequest(turn):
            return server.norm_request is not None and turn <= server.norm_request.attempt
        case messages.UpdateDecision(number):
            is_told = any(server.name in is_paced.servers for is_paced in server.placement.replicas)
            return is_told and all(k.is_initialized and number < k.version for k in server.slice_states.values())
        case messages.BackupPushAck(_, slice_id, work_item):
            state = server.slice_states.get(slice_id)
            return (
                state is not None
                and work_item not in state.pushes_awaiting_backup
                and (work_item in state.pending_work_items or state.decided.has(work_item))
            )
        case messages.SliceStartVersion(slice_id) | messages.ParameterStateTransfer(slice_id):
            return server.is_slice_initialized(slice_id)
    return False


def _ignored_by_coordinator(coordinator: CoordinatorStateMachine, message: Message) -> bool:
    match message:
        case messages.GradientNormReply(turn, slice_id):
            return (
                turn < coordinator.norm_attempt
                or coordinator.next_update_items is None
                or slice_id in coordinator.squared_norms
            )
        case messages.WorkerJoined(worker):
            return worker in coordinator.lost_processes
    return False


def is_answered(server: ServerStateMachine, worker: WorkerStateMachine | None, pull: ParameterPull) -> bool:
    """Whether the worker has ended (None) or gone on, or has the answer: the server's would be ignored."""
    if pull.slice_id not in server.slice_states:
        return False
    if worker is None or pull.assignment_id < worker.assignment.assignment_id:
        return True
    return pull.assignment_id == worker.assignment.assignment_id and pull.slice_id in worker.pulled_versions


def is_known(
    server: ServerStateMachine, worker: WorkerStateMachine | None, push: messages.GradientPush, is_lasting: bool
) -> bool:
    """The server has it, and who pushed need not be told."""
    state = server.slice_states.get(push.slice_id)
    if (
        state is None
        or push.work_item in state.pushes_awaiting_backup
        or not (push.work_item in state.pending_work_items or state.decided.has(push.work_item))
    ):
        return False
    if worker is None or push.assignment_id < worker.assignment.assignment_id:
        return True
    return (
        push.assignment_id == worker.assignment.assignment_id
        and push.slice_id in worker.acknowledged_slices
        and is_lasting
    )
