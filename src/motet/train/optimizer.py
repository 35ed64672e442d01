"""From the `[optimizer]` section to an update: parameter groups, the norm, and AdamW or SGD on flat masters."""

import fnmatch
import math
from typing import Any

import torch
from torch import Tensor, nn

from motet.core.errors import InputError
from motet.precision.master import FlatWeights
from motet.precision.recipe import Recipe
from motet.train.settings import OptimizerSettings

GroupKey = tuple[float, float]
"""(learning-rate scale, weight decay): parameters that agree in both share one flat tensor."""


def group_parameters(
    named: dict[str, nn.Parameter], settings: OptimizerSettings
) -> dict[GroupKey, dict[str, nn.Parameter]]:
    """Sort parameters by what their update needs, in the order of the module."""
    groups: dict[GroupKey, dict[str, nn.Parameter]] = {}
    unmatched = {pattern for group in settings.groups for pattern in group.match}
    for name, parameter in named.items():
        scale, decay = 1.0, settings.weight_decay if parameter.ndim > 1 else 0.0
        for group in settings.groups:
            hits = {pattern for pattern in group.match if fnmatch.fnmatchcase(name, pattern)}
            unmatched -= hits
            if hits:
                scale = group.learning_rate_scale
                decay = settings.weight_decay if group.weight_decay is None else group.weight_decay
                break
        groups.setdefault((scale, decay), {})[name] = parameter
    if unmatched:
        raise InputError(
            f"optimizer.groups: no trainable parameter's name matches {sorted(unmatched)[0]!r}; "
            f"names look like {', '.join(list(named)[:3])}"
        )
    return groups


class Updater:
    """Owns the flat weights and their optimizer."""

    def __init__(self, module: nn.Module, settings: OptimizerSettings, recipe: Recipe) -> None:
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        groups = group_parameters(named, settings)
        self.weights = [FlatWeights(members, recipe) for members in groups.values()]
        self._settings = settings
        self._scales = [scale for scale, _ in groups]
        self._optimizer = _optimizer(self.weights, list(groups), settings)

    def begin_step(self) -> None:
        for weights in self.weights:
            weights.begin_step()

    def end_backward(self) -> None:
        for weights in self.weights:
            weights.end_backward()

    def norm(self) -> float:
        """The Euclidean norm of all gradients as they stand in the flat tensors."""
        return math.sqrt(sum(torch.linalg.vector_norm(w.grad).item() ** 2 for w in self.weights))

    def scale_gradients(self, factor: float) -> None:
        for weights in self.weights:
            weights.grad.mul_(factor)

    def update(self, learning_rate: float) -> None:
        """One step of the optimizer on the masters, and the result handed to the model."""
        for group, scale in zip(self._optimizer.param_groups, self._scales, strict=True):
            group["lr"] = learning_rate * scale
        for weights, group in zip(self.weights, self._optimizer.param_groups, strict=True):
            group["params"][0].grad = weights.grad
        self._optimizer.step()
        for weights in self.weights:
            weights.publish()

    def state(self) -> dict[str, Tensor]:
        """Masters and moments by name, as views: reading gives the state, writing in place restores it."""
        state: dict[str, Tensor] = {}
        for weights, group in zip(self.weights, self._optimizer.param_groups, strict=True):
            state |= {f"master/{name}": view for name, view in weights.views(weights.master).items()}
            for kind, flat in self._moments(group["params"][0]).items():
                if flat.ndim == 0:
                    state.setdefault(kind, flat)  # the count of steps: all groups take theirs together
                else:
                    state |= {f"{kind}/{name}": view for name, view in weights.views(flat).items()}
        return state

    def publish(self) -> None:
        """After `state()` was written to."""
        counts = [self._moments(group["params"][0]).get("step") for group in self._optimizer.param_groups]
        for count in counts[1:]:
            if count is not None and counts[0] is not None:
                count.copy_(counts[0])
        for weights in self.weights:
            weights.publish()

    def _moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """The optimizer's own tensors of one group, made now if no step was taken yet."""
        moments: dict[str, Any] = self._optimizer.state[parameter]
        if self._settings.name == "adamw" and not moments:
            moments["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            moments["exp_avg"] = torch.zeros_like(parameter)
            moments["exp_avg_sq"] = torch.zeros_like(parameter)
        if self._settings.name == "sgd" and self._settings.momentum and not moments:
            # torch sets the buffer to the first gradient; from zero, momentum x 0 + gradient is the same.
            moments["momentum_buffer"] = torch.zeros_like(parameter)
        return {kind: value for kind, value in moments.items() if isinstance(value, Tensor)}


def _optimizer(weights: list[FlatWeights], keys: list[GroupKey], settings: OptimizerSettings) -> torch.optim.Optimizer:
    groups = [
        {"params": [nn.Parameter(w.master, requires_grad=False)], "weight_decay": decay}
        for w, (_, decay) in zip(weights, keys, strict=True)
    ]
    if settings.name == "adamw":
        return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps, fused=True)
    return torch.optim.SGD(
        groups, lr=settings.learning_rate, momentum=settings.momentum, nesterov=settings.nesterov, fused=True
    )
