"""The update that an optimizer should make, and the updates that it would make after one of several mistakes."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from motet.train.optimizer.optimizer_settings import OptimizerSettings


class ExpectedSummand(NamedTuple):
    """One term of a sum, and the factor that it should have."""

    description: str
    value: Tensor
    expected_factor: float


@dataclass(frozen=True)
class ExpectedOptimizerUpdate:
    """One step of the optimizer on one parameter, or on a slice of it."""

    settings: OptimizerSettings
    learning_rate: float
    weight_decay: float
    step_count: float  # With this step
    master: Tensor
    moments: Mapping[str, Tensor]  # exp_avg, exp_avg_sq or momentum_buffer, before the step
    gradient: Tensor
    alternative_rates: Mapping[str, float] = field(default_factory=dict)  # Description -> learning rate

    def expected_state(self) -> dict[str, Tensor]:
        """The master and the moments by the formulas of AdamW (arXiv:1711.05101) or of SGD with momentum."""
        if self.settings.name == "adamw":
            (beta1, beta2), eps = self.settings.betas, self.settings.eps
            exp_avg = beta1 * self.moments["exp_avg"] + (1 - beta1) * self.gradient
            exp_avg_sq = beta2 * self.moments["exp_avg_sq"] + (1 - beta2) * self.gradient.square()
            mean, root = self.bias_corrected(exp_avg, exp_avg_sq)
            change: Tensor = -self.learning_rate * (self.weight_decay * self.master + mean / (root + eps))
            return {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "master": self.master + change}
        momentum, decayed_gradient = self.settings.momentum, self.decayed_gradient
        if not momentum:
            return {"master": self.master - self.learning_rate * decayed_gradient}
        buffer = momentum * self.moments["momentum_buffer"] + decayed_gradient
        direction = decayed_gradient + momentum * buffer if self.settings.nesterov else buffer
        return {"momentum_buffer": buffer, "master": self.master - self.learning_rate * direction}

    @property
    def decayed_gradient(self) -> Tensor:
        return self.gradient + self.weight_decay * self.master

    def bias_corrected(self, exp_avg: Tensor, exp_avg_sq: Tensor) -> tuple[Tensor, Tensor]:
        """AdamW's mean of gradients, and the root of the mean of their squares."""
        beta1, beta2 = self.settings.betas
        return exp_avg / (1 - beta1**self.step_count), (exp_avg_sq / (1 - beta2**self.step_count)).sqrt()

    def base(self, state_name: str) -> Tensor:
        """A master is compared by its change, which is small against the master itself."""
        return self.master if state_name == "master" else torch.zeros_like(self.master)

    def summands(self, state_name: str) -> list[ExpectedSummand]:
        """The terms of a moment, or of the change of a master."""
        is_adamw, before = self.settings.name == "adamw", self.moments.get(state_name, self.master)
        if is_adamw and state_name != "master":
            beta = self.settings.betas[state_name == "exp_avg_sq"]
            if state_name == "exp_avg":
                new_term = ExpectedSummand("the gradient", self.gradient, 1 - beta)
            else:
                new_term = ExpectedSummand("the square of the gradient", self.gradient.square(), 1 - beta)
            return [ExpectedSummand("what it was before", before, beta), new_term]
        if state_name == "momentum_buffer":
            return [
                ExpectedSummand("what it was before", before, self.settings.momentum),
                ExpectedSummand("the gradient", self.gradient, 1.0),
                ExpectedSummand("weight decay", self.master, self.weight_decay),
            ]
        without_decay = replace(self, weight_decay=0.0) if is_adamw else self
        change = without_decay.expected_state()["master"] - self.master
        decay = -self.learning_rate * self.master
        return [
            ExpectedSummand("weight decay", decay, self.weight_decay if is_adamw else 0.0),
            ExpectedSummand("the update", change, 1.0),
        ]

    def implied_terms(self, state_name: str) -> tuple[float, Tensor, float] | None:
        """A moment is decay * before + new term, where the new term is factor * gradient: (decay, new term, factor)."""
        beta1, beta2 = self.settings.betas
        return {
            "exp_avg": (beta1, self.gradient * (1 - beta1), 1 - beta1),
            "exp_avg_sq": (beta2, self.gradient.square() * (1 - beta2), 0.0),
            "momentum_buffer": (self.settings.momentum, self.decayed_gradient, 1.0),
        }.get(state_name)

    def alternatives(self) -> Iterator[tuple[str, "ExpectedOptimizerUpdate"]]:
        """Descriptions of mistakes, each with the update that it makes."""
        count = int(self.step_count)
        for other_count in range(max(1, count - 3), count + 5):
            if other_count != self.step_count:
                words = f"as in step {other_count} of the optimizer, not {count}"
                yield words, replace(self, step_count=float(other_count))
        zero_moments = {name: torch.zeros_like(moment) for name, moment in self.moments.items()}
        yield "as if its moments had been 0 before, as in a first step", replace(self, moments=zero_moments)
        yield "as if without bias correction", replace(self, step_count=math.inf)
        yield "with a gradient of 0", replace(self, gradient=torch.zeros_like(self.gradient))
