"""The `[outer]` section: independent replicas with rare outer steps, and the schedule of these steps.

Local SGD (arXiv:1805.09767), DiLoCo (arXiv:2311.08105) and Streaming DiLoCo (arXiv:2501.18512).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from motet.core.config_loading import FrozenSettings
from motet.core.errors import check_input


class LocalSGDSettings(FrozenSettings):
    """Independent replicas, which are averaged in outer steps. A replica is a shard group."""

    every: Annotated[int, Field(ge=1)] | None = None
    """Steps of a replica between two outer steps; when not given, gradients are summed in every step."""
    optimizer: Literal["nesterov", "average"] = "nesterov"
    """The outer step: Nesterov momentum along the mean pseudo-gradient (DiLoCo), or the average of the replicas (local
    SGD)."""
    learning_rate: Annotated[float, Field(gt=0)] = 0.7
    """Learning rate of the outer step."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of the outer step."""
    fragments: Annotated[int, Field(ge=1)] = 1
    """Parts of the model with an outer step in turn, each once in `every` steps, so that less is sent at a time."""
    delay: Annotated[int, Field(ge=0)] = 0
    """Steps of a replica while an outer step is in flight; the result is merged after them."""
    mixing_factor: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """The weight of a replica's parameters when they are merged after a delay."""

    @model_validator(mode="after")
    def _check_fits_between_outer_steps(self) -> Self:
        for name, count in (("fragments", self.fragments - 1), ("delay", self.delay)):
            if self.every is not None and count >= self.every:
                maximum = self.every if name == "fragments" else self.every - 1
                raise ValueError(
                    f"outer.{name} = {getattr(self, name)} does not fit between the steps of outer.every = "
                    f"{self.every}; use at most {maximum}"
                )
        return self


@dataclass(frozen=True)
class FragmentSyncSchedule:
    """The steps after which the outer step of each fragment begins: evenly distributed over `every` steps."""

    every: int
    fragments: int
    delay: int

    def due_fragments(self, done: int) -> list[int]:
        """Fragments whose outer step begins after this step; the last fragment is due after `every` steps."""
        return [i for i in range(self.fragments) if (done - (i + 1) * self.every // self.fragments) % self.every == 0]

    def in_flight(self, done: int) -> list[tuple[int, list[int]]]:
        """(step after which they began, fragments) of the outer steps that are not merged after this step."""
        start_steps = range(max(1, done - self.delay + 1), done + 1)
        return [(step, due) for step in start_steps if (due := self.due_fragments(step))]


def split_into_fragments(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """Names of parameters in contiguous fragments of about equal size; `sizes` is name -> elements, in model order."""
    check_input(
        count <= len(sizes),
        f"outer.fragments = {count} is more than the {len(sizes)} trainable parameters of the model; take fewer",
    )
    names, remaining_numel = list(sizes), sum(sizes.values())
    fragments: list[list[str]] = []
    for left in range(count, 0, -1):
        target, filled = remaining_numel / left, 0
        fragment: list[str] = []
        while len(names) >= left and (not fragment or left == 1 or filled + sizes[names[0]] / 2 < target):
            fragment.append(names.pop(0))
            filled += sizes[fragment[-1]]
        fragments.append(fragment)
        remaining_numel -= filled
    return fragments
