"""What an optimizer should make of a tensor, and what it would make of it otherwise."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from torch import Tensor

from motet.parity.diagnose.linear_fit import FIT_TOLERANCE, factor_meaning, format_factor, relative_error
from motet.parity.diagnose.mismatch_hypotheses import ExpectedSummand, TensorMismatch, explain_mismatch, explain_sum
from motet.train.optimizer.optimizer_settings import OptimizerSettings

MomentsByName = Mapping[str, Tensor]  # exp_avg, exp_avg_sq or momentum_buffer


@dataclass(frozen=True)
class ExpectedOptimizerUpdate:
    """Of one parameter, or of a part of it."""

    settings: OptimizerSettings
    learning_rate: float
    weight_decay: float
    step_count: float  # Of steps, with this one
    master: Tensor
    moments: MomentsByName  # Before it
    gradient: Tensor
    alternative_rates: Mapping[str, float] = field(default_factory=dict)  # In words -> that of another step

    def expected_state(self) -> dict[str, Tensor]:
        """By the formulas of AdamW (arXiv:1711.05101) or of SGD with momentum."""
        if self.settings.name == "adamw":
            beta1, beta2 = self.settings.betas
            first_moment = beta1 * self.moments["exp_avg"] + (1 - beta1) * self.gradient
            second_moment = beta2 * self.moments["exp_avg_sq"] + (1 - beta2) * self.gradient.square()
            return {
                "exp_avg": first_moment,
                "exp_avg_sq": second_moment,
                "master": self.master + self._adamw_change(first_moment, second_moment),
            }
        decayed_gradient = self._decayed_gradient
        momentum = self.settings.momentum
        if not momentum:
            return {"master": self.master - self.learning_rate * decayed_gradient}
        buffer = momentum * self.moments["momentum_buffer"] + decayed_gradient
        direction = decayed_gradient + momentum * buffer if self.settings.nesterov else buffer
        return {"momentum_buffer": buffer, "master": self.master - self.learning_rate * direction}

    @property
    def _decayed_gradient(self) -> Tensor:
        return self.gradient + self.weight_decay * self.master

    def _adamw_change(self, first_moment: Tensor, second_moment: Tensor) -> Tensor:
        beta1, beta2 = self.settings.betas
        corrected_mean, corrected_root = (
            first_moment / (1 - beta1**self.step_count),
            (second_moment / (1 - beta2**self.step_count)).sqrt(),
        )
        change: Tensor = -self.learning_rate * (
            self.weight_decay * self.master + corrected_mean / (corrected_root + self.settings.eps)
        )
        return change

    def summands(self, state_name: str) -> tuple[Tensor, list[ExpectedSummand]]:
        """(what is subtracted from the value first, what the rest is made of)."""
        zeros = torch.zeros_like(self.master)
        before = self.moments.get(state_name, self.master)
        if self.settings.name == "adamw" and state_name != "master":
            beta = self.settings.betas[state_name == "exp_avg_sq"]
            new_term = self.gradient.square() if state_name == "exp_avg_sq" else self.gradient
            description = "the gradient" if state_name == "exp_avg" else "the square of the gradient"
            return zeros, [
                ExpectedSummand("what it was before", before, beta), ExpectedSummand(description, new_term, 1 - beta),
            ]  # fmt: skip
        if state_name == "momentum_buffer":
            return zeros, [
                ExpectedSummand("what it was before", before, self.settings.momentum),
                ExpectedSummand("the gradient", self.gradient, 1.0),
                ExpectedSummand("weight decay", self.master, self.weight_decay),
            ]
        without_decay = replace(self, weight_decay=0.0)
        change = without_decay.expected_state()["master"] - self.master
        return self.master, [
            ExpectedSummand(
                "weight decay",
                -self.learning_rate * self.master,
                self.weight_decay if self.settings.name == "adamw" else 0.0,
            ),
            ExpectedSummand("the update", change if self.settings.name == "adamw" else self._master_change(), 1.0),
        ]

    def _master_change(self) -> Tensor:
        return self.expected_state()["master"] - self.master

    def alternatives(self) -> Iterator[tuple[str, "ExpectedOptimizerUpdate"]]:
        """In words -> the update as it might have been."""
        for count in range(max(1, int(self.step_count) - 3), int(self.step_count) + 5):
            if count != self.step_count:
                yield (
                    f"as in step {count} of the optimizer, not {int(self.step_count)}",
                    replace(self, step_count=float(count)),
                )
        zero_moments = {name: torch.zeros_like(moment) for name, moment in self.moments.items()}
        yield "as if its moments had been 0 before, as in a first step", replace(self, moments=zero_moments)
        yield "as if without bias correction", replace(self, step_count=math.inf)
        yield "with a gradient of 0", replace(self, gradient=torch.zeros_like(self.gradient))


def explain_update(
    mismatch: TensorMismatch,
    update: ExpectedOptimizerUpdate,
    state_name: str,
    gradient_mismatch: TensorMismatch,
    other_gradients: Mapping[str, Tensor] = MappingProxyType({}),
) -> str:
    """`gradients`: what the gradient might have been instead, and what it is made of; `strangers`: those of others."""
    base, summands = update.summands(state_name)
    for description, other_rate in update.alternative_rates.items():
        if other_rate != update.learning_rate and _matches_alternative(
            mismatch, update, state_name, replace(update, learning_rate=other_rate)
        ):
            factor = other_rate / update.learning_rate if update.learning_rate else 0.0
            meaning_text = factor_meaning(factor, mismatch.known_factors)
            factor_text = f", or with {format_factor(factor)} times its own{meaning_text}" if meaning_text else ""
            return f"it was updated with the learning rate of {description}{factor_text}"
    if cause_text := explain_sum(mismatch.value - base, summands, mismatch.known_factors):
        return cause_text
    for description, alternative in update.alternatives():
        if _matches_alternative(mismatch, update, state_name, alternative):
            return f"it was updated {description}"
    for description, gradient in gradient_mismatch.alternatives.items():
        if gradient.shape == update.gradient.shape and _matches_alternative(
            mismatch, update, state_name, replace(update, gradient=gradient)
        ):
            return f"it was updated with a gradient that is {description}"
    extra_summands = [
        ExpectedSummand(words, other, 0.0) for words, other in other_gradients.items() if state_name in FIRST_MOMENTS
    ]
    if cause_text := _explain_epsilon(mismatch, update, state_name) or (
        explain_sum(mismatch.value - base, [*summands, *extra_summands], mismatch.known_factors)
    ):
        return cause_text
    return _explain_implied(mismatch, update, state_name, gradient_mismatch)


FIRST_MOMENTS = ("exp_avg", "momentum_buffer")
UPDATE_TOLERANCE = 1e-6  # How near updates of masters are to each other, that are the same


def _matches_alternative(
    mismatch: TensorMismatch, update: ExpectedOptimizerUpdate, state_name: str, alternative: ExpectedOptimizerUpdate
) -> bool:
    """What the other one gives, and that is not what it should be. Updates are small beside what is updated."""
    predicted, base = (
        alternative.expected_state()[state_name],
        update.master if state_name == "master" else torch.zeros_like(update.master),
    )
    tolerance = UPDATE_TOLERANCE if state_name == "master" else FIT_TOLERANCE
    is_distinct = relative_error(mismatch.expected - base, predicted - base) > tolerance
    return is_distinct and relative_error(mismatch.value - base, predicted - base) < tolerance


def _explain_epsilon(mismatch: TensorMismatch, update: ExpectedOptimizerUpdate, state_name: str) -> str:
    """Solve for the number that AdamW adds to the root."""
    if state_name != "master" or update.settings.name != "adamw":
        return ""
    expected_state, (beta1, beta2) = update.expected_state(), update.settings.betas
    corrected_mean, corrected_root = (
        expected_state["exp_avg"] / (1 - beta1**update.step_count),
        (expected_state["exp_avg_sq"] / (1 - beta2**update.step_count)).sqrt(),
    )
    ratio = (update.master - mismatch.value) / update.learning_rate - update.weight_decay * update.master
    epsilon = float((ratio * (corrected_mean - ratio * corrected_root)).sum() / ratio.square().sum())
    alternative = replace(update, settings=update.settings.model_copy(update={"eps": epsilon}))
    if not math.isfinite(epsilon) or not _matches_alternative(mismatch, update, state_name, alternative):
        return ""
    return f"it was updated with eps = {epsilon:.4g}, not {update.settings.eps:g}"


def _explain_implied(
    mismatch: TensorMismatch, update: ExpectedOptimizerUpdate, state_name: str, gradient_mismatch: TensorMismatch
) -> str:
    """Solve for what was there before, or for the gradient, and see what that is."""
    beta1, beta2 = update.settings.betas
    if state_name == "exp_avg":
        decay_factor, new_term = beta1, update.gradient * (1 - beta1)
    elif state_name == "exp_avg_sq":
        decay_factor, new_term = beta2, update.gradient.square() * (1 - beta2)
    elif state_name == "momentum_buffer":
        decay_factor, new_term = update.settings.momentum, update._decayed_gradient
    else:
        return ""
    if decay_factor:
        implied_before = (mismatch.value - new_term) / decay_factor
        before_mismatch = replace(
            mismatch,
            value=implied_before,
            expected=update.moments[state_name],
            contributions=(),
            value_before_step=None,
        )
        if cause_text := explain_mismatch(before_mismatch, allows_rough_guess=False):
            return f"what it was before the step is wrong: {cause_text}"
    if state_name == "exp_avg_sq":
        return ""
    gradient = (mismatch.value - decay_factor * update.moments[state_name]) / (
        (1 - decay_factor) if state_name == "exp_avg" else 1.0
    )
    if cause_text := explain_mismatch(replace(gradient_mismatch, value=gradient, expected=update.gradient)):
        return f"the gradient that it was updated with is wrong: {cause_text}"
    return ""
