"""Modules of blocks that can be cut into stages, each with something of its kind between blocks."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from modules_to_split import VOCABULARY
from staged_models import WIDTH, draw_tokens, loss_of_logits
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def loss_of_module(module: nn.Module, sizes: dict[str, int], seed: int = 0) -> Tensor:
    """The loss of a module that computes it from tokens."""
    loss: Tensor = module(draw_tokens(sizes["rows"], sizes["tokens"], seed))
    return loss


class Block(nn.Module):
    """x + MLP(norm x), with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def change(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))

    def forward(self, x: Tensor, *_: Any) -> Any:
        return self.change(x)


class BlockModel(nn.Module):
    """An embedding, four blocks and a head; a subclass changes what lies between."""

    block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        return loss_of_logits(self.head(self.norm(self.run_blocks(self.table(tokens)))), tokens)


class SequentialModel(BlockModel):
    """Blocks in an nn.Sequential, which one call runs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*self.blocks)

    def run_blocks(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class ResidualBlock(Block):
    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.change(x) + 0.1 * residual


class PassesEmbedding(BlockModel):
    """Each block gets the embedding too."""

    block = ResidualBlock

    def run_blocks(self, x: Tensor) -> Tensor:
        residual = x
        for block in self.blocks:
            x = block(x, residual=residual)
        return x


class AddsEmbedding(BlockModel):
    """The embedding is added between blocks, where no block gets it."""

    def run_blocks(self, x: Tensor) -> Tensor:
        residual = x
        for block in self.blocks:
            x = block(x) + 0.1 * residual
        return x


class TupleBlock(Block):
    def forward(self, x: Tensor, previous: Tensor | None = None) -> tuple[Any, ...]:
        scores = x @ x.mT if previous is None else previous * 0.5
        return self.change(x) + (scores.softmax(-1) @ x), {"scores": scores, "count": 3}, None


class PassesScores(BlockModel):
    """Blocks return tuples; the scores of a block are an argument of the next."""

    block = TupleBlock

    def run_blocks(self, x: Tensor) -> Tensor:
        scores = None
        for block in self.blocks:
            x, more, nothing = block(x, scores)
            assert nothing is None and more["count"] == 3
            scores = more["scores"]
        return x


@dataclass
class Stream:
    x: Tensor
    mask: Tensor
    steps: int = 0


class StreamBlock(Block):
    def forward(self, stream: Stream) -> Stream:
        return Stream(self.change(stream.x) * stream.mask, stream.mask, stream.steps + 1)


class PassesDataclass(BlockModel):
    """The stream is an object with a mask, which the batch decides."""

    block = StreamBlock

    def forward(self, tokens: Tensor) -> Tensor:
        stream = Stream(self.table(tokens), (tokens > 9).unsqueeze(-1).to(self.head.weight.dtype))
        for block in self.blocks:
            stream = block(stream)
        return loss_of_logits(self.head(stream.x), tokens)


class Pair(NamedTuple):
    x: Tensor
    chosen: Tensor


class ChoosingBlock(Block):
    def forward(self, pair: Pair) -> Pair:
        x = self.change(pair.x)
        return Pair(x + F.one_hot(pair.chosen, WIDTH), x.argmax(-1))


class PassesIndices(BlockModel):
    """Integers that are computed from the stream cross the border."""

    block = ChoosingBlock

    def run_blocks(self, x: Tensor) -> Tensor:
        pair = Pair(x, x.argmax(-1))
        for block in self.blocks:
            pair = block(pair)
        return pair.x


class LayersBetween(BlockModel):
    """A layer between blocks, whose parameters belong to the stage before it; statistics of the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.between, self.statistics = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def run_blocks(self, x: Tensor) -> Tensor:
        x = self.statistics(x.mT).mT
        for i, block in enumerate(self.blocks):
            x = block(self.between(x) if i == 2 else x)
        return x


class PassesOwnTable(BlockModel):
    """A parameter is an argument of each block."""

    block = ResidualBlock

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.shift)
        return x


class FrozenStart(PassesEmbedding):
    """Nothing in the first stage is trained, so no gradient crosses."""

    def __init__(self) -> None:
        super().__init__()
        self.table.requires_grad_(False)
        self.blocks[0].requires_grad_(False)
        self.blocks[1].requires_grad_(False)


class TeacherInLoss(BlockModel):
    """A frozen layer that the loss uses without a gradient, although it is defined first."""

    def __init__(self) -> None:
        super().__init__()
        parts = dict(self._modules)
        self._modules.clear()
        self.teacher = nn.Embedding(VOCABULARY, WIDTH)
        self._modules.update(parts)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.run_blocks(self.table(tokens))
        with torch.no_grad():
            aim = self.teacher(tokens)
        return loss_of_logits(self.head(x), tokens) + (x - aim).square().sum()


class CalledBackwards(BlockModel):
    """Blocks are called from the last to the first."""

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return x


class Checkpointed(BlockModel):
    """Blocks are computed again in backward."""

    reentrant = False

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class CheckpointsInside(BlockModel):
    """Each block computes itself again in backward."""

    class block(Block):  # noqa: N801  # an attribute
        reentrant = False

        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Identity()

        def forward(self, x: Tensor, *_: Any) -> Tensor:
            return checkpoint(self.change, x, use_reentrant=self.reentrant)


class CheckpointsInsideReentrant(CheckpointsInside):
    class block(CheckpointsInside.block):  # noqa: N801  # an attribute
        reentrant = True


class CheckpointsSegments(BlockModel):
    """Two blocks at a time are computed again in backward."""

    def run_blocks(self, x: Tensor) -> Tensor:
        for first in (0, 2):
            x = checkpoint(lambda x, i=first: self.blocks[i + 1](self.blocks[i](x)), x, use_reentrant=False)
        return x


class _AddGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones((), dtype=gradient.dtype)


class InjectsLosses(BlockModel):
    """Blocks add the gradient of a loss of the stream, as mixtures of experts do; the value is not in the loss."""

    class block(Block):  # noqa: N801  # an attribute
        def forward(self, x: Tensor, *_: Any) -> Tensor:
            x = self.change(x)
            return _AddGradient.apply(x, x.square().mean())


class SelfWriting(BlockModel):
    """Blocks write into their input."""

    class block(Block):  # noqa: N801  # an attribute
        def forward(self, x: Tensor, *_: Any) -> Tensor:
            x.mul_(0.9)
            return self.change(x)


class CatchesExceptions(BlockModel):
    """A block that fails is left out."""

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            try:
                x = block(x)
            except Exception:  # noqa: BLE001  # as in a module of a user
                continue
        return x


class RefusesNan(BlockModel):
    class block(Block):  # noqa: N801  # an attribute
        def forward(self, x: Tensor, *_: Any) -> Tensor:
            return self.change(x)

    def run_blocks(self, x: Tensor) -> Tensor:
        x = super().run_blocks(x)
        assert not x.isnan().any(), "a NaN"
        return x
