"""What an optimizer should make of a tensor, and what it would make of it otherwise."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from torch import Tensor

from motet.train.optimizer.optimizer_settings import OptimizerSettings
from motet.verify.causes import Case, Ingredient, cause, made_of
from motet.verify.equations import FITS, meaning, number, relative

Moments = Mapping[str, Tensor]
"""exp_avg, exp_avg_sq or momentum_buffer."""


@dataclass(frozen=True)
class Update:
    """Of one parameter, or of a part of it."""

    settings: OptimizerSettings
    rate: float
    decay: float
    count: float
    """Of steps, with this one."""
    master: Tensor
    moments: Moments
    """Before it."""
    gradient: Tensor
    rates: Mapping[str, float] = field(default_factory=dict)
    """In words -> that of another step."""

    def after(self) -> dict[str, Tensor]:
        """By the formulas of AdamW (arXiv:1711.05101) or of SGD with momentum."""
        if self.settings.name == "adamw":
            one, two = self.settings.betas
            first = one * self.moments["exp_avg"] + (1 - one) * self.gradient
            second = two * self.moments["exp_avg_sq"] + (1 - two) * self.gradient.square()
            return {"exp_avg": first, "exp_avg_sq": second, "master": self.master + self._step(first, second)}
        pushed = self._pushed
        momentum = self.settings.momentum
        if not momentum:
            return {"master": self.master - self.rate * pushed}
        buffer = momentum * self.moments["momentum_buffer"] + pushed
        along = pushed + momentum * buffer if self.settings.nesterov else buffer
        return {"momentum_buffer": buffer, "master": self.master - self.rate * along}

    @property
    def _pushed(self) -> Tensor:
        return self.gradient + self.decay * self.master

    def _step(self, first: Tensor, second: Tensor) -> Tensor:
        one, two = self.settings.betas
        mean, size = first / (1 - one**self.count), (second / (1 - two**self.count)).sqrt()
        moved: Tensor = -self.rate * (self.decay * self.master + mean / (size + self.settings.eps))
        return moved

    def ingredients(self, kind: str) -> tuple[Tensor, list[Ingredient]]:
        """(what is subtracted from the value first, what the rest is made of)."""
        nothing = torch.zeros_like(self.master)
        before = self.moments.get(kind, self.master)
        if self.settings.name == "adamw" and kind != "master":
            beta = self.settings.betas[kind == "exp_avg_sq"]
            given = self.gradient.square() if kind == "exp_avg_sq" else self.gradient
            words = "the gradient" if kind == "exp_avg" else "the square of the gradient"
            return nothing, [
                Ingredient("what it was before", before, beta), Ingredient(words, given, 1 - beta),
            ]  # fmt: skip
        if kind == "momentum_buffer":
            return nothing, [
                Ingredient("what it was before", before, self.settings.momentum),
                Ingredient("the gradient", self.gradient, 1.0),
                Ingredient("weight decay", self.master, self.decay),
            ]
        bare = replace(self, decay=0.0)
        moved = bare.after()["master"] - self.master
        return self.master, [
            Ingredient("weight decay", -self.rate * self.master, self.decay if self.settings.name == "adamw" else 0.0),
            Ingredient("the update", moved if self.settings.name == "adamw" else self._moved(), 1.0),
        ]

    def _moved(self) -> Tensor:
        return self.after()["master"] - self.master

    def otherwise(self) -> Iterator[tuple[str, "Update"]]:
        """In words -> the update as it might have been."""
        for count in range(max(1, int(self.count) - 3), int(self.count) + 5):
            if count != self.count:
                yield f"as in step {count} of the optimizer, not {int(self.count)}", replace(self, count=float(count))
        none = {name: torch.zeros_like(moment) for name, moment in self.moments.items()}
        yield "as if its moments had been 0 before, as in a first step", replace(self, moments=none)
        yield "as if without bias correction", replace(self, count=math.inf)
        yield "with a gradient of 0", replace(self, gradient=torch.zeros_like(self.gradient))


def cause_of_update(
    case: Case, update: Update, kind: str, gradients: Case, strangers: Mapping[str, Tensor] = MappingProxyType({})
) -> str:
    """`gradients`: what the gradient might have been instead, and what it is made of; `strangers`: those of others."""
    base, ingredients = update.ingredients(kind)
    for words, rate in update.rates.items():
        if rate != update.rate and _is(case, update, kind, replace(update, rate=rate)):
            times = rate / update.rate if update.rate else 0.0
            said = meaning(times, case.sizes)
            too = f", or with {number(times)} times its own{said}" if said else ""
            return f"it was updated with the learning rate of {words}{too}"
    if found := made_of(case.value - base, ingredients, case.sizes):
        return found
    for words, other in update.otherwise():
        if _is(case, update, kind, other):
            return f"it was updated {words}"
    for words, gradient in gradients.others.items():
        if gradient.shape == update.gradient.shape and _is(case, update, kind, replace(update, gradient=gradient)):
            return f"it was updated with a gradient that is {words}"
    more = [Ingredient(words, other, 0.0) for words, other in strangers.items() if kind in FIRST]
    if found := _of_epsilon(case, update, kind) or (made_of(case.value - base, [*ingredients, *more], case.sizes)):
        return found
    return _implied(case, update, kind, gradients)


FIRST = ("exp_avg", "momentum_buffer")
ALIKE = 1e-6
"""How near updates of masters are to each other, that are the same."""


def _is(case: Case, update: Update, kind: str, other: Update) -> bool:
    """What the other one gives, and that is not what it should be. Updates are small beside what is updated."""
    given, base = other.after()[kind], update.master if kind == "master" else torch.zeros_like(update.master)
    close = ALIKE if kind == "master" else FITS
    is_another = relative(case.expected - base, given - base) > close
    return is_another and relative(case.value - base, given - base) < close


def _of_epsilon(case: Case, update: Update, kind: str) -> str:
    """Solve for the number that AdamW adds to the root."""
    if kind != "master" or update.settings.name != "adamw":
        return ""
    after, (one, two) = update.after(), update.settings.betas
    mean, size = after["exp_avg"] / (1 - one**update.count), (after["exp_avg_sq"] / (1 - two**update.count)).sqrt()
    ratio = (update.master - case.value) / update.rate - update.decay * update.master
    epsilon = float((ratio * (mean - ratio * size)).sum() / ratio.square().sum())
    other = replace(update, settings=update.settings.model_copy(update={"eps": epsilon}))
    if not math.isfinite(epsilon) or not _is(case, update, kind, other):
        return ""
    return f"it was updated with eps = {epsilon:.4g}, not {update.settings.eps:g}"


def _implied(case: Case, update: Update, kind: str, gradients: Case) -> str:
    """Solve for what was there before, or for the gradient, and see what that is."""
    one, two = update.settings.betas
    if kind == "exp_avg":
        kept, given = one, update.gradient * (1 - one)
    elif kind == "exp_avg_sq":
        kept, given = two, update.gradient.square() * (1 - two)
    elif kind == "momentum_buffer":
        kept, given = update.settings.momentum, update._pushed
    else:
        return ""
    if kept:
        before = (case.value - given) / kept
        known = replace(case, value=before, expected=update.moments[kind], shares=(), before=None)
        if found := cause(known, roughly=False):
            return f"what it was before the step is wrong: {found}"
    if kind == "exp_avg_sq":
        return ""
    gradient = (case.value - kept * update.moments[kind]) / ((1 - kept) if kind == "exp_avg" else 1.0)
    if found := cause(replace(gradients, value=gradient, expected=update.gradient)):
        return f"the gradient that it was updated with is wrong: {found}"
    return ""
