"""The tensors of a server: masters and moments of its pieces, what was pushed of their gradients, and what is pulled.

What is pulled is never written to again: an update makes a new tensor, so that a value that is being sent is of one
version.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import torch
from torch import Tensor, nn

from motet.parallel.buckets import Bucket
from motet.parallel.server.pieces import ServedPiece
from motet.precision.recipe import Recipe

MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Plan:
    """What all processes know of the parameters."""

    buckets: tuple[Bucket, ...]
    pieces: tuple[ServedPiece, ...]
    recipe: Recipe
    groups: tuple[tuple[float, float], ...]
    """Of the optimizer: (scale of the learning rate, weight decay)."""

    @property
    def gradient(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.recipe.reduce)
        return found

    def of_bucket(self, bucket: int) -> list[int]:
        return [number for number, piece in enumerate(self.pieces) if piece.bucket == bucket]


@dataclass
class _Tensors:
    """Of one piece."""

    master: Tensor
    optimizer: torch.optim.Optimizer
    parts: list[tuple[slice, nn.Parameter]]
    """(where in the piece, what is updated as one)"""
    published: Tensor
    given: dict[int, bytearray] = field(default_factory=dict)
    """By share, as it came."""
    total: tuple[tuple[int, ...], Tensor] | None = None
    """The sum over these shares."""


class Shelf:
    """All begins with zeros, until it is loaded."""

    def __init__(self, plan: Plan, make_optimizer: MakeOptimizer) -> None:
        self._plan = plan
        self._make_optimizer = make_optimizer
        self._made: dict[int, _Tensors] = {}

    def _of(self, piece: int) -> _Tensors:
        if piece not in self._made:
            self._made[piece] = self._make(piece)
        return self._made[piece]

    def _make(self, number: int) -> _Tensors:
        piece = self._plan.pieces[number]
        master = torch.zeros(piece.numel, dtype=getattr(torch, self._plan.recipe.master))
        runs = self._plan.buckets[piece.bucket].runs(piece.place)
        parts, groups = [], []
        for group, place in runs:
            inside = slice(place.start - piece.place.start, place.stop - piece.place.start)
            scale, decay = self._plan.groups[group]
            parts.append((inside, nn.Parameter(master[inside], requires_grad=False)))
            groups.append({"params": [parts[-1][1]], "weight_decay": decay, "scale": scale})
        return _Tensors(master, self._make_optimizer(groups), parts, self._published(master))

    def _published(self, master: Tensor) -> Tensor:
        return master.to(getattr(torch, self._plan.recipe.compute), copy=True)

    def hold(self, piece: int, share: int, gradient: bytearray) -> None:
        self._of(piece).given.setdefault(share, gradient)

    def given(self, piece: int, share: int) -> memoryview:
        return memoryview(self._of(piece).given[share])

    def keep_only(self, piece: int, shares: Collection[int]) -> None:
        tensors = self._of(piece)
        tensors.given = {share: gradient for share, gradient in tensors.given.items() if share in shares}

    def squares(self, piece: int, shares: Sequence[int]) -> float:
        """Of the norm of a sum."""
        return float(torch.linalg.vector_norm(self._total(piece, shares)).item() ** 2)

    def apply(self, piece: int, shares: Sequence[int], learning_rate: float, factor: float) -> None:
        """One update with the sum of these gradients times the factor."""
        tensors, total = self._of(piece), self._total(piece, shares)
        total.mul_(factor)
        for group in tensors.optimizer.param_groups:
            group["lr"] = learning_rate * group["scale"]
        for place, part in tensors.parts:
            part.grad = total[place]
        tensors.optimizer.step()
        for _, part in tensors.parts:
            part.grad = None
        tensors.total = None
        tensors.published = self._published(tensors.master)

    def value(self, piece: int) -> memoryview:
        return as_bytes(self._of(piece).published)

    def _total(self, piece: int, shares: Sequence[int]) -> Tensor:
        """In the order of the shares, whatever order they came in."""
        tensors = self._of(piece)
        if tensors.total is None or tensors.total[0] != tuple(shares):
            first, *others = (torch.frombuffer(tensors.given[share], dtype=self._plan.gradient) for share in shares)
            total = first.to(tensors.master.dtype, copy=True)
            for other in others:
                total.add_(other)
            tensors.total = tuple(shares), total
        return tensors.total[1]

    # --- what a second server, a checkpoint and a snapshot are given --------------------------------

    def state(self, piece: int) -> dict[str, Tensor]:
        """Masters and moments of the whole piece, and counts."""
        tensors = self._of(piece)
        moments = [tensors.optimizer.state[part] for _, part in tensors.parts]
        found = {"master": tensors.master}
        for kind, value in moments[0].items():
            if isinstance(value, Tensor):
                found[kind] = value if value.ndim == 0 else torch.cat([moment[kind] for moment in moments])
        return found

    def load(self, piece: int, state: Mapping[str, Tensor]) -> None:
        tensors = self._of(piece)
        tensors.master.copy_(state["master"])
        for kind, value in state.items():
            for place, part in tensors.parts if kind != "master" else ():
                tensors.optimizer.state[part][kind] = value.clone() if value.ndim == 0 else value[place].clone()
        tensors.published = self._published(tensors.master)


def pack(tensors: Mapping[str, Tensor]) -> memoryview:
    file = BytesIO()
    torch.save(dict(tensors), file)
    return file.getbuffer()


def unpack(content: bytes | bytearray) -> dict[str, Tensor]:
    found: dict[str, Tensor] = torch.load(BytesIO(content), weights_only=True)
    return found


def as_bytes(tensor: Tensor) -> memoryview:
    """Of a contiguous tensor on the CPU, which stays alive as long as this does."""
    return tensor.detach().view(torch.uint8).numpy().data
