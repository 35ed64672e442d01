"""A schedule of a pipeline: for each rank the forwards, backwards and messages of one step, in order.

An activation goes from stage s to s + 1, a gradient from s to s - 1. Neighbouring stages on one rank send nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

# F is a forward, B a whole backward, I a backward of inputs alone, W the weight gradients that I left for later.
ComputeKind = Literal["F", "B", "I", "W"]
MessageKind = Literal["send_activation", "receive_activation", "send_gradient", "receive_gradient"]
ActionKind = ComputeKind | MessageKind

# Kind -> (its word in files, which are torch's; the kind at the other end; steps to the stage at the other end)
MESSAGES: dict[ActionKind, tuple[str, MessageKind, int]] = {
    "send_activation": ("SEND_F", "receive_activation", 1),
    "receive_activation": ("RECV_F", "send_activation", -1),
    "send_gradient": ("SEND_B", "receive_gradient", -1),
    "receive_gradient": ("RECV_B", "send_gradient", 1),
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

    def __str__(self) -> str:
        """The text of files, such as `0F3` or `0SEND_F3`."""
        return f"{self.stage}{MESSAGES[self.kind][0] if self.kind in MESSAGES else self.kind}{self.microbatch}"


@dataclass(frozen=True)
class PipelineSchedule:
    """The actions of each rank of a pipeline in one step."""

    name: str
    microbatches: int
    stage_ranks: tuple[int, ...]  # The pipeline rank of each stage, in the order of the model
    actions: tuple[tuple[PipelineAction, ...], ...]  # By pipeline rank
    max_in_flight: tuple[int, ...]  # By pipeline rank: how many activations of a stage and a micro-batch it may hold

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

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage, owner in enumerate(self.stage_ranks) if owner == rank)

    def peer(self, message: PipelineAction) -> int:
        """The rank at the other end of a message."""
        return self.stage_ranks[message.other_end.stage]

    def compute_actions(self, rank: int) -> tuple[PipelineAction, ...]:
        return tuple(action for action in self.actions[rank] if not action.is_message)

    def crosses_ranks(self, border: int) -> bool:
        """Whether stages `border` and `border + 1` are on different ranks."""
        return self.stage_ranks[border] != self.stage_ranks[border + 1]


def message_of_compute(action: PipelineAction, stage_ranks: tuple[int, ...]) -> PipelineAction | None:
    """The send of what a computation hands to a neighbouring stage on another rank, if there is one."""
    kind: MessageKind = "send_activation" if action.kind == "F" else "send_gradient"
    send = PipelineAction(kind, action.stage, action.microbatch)
    peer = send.other_end.stage
    if action.kind == "W" or not 0 <= peer < len(stage_ranks) or stage_ranks[peer] == stage_ranks[action.stage]:
        return None
    return send


def peak_in_flight(actions: Iterable[PipelineAction]) -> int:
    """The largest number of activations that a rank holds: from each forward to the whole backward or to W."""
    changes = {"F": 1, "B": -1, "W": -1}
    count = peak = 0
    for action in actions:
        count += changes.get(action.kind, 0)
        peak = max(peak, count)
    return peak
