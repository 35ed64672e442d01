"""The policies of recomputation that take the least time within a budget of bytes, exactly.

While blocks run one after the other and back, the live bytes of a moment are the bytes that the blocks before it keep
plus the bytes that the moment itself needs. So the best choices for the first blocks depend on the later ones only
through one number, the bytes that they keep: of all choices that keep as much, the quickest is enough. Where a rank
holds activations of several micro-batches, as in a pipeline, the largest need of a moment is added to the largest sum.

The `[memory]` section: which activations are kept from forward to backward.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, Field, model_validator

from motet.core.config_loading import FrozenSettings
from motet.models.spec.layer_specs import BlockPolicy

Place = Literal["device", "host", "disk"]


class StatePlaces(NamedTuple):
    """The places of masters and moments, and of parameters that stage 3 cuts into rows; and whether the host updates
    while the next step computes."""

    states: Place = "device"
    parameters: Place = "device"
    delays: bool = False
    window: int = 2  # Blocks whose rows the host reads ahead, if they lie on disk


ALL_ON_DEVICE = StatePlaces()
MIN_SENT_BYTES = 1 << 16  # Smaller storages of activations stay on the device: many copies would free few bytes
POLICIES: tuple[BlockPolicy, ...] = ("none", "selective", "full")
# With more partial sums than this, sums are rounded up to a multiple of one part of the budget.
MAX_PARTIAL_SUMS, PARTS_OF_BUDGET = 4096, 16384
_LEVELS = 64  # Tried limits of the largest need of any moment, in pipelines


@dataclass(frozen=True)
class PolicyCost:
    """A block with one policy."""

    saved: int  # Bytes from the end of its forward to the beginning of its backward
    forward: int  # Peak during its forward, in addition to the bytes that the blocks before it keep
    backward: int  # Peak during its backward, in addition to the bytes that the blocks up to it keep
    seconds: float  # Time added by recomputation


BlockCosts = Mapping[BlockPolicy, PolicyCost]  # One entry for each possible policy


class ChosenPolicies(NamedTuple):
    """The policies of the blocks, in the order in which they run."""

    policies: tuple[BlockPolicy, ...]
    peak_bytes: int
    seconds: float


@dataclass(frozen=True)
class ChoiceProblem:
    """The blocks that a rank runs, in their order."""

    blocks: Sequence[BlockCosts]
    # Micro-batches whose activations a rank keeps, by block. With one each, they run one after the other.
    in_flight: Sequence[int]
    elsewhere: int = 0  # The peak while no block runs, such as during the update

    @property
    def is_sequential(self) -> bool:
        """Whether one micro-batch is kept."""
        return all(count <= 1 for count in self.in_flight)

    def peak(self, policies: Sequence[BlockPolicy]) -> int:
        """The peak of the live bytes of a step."""
        costs = [block[policy] for block, policy in zip(self.blocks, policies, strict=True)]
        peak, before = self.elsewhere, 0
        if not self.is_sequential:
            kept = sum(count * cost.saved for count, cost in zip(self.in_flight, costs, strict=True))
            return max([peak, *(kept + max(cost.forward, cost.backward) for cost in costs)])
        for cost in costs:
            peak = max(peak, before + cost.forward, before + cost.saved + cost.backward)
            before += cost.saved
        return peak

    def seconds(self, policies: Sequence[BlockPolicy]) -> float:
        """The time of recomputation, for each micro-batch."""
        return sum(block[policy].seconds for block, policy in zip(self.blocks, policies, strict=True))

    def choose(self, budget: int) -> ChosenPolicies | None:
        """The quickest policies with which a step stays within the budget; None if there are none."""
        if self.elsewhere > budget:
            return None
        choices = self._choose_in_order(budget) if self.is_sequential else self._choose_for_sums(budget)
        if choices is None:
            return None
        return ChosenPolicies(choices, self.peak(choices), self.seconds(choices))

    def _choose_in_order(self, budget: int) -> tuple[BlockPolicy, ...] | None:
        partial = _PartialChoices(budget)
        for costs in self.blocks:
            partial.extend(costs, weight=1, limit=lambda c: budget - max(c.forward, c.saved + c.backward))
        return partial.quickest()

    def _choose_for_sums(self, budget: int) -> tuple[BlockPolicy, ...] | None:
        needs = sorted({max(cost.forward, cost.backward) for block in self.blocks for cost in block.values()})
        step = max(1, len(needs) // _LEVELS)
        best: tuple[BlockPolicy, ...] | None = None
        for need in needs[::-1][::step]:
            chosen = self._choose_for_need(need, budget - need)
            if chosen is not None and (best is None or self.seconds(chosen) < self.seconds(best)):
                best = chosen
        return best

    def _choose_for_need(self, need: int, left: int) -> tuple[BlockPolicy, ...] | None:
        """The quickest policies whose moments need at most `need` bytes, and which keep at most `left`."""
        partial = _PartialChoices(left)
        for costs, count in zip(self.blocks, self.in_flight, strict=True):
            possible = {p: cost for p, cost in costs.items() if max(cost.forward, cost.backward) <= need}
            partial.extend(possible, weight=count, limit=lambda _: left)
        return partial.quickest()


class _Partial(NamedTuple):
    saved: int
    seconds: float
    policies: "tuple[_Partial, BlockPolicy] | None"  # Choice for the blocks before, policy of the last one


class _PartialChoices:
    """Choices for the first blocks. One that keeps no less than another must be quicker."""

    def __init__(self, budget: int) -> None:
        self._granularity, self._budget = 1, budget
        self._choices = [_Partial(0, 0.0, None)] if budget >= 0 else []

    def extend(self, costs: BlockCosts, *, weight: int, limit: Callable[[PolicyCost], int]) -> None:
        """Choose for one more block; `limit` is the bytes that blocks before it may keep."""
        extended = [
            _Partial(self._rounded(before.saved + weight * cost.saved), before.seconds + cost.seconds, (before, policy))
            for policy, cost in costs.items()
            for before in self._choices
            if before.saved <= limit(cost) and before.saved + weight * cost.saved <= self._budget
        ]
        self._choices = _not_dominated(extended)
        if len(self._choices) > MAX_PARTIAL_SUMS:
            self._granularity = max(1, self._budget // PARTS_OF_BUDGET)

    def _rounded(self, saved: int) -> int:
        return -(-saved // self._granularity) * self._granularity

    def quickest(self) -> tuple[BlockPolicy, ...] | None:
        if not self._choices:
            return None
        policies, last = list[BlockPolicy](), min(self._choices, key=lambda choice: (choice.seconds, choice.saved))
        while last.policies is not None:
            last, policy = last.policies
            policies.append(policy)
        return tuple(reversed(policies))


def _not_dominated(choices: list[_Partial]) -> list[_Partial]:
    kept = list[_Partial]()
    for choice in sorted(choices, key=lambda each: (each.saved, each.seconds)):
        if not kept or choice.seconds < kept[-1].seconds:
            kept.append(choice)
    return kept


_UNITS = {"": 1, "B": 1, **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)}}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}
_MAX_BYTES = 2**50


def parse_bytes(value: object) -> object:
    """`"1.5 GiB"` -> 1610612736; anything but text is left to the type."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*([0-9]{1,16}(?:\.[0-9]{1,6})?)\s*([A-Za-z]*)\s*", value)
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{value!r} is not a number of bytes; write for instance 512MiB, 8GiB or 8000000000")
    return int(float(match[1]) * _UNITS[match[2]])


class MemorySettings(FrozenSettings):
    """The activations to keep, and those to compute again in backward."""

    other_names: ClassVar = {
        "recompute": "*checkpointing *recompute* activation_checkpoint*",
        "budget": "*memory",
        "optimizer": "*offload*",
        "folder": "*path",
        "parameters": "*param_offload* *offload_param*",
        "activations": "*offload_activation* *activation_offload* activation_place*",
    }
    recompute: Literal["none", "selective", "full", "every-k", "auto"] = "none"
    """Computation that backward repeats, block by block: none; with `selective` all but matrix products with weights,
    so attention, softmax, dropout, norms and activation functions; with `full` whole blocks, of which only the input is
    kept; with `every-k` each `every`-th block in full; with `auto` as little time as fits into `budget`."""

    every: Annotated[int, Field(ge=1, le=100_000)] = 2
    """With `every-k`, backward recomputes one block in this many, beginning with the first."""

    budget: Annotated[int, BeforeValidator(parse_bytes), Field(ge=1, le=_MAX_BYTES)] | None = None
    """The bytes that a step may take on each rank: model state, activations and temporary tensors; a number, or text
    such as `24GiB`. By default `device_limit`."""

    optimizer: Place = "device"
    """Where master parameters and moments lie and are updated: in the memory of the device; in that of the host, which
    updates them; or in files that the host reads, updates and writes piece by piece."""

    tiers: Literal["explicit", "auto"] = "explicit"
    """With `auto`, `motet train` chooses `optimizer` before it starts ranks: the first of `device`, `host` and `disk`
    with which a step is predicted to fit on the devices and their host."""

    update: Literal["exact", "delayed"] = "exact"
    """When the host updates masters that do not lie on the device: between two steps, or with the gradients of the step
    before while a step computes, which is another training."""

    parameters: Place = "device"
    """Where the rows of parameters that stage 3 of ZeRO cuts lie: in the memory of the device; in that of the host,
    from which each block travels to the device when it computes; or in the files of `optimizer = "disk"`, from which
    the host reads the next blocks. A single rank cuts them, too."""

    window: Annotated[int, Field(ge=1, le=100_000)] = 2
    """With `parameters = "disk"`, the blocks whose rows the host reads ahead of the one that is gathered."""

    folder: Annotated[str, Field(min_length=1)] | None = None
    """The folder of the files of `disk`. Each run makes a subfolder, which it locks, and removes at its end."""

    activations: Literal["device", "host"] = "device"
    """Where the tensors lie that blocks save for backward: in the memory of the device, or from forward to backward in
    that of the host, all but those of two blocks."""

    device_limit: Annotated[int, BeforeValidator(parse_bytes), Field(ge=1, le=_MAX_BYTES)] | None = None
    """The bytes of its device that a rank may use, a number or text such as `24GiB`. A CPU rank counts its tensors, and
    ends in the kernel that would pass the limit: a device in miniature."""

    @model_validator(mode="after")
    def _check_budget(self) -> "MemorySettings":
        if self.optimizer == "disk" and self.folder is None:
            raise ValueError("optimizer = 'disk' keeps its files in memory.folder; set it to a folder on a fast disk")
        if self.tiers == "auto" and "optimizer" in self.model_fields_set:
            raise ValueError(
                f"tiers = 'auto' chooses memory.optimizer, which is {self.optimizer!r} already; leave one of them out"
            )
        if self.parameters == "disk" and self.optimizer != "disk":
            raise ValueError(
                "parameters = 'disk' needs memory.optimizer = 'disk', since the rows are the masters in its files; set "
                "memory.optimizer=disk and memory.folder, or memory.parameters=host"
            )
        if self.parameters == "host" and self.optimizer == "device" and self.tiers != "auto":
            raise ValueError(
                "parameters = 'host' needs memory.optimizer = 'host' or 'disk', since an update on the device would "
                "fetch all rows; set memory.optimizer=host"
            )
        if self.recompute == "auto" and self.step_budget is None:
            raise ValueError("recompute = 'auto' chooses by memory.budget; set it, for instance memory.budget=24GiB")
        if self.recompute == "auto" and self.activations == "host":
            raise ValueError(
                "recompute = 'auto' chooses by the bytes that blocks keep on the device, and activations = 'host' "
                "keeps them elsewhere; set recompute to none, selective, full or every-k, or leave activations out"
            )
        if self.budget is not None and self.device_limit is not None and self.budget > self.device_limit:
            raise ValueError(
                f"memory.budget = {self.budget} is more than memory.device_limit = {self.device_limit}; lower it, or "
                "leave it out: it is the limit then"
            )
        return self

    def with_optimizer(self, place: Place) -> "MemorySettings":
        """The settings with states in a place that `auto` has chosen, or a plan."""
        folder = self.folder if place == "disk" else None
        return self.model_copy(update={"tiers": "explicit", "optimizer": place, "folder": folder})

    @property
    def places(self) -> StatePlaces:
        return StatePlaces(self.optimizer, self.parameters, self.update == "delayed", self.window)

    @property
    def step_budget(self) -> int | None:
        """The bytes by which `auto` chooses: `budget`, by default `device_limit`."""
        if self.recompute != "auto":
            return None
        return self.device_limit if self.budget is None else self.budget


def fixed_policies(settings: MemorySettings, blocks: int) -> tuple[BlockPolicy, ...]:
    """The policy of each block, where it does not depend on costs."""
    if settings.recompute == "every-k":
        return tuple("none" if index % settings.every else "full" for index in range(blocks))
    policies: dict[str, BlockPolicy] = {"none": "none", "selective": "selective"}
    return (policies.get(settings.recompute, "full"),) * blocks  # `auto` begins with full recomputation
