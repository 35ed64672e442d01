"""The tensors of a server: masters and moments of its pieces, what was pushed of their gradients, and what is pulled.

What is pulled is never written to again: an update makes a new tensor, so that a value that is being sent is of one
version.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from io import BytesIO
from typing import Any

import torch
from torch import Tensor, nn

from motet.parallel.buckets import Bucket
from motet.parallel.server.packing import ERROR, MESSAGE, Packer, unpack_gradient
from motet.parallel.server.pieces import ServedPiece
from motet.parallel.server.settings import AS_IT_IS, Packing
from motet.parallel.squares import squares_of
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
    packing: Packing = AS_IT_IS
    compensation: float = 0.0
    """Of delays: how much of what has become of the parameters since."""

    @property
    def gradient(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.recipe.reduce)
        return found

    def of_bucket(self, bucket: int) -> list[int]:
        return self._by_bucket[bucket]

    @cached_property
    def _by_bucket(self) -> dict[int, list[int]]:
        """Asked for again and again in every step."""
        found: dict[int, list[int]] = {}
        for number, piece in enumerate(self.pieces):
            found.setdefault(piece.bucket, []).append(number)
        return found


@dataclass
class _Tensors:
    """Of one piece."""

    master: Tensor
    optimizer: torch.optim.Optimizer
    parts: list[tuple[slice, nn.Parameter]]
    """(where in the piece, what is updated as one)"""
    published: Tensor
    """What is pulled: parameters, or a message about them."""
    given: dict[int, bytearray] = field(default_factory=dict)
    """By share, as it came."""
    pulled: dict[str, Tensor] = field(default_factory=dict)
    """By worker, the parameters of its last pull, where delays are compensated for."""
    given_at: dict[int, Tensor] = field(default_factory=dict)
    """By share, the parameters that it was computed with."""
    total: tuple[tuple[int, ...], Tensor] | None = None
    """The sum over these shares."""


class Shelf:
    """All begins with zeros, until it is loaded."""

    def __init__(self, plan: Plan, make_optimizer: MakeOptimizer) -> None:
        self._plan = plan
        self._make_optimizer = make_optimizer
        self._made: dict[int, _Tensors] = {}
        self._packer = Packer(plan.packing.pull, plan.packing) if plan.packing.pull else None

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
        return _Tensors(master, self._make_optimizer(groups), parts, self._published(number, master))

    def _published(self, piece: int, master: Tensor) -> Tensor:
        if self._packer:
            return self._packer.pack(piece, 0, master)
        return master.to(getattr(torch, self._plan.recipe.compute), copy=True)

    def hold(self, piece: int, share: int, gradient: bytearray, worker: str = "") -> None:
        tensors = self._of(piece)
        tensors.given.setdefault(share, gradient)
        if worker in tensors.pulled:
            tensors.given_at.setdefault(share, tensors.pulled.pop(worker))

    def given(self, piece: int, share: int) -> memoryview:
        return memoryview(self._of(piece).given[share])

    def keep_only(self, piece: int, shares: Collection[int]) -> None:
        tensors = self._of(piece)
        tensors.given = {share: gradient for share, gradient in tensors.given.items() if share in shares}
        tensors.given_at = {share: before for share, before in tensors.given_at.items() if share in shares}

    def squares(self, piece: int, shares: Sequence[int]) -> float:
        """Of the norm of a sum."""
        return squares_of(self._total(piece, shares))

    def apply(self, piece: int, shares: Sequence[int], learning_rate: float, factor: float) -> None:
        """One update with the sum of these gradients times the factor."""
        tensors, total = self._of(piece), self._total(piece, shares)
        total.mul_(factor)
        if self._plan.compensation and shares[0] in tensors.given_at:
            since = tensors.master - tensors.given_at[shares[0]]
            total.add_(self._plan.compensation * total.square() * since)
        for group in tensors.optimizer.param_groups:
            group["lr"] = learning_rate * group["scale"]
        for place, part in tensors.parts:
            part.grad = total[place]
        tensors.optimizer.step()
        for _, part in tensors.parts:
            part.grad = None
        tensors.total = None
        tensors.published = self._published(piece, tensors.master)

    def value(self, piece: int, worker: str = "") -> memoryview:
        """For this worker."""
        tensors = self._of(piece)
        if self._plan.compensation:
            tensors.pulled[worker] = tensors.master.clone()
        return as_bytes(tensors.published)

    def _total(self, piece: int, shares: Sequence[int]) -> Tensor:
        """In the order of the shares, whatever order they came in."""
        tensors = self._of(piece)
        if tensors.total is None or tensors.total[0] != tuple(shares):
            like = torch.empty(tensors.master.shape, dtype=self._plan.gradient, device="meta")
            packing = self._plan.packing
            first, *others = (unpack_gradient(packing, tensors.given[share], piece, share, like) for share in shares)
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

    def whole(self, piece: int) -> dict[str, Tensor]:
        """And what is published, with what that has lost."""
        if self._packer is None:
            return self.state(piece)
        return self.state(piece) | {MESSAGE: self._of(piece).published} | self._packer.error(piece)

    def load(self, piece: int, state: Mapping[str, Tensor]) -> None:
        """A state, or all of it."""
        tensors = self._of(piece)
        tensors.master.copy_(state["master"])
        for kind, value in state.items():
            for place, part in tensors.parts if kind not in ("master", MESSAGE, ERROR) else ():
                tensors.optimizer.state[part][kind] = value.clone() if value.ndim == 0 else value[place].clone()
        if self._packer is not None and MESSAGE in state:
            tensors.published = state[MESSAGE].clone()
            if ERROR in state:
                self._packer.load(piece, state[ERROR])
        else:
            tensors.published = self._published(piece, tensors.master)


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
