"""A schedule of a pipeline: for each rank the forwards, backwards and messages of one step, in order.

An activation goes from stage s to s + 1, a gradient from s to s - 1. Neighbouring stages on one rank send nothing.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import Literal, NamedTuple

# F is a forward, B a whole backward, I a backward of inputs alone, W the weight gradients that I left for later.
ComputeKind = Literal["F", "B", "I", "W"]
MessageKind = Literal["send_activation", "receive_activation", "send_gradient", "receive_gradient"]
ActionKind = ComputeKind | MessageKind

# Kind -> (word in files, which is torch's; kind at the other end; steps to the stage at the other end)
MESSAGES: dict[ActionKind, tuple[str, MessageKind, int]] = {
    "send_activation": ("SEND_F", "receive_activation", 1),
    "receive_activation": ("RECV_F", "send_activation", -1),
    "send_gradient": ("SEND_B", "receive_gradient", -1),
    "receive_gradient": ("RECV_B", "send_gradient", 1),
}

_OUTPUT_GRADIENT: tuple[tuple[ActionKind, int], ...] = (("receive_gradient", 0), ("B", 1), ("I", 1))
# Kind -> needs of an action, as (kind, steps to its stage); of each line, the one that exists.
NEEDS: dict[ActionKind, tuple[tuple[tuple[ActionKind, int], ...], ...]] = {
    "F": ((("receive_activation", 0), ("F", -1)),),
    "B": ((("F", 0),), _OUTPUT_GRADIENT),
    "I": ((("F", 0),), _OUTPUT_GRADIENT),
    "W": ((("I", 0),),),
    "send_activation": ((("F", 0),),),
    "send_gradient": ((("B", 0), ("I", 0)),),
    "receive_activation": (),
    "receive_gradient": (),
}


class PipelineAction(NamedTuple):
    """The work of one stage on one micro-batch, or the start of a message from or to the stage."""

    kind: ActionKind
    stage: int
    microbatch: int

    @property
    def is_message(self) -> bool:
        return self.kind in MESSAGES

    @property
    def is_receive(self) -> bool:
        return self.kind.startswith("receive")

    @property
    def other_end(self) -> "PipelineAction":
        """The receive of a send, and the send of a receive."""
        _, kind, distance = MESSAGES[self.kind]
        return PipelineAction(kind, self.stage + distance, self.microbatch)

    def needs(self) -> Iterator[list["PipelineAction"]]:
        """Yield, for each need of the action, the actions that can provide it."""
        for choices in NEEDS[self.kind]:
            yield [PipelineAction(kind, self.stage + distance, self.microbatch) for kind, distance in choices]

    def __str__(self) -> str:
        """The text of files, such as `0F3` or `0SEND_F3`."""
        return f"{self.stage}{MESSAGES[self.kind][0] if self.kind in MESSAGES else self.kind}{self.microbatch}"


class PipelineMessage(NamedTuple):
    """A message as the rank at one of its ends starts it."""

    action: PipelineAction
    border: int  # Between the stages `border` and `border + 1`
    is_gradient: bool
    is_receive: bool
    peer: int  # The rank at the other end
    number: int  # Differs for each message between two ranks in one direction


RankActions = tuple[tuple[PipelineAction, ...], ...]  # By pipeline rank, in order


@dataclass(frozen=True)
class PipelineSchedule:
    """The actions of each rank of a pipeline in one step."""

    name: str
    microbatches: int
    stage_ranks: tuple[int, ...]  # The pipeline rank of each stage, in the order of the model
    actions: RankActions
    max_in_flight: tuple[int, ...]  # By pipeline rank: most activations (one for a stage and a micro-batch) it may hold

    @property
    def ranks(self) -> int:
        return len(self.actions)

    @property
    def stages(self) -> int:
        return len(self.stage_ranks)

    @cached_property
    def chunks(self) -> int:
        """The largest number of stages of a rank."""
        return max(len(self.stages_of_rank(rank)) for rank in range(self.ranks))

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are computed after the backward of inputs."""
        return any(action.kind == "I" for actions in self.actions for action in actions)

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage, owner in enumerate(self.stage_ranks) if owner == rank)

    def peer(self, message: PipelineAction) -> int:
        """The rank at the other end of a message."""
        return self.stage_ranks[message.other_end.stage]

    @cached_property
    def steps(self) -> tuple[tuple[PipelineAction | tuple[PipelineMessage, ...], ...], ...]:
        """The actions of each rank, in which neighbouring messages are one step and start together."""
        steps = list[tuple[PipelineAction | tuple[PipelineMessage, ...], ...]]()
        for actions in self.actions:
            rank_steps = list[PipelineAction | tuple[PipelineMessage, ...]]()
            for is_message, run in groupby(actions, lambda action: action.is_message):
                neighbours = tuple(run)
                rank_steps += [tuple(map(self._message, neighbours))] if is_message else neighbours
            steps.append(tuple(rank_steps))
        return tuple(steps)

    @cached_property
    def sent_last_backwards(self) -> frozenset[PipelineAction]:
        """The last whole backward of each stage, if the gradient that it computes is sent next."""
        last = {action.stage: action for actions in self.actions for action in actions if action.kind == "B"}
        sent = (
            (before, PipelineAction("B", message.action.stage, message.action.microbatch))
            for steps in self.steps
            for before, messages in pairwise(steps)
            if not isinstance(messages, PipelineAction)
            for message in messages
            if message.action.kind == "send_gradient"
        )
        return frozenset(backward for before, backward in sent if before == backward == last.get(backward.stage))

    def _message(self, action: PipelineAction) -> PipelineMessage:
        border, is_gradient = min(action.stage, action.other_end.stage), action.kind.endswith("gradient")
        number = (border * self.microbatches + action.microbatch) * 2 + is_gradient
        return PipelineMessage(action, border, is_gradient, action.is_receive, self.peer(action), number)

    @property
    def compute_actions(self) -> RankActions:
        """The actions of each rank without messages."""
        return tuple(tuple(action for action in order if not action.is_message) for order in self.actions)

    @property
    def crossings(self) -> int:
        """Borders between stages that an activation and a gradient of each micro-batch cross to another rank."""
        return sum(a != b for a, b in zip(self.stage_ranks, self.stage_ranks[1:], strict=False))


def message_of_compute(action: PipelineAction, stage_ranks: tuple[int, ...]) -> PipelineAction | None:
    """The send of the tensors that a computation hands to a neighbouring stage on another rank, if there is one."""
    send = PipelineAction("send_activation" if action.kind == "F" else "send_gradient", action.stage, action.microbatch)
    peer = send.other_end.stage
    is_sent = action.kind in ("F", "B", "I") and 0 <= peer < len(stage_ranks)
    return send if is_sent and stage_ranks[peer] != stage_ranks[action.stage] else None


def peak_in_flight(actions: Iterable[PipelineAction]) -> int:
    """The largest number of activations that a rank holds: each from its forward to its whole backward or its W."""
    changes = {"F": 1, "B": -1, "W": -1}
    count = peak = 0
    for action in actions:
        count += changes.get(action.kind, 0)
        peak = max(peak, count)
    return peak
