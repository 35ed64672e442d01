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
from server.system import Machine, Reading


def is_ignored(machine: Machine, message: Message | Reading, is_lasting: bool) -> bool:
    """By the one that it goes to. `is_lasting`: what a worker knows to be safe stays so."""
    message = message.value if isinstance(message, Reading) else message
    if isinstance(machine, WorkerStateMachine):
        return _by_client(machine, message, is_lasting)
    return _by_keeper(machine, message) if isinstance(machine, ServerStateMachine) else _by_desk(machine, message)


def _by_client(client: WorkerStateMachine, message: Message, is_lasting: bool) -> bool:
    match message:
        case WorkAssignment(number):
            return number <= client.assignment.assignment_id
        case ParameterPullReply(ticket, piece):
            return ticket < client.assignment.assignment_id or (
                ticket == client.assignment.assignment_id and piece in client.pulled_versions
            )
        case GradientPushAck(_, ticket, piece):
            again = ticket == client.assignment.assignment_id and piece in client.acknowledged_slices
            return ticket < client.assignment.assignment_id or (again and is_lasting)
        case ParameterPlacement(epoch):
            return epoch <= client.placement.epoch
    return False


def _by_keeper(keeper: ServerStateMachine, message: Message) -> bool:
    match message:
        case ParameterPlacement(epoch):
            return epoch <= keeper.placement.epoch
        case GradientNormRequest(turn):
            return keeper.norm_request is not None and turn <= keeper.norm_request.attempt
        case UpdateDecision(number):
            is_told = any(keeper.name in owned.servers for owned in keeper.placement.replicas)
            return is_told and all(k.is_initialized and number < k.version for k in keeper.slice_states.values())
        case BackupPushAck(_, piece, share):
            kept = keeper.slice_states.get(piece)
            return (
                kept is not None
                and share not in kept.pushes_awaiting_backup
                and (share in kept.pending_work_items or kept.decided.has(share))
            )
        case ParameterStateAssignment(piece) | ParameterStateTransfer(piece):
            return keeper.is_slice_initialized(piece)
    return False


def _by_desk(desk: CoordinatorStateMachine, message: Message) -> bool:
    match message:
        case GradientNormReply(turn, piece):
            return turn < desk.norm_attempt or desk.next_update_items is None or piece in desk.squared_norms
        case WorkerJoined(worker):
            return worker in desk.lost_processes
    return False


def is_answered(keeper: ServerStateMachine, client: WorkerStateMachine | None, pull: ParameterPull) -> bool:
    """Who asked has ended or gone on, or has the answer: the server's would be ignored. None: has ended."""
    if pull.slice_id not in keeper.slice_states:
        return False
    if client is None or pull.assignment_id < client.assignment.assignment_id:
        return True
    return pull.assignment_id == client.assignment.assignment_id and pull.slice_id in client.pulled_versions


def is_known(
    keeper: ServerStateMachine, client: WorkerStateMachine | None, push: GradientPush, is_lasting: bool
) -> bool:
    """The server has it, and who pushed need not be told."""
    kept = keeper.slice_states.get(push.slice_id)
    if (
        kept is None
        or push.work_item in kept.pushes_awaiting_backup
        or not (push.work_item in kept.pending_work_items or kept.decided.has(push.work_item))
    ):
        return False
    if client is None or push.assignment_id < client.assignment.assignment_id:
        return True
    return (
        push.assignment_id == client.assignment.assignment_id
        and push.slice_id in client.acknowledged_slices
        and is_lasting
    )
