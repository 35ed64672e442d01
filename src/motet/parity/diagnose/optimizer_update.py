"""The update that an optimizer should make, and the updates that it would make after one of several mistakes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from motet.train.optimizer.optimizer_settings import OptimizerSettings


class OptimizerUpdateTerm(NamedTuple):
    """One term of a sum, and the factor that it should have."""

    description: str
    value: Tensor
    expected_factor: float


def weighted_sum(summands: list[OptimizerUpdateTerm]) -> Tensor:
    """The sum that the terms should have."""
    return torch.stack([s.expected_factor * s.value for s in summands]).sum(0)


@dataclass(frozen=True)
class ExpectedOptimizerUpdate:
    """One step of the optimizer on one parameter, or on a slice of it."""

    settings: OptimizerSettings
    learning_rate: float
    weight_decay: float
    step_count: float  # Steps, this one included
    master: Tensor
    moments: Mapping[str, Tensor]  # exp_avg, exp_avg_sq or momentum_buffer, before the step
    gradient: Tensor
    alternative_rates: Mapping[str, float] = field(default_factory=dict)  # Description -> learning rate

    def expected_state(self) -> dict[str, Tensor]:
        """The master and the moments by the formulas of AdamW (arXiv:1711.05101) or of SGD with momentum."""
        if self.settings.name == "adamw":
            state = {name: weighted_sum(self.summands(name)) for name in ("exp_avg", "exp_avg_sq")}
            mean, root = self.bias_corrected(state)
            direction = self.weight_decay * self.master + mean / (root + self.settings.eps)
        else:
            momentum, direction, state = self.settings.momentum, self.gradient + self.weight_decay * self.master, {}
            if momentum:
                buffer = state["momentum_buffer"] = weighted_sum(self.summands("momentum_buffer"))
                direction = direction + momentum * buffer if self.settings.nesterov else buffer
        return {**state, "master": self.master - self.learning_rate * direction}

    def bias_corrected(self, state: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """AdamW's mean of gradients, and the root of the mean of their squares."""
        scale1, scale2 = (1 - beta**self.step_count for beta in self.settings.betas)
        return state["exp_avg"] / scale1, (state["exp_avg_sq"] / scale2).sqrt()

    def base(self, state_name: str) -> Tensor:
        """A master is compared by its change, which is small against the master itself."""
        return self.master if state_name == "master" else torch.zeros_like(self.master)

    def summands(self, state_name: str) -> list[OptimizerUpdateTerm]:
        """The terms of a moment, its value before the step first; or of the change of a master."""
        (beta1, beta2), gradient = self.settings.betas, self.gradient
        decay = OptimizerUpdateTerm("weight decay", self.master, self.weight_decay)
        if state_name == "master":
            decouples_decay = self.settings.name == "adamw"
            without_decay = replace(self, weight_decay=0.0) if decouples_decay else self
            change = without_decay.expected_state()["master"] - self.master
            factor = self.weight_decay if decouples_decay else 0.0
            decay = decay._replace(value=-self.learning_rate * self.master, expected_factor=factor)
            return [decay, OptimizerUpdateTerm("the update", change, 1.0)]
        factor, new_terms = {
            "exp_avg": (beta1, [OptimizerUpdateTerm("the gradient", gradient, 1 - beta1)]),
            "exp_avg_sq": (beta2, [OptimizerUpdateTerm("the square of the gradient", gradient.square(), 1 - beta2)]),
            "momentum_buffer": (self.settings.momentum, [OptimizerUpdateTerm("the gradient", gradient, 1.0), decay]),
        }[state_name]
        return [OptimizerUpdateTerm("its earlier value", self.moments[state_name], factor), *new_terms]

    def alternatives(self) -> Iterator[tuple[str, "ExpectedOptimizerUpdate"]]:
        """Descriptions of mistakes, each with the update that it makes."""
        count = int(self.step_count)
        for other in [n for n in range(max(1, count - 3), count + 5) if n != count]:
            yield f"as in step {other} of the optimizer, not {count}", replace(self, step_count=float(other))
        zero_moments = {name: torch.zeros_like(moment) for name, moment in self.moments.items()}
        yield "as if its moments had been 0 before, as in a first step", replace(self, moments=zero_moments)
        yield "as if without bias correction", replace(self, step_count=torch.inf)
        yield "with a gradient of 0", replace(self, gradient=torch.zeros_like(self.gradient))
