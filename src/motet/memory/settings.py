"""The `[memory]` section: which activations are kept from forward to backward."""

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from motet.core.base_settings import FrozenSettings
from motet.models.spec.layer_specs import BlockPolicy

_UNITS = {"": 1, "B": 1, **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)}}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}
_MAX_BYTES = 2**50


def parse_bytes(value: object) -> object:
    """`"1.5 GiB"` -> 1610612736; anything but text is left to the type."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*([0-9]{1,16}(?:\.[0-9]{1,6})?)\s*([A-Za-z]*)\s*", value)
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{value!r} is no number of bytes; write for instance 512MiB, 8GiB or 8000000000")
    return int(float(match[1]) * _UNITS[match[2]])


class MemorySettings(FrozenSettings):
    """Which activations are kept, and which backward computes again."""

    recompute: Literal["none", "selective", "full", "every-k", "auto"] = "none"
    """What backward computes again, block by block: nothing; with `selective` all but the matrix products with weights,
    so attention, softmax, dropout, norms and activation functions; with `full` whole blocks, of which only the input is
    kept; with `every-k` each `every`-th block in full; with `auto` as little time as fits into `budget`."""

    every: Annotated[int, Field(ge=1, le=100_000)] = 2
    """With `every-k`: one block in this many is recomputed, beginning with the first."""

    budget: Annotated[int, BeforeValidator(parse_bytes), Field(ge=1, le=_MAX_BYTES)] | None = None
    """The bytes that a step may take on each rank: model state, activations, and what comes and goes; a number, or text
    such as `24GiB`."""

    @model_validator(mode="after")
    def _check_budget(self) -> "MemorySettings":
        if self.recompute == "auto" and self.budget is None:
            raise ValueError("recompute = 'auto' chooses by memory.budget; set it, for instance memory.budget=24GiB")
        return self


def fixed_policies(settings: MemorySettings, blocks: int) -> tuple[BlockPolicy, ...]:
    """The policy of each block, where it does not depend on costs."""
    if settings.recompute == "every-k":
        return tuple("none" if index % settings.every else "full" for index in range(blocks))
    policies: dict[str, BlockPolicy] = {"none": "none", "selective": "selective"}
    return (policies.get(settings.recompute, "full"),) * blocks  # `auto` begins with full recomputation
