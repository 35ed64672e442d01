"""Messages that nothing will come of, now or later: a state is the same without them."""

from motet.parallel.parameter_server.protocol.coordinator_state_machine import CoordinatorStateMachine
from motet.parallel.parameter_server.protocol.messages import (
    BackupPushAck,
    GradientNormReply,
    GradientNormRequest,
    GradientPush,
    GradientPushAck,
    Message,
    ParameterPlacement,
    ParameterPull,
    ParameterPullReply,
    ParameterStateAssignment,
    ParameterStateTransfer,
    UpdateDecision,
    WorkAssignment,
    WorkerJoined,
)
from motet.parallel.parameter_server.protocol.server_state_machine import ServerStateMachine
from motet.parallel.parameter_server.protocol.worker_state_machine import WorkerStateMachine
from parallel.parameter_server.scenario import Machine, PartialRead


def is_ignored(machine: Machine, message: Message | PartialRead, is_lasting: bool) -> bool:
    """Whether the receiver ignores the message. `is_lasting`: what a worker knows to be safe stays so."""
    message = message.value if isinstance(message, PartialRead) else message
    if isinstance(machine, WorkerStateMachine):
        return _ignored_by_worker(machine, message, is_lasting)
    return (
        _ignored_by_server(machine, message)
        if isinstance(machine, ServerStateMachine)
        else _ignored_by_coordinator(machine, message)
    )


def _ignored_by_worker(worker_machine: WorkerStateMachine, message: Message, is_lasting: bool) -> bool:
    match message:
        case WorkAssignment(number):
            return number <= worker_machine.assignment.assignment_id
        case ParameterPullReply(assignment, slice_id):
            return assignment < worker_machine.assignment.assignment_id or (
                assignment == worker_machine.assignment.assignment_id and slice_id in worker_machine.pulled_versions
            )
        case GradientPushAck(_, assignment, slice_id):
            again = (
                assignment == worker_machine.assignment.assignment_id and slice_id in worker_machine.acknowledged_slices
            )
            return assignment < worker_machine.assignment.assignment_id or (again and is_lasting)
        case ParameterPlacement(epoch):
            return epoch <= worker_machine.placement.epoch
    return False


def _ignored_by_server(server_machine: ServerStateMachine, message: Message) -> bool:
    match message:
        case ParameterPlacement(epoch):
            return epoch <= server_machine.placement.epoch
        case GradientNormRequest(turn):
            return server_machine.norm_request is not None and turn <= server_machine.norm_request.attempt
        case UpdateDecision(number):
            is_told = any(server_machine.name in is_paced.servers for is_paced in server_machine.placement.replicas)
            return is_told and all(
                k.is_initialized and number < k.version for k in server_machine.slice_states.values()
            )
        case BackupPushAck(_, slice_id, work_item):
            state = server_machine.slice_states.get(slice_id)
            return (
                state is not None
                and work_item not in state.pushes_awaiting_backup
                and (work_item in state.pending_work_items or state.decided.has(work_item))
            )
        case ParameterStateAssignment(slice_id) | ParameterStateTransfer(slice_id):
            return server_machine.is_slice_initialized(slice_id)
    return False


def _ignored_by_coordinator(coordinator: CoordinatorStateMachine, message: Message) -> bool:
    match message:
        case GradientNormReply(turn, slice_id):
            return (
                turn < coordinator.norm_attempt
                or coordinator.next_update_items is None
                or slice_id in coordinator.squared_norms
            )
        case WorkerJoined(worker):
            return worker in coordinator.lost_processes
    return False


def is_answered(
    server_machine: ServerStateMachine, worker_machine: WorkerStateMachine | None, pull: ParameterPull
) -> bool:
    """Whether the worker would ignore the server's answer: it has ended (None), gone on, or has the answer."""
    if pull.slice_id not in server_machine.slice_states:
        return False
    if worker_machine is None or pull.assignment_id < worker_machine.assignment.assignment_id:
        return True
    return (
        pull.assignment_id == worker_machine.assignment.assignment_id
        and pull.slice_id in worker_machine.pulled_versions
    )


def is_known(
    server_machine: ServerStateMachine, worker_machine: WorkerStateMachine | None, push: GradientPush, is_lasting: bool
) -> bool:
    """The server has it, and who pushed need not be told."""
    state = server_machine.slice_states.get(push.slice_id)
    if (
        state is None
        or push.work_item in state.pushes_awaiting_backup
        or not (push.work_item in state.pending_work_items or state.decided.has(push.work_item))
    ):
        return False
    if worker_machine is None or push.assignment_id < worker_machine.assignment.assignment_id:
        return True
    return (
        push.assignment_id == worker_machine.assignment.assignment_id
        and push.slice_id in worker_machine.acknowledged_slices
        and is_lasting
    )
