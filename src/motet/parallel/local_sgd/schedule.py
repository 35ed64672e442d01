"""The `[outer]` section: replicas that train on their own and meet rarely, and when which parameters meet.

Local SGD (arXiv:1805.09767), DiLoCo (arXiv:2311.08105) and Streaming DiLoCo (arXiv:2501.18512).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from motet.core.base_settings import FrozenSettings
from motet.core.errors import InputError


class LocalSGDSettings(FrozenSettings):
    """Replicas that take steps on their own, and meet now and then. A replica is the ranks that share one copy."""

    every: Annotated[int, Field(ge=1)] | None = None
    """Steps that replicas take alone between two meetings; when not given, gradients are summed in every step."""
    optimizer: Literal["nesterov", "average"] = "nesterov"
    """What replicas go on from after a meeting: a step with Nesterov momentum along their mean difference (DiLoCo), or
    their average (local SGD)."""
    learning_rate: Annotated[float, Field(gt=0)] = 0.7
    """Of that step."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Of that step."""
    fragments: Annotated[int, Field(ge=1)] = 1
    """Parts of the model that meet in turn, each once in `every` steps, so that less travels at a time."""
    delay: Annotated[int, Field(ge=0)] = 0
    """Steps that replicas go on while a part is underway; what has come by then is merged."""
    mixing_factor: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """The weight of a replica's own parameters when they are merged after a delay."""

    @model_validator(mode="after")
    def _check_fits_between_outer_steps(self) -> Self:
        for name, count in (("fragments", self.fragments - 1), ("delay", self.delay)):
            if self.every is not None and count >= self.every:
                maximum = self.every if name == "fragments" else self.every - 1
                raise ValueError(
                    f"outer.{name} = {getattr(self, name)} does not fit between meetings: with outer.every = "
                    f"{self.every} it is at most {maximum}"
                )
        return self


@dataclass(frozen=True)
class FragmentSyncSchedule:
    """When fragments leave for a meeting: their turns are spread evenly over the steps between two meetings."""

    every: int
    fragments: int
    delay: int

    def due_fragments(self, steps_done: int) -> list[int]:
        """Those that leave after so many steps. The last one's turn is after `every`."""
        return [
            n for n in range(self.fragments) if (steps_done - (n + 1) * self.every // self.fragments) % self.every == 0
        ]

    def in_flight(self, steps_done: int) -> list[tuple[int, list[int]]]:
        """(step after which they left, fragments) of those that are not merged after so many steps."""
        start_steps = range(max(1, steps_done - self.delay + 1), steps_done + 1)
        return [(left, self.due_fragments(left)) for left in start_steps if self.due_fragments(left)]


def split_into_fragments(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """Names of parameters in so many runs of about equal size. `sizes`: name -> numel, in the model's order."""
    if count > len(sizes):
        raise InputError(
            f"outer.fragments = {count} is more than the {len(sizes)} trainable parameters of the model; take fewer"
        )
    names, remaining_numel = list(sizes), sum(sizes.values())
    fragments: list[list[str]] = []
    for fragments_left in range(count, 0, -1):
        target_numel, fragment_numel = remaining_numel / fragments_left, 0
        fragment: list[str] = []
        while (
            names
            and len(names) >= fragments_left
            and (not fragment or fragments_left == 1 or fragment_numel + sizes[names[0]] / 2 < target_numel)
        ):
            fragment.append(names.pop(0))
            fragment_numel += sizes[fragment[-1]]
        fragments.append(fragment)
        remaining_numel -= fragment_numel
    return fragments
