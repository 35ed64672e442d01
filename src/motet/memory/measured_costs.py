"""Bytes and seconds of blocks with each policy, measured in the first steps of a run.

Policies change no number, so these steps are steps like any other: all blocks are recomputed in full, except for the
last block of each kind, which shows the costs of other policies where they fit. Then the policies are chosen.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

import torch

from motet.cluster.device_clock import DeviceClock
from motet.memory.kept_products import KEPT_OPERATORS
from motet.memory.policy_choice import POLICIES, BlockCosts, PolicyCost
from motet.memory.storage_tracker import LiveBytes, StorageTracker
from motet.models.spec.layer_specs import BlockPolicy

WARM_UP_STEPS, TIMED_CYCLES = 1, 3
_CYCLE: tuple[BlockPolicy, ...] = ("full", "selective", "none")
# Policy of the last block of each kind, and the measured quantity
MEASURED_STEPS: tuple[tuple[BlockPolicy, str], ...] = (
    *((_CYCLE[0], "nothing") for _ in range(WARM_UP_STEPS)),
    *((policy, "bytes") for policy in _CYCLE),
    *((policy, "seconds") for policy in _CYCLE * TIMED_CYCLES),
)


@dataclass
class _Moment:
    """A stretch of a step, from one mark to the next."""

    kind: Literal["forward", "backward", "elsewhere"]
    block: int
    alive: Mapping[int, int]  # Blocks between forward and backward, with the number of their micro-batches
    peak: int = 0


@dataclass
class StepBytes:
    """Live bytes of one step, by the stretches of blocks."""

    meter: LiveBytes
    saved: dict[int, int] = field(default_factory=dict)
    recomputed: dict[int, int] = field(default_factory=dict)  # Bytes that the recomputation of a block makes
    products: dict[int, int] = field(default_factory=dict)
    moments: list[_Moment] = field(default_factory=list)
    in_flight: Counter[int] = field(default_factory=Counter)
    _alive: Counter[int] = field(default_factory=Counter)

    def begin(self) -> None:
        self.meter.start()
        self._mark("elsewhere", -1)

    def end(self) -> None:
        self._mark("elsewhere", -1)
        self.moments.pop()
        self.meter.stop()

    @contextmanager
    def forward(self, block: int) -> Iterator[None]:
        """Around the forward of a block."""
        self._mark("forward", block)
        kernels = self.meter if isinstance(self.meter, StorageTracker) else StorageTracker()
        before, products = self.meter.live(), _product_bytes(kernels)
        with nullcontext() if kernels is self.meter else kernels:
            yield
        self.products[block] = _product_bytes(kernels) - products
        self.saved[block] = max(self.saved.get(block, 0), self.meter.live() - before)
        self._alive[block] += 1
        self.in_flight[block] = max(self.in_flight[block], self._alive[block])

    @contextmanager
    def recomputation(self, block: int) -> Iterator[None]:
        """Around the recomputation of a block in backward."""
        before = self.meter.live()
        try:
            yield
        finally:
            self.recomputed[block] = max(self.recomputed.get(block, 0), self.meter.live() - before)

    def begin_backward(self, block: int) -> None:
        self._mark("backward", block)

    def end_backward(self, block: int) -> None:
        """Called when the gradient of the block's input is known, unless the backward of another block has begun."""
        if self.moments[-1].kind == "backward" and self.moments[-1].block == block:
            self._mark("elsewhere", block)

    def end_backwards(self) -> None:
        """Called after the last backward of the step."""
        self._mark("elsewhere", -1)

    def _mark(self, kind: Literal["forward", "backward", "elsewhere"], block: int) -> None:
        if self.moments:
            last = self.moments[-1]
            last.peak = max(last.peak, self.meter.peak())
            if last.kind == "backward":
                self._alive[last.block] -= 1
        self.moments.append(_Moment(kind, block, {b: n for b, n in self._alive.items() if n}))
        self.meter.reset_peak()

    def needs(self) -> tuple[dict[int, int], dict[int, int], int]:
        """Peaks beyond the bytes that blocks keep: in forwards and backwards, by block, and elsewhere."""
        forward, backward, elsewhere = defaultdict[int, int](int), defaultdict[int, int](int), 0
        for moment in self.moments:
            need = moment.peak - sum(count * self.saved[block] for block, count in moment.alive.items())
            if moment.kind == "forward":
                forward[moment.block] = max(forward[moment.block], need)
            elif moment.kind == "backward":
                backward[moment.block] = max(backward[moment.block], need)
            elif moment.alive:  # Between blocks: as much is kept as during the backward of the last one
                last = max(moment.alive)
                backward[last] = max(backward[last], need)
            else:
                elsewhere = max(elsewhere, need)
        return forward, backward, elsewhere


def _product_bytes(kernels: StorageTracker) -> int:
    return sum(kernels.made[operator] for operator in KEPT_OPERATORS)


class StepSeconds:
    """Durations of the forwards and recomputations of blocks."""

    def __init__(self, device: torch.device) -> None:
        self.clock, self._pending = DeviceClock(device), list[tuple[list[float], Any, Any]]()
        self.forwards, self.recomputations = defaultdict[int, list[float]](list), defaultdict[int, list[float]](list)

    def forward(self, block: int) -> "_Timed":
        return _Timed(self, self.forwards[block])

    def recomputation(self, block: int) -> "_Timed":
        return _Timed(self, self.recomputations[block])

    def add(self, durations: list[float], begin: Any, end: Any) -> None:
        self._pending.append((durations, begin, end))

    def finish(self) -> None:
        """Read the clock of the device."""
        for durations, begin, end in self._pending:
            durations.append(self.clock.seconds(begin, end))
        self._pending.clear()


class _Timed:
    def __init__(self, seconds: StepSeconds, durations: list[float]) -> None:
        self._seconds, self._durations = seconds, durations

    def __enter__(self) -> None:
        self._begin = self._seconds.clock.now()

    def __exit__(self, *_: object) -> None:
        self._seconds.add(self._durations, self._begin, self._seconds.clock.now())


class CostMeasurement:
    """Collects the measured steps of one rank."""

    def __init__(
        self, kinds: Sequence[object], budget: int, *, meter: Callable[[], LiveBytes], device: torch.device
    ) -> None:
        """Blocks with equal `kinds` cost the same."""
        self._kinds, self._budget, self._meter, self._device = kinds, budget, meter, device
        self._bytes: dict[BlockPolicy, StepBytes] = {}
        self._seconds: dict[BlockPolicy, list[StepSeconds]] = {policy: [] for policy in POLICIES}
        self.blocks: list[int] = []  # Blocks that this rank runs, in their order
        self.last_of_kind: dict[object, int] = {}

    def policies(self, step: int) -> list[BlockPolicy]:
        """The policies in a measured step."""
        policies: list[BlockPolicy] = ["full"] * len(self._kinds)
        shown = MEASURED_STEPS[step][0]
        for block in self.last_of_kind.values():
            if shown in self.possible(block):
                policies[block] = shown
        return policies

    def possible(self, block: int) -> tuple[BlockPolicy, ...]:
        """The policies of a block that can fit into the budget, as far as full recomputation tells."""
        full = self._bytes.get("full")
        if full is None:
            return ("full",)
        forward = full.needs()[0]
        kept = sum(full.in_flight[each] * size for each, size in full.saved.items())
        largest = kept + max(forward[self.blocks[-1]] - full.saved[self.blocks[-1]], 0)
        fits: list[BlockPolicy] = ["full"]
        times = max(full.in_flight[block], 1)
        if largest + times * full.products.get(block, 0) <= self._budget:
            fits.append("selective")
        if largest + times * full.recomputed.get(block, 0) <= self._budget:
            fits.append("none")
        return tuple(fits)

    def begin(self, step: int) -> StepBytes | StepSeconds | None:
        """A recorder for a measured step, unless it only warms up."""
        policy, quantity = MEASURED_STEPS[step]
        if quantity == "bytes":
            self._bytes[policy] = recorded = StepBytes(self._meter())
            return recorded
        if quantity == "seconds":
            self._seconds[policy].append(StepSeconds(self._device))
            return self._seconds[policy][-1]
        return None

    def end(self, step: int) -> None:
        if MEASURED_STEPS[step] == ("full", "bytes"):
            self.blocks = [*self._bytes["full"].saved]
            self.last_of_kind = {self._kinds[block]: block for block in self.blocks}

    def costs(self) -> tuple[dict[int, BlockCosts], int, dict[int, int]]:
        """The costs of the blocks of this rank, the peak elsewhere, and the micro-batches in flight by block."""
        full = self._bytes["full"]
        forward, backward, elsewhere = full.needs()
        costs: dict[int, BlockCosts] = {}
        for block in self.blocks:
            shown = self.last_of_kind[self._kinds[block]]
            block_costs: dict[BlockPolicy, PolicyCost] = {}
            for policy in self.possible(shown):
                measured = self._bytes[policy]
                forward_p, backward_p, _ = measured.needs()
                block_costs[policy] = PolicyCost(
                    full.saved[block] + measured.saved[shown] - full.saved[shown],
                    forward[block] + forward_p[shown] - forward[shown],
                    backward[block] + backward_p[shown] - backward[shown],
                    self._seconds_of(shown, policy),
                )
            costs[block] = block_costs
        return costs, elsewhere, dict(full.in_flight)

    def _seconds_of(self, shown: int, policy: BlockPolicy) -> float:
        if policy == "none":
            return 0.0

        def total(timed_policy: BlockPolicy) -> float:
            forwards = [t for each in self._seconds[timed_policy] for t in each.forwards[shown]]
            again = [t for each in self._seconds[timed_policy] for t in each.recomputations[shown]]
            return (median(forwards) if forwards else 0.0) + (median(again) if again else 0.0)

        without = [t for each in self._seconds["full"] for t in each.forwards[shown]]
        base = total("none") if "none" in self.possible(shown) else (median(without) if without else 0.0)
        return max(total(policy) - base, 1e-9)
