"""Modules of blocks that cannot be cut into stages, each for a reason of its kind."""

from typing import Any, ClassVar

import torch
from modules_to_cut import Block, BlockModel, Checkpointed
from modules_to_split import VOCABULARY
from staged_models import WIDTH, loss_of_logits
from torch import Tensor, nn


class ReadsAllOutputs(BlockModel):
    def run_blocks(self, x: Tensor) -> Tensor:
        outputs = []
        for block in self.blocks:
            x = block(x)
            outputs.append(x)
        return torch.stack(outputs).sum(0)


class LeavesAttribute(BlockModel):
    """The first block leaves a tensor that later ones read."""

    class block(Block):  # noqa: N801  # an attribute
        kept: ClassVar[list[Tensor]] = []

        def forward(self, x: Tensor, *_: Any) -> Tensor:
            if self.is_first:
                self.kept[:] = [x * 2]
            return self.change(x) + self.kept[0]

    def __init__(self) -> None:
        super().__init__()
        for i, block in enumerate(self.blocks):
            block.is_first = i == 0


class Shared:
    def __init__(self) -> None:
        self.x: Any = 0.0


class LeavesInSharedObject(BlockModel):
    """Blocks add to one object, which the next one reads."""

    class block(Block):  # noqa: N801  # an attribute
        shared: Shared

        def forward(self, x: Tensor, *_: Any) -> Tensor:
            out = self.change(x) + self.shared.x
            self.shared.x = x.detach().mean()
            return out

    def __init__(self) -> None:
        super().__init__()
        shared = Shared()
        for block in self.blocks:
            block.shared = shared


class CountsInBuffer(BlockModel):
    """Each block adds to a buffer, and depends on it."""

    class block(Block):  # noqa: N801  # an attribute
        def forward(self, x: Tensor, counter: Tensor) -> Tensor:
            out = self.change(x) * (1 + 0.1 * counter)
            counter += 1
            return out

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counter", torch.zeros(()))

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.counter)
        return x


class CountsOnly(CountsInBuffer):
    """Each block adds to a buffer that nothing reads."""

    class block(Block):  # noqa: N801  # an attribute
        def forward(self, x: Tensor, counter: Tensor) -> Tensor:
            counter += 1
            return self.change(x)


class _ScaleByCount(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counter: list[int]) -> Tensor:
        ctx.counter = counter
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.counter[0] += 1
        return gradient * (1 + 0.1 * ctx.counter[0]), None


class CountsBackwards(BlockModel):
    """The backward of a block depends on how many blocks came before it, since the forward of the model."""

    class block(Block):  # noqa: N801  # an attribute
        counter: ClassVar[list[int]] = [0]

        def forward(self, x: Tensor, *_: Any) -> Tensor:
            return _ScaleByCount.apply(self.change(x), self.counter)

    def run_blocks(self, x: Tensor) -> Tensor:
        self.block.counter[0] = 0
        return super().run_blocks(x)


class GathersLosses(BlockModel):
    """A loss is added up over blocks."""

    class block(Block):  # noqa: N801  # an attribute
        def forward(self, x: Tensor, *_: Any) -> Tensor:
            self.loss = x.square().mean()
            return self.change(x)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + sum(block.loss for block in self.blocks)


class CalledTwice(BlockModel):
    def run_blocks(self, x: Tensor) -> Tensor:
        return super().run_blocks(super().run_blocks(x))


class ReturnsNothing(BlockModel):
    class block(Block):  # noqa: N801  # an attribute
        def forward(self, x: Tensor, *_: Any) -> None:
            x.copy_(self.change(x.clone()))

    def run_blocks(self, x: Tensor) -> Tensor:
        x = x * 1
        for block in self.blocks:
            block(x)
        return x


class SkipsAcross(BlockModel):
    """The last block gets what the first one returned."""

    def run_blocks(self, x: Tensor) -> Tensor:
        first = x = self.blocks[0](x)
        x = self.blocks[2](self.blocks[1](x))
        return self.blocks[3](x + first)


class CheckpointedReentrant(Checkpointed):
    """The received tensor is no argument of a checkpoint, which sees no gradient."""

    reentrant = True


class CatchesAll(BlockModel):
    """Not even what ends a stage gets out of the blocks."""

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            try:
                x = block(x)
            except BaseException:  # noqa: BLE001  # as in a module of a user
                continue
        return x


class CallsForward(BlockModel):
    """Blocks are not called as modules."""

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.forward(x)
        return x


class NoBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return loss_of_logits(self.head(self.table(tokens)), tokens)
