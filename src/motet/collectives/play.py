"""A rank plays its part in a Program: messages over torch.distributed, and what is made of them in between."""

from dataclasses import dataclass

import torch
from torch import Tensor

from motet.collectives.arithmetic import Arithmetic
from motet.collectives.lower import Act, Buffer, Part, Span
from motet.collectives.transport import Channel, Messages, Parcel


@dataclass(frozen=True)
class Playing:
    """A part with the tensors to play it on, all flat and of one dtype and device."""

    title: str
    part: Part
    numel: int
    """Of all chunks."""
    buffers: dict[Buffer, Tensor]
    arithmetic: Arithmetic
    channel: Channel

    @property
    def device(self) -> torch.device:
        return self.buffers["output"].device


@torch.no_grad()
def play(playing: Playing) -> None:
    """From the first step to the last; on CUDA everything is queued on the current stream."""
    part = playing.part
    scratch = playing.buffers["output"].new_empty(part.scratch)
    stage = _Stage(playing, playing.buffers | {"scratch": scratch})
    for number, act in enumerate(part.acts):
        if act.sends or act.receives:
            stage.act(number, act)
    for move in part.finish:
        stage.view(move.target).copy_(stage.view(move.source))
    if playing.arithmetic.operator == "avg":
        for count in part.counts:
            playing.arithmetic.divide(stage.view(count.span), count.ranks)


class _Stage:
    """The buffers of a rank while it plays."""

    def __init__(self, playing: Playing, buffers: dict[Buffer, Tensor]) -> None:
        self.playing = playing
        self.buffers = buffers

    def view(self, span: Span) -> Tensor:
        return self.buffers[span.buffer][span.start : span.stop]

    def act(self, number: int, act: Act) -> None:
        for pack in act.packs:
            self.view(pack.target).copy_(self.view(pack.source))
        receives, sends = ([Parcel(m.peer, self.view(m.span)) for m in side] for side in (act.receives, act.sends))
        messages = Messages(receives, sends, self.playing.channel, f"step {number} of {self.playing.title}")

        def arrival(message: int, span: Span) -> Tensor:
            messages.received(message)
            return self.view(span)

        for update in act.updates:
            if update.after_sends:
                messages.sent()
            arrived = (arrival(*each) for each in update.arrived)
            if update.own is None:
                self.view(update.target).copy_(next(arrived))
            else:
                self.playing.arithmetic.join(self.view(update.target), self.view(update.own), arrived)
        messages.wait()
