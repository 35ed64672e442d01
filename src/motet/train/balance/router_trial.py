"""Trials of a router with random values: the scores that its weights follow, and the buffer that corrects its choice.

A trial proves by running, so the names of buffers and settings do not matter. It needs the router alone, not experts.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor, nn

from motet.core.errors import InputError
from motet.parallel.proof.comparison import distance
from motet.parallel.proof.module_calls import value_at
from motet.train.balance.routers import RoutedLayer
from motet.train.balance.terms import ScoreKind, normalized_scores

_TOLERANCE = 1e-4  # Routers compute in float32
_ROUNDING = 1e-6
_SIZES = (1.0, 0.3, 0.1, 0.03, 0.01)  # Corrections that change the choice of some tokens, and not of all


@dataclass(frozen=True)
class Routing:
    """The result of a router, each token's experts in ascending order."""

    logits: Tensor  # [N, E]
    weights: Tensor  # [N, K]
    chosen: Tensor  # [N, K]


class RouterTrial:
    """A copy of a router with random values, and its inputs."""

    def __init__(self, module: nn.Module, layer: RoutedLayer) -> None:
        self.layer = layer
        self._generator = torch.Generator().manual_seed(0)
        original = module.get_submodule(layer.router)
        self._prefix = f"{layer.router}."
        self._router = copy.deepcopy(original).to_empty(device="cpu").train()
        for tensor in (*self._router.parameters(), *self._router.buffers()):
            tensor.data = self._random(tensor)
        self._arguments = {key: self._draw(shape) / shape[-1] ** 0.5 for key, shape in layer.input_shapes.items()}
        self._arguments |= {key: torch.zeros(layer.count) for key in layer.input_buffers}
        self.corrections = dict(self._possible_corrections(module))
        for buffer in self.corrections.values():
            buffer.zero_()

    def _draw(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self._generator)

    def _random(self, tensor: Tensor) -> Tensor:
        return self._draw(tuple(tensor.shape)) if tensor.is_floating_point() else torch.zeros_like(tensor)

    def _possible_corrections(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Buffers with a number for each expert, which a checkpoint holds, by their names in the model."""
        stored = module.state_dict(keep_vars=True)
        for name, buffer in self._router.named_buffers():
            if f"{self._prefix}{name}" in stored and buffer.is_floating_point() and buffer.numel() == self.layer.count:
                yield f"{self._prefix}{name}", buffer
        for key, name in self.layer.input_buffers.items():
            if name in stored and not isinstance(stored[name], nn.Parameter):
                yield name, self._arguments[key]

    @torch.no_grad()
    def run(self) -> Routing:
        """Run the router on the same tokens."""
        positional = [self._arguments[key] for key in sorted(key for key in self._arguments if isinstance(key, int))]
        named = {key: value for key, value in self._arguments.items() if isinstance(key, str)}
        output, paths = self._router(*[value.clone() for value in positional], **named), self.layer.output
        logits, weights, chosen = (value_at(output, path) for path in (paths.logits, paths.weights, paths.chosen))
        order = chosen.reshape(-1, self.layer.per_token).sort(-1)
        weights = weights.reshape(-1, self.layer.per_token).gather(1, order.indices)
        return Routing(logits.reshape(-1, self.layer.count), weights.float(), order.values)

    def score_kind(self) -> ScoreKind | None:
        """The scores in proportion to which a token's weights are; None if they follow neither."""
        routing, kinds = self.run(), get_args(ScoreKind)
        shares = routing.weights / routing.weights.sum(1, keepdim=True)

        def is_followed(kind: ScoreKind) -> bool:
            scores = normalized_scores(routing.logits.float(), kind).gather(1, routing.chosen)
            return distance(shares, scores / scores.sum(1, keepdim=True)) < _TOLERANCE

        return next(filter(is_followed, kinds), None)

    def corrects_choice(self, correction: Tensor) -> bool:
        """Whether numbers in a buffer change the choice, and not the weights of tokens whose choice stays the same."""
        before, changes_choice = self.run(), False
        direction = torch.rand(correction.shape, generator=self._generator) - 0.5
        for size in _SIZES:
            correction.copy_(direction * size)
            after = self.run()
            same = (before.chosen == after.chosen).all(1)
            # The experts of a token may be added in another order
            if distance(after.weights[same], before.weights[same]) > _ROUNDING or not torch.equal(
                before.logits, after.logits
            ):
                return False
            changes_choice |= bool(same.any()) and not bool(same.all())
        correction.zero_()
        return changes_choice


def score_kind_of(module: nn.Module, layer: RoutedLayer) -> ScoreKind:
    """The scores of a router; refuses one whose weights follow neither softmax nor sigmoid scores."""
    kind = RouterTrial(module, layer).score_kind()
    if kind is None:
        raise InputError(
            f"[model.balance]: the weights of {layer.router} follow neither the softmax nor the sigmoids of its "
            f"{layer.count} logits, so the loss of a row has no scores; leave the section out"
        )
    return kind


def correction_of(module: nn.Module, layer: RoutedLayer) -> str:
    """The name of the buffer that corrects the choice of a router; refuses a router without one."""
    trial = RouterTrial(module, layer)
    for name, buffer in trial.corrections.items():
        if trial.corrects_choice(buffer):
            return name
    tried = f"of {', '.join(trial.corrections)}, none does" if trial.corrections else "it has no such buffer"
    raise InputError(
        f"model.balance.kind = 'bias' moves a buffer of {layer.count} numbers that changes the choice of "
        f"{layer.router} and not its weights, and {tried}; use model.balance.kind = 'row'"
    )
